"""What the ranks of the worker tests run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import backward
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isthmus
from isthmus.protos.errors import IsthmusError
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.sharding import whole_of
from tests.fakes.ranks import wait_for_all_ranks

NUM_STEPS = 4
FIRST_ACCUMULATED_STEP = 2
BATCH = 4
WIDTH = 24
LEARNING_RATE = 0.1


class Net(nn.Module):
    """Odd sizes, so that shards are padded; buffers of several dtypes; several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 37), nn.Tanh(), nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 3)
        )
        self.register_buffer("count", torch.randint(1 << 40, (3,)))
        self.register_buffer("flag", torch.rand(5) > 0.5)
        self.register_buffer("halves", torch.randn(7).to(torch.bfloat16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def build(seed: int, dtype: torch.dtype = torch.float32) -> Net:
    """Return the net that a site starts with, before it hears of the others."""
    torch.manual_seed(seed)
    net = Net()
    # Bits that arithmetic would not keep: a NaN with a payload, an infinity, a negative zero.
    odd = torch.tensor([0x7FA12345, -0x800000, -0x80000000, seed], dtype=torch.int64)
    net.register_buffer("odd", odd.to(torch.int32).view(torch.float32))
    return net.to(dtype) if dtype != torch.float32 else net


def batch(step: int, global_rank: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets that only these numbers determine."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * global_rank + micro_batch)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, torch.randn(BATCH, 3, generator=generator)


def tokens_of(step: int, global_rank: int) -> int:
    """Return how many tokens a rank counts: different ones, and once none at all."""
    return 0 if (step, global_rank) == (1, 1) else 1 + 3 * global_rank + step


def loss_of(
    model: Callable[[torch.Tensor], torch.Tensor],
    step: int,
    rank: int,
    micro: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a micro-batch's mean loss."""
    inputs, targets = batch(step, rank, micro)
    return nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype))


def train_bfloat16(folder: Path, name: str) -> None:
    """Train a model of bf16."""
    train(folder, name, torch.bfloat16)


def train(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Four steps: unequal tokens, from the third on two micro-batches a step."""
    site = join_site()
    net = build(seed=site.index, dtype=dtype)
    model = DistributedDataParallel(net, bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    site.attach(model, optimizer)
    initial = {key: value.clone() for key, value in net.state_dict().items()}
    grads = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        site.count_tokens(tokens_of(step, site.global_rank))
        num_micro = 2 if step >= FIRST_ACCUMULATED_STEP else 1
        for micro in reversed(range(num_micro)):
            with model.no_sync() if micro else nullcontext():
                backward(loss_of(model, step, site.global_rank, micro, dtype) / num_micro)
        grads.append([each.grad.clone() for each in net.parameters() if each.grad is not None])
        optimizer.step()
        site.log(loss=step, norm=torch.tensor(2.0))
    site.record("evaluation", NUM_STEPS, {"held_out_loss": 1.5}, {"by": name})
    site.leave()
    site.leave()
    place = [site.rank, site.world_size, site.global_rank, site.global_world_size]
    saved = {"initial": initial, "grads": grads, "final": net.state_dict(), "place": place}
    torch.save(saved, folder / f"{name}.pt")


def train_equal(folder: Path, name: str) -> None:
    """Start with the same model everywhere; no step."""
    _attach_only(folder, name, is_equal=True)


def train_unequal_ranks(folder: Path, name: str) -> None:
    """The first ranks of all sites have the same model, the others do not; no step."""
    _attach_only(folder, name, is_equal=False)


def _attach_only(folder: Path, name: str, *, is_equal: bool) -> None:
    site = join_site()
    net = build(seed=7 if is_equal or site.rank == 0 else 8)
    model = DistributedDataParallel(net, init_sync=False)
    site.attach(model, torch.optim.SGD(net.parameters(), lr=LEARNING_RATE))
    site.leave()
    torch.save({"final": net.state_dict()}, folder / f"{name}.pt")


def train_other_model(folder: Path, name: str) -> None:
    """The second site has one layer more."""
    site = join_site()
    net = nn.Sequential(nn.Linear(3, 3), *([nn.Linear(3, 3)] if site.index else []))
    note_error(folder, name, lambda: site.attach(*_wrapped(net)))
    wait_for_all_ranks()


def backward_until_error(folder: Path, name: str) -> None:
    """Train until something raises; note what."""
    _train_until_error(folder, name, 1_000_000)


def die_in_second_step(folder: Path, name: str) -> None:
    """The last rank ends without a word; the others note what they hear."""

    def die(site: Site, step: int) -> None:
        if step == 1 and site.global_rank == site.global_world_size - 1:
            os._exit(9)

    _train_until_error(folder, name, 100, die)


def forget_tokens(folder: Path, name: str) -> None:
    """Count tokens for the first step only."""
    _train_until_error(
        folder, name, 2, lambda site, step: site.count_tokens(5) if step == 0 else None
    )
    wait_for_all_ranks()


def _train_until_error(
    folder: Path,
    name: str,
    num_steps: int,
    before_step: Callable[[Site, int], None] = lambda *_: None,
) -> None:
    site = join_site()
    model, optimizer = _wrapped(build(seed=0))
    site.attach(model, optimizer)

    def steps() -> None:
        for step in range(num_steps):
            before_step(site, step)
            backward(loss_of(model, step, site.global_rank, 0, torch.float32))
            optimizer.step()

    note_error(folder, name, steps)


def train_alone(folder: Path, name: str) -> None:
    """Train a step as torchrun's ranks do, outside a run; each starts with other parameters."""
    site = _join_alone()
    net = build(seed=site.global_rank)
    model, optimizer = _wrapped(net)
    site.attach(model, optimizer)
    site.count_tokens(tokens_of(0, site.global_rank))
    backward(loss_of(model, 0, site.global_rank, 0, torch.float32))
    optimizer.step()
    place = [site.name, site.global_rank, site.global_world_size]
    torch.save({"place": place, "weight": net.layers[0].weight}, folder / f"{name}.pt")


def resume_two_models(folder: Path, name: str) -> None:
    """Resume after a backward pass through two models; the next goes through one of them."""
    site = _join_alone()
    pairs = [_wrapped(build(seed)) for seed in (0, 1)]
    site.attach([model for model, _ in pairs], [optimizer for _, optimizer in pairs])

    def train(*models: DistributedDataParallel) -> list[torch.Tensor]:
        for each in models:
            each.zero_grad()
        losses = [loss_of(each, 0, site.global_rank, 0, torch.float32) for each in models]
        backward(torch.stack(losses).sum())
        return [each.grad.clone() for model in models for each in model.parameters()]  # type: ignore[union-attr]

    (first, _), (second, _) = pairs
    train(first, second)
    grads = train(first, second)
    hook = site._parts.attachment.replica_hook
    assert hook is not None
    train(first)
    saved = hook.buckets
    assert len({each for names in saved for each in names}) == len(grads), "of both models"
    hook.resume([*reversed(saved)])
    found = [*train(first), *train(second)]
    both = train(first, second)
    torch.save([grads, found, both], folder / f"{name}.pt")
    site.leave()


def join_site() -> Site:
    """Join; torch.distributed is initialised before, from a file, which needs no port."""
    _init_process_group()
    return isthmus.join()


def _join_alone() -> Site:
    """Join as torchrun's ranks do, outside a run."""
    for each in [each for each in os.environ if each.startswith("ISTHMUS_")]:
        del os.environ[each]
    _init_process_group()
    return isthmus.join(alone=True)


def _init_process_group() -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['TEST_STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def _wrapped(net: nn.Module) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(net, bucket_cap_mb=0.004)
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def note_error(folder: Path, name: str, attempt: Callable[[], None]) -> None:
    """Save what an attempt raises."""
    try:
        attempt()
    except (IsthmusError, RuntimeError) as error:
        code = getattr(error, "code", "")
        noted = {"type": type(error).__name__, "code": code, "text": str(error)}
        torch.save(noted, folder / f"{name}.pt")


def train_compared_beside_shards(folder: Path, name: str) -> None:
    """As `train_compared`; site 1 shards its model."""
    train_compared(folder, name, is_sharded=True)


def train_compared(folder: Path, name: str, *, is_sharded: bool = False) -> None:
    """Eight steps, in any regime, that draw random numbers; site 0 trains a plain model."""
    site = join_site()
    torch.manual_seed(11 + site.global_rank)
    net = nn.Sequential(build(seed=0), nn.Dropout(0.5), nn.BatchNorm1d(3, affine=False))
    model: nn.Module = net
    if site.index > 0 and is_sharded:
        fully_shard(net)
    elif site.index > 0:
        model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    site.attach(model, optimizer, beside_shards=True)
    for step in range(8):
        optimizer.zero_grad()
        site.count_tokens(1 + site.global_rank)
        backward(loss_of(model, step, site.global_rank, 0, torch.float32))
        optimizer.step()
    with site.global_parameters():
        final = {key: whole_of(each).clone() for key, each in net.state_dict().items()}
    site.leave()
    torch.save({"final": final, "next": torch.rand(3)}, folder / f"{name}.pt")
