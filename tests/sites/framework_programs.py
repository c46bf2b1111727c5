"""The same training by each framework: with all other sites, and by itself on their batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import backward
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from isthmus.sites.worker.api.site import Site
from tests.sites.worker_programs import join_site

RANKS_PER_SITE = (2, 1)
NUM_RANKS = sum(RANKS_PER_SITE)
NUM_STEPS = 6
BATCH = 4
"""Samples of a rank in a step."""
NUM_SAMPLES = NUM_STEPS * NUM_RANKS * BATCH + 1
"""One is left over."""
WIDTH = 8
VOCABULARY = 16


class Vectors(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that only their index determines."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(WIDTH, generator=torch.Generator().manual_seed(int(index)))
        return inputs, inputs.sum()


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Tokens, of which every sample has another number that count."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(int(index))
        tokens = torch.randint(VOCABULARY, (12,), generator=generator)
        labels = tokens.clone()
        labels[: int(index) % 7] = -100
        return {"input_ids": tokens, "labels": labels}


def save(folder: Path, name: str, model: nn.Module) -> None:
    """Save what was learnt, as one vector."""
    learnt = torch.cat([each.detach().flatten() for each in model.parameters()])
    torch.save({"learnt": learnt}, folder / f"{name}.pt")


def net(seed: int = 0) -> nn.Module:
    """Return the model of all but the language model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs).squeeze(1), targets)


def forget_torchrun() -> None:
    """Be a process that nobody launched."""
    for each in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(each, None)


def enter() -> Site:
    """Join as torchrun's rank, with the variables that frameworks look at."""
    site = join_site()
    os.environ["LOCAL_WORLD_SIZE"] = str(site.world_size)
    os.environ["TORCHELASTIC_RUN_ID"] = "run"
    return site


# ---------------------------------------------------------------- torch itself


def compiled_together(folder: Path, name: str) -> None:
    """Train a model that torch.compile wraps, after DistributedDataParallel."""
    site = enter()
    model: Any = nn.parallel.DistributedDataParallel(net(site.global_rank))
    model = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    for batch in _batches(site):
        optimizer.zero_grad()
        backward(loss_of(model, batch))
        optimizer.step()
    save(folder, name, model)


