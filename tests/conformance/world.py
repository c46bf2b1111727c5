"""What a script of the conformance suite has of its surroundings, at a site and in one process.

At a site this is thin: the real `isthmus.join()`, DistributedDataParallel and `fully_shard`. In one
process there is nothing of isthmus: a batch holds the samples of all ranks, a wrapper does nothing,
and `site` has methods that do what a user expects of a single process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.worker.data.batch_shares import BatchShares
from isthmus.sites.worker.data.sampler import Sampler
from isthmus.topology.spec.batch_rule import FullBatch

WIDTH, HIDDEN, OUTPUTS, BATCH = 6, 10, 3, 4
BUCKET_MB = 0.0005
"""Small, so that a model has several buckets."""

F: Any = nn.functional
"""As scripts call it; what it returns has a `backward` that mypy knows nothing of."""
Batch = tuple[torch.Tensor, torch.Tensor]


def net() -> Any:  # noqa: ANN401 - a Sequential, whose parts have types that mypy knows not
    """Return a small model. Each rank draws other values: that of the first site counts."""
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, OUTPUTS),
    )


def loss_of(model: Callable[[torch.Tensor], Any], batch: Batch) -> Any:  # noqa: ANN401 - a loss
    """Return the mean loss of a batch."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


class World:
    """A rank's place, or that of one process that has everything."""

    way: str
    rank: int
    """Among the ranks of all sites."""
    num_ranks: int
    site: Any
    """A `Site`, or what stands for it where there is one process."""
    is_oracle: bool
    """One process has everything."""
    is_sharded: bool
    """Parameters are this rank's shards."""

    def __init__(
        self, way: str, rank: int, num_ranks: int, site: object, *, twin_ranks: int = 0
    ) -> None:
        """`rank` is -1 for the process that has everything.

        `twin_ranks`: so many ranks has each site, and all sites have the data of the first one.
        """
        self.way = way
        self.rank = max(rank, 0)
        self.num_ranks = num_ranks
        self.site = site
        self.is_oracle = rank < 0
        self.is_sharded = way == "fsdp2" and not self.is_oracle
        self.losses: list[float] = []
        self._data_rank = self.rank % twin_ranks if twin_ranks else self.rank

    # ---------------------------------------------------------------- models

    def wrap(
        self,
        model: nn.Module,
        *,
        as_one: bool = False,
        by_rank: bool = False,
        **options: Any,  # noqa: ANN401 - of DistributedDataParallel
    ) -> Any:  # noqa: ANN401 - DistributedDataParallel or FSDPModule
        """Wrap a model in DistributedDataParallel with these options, or shard it.

        With `as_one`, its children are not sharded by themselves. `by_rank`: one process, too,
        computes for each rank's samples by themselves.
        """
        if self.is_oracle:
            return Whole(model, self.num_ranks if by_rank else 1)
        if self.way == "ddp":
            return DistributedDataParallel(model, **{"bucket_cap_mb": BUCKET_MB, **options})
        if self.way == "fsdp2":
            for each in () if as_one else _parts(model):
                fully_shard(each)
            return fully_shard(model)
        return model

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:  # noqa: ANN401 - DDP or FSDPModule
        """Accumulate gradients without a round."""
        if self.way == "lone" and not self.is_oracle:
            with self.site.no_sync():
                yield
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)
        elif isinstance(model, DistributedDataParallel):
            with model.no_sync():
                yield
        else:
            yield

    def start(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    ) -> None:
        """Attach, or have the optimizer average gradients."""
        if self.way == "average":
            assert isinstance(optimizer, torch.optim.Optimizer)
            self.site.average_gradients(optimizer)
            self.site.broadcast(model)
        else:
            self.site.attach(model, optimizer)

    # ---------------------------------------------------------------- data

    def of_ranks(self) -> range:
        """Return the ranks whose data this process has."""
        return (
            range(self.num_ranks) if self.is_oracle else range(self._data_rank, self._data_rank + 1)
        )

    def batch(self, step: int, *, sizes: Sequence[int] = ()) -> Batch:
        """Return this rank's part of a step's data; `sizes`: of each rank's, if unequal."""
        parts = [samples(step, each, sizes[each] if sizes else BATCH) for each in self.of_ranks()]
        return torch.cat([each for each, _ in parts]), torch.cat([each for _, each in parts])

    def batches(self, steps: int, first: int = 0) -> Iterator[Batch]:
        """Return the batches of some steps."""
        return (self.batch(step) for step in range(first, first + steps))

    def generators(self, seed: int) -> list[torch.Generator]:
        """Return a generator of random numbers for each rank whose data this process has."""
        return [torch.Generator().manual_seed(100 * seed + each) for each in self.of_ranks()]

    def note(self, loss: torch.Tensor) -> None:
        """Have a loss compared: the mean over ranks is that of one process."""
        self.losses.append(float(loss.detach()))


