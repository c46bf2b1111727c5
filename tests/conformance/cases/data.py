"""Data, and randomness."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import isthmus
from tests.conformance.case import APART, AVERAGE, BOTH, DDP, STEPS, Refused, case
from tests.conformance.cases.loops import plain_loop, sgd
from tests.conformance.cases.models import by_parts
from tests.conformance.world import BATCH, F, World, loss_of, net, samples

SIZES = (2, 7)
STARTS_S = 120.0
"""By then a process has started that imports torch anew, on a busy machine, too."""


def train_on(world: World, batches: Any, steps: int = STEPS) -> Any:
    """Train the small model on batches."""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch, _ in zip(batches, range(steps), strict=False):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case((*BOTH, *AVERAGE), quick=True)
def unequal_batches(world: World) -> Any:
    """Unequal batches, weighed by `site.count_tokens`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step in range(STEPS):
        batch = world.batch(step, sizes=SIZES)
        optimizer.zero_grad()
        world.site.count_tokens(len(batch[0]))
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(BOTH)
def unequal_micro_batches(world: World) -> Any:
    """Unequal micro-batches, whose losses are divided by the step's own tokens"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step in range(STEPS):
        micro_batches = [world.batch(2 * step + each, sizes=SIZES[::-1]) for each in (0, 1)]
        num = sum(len(inputs) for inputs, _ in micro_batches)
        optimizer.zero_grad()
        for index, (inputs, targets) in enumerate(micro_batches):
            world.site.count_tokens(len(inputs))
            if index == 0:
                with world.no_sync(model):
                    (loss_of(model, (inputs, targets)) * len(inputs) / num).backward()
            else:
                (loss_of(model, (inputs, targets)) * len(inputs) / num).backward()
        optimizer.step()
    return model


def _of_all_micro_batches(world: World) -> Any:
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        parts = [
            samples(10 * step + micro, rank)
            for rank in range(world.num_ranks)
            for micro in range(2 + rank)
        ]
        optimizer.zero_grad()
        inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        loss_of(model, (inputs, targets)).backward()
        optimizer.step()
    return model


@case(BOTH, oracle=_of_all_micro_batches, beside=APART)
def unequal_numbers_of_micro_batches(world: World) -> Any:
    """Sites with unlike numbers of micro-batches in a step"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    num_micro = 2 + world.rank
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(num_micro):
            is_last = micro == num_micro - 1
            batch = samples(10 * step + micro, world.rank)
            world.site.count_tokens(len(batch[0]))
            with contextlib.nullcontext() if is_last else world.no_sync(model):
                (loss_of(model, batch) / num_micro).backward()
        optimizer.step()
    return model


@case(BOTH)
def summed_losses(world: World) -> Any:
    """Losses that are sums over unequal batches (`loss="sum"`)"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.site.attach(model, optimizer, loss="sum")
    for step in range(STEPS):
        inputs, targets = world.batch(step, sizes=SIZES)
        optimizer.zero_grad()
        world.site.count_tokens(len(inputs))
        loss = F.mse_loss(model(inputs), targets, reduction="sum")
        (loss / (len(inputs) if world.is_oracle else 1)).backward()
        optimizer.step()
    return model


@case(BOTH, Refused("ScriptError", "count_tokens was called for earlier steps"))
def forgotten_tokens(world: World) -> Any:
    """Tokens that are counted in the first step only"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    world.site.count_tokens(3)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(BOTH, Refused("SAME_DATA", "had the same gradient"), oracle=plain_loop)
def same_data(world: World) -> Any:
    """Sites that read the same data"""
    return train_on(world, (samples(step, 0) for step in range(STEPS)))


class Numbers(Dataset[Any]):
    """The batches of this suite as a map-style dataset, in which a rank's part is every so many."""

    def __init__(self, num: int = 32, held: Any = None) -> None:
        self.num = num
        self.held = held

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        inputs, targets = samples(index, index % 2, 1)
        return inputs[0], targets[0]


def _workers(world: World, kind: str, held: Any = None) -> Any:
    sampler = world.site.sampler(Numbers(), global_batch=2 * BATCH)
    loader: Any = DataLoader(
        Numbers(held=held), batch_sampler=sampler, num_workers=1, multiprocessing_context=kind
    )
    return train_on(world, loader)


@case(BOTH, quick=DDP, beside=APART)
def site_sampler(world: World) -> Any:
    """`site.sampler`"""
    sampler = world.site.sampler(Numbers(), global_batch=2 * BATCH)
    return train_on(world, DataLoader(Numbers(), batch_sampler=sampler))


def by_epochs(model: Any, optimizer: Any, loader: Any, steps: int) -> None:
    """Train for two steps an epoch, each of which ends by `break`."""
    while steps > 0:
        for index, batch in enumerate(loader):
            if index == min(2, steps):
                break
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        steps -= 2