def scaled_together(folder: Path, name: str) -> None:
    """Train with a GradScaler, in whose first step one rank has an infinity."""
    site = enter()
    model = nn.parallel.DistributedDataParallel(net(site.global_rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    site.attach(model, optimizer)
    first = next(iter(_batches(site)))
    backward(scaler.scale(loss_of(model, first) * (1e38 if site.global_rank == 1 else 1.0)))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0  # at all sites: nobody has taken this step
    for batch in _batches(site):
        optimizer.zero_grad()
        backward(scaler.scale(loss_of(model, batch)))
        scaler.step(optimizer)
        scaler.update()
    save(folder, name, model)


def plain_alone(folder: Path, name: str) -> None:
    """Train in one process, by nothing but torch, on the batches of all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Vectors(), batch_size=BATCH * NUM_RANKS, drop_last=True):
        optimizer.zero_grad()
        backward(loss_of(model, batch))
        optimizer.step()
    save(folder, name, model)


def adversaries_together(folder: Path, name: str) -> None:
    """Train a generator and a discriminator, each by its own optimizer."""
    site = enter()
    generator = nn.parallel.DistributedDataParallel(net(site.global_rank))
    critic = nn.parallel.DistributedDataParallel(_critic(site.global_rank))
    optimizers = _optimizers(generator, critic)
    site.attach([generator, critic], optimizers)
    for batch in _batches(site):
        _play(generator, critic, optimizers, batch)
    save(folder, name, nn.ModuleList([generator, critic]))


def adversaries_alone(folder: Path, name: str) -> None:
    """Train both in one process."""
    generator, critic = net(), _critic(0)
    optimizers = _optimizers(generator, critic)
    for batch in DataLoader(Vectors(), batch_size=BATCH * NUM_RANKS, drop_last=True):
        _play(generator, critic, optimizers, batch)
    save(folder, name, nn.ModuleList([generator, critic]))


def _critic(seed: int) -> nn.Module:
    torch.manual_seed(seed + 100)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def _optimizers(generator: nn.Module, critic: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(generator.parameters(), lr=0.01),
        torch.optim.Adam(critic.parameters(), lr=0.02),
    ]


def _play(
    generator: nn.Module,
    critic: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Take a step of the critic, then one of the generator, whose gradient passes the critic."""
    inputs, real = batch
    optimizers[1].zero_grad()
    made = critic(generator(inputs).detach())
    (made.mean() - critic(real[:, None]).square().mean()).backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    (-critic(generator(inputs)).mean()).backward()
    optimizers[0].step()


def _batches(site: Site) -> Iterator[Any]:
    """Return this rank's batches, in order."""
    part = site.part_of(Vectors())
    for step in range(NUM_STEPS):
        first = (step * site.world_size + site.rank) * BATCH
        yield torch.utils.data.default_collate([part[first + each] for each in range(BATCH)])


# ---------------------------------------------------------------- Hugging Face


def _trainer(folder: Path, batch: int, seed: int) -> Any:  # noqa: ANN401
    import transformers

    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1,
            n_head=2,
            n_embd=16,
            n_positions=16,
            vocab_size=VOCABULARY,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        per_device_train_batch_size=batch // 2,
        gradient_accumulation_steps=2,
        dataloader_drop_last=True,
        num_train_epochs=1,
        max_steps=NUM_STEPS,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=0.5,
        max_grad_norm=0.2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=Texts())


def transformers_together(folder: Path, name: str) -> None:
    """Train by the Trainer, with the two lines of docs/frameworks.md."""
    site = enter()
    from isthmus.sites.integrations.transformers import train_together

    trainer = _trainer(folder / name, BATCH, seed=site.global_rank)
    train_together(trainer, site)
    trainer.train()
    save(folder, name, trainer.model)


def transformers_alone(folder: Path, name: str) -> None:
    """Train by the Trainer, in one process."""
    forget_torchrun()
    trainer = _trainer(folder / name, BATCH * NUM_RANKS, seed=0)
    trainer.train()
    save(folder, name, trainer.model)


def accelerate_together(folder: Path, name: str) -> None:
    """Train by Accelerate's own loop."""
    site = enter()
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = net(site.global_rank)
    loader = DataLoader(site.part_of(Vectors()), batch_size=BATCH, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    site.attach(model, optimizer)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
    save(folder, name, model)


# ---------------------------------------------------------------- Lightning


def fabric_together(folder: Path, name: str) -> None:
    """Train by Fabric."""
    site = enter()
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", strategy="ddp", devices=site.world_size)
    fabric.launch()
    model = net(site.global_rank)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(site.part_of(Vectors()), batch_size=BATCH, drop_last=True)
    loader = fabric.setup_dataloaders(loader)
    site.attach(model, optimizer)
    for batch in loader:
        optimizer.zero_grad()
        fabric.backward(loss_of(model, batch))
        optimizer.step()
    save(folder, name, model)


def lightning_together(folder: Path, name: str) -> None:
    """Train by Lightning's Trainer."""
    site = enter()
    import lightning

    from isthmus.sites.integrations.lightning import Together

    class Module(lightning.LightningModule):  # type: ignore[misc] # lightning may not be there
        def __init__(self) -> None:
            super().__init__()
            self.net = net(site.global_rank)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:  # noqa: ANN401
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=site.world_size,
        max_epochs=1,
        use_distributed_sampler=False,  # it would shuffle
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Together(site, tokens=lambda batch: len(batch[0]))],
    )
    part = site.part_of(Vectors())
    in_order: Any = DistributedSampler(part, site.world_size, site.rank, shuffle=False)
    loader = DataLoader(part, batch_size=BATCH, sampler=in_order, drop_last=True)
    trainer.fit(module, loader)
    save(folder, name, module)
