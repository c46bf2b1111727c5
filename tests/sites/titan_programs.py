"""torchtitan's Trainer on CPU and Gloo, which it does not know: with other sites, and by itself."""

from __future__ import annotations

import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from tests.sites.framework_programs import enter

VOCABULARY = 2048
"""What torchtitan's smallest model has."""
NUM_STEPS = 4
MAX_NORM = 0.5
"""Less than the norm of its gradients: every step is clipped."""


def prepare_for_cpu() -> None:
    """Have torchtitan 0.3 train where there is no accelerator. Before its trainer is imported.

    It asks torch.cuda what the device is, and a nightly PyTorch for `set_timeout`.
    """
    from torchtitan.tools import utils

    def nothing(*_: object) -> None:
        pass

    memory = types.SimpleNamespace(total_memory=1 << 34)
    utils.device_type = "cpu"
    utils.device_module = types.SimpleNamespace(
        set_device=nothing,
        attach=nothing,
        reset_peak_memory_stats=nothing,
        empty_cache=nothing,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda _: "cpu",
        get_device_properties=lambda _: memory,
        memory_stats=lambda _: {},
    )
    utils.get_local_device = lambda: torch.device("cpu")
    utils.get_peak_flops = lambda _: 1e12
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = nothing  # type: ignore[attr-defined]


def sum_in_gloo(parts: list[Any]) -> None:
    """Reduce by plain sums: Gloo cannot scale beforehand, as a divide factor wants it."""
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def initialise(parts: list[Any]) -> None:
    """Give parameters values that only their names determine, whatever the shards."""
    for part in parts:
        for name, each in part.named_parameters():
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(each.shape, generator=drawn) * 0.05
            with torch.no_grad():
                each.copy_(distribute_tensor(whole, each.device_mesh, each.placements))


def config_of(folder: Path, **parallelism: Any) -> Any:  # noqa: ANN401
    """Return the configuration of a small Llama on made-up tokens."""
    prepare_for_cpu()
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class Tokenizer(BaseTokenizer):  # type: ignore[misc] # torchtitan may not be there
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Config, **_: object) -> None:
            super().__init__()

        def encode(self, *_: object, **__: object) -> list[int]:
            return []

        def decode(self, *_: object, **__: object) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Loader(BaseDataLoader):  # type: ignore[misc]
        """Batches that only the reading rank and the step determine; unlike numbers count."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]
            pass

        def __init__(
            self,
            config: Config,
            *,
            dp_world_size: int,
            dp_rank: int,
            seq_len: int,
            local_batch_size: int,
            **_: object,
        ) -> None:
            self._parts, self._part = dp_world_size, dp_rank
            self._shape = (local_batch_size, seq_len + 1)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            batch = 0
            while True:
                seed = batch * self._parts + self._part
                batch += 1
                drawn = torch.Generator().manual_seed(seed)
                tokens = torch.randint(VOCABULARY, self._shape, generator=drawn)
                inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
                labels[0, : 1 + seed % 7] = IGNORE_INDEX
                positions = torch.arange(inputs.shape[1]).repeat(len(inputs), 1)
                yield {"input": inputs, "positions": positions}, labels

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # FlexAttention has no backward on CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-3, eps=1e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=16,
            steps=NUM_STEPS,
            max_norm=MAX_NORM,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False),
        validator=Validator.Config(enable=False),
        activation_checkpoint=None,
        dump_folder=str(folder / "torchtitan"),
    )


def torchtitan_together(folder: Path, name: str) -> None:
    """Train the small Llama with all other sites."""
    site = enter()
    config = config_of(folder)
    from isthmus.sites.integrations.torchtitan import TogetherTrainer

    trainer = TogetherTrainer(config, site)
    sum_in_gloo(trainer.model_parts)
    initialise(trainer.model_parts)
    trainer.train()
    trainer.close()
    save_whole(folder, name, trainer)
    site.leave()


def torchtitan_alone(folder: Path, name: str) -> None:
    """Train the small Llama as torchtitan does, over all ranks of one site."""
    enter()
    config = config_of(folder)
    from torchtitan.trainer import Trainer

    trainer = Trainer(config)
    sum_in_gloo(trainer.model_parts)
    initialise(trainer.model_parts)
    trainer.train()
    trainer.close()
    save_whole(folder, name, trainer)


def save_whole(folder: Path, name: str, trainer: Any) -> None:  # noqa: ANN401
    """Save what was learnt, as one vector, whatever the shards."""
    learnt = [
        each.full_tensor().detach().flatten()
        for part in trainer.model_parts
        for each in part.parameters()
    ]
    torch.save({"learnt": torch.cat(learnt)}, folder / f"{name}.pt")