@case(BOTH, quick=DDP, oracle=site_sampler, beside=APART)
def epochs_left_by_break(world: World) -> Any:
    """`site.sampler`, epochs that end by `break`, and a batch that is looked at before"""
    model = world.wrap(net())
    optimizer = sgd(model)
    sampler = world.site.sampler(Numbers(), global_batch=2 * BATCH)
    loader: Any = DataLoader(
        Numbers(), batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"
    )
    next(iter(loader))
    world.start(model, optimizer)
    by_epochs(model, optimizer, loader, STEPS)
    return model


@case(
    DDP,
    Refused("ScriptError", "took 4 batches for 2 steps of the optimizer.*micro-batches"),
    oracle=plain_loop,
    steps=None,
)
def several_batches_a_step(world: World) -> Any:
    """`site.sampler`, of which a step takes several batches"""
    sampler = world.site.sampler(Numbers(), global_batch=2 * BATCH)
    loader: Any = DataLoader(Numbers(), batch_sampler=sampler)
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for _ in range(2):
        for index, batch in enumerate(loader):
            if index == 6:
                break
            with contextlib.nullcontext() if index % 2 else model.no_sync():
                loss_of(model, batch).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    return model


def _sampled_otherwise(world: World, num: int, batch: int, seed: int) -> Any:
    sampler = world.site.sampler(Numbers(num), global_batch=batch, seed=seed)
    return train_on(world, DataLoader(Numbers(num), batch_sampler=sampler))


@case(
    DDP,
    Refused("DATA_DIFFERS", "31 samples, .* and 32 samples, "),
    oracle=site_sampler,
    quick=True,
)
def shorter_dataset(world: World) -> Any:
    """`site.sampler`, and a dataset that is one sample shorter at one site"""
    return _sampled_otherwise(world, 32 - world.rank, 2 * BATCH, 0)


@case(DDP, Refused("DATA_DIFFERS", "seed 0 and .* seed 1"), ranks=(2, 1), oracle=site_sampler)
def other_seed(world: World) -> Any:
    """`site.sampler`, and a seed of its own at one rank"""
    return _sampled_otherwise(world, 32, 3 * BATCH, int(world.rank == 1))


@case(DDP, Refused("DATA_DIFFERS", "batch of 16 .* batch of 8 "), oracle=site_sampler)
def other_global_batch(world: World) -> Any:
    """`site.sampler`, and another `global_batch` at one site"""
    return _sampled_otherwise(world, 32, 2 * BATCH * (1 + world.rank), 0)


@case((*BOTH, *AVERAGE), quick=DDP, beside=APART)
def uneven_global_batch(world: World) -> Any:
    """`site.sampler` with a batch that ranks cannot share evenly, and tokens that nobody counts"""
    model = world.wrap(net())
    optimizer = sgd(model)
    sampler = world.site.sampler(Numbers(), global_batch=5)
    world.start(model, optimizer)
    loader: Any = DataLoader(Numbers(), batch_sampler=sampler)
    for batch, _ in zip(loader, range(STEPS), strict=False):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(DDP, ranks=(2, 1), oracle=uneven_global_batch)
def uneven_global_batch_and_sites(world: World) -> Any:
    """`site.sampler` with such a batch, and a site with twice the ranks of the other"""
    return uneven_global_batch(world)