def samples(step: int, rank: int, size: int = BATCH) -> Batch:
    """Return inputs and targets that only these numbers determine."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return inputs, torch.randn(size, OUTPUTS, generator=generator) + rank


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Return the parts that `fully_shard` is called on: layers, also those of lists."""
    for each in model.children():
        if isinstance(each, nn.ModuleList):
            yield from _parts(each)
        elif any(True for _ in each.parameters()):
            yield each


class Whole(nn.Module):
    """Stands for a wrapper of the model where one process has everything."""

    def __init__(self, module: nn.Module, num_parts: int = 1) -> None:
        super().__init__()
        self.module = module
        self._num_parts = num_parts

    def forward(self, inputs: torch.Tensor, *args: Any) -> Any:  # noqa: ANN401 - the model's
        parts = inputs.chunk(self._num_parts)
        outputs = [self.module(each, *args) for each in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class OneProcess:
    """What a site is to a script that runs in one process: it does what torch does."""

    index = rank = global_rank = 0
    num_sites = world_size = global_world_size = 1
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._models: list[nn.Module] = []
        self.grad_norm = 0.0

    def attach(self, model: nn.Module | Sequence[nn.Module], *_: object, **__: object) -> None:
        """Note what is trained."""
        self._models = [model] if isinstance(model, nn.Module) else [*model]

    def clip_grad_norm_(self, max_norm: float, *, loss_scale: float = 1.0) -> float:
        """Clip as torch does."""
        del loss_scale
        parameters = [each for model in self._models for each in model.parameters()]
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def checkpoint(self, *_: object, **__: object) -> int:
        """Begin at the start."""
        return 0

    def global_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return contextlib.nullcontext()

    def sampler(self, dataset: Sized, *, global_batch: int) -> Sampler:
        """Return the samples of each step in the run's order, of which nothing here is claimed."""
        shares = BatchShares(full=FullBatch(global_batch, 1), rule="keep", ranks=(1,))
        return Sampler(
            num_samples=len(dataset), shares=shares, site=0, rank=0, replicas=None, seed=0
        )

    def part_of(self, dataset: Any) -> Any:  # noqa: ANN401 - a dataset
        """Return all of it."""
        return dataset

    def _nothing(self, *_: object, **__: object) -> None:
        pass

    average_gradients = broadcast = all_reduce = average_buffers = _nothing
    count_tokens = log = record = leave = _nothing


def learnt(result: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401 - what scripts return
    """Return what a script has learnt, as whole tensors by name."""
    if isinstance(result, nn.Module):
        result = {inner_name(name): each for name, each in result.named_parameters()}
    elif not isinstance(result, dict):
        result = {
            f"{index}.{name}": each
            for index, part in enumerate(result)
            for name, each in learnt(part).items()
        }
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in result.items()
    }


def inner_name(name: str) -> str:
    """Return a parameter's name without those of wrappers."""
    inner = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
    return ".".join(each for each in name.split(".") if each not in inner)