def _scaled_over(world: World, loader: Any, epochs: int, batches: int) -> Any:
    """Train in epochs that end after some batches, the first of which is infinite at a rank."""
    model = world.wrap(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    world.start(model, optimizer)
    for _ in range(epochs):
        for place, batch in enumerate(loader, start=1):
            optimizer.zero_grad()
            is_bad = place % 2 == 1 and (world.is_oracle or world.rank == 1)
            scaler.scale(loss_of(model, batch) * (1e38 if is_bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            if place == batches:
                break
    return model


def _scaled_in_one_epoch(world: World) -> Any:
    sampler = world.site.sampler(Numbers(), global_batch=2 * BATCH)
    return _scaled_over(world, DataLoader(Numbers(), batch_sampler=sampler), 1, 6)


@case(BOTH, quick=DDP, steps=6, oracle=_scaled_in_one_epoch)
def site_sampler_and_a_scaler(world: World) -> Any:
    """`site.sampler`, epochs that end by `break`, and steps that a `GradScaler` leaves out"""
    sampler = world.site.sampler(Numbers(), global_batch=2 * BATCH)
    return _scaled_over(world, DataLoader(Numbers(), batch_sampler=sampler), 3, 2)


@case(BOTH, quick=DDP, beside=APART)
def global_distributed_sampler(world: World) -> Any:
    """torch's `DistributedSampler` with `site.global_world_size` and `site.global_rank`"""
    num, rank = world.site.global_world_size, world.site.global_rank
    sampler: Any = DistributedSampler(Numbers(), num, rank, shuffle=False)
    loader: Any = DataLoader(Numbers(), batch_size=2 * BATCH // num, sampler=sampler)
    return train_on(world, loader)


@case(DDP, beside=APART)
def forked_workers(world: World) -> Any:
    """DataLoader workers that are forked"""
    return _workers(world, "fork")


@case(DDP, within_s=STARTS_S, beside=APART)
def forkserver_workers(world: World) -> Any:
    """DataLoader workers under forkserver"""
    return _workers(world, "forkserver")


@case(DDP, within_s=STARTS_S, beside=APART)
def spawned_workers(world: World) -> Any:
    """DataLoader workers under spawn"""
    return _workers(world, "spawn")


@case(
    DDP,
    Refused("TypeError", r"site cannot be pickled.*site\.global_rank"),
    within_s=STARTS_S,
)
def pickled_site(world: World) -> Any:
    """A dataset that holds `site`, under spawn"""
    return _workers(world, "spawn", held=None if world.is_oracle else world.site)


@case(DDP, beside=APART)
def site_in_forked_workers(world: World) -> Any:
    """A dataset that holds `site`, in workers that are forked"""
    return _workers(world, "fork", held=world.site)


class Joining(Numbers):
    """Joins in the process that reads, as a script without a main guard does."""

    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            isthmus.join()
        return super().__getitem__(index)


@case(
    DDP,
    Refused("RuntimeError", r"isthmus\.join: called in DataLoader worker 0"),
)
def join_in_a_worker(world: World) -> Any:
    """A second `isthmus.join()`, in a DataLoader worker"""
    sampler = world.site.sampler(Numbers(), global_batch=2 * BATCH)
    data = Numbers() if world.is_oracle else Joining()
    loader: Any = DataLoader(
        data, batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"
    )
    return train_on(world, loader)


class Stream(IterableDataset[Any]):
    def __init__(self, ranks: range) -> None:
        self.ranks = ranks

    def __iter__(self) -> Iterator[Any]:
        for step in range(STEPS + 2):
            parts = [samples(step, each) for each in self.ranks]
            yield tuple(torch.cat(part) for part in zip(*parts, strict=True))


@case(BOTH)
def iterable_dataset(world: World) -> Any:
    """An iterable dataset, divided by `site.global_rank`"""
    ranks = world.of_ranks()
    loader: Any = DataLoader(Stream(ranks), batch_size=None)
    return train_on(world, loader)


@case(
    DDP,
    Refused("ValueError", r"part_of: want a sample for each of 2 ranks at least, got 1"),
    steps=None,
)
def part_of_too_little(world: World) -> Any:
    """`site.part_of` a dataset with fewer samples than ranks"""
    part = world.site.part_of(Numbers(num=1))
    loader: Any = DataLoader(part, batch_size=1) if len(part) else []
    return train_on(world, loader)


@case(BOTH)
def random_augmentation(world: World) -> Any:
    """Augmentation that is random at each rank"""

    def batches() -> Iterator[Any]:
        for step in range(STEPS):
            inputs, targets = world.batch(step)
            noise = [torch.randn(BATCH, 1, generator=each) for each in world.generators(step)]
            yield inputs * torch.cat(noise), targets

    return train_on(world, batches())


def _dropped() -> nn.Module:
    return nn.Sequential(*net()[:2], nn.Dropout(0.5), *net()[2:])


def _dropout_alone(world: World) -> Any:
    model = _dropped()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, part in enumerate(by_parts(world, world.batch(step))):
            torch.manual_seed(100 * step + rank)
            (loss_of(model, part) / world.num_ranks).backward()
        optimizer.step()
    return model


@case(BOTH, oracle=_dropout_alone, beside=APART)
def dropout(world: World) -> Any:
    """Dropout, of each rank's own random numbers"""
    model = world.wrap(_dropped())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        torch.manual_seed(100 * step + world.rank)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


def _data_of_one_site_at_last(world: World) -> Any:
    half = [(world.batch(step)[0][:BATCH], world.batch(step)[1][:BATCH]) for step in range(STEPS)]
    return train_on(world, [*world.batches(STEPS - 2), *half[STEPS - 2 :]])


@case((*BOTH, *AVERAGE), oracle=_data_of_one_site_at_last, steps=None, early_ranks=(1,))
def data_ends_first_at_one_site(world: World) -> Any:
    """One site's data ends first"""
    return train_on(world, world.batches(STEPS - 2 * (not world.is_oracle and world.rank)))
