"""Models that nothing wraps: one rank, tensor parallelism alone, pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.conformance.case import APART, LONE, STEPS, Refused, case
from tests.conformance.cases.loops import accumulation, clip_by_norm, plain_loop, sgd
from tests.conformance.world import BATCH, HIDDEN, OUTPUTS, WIDTH, World, loss_of, net, samples

SITES = 2


def batch_of_site(world: World, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch that all ranks of a site share; in one process those of all sites."""
    sites = range(SITES) if world.is_oracle else [world.site.index]
    parts = [samples(step, each, BATCH) for each in sites]
    return torch.cat([each for each, _ in parts]), torch.cat([each for _, each in parts])


def seed_alike(world: World) -> None:
    """Have all ranks of a site draw the same parameters, as they must where they share them."""
    torch.manual_seed(world.site.index)


def lay_out(world: World, model: nn.Module, *, way: str) -> nn.Module:
    """Lay the model out over all ranks of this site; in one process there is nothing to do."""
    if world.is_oracle or way == "lone":
        return model
    if way == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "fsdp2":
        fully_shard(model, mesh=mesh)
        return model
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def train(world: World, *ways: str, by_two: bool = False) -> Any:
    """Train the small model with a layout for each site. `by_two`: steps of two micro-batches."""
    seed_alike(world)
    way = "" if world.is_oracle else ways[world.site.index]
    model = lay_out(world, net(), way=way)
    optimizer = sgd(model)
    if not world.is_oracle:
        world.site.attach(model, optimizer, beside_shards="ddp" in ways)
    num_batches = world.site.world_size if way == "fsdp2" else 1
    return learn(world, model, optimizer, by_two=by_two, num_batches=num_batches)


def learn(
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    by_two: bool = False,
    num_batches: int = 1,
) -> Any:
    """Take some steps. `num_batches`: ranks of the site that each count its batch."""
    for step in range(STEPS):
        optimizer.zero_grad()
        world.site.count_tokens(BATCH // num_batches)
        if by_two:
            with world.no_sync(model):
                loss_of(model, batch_of_site(world, step + STEPS)).backward()
        loss_of(model, batch_of_site(world, step)).backward()
        optimizer.step()
    return model


@case(LONE, quick=True)
def lone_module(world: World) -> Any:
    """A plain module on one rank"""
    return plain_loop(world)


@case(LONE)
def lone_accumulation(world: World) -> Any:
    """A plain module, and accumulation under `site.no_sync()`"""
    return accumulation(world)


@case(LONE)
def lone_clipping(world: World) -> Any:
    """A plain module, and `torch.nn.utils.clip_grad_norm_`"""
    return clip_by_norm(world)


@case(LONE, quick=True, ranks=(2, 2), beside=APART)
def tp_alone(world: World) -> Any:
    """Tensor parallelism alone (`parallelize_module`) at both sites"""
    return train(world, "tp", "tp")


@case(LONE, quick=True, ranks=(2, 1))
def tp_beside_ddp(world: World) -> Any:
    """Tensor parallelism alone, beside a site with DistributedDataParallel"""
    return train(world, "tp", "ddp")


@case(LONE, ranks=(2, 2), beside=APART)
def tp_beside_fsdp2(world: World) -> Any:
    """Tensor parallelism alone, beside a site with `fully_shard`"""
    return train(world, "tp", "fsdp2")


@case(LONE, ranks=(1, 2))
def tp_beside_a_module(world: World) -> Any:
    """Tensor parallelism alone, beside a site of one rank with a plain module"""
    return train(world, "lone", "tp")


@case(LONE, ranks=(2, 2), beside=APART)
def tp_accumulation(world: World) -> Any:
    """Tensor parallelism alone, and accumulation under `site.no_sync()`"""
    return train(world, "tp", "tp", by_two=True)


@case(LONE, ranks=(2, 1))
def accumulation_beside_tp(world: World) -> Any:
    """Accumulation under `site.no_sync()` with DistributedDataParallel, whatever others have"""
    return train(world, "tp", "ddp", by_two=True)


@case(LONE, Refused("TypeError", "both have the parameters that they train"), ranks=(2, 1))
def replicas_that_nothing_averages(world: World) -> Any:
    """Two ranks of a site with plain modules: nothing would average their gradients"""
    return train(world, "lone", "lone")


class Normed(nn.Module):
    """A layer with a norm over what sequence parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = torch.tanh(self.up(self.norm(self.cut(inputs))))
        return self.head(inputs + self.down(hidden))


def _in_sequence(world: World, *, by_two: bool) -> Any:
    seed_alike(world)
    model: nn.Module = Normed()
    if not world.is_oracle:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {
            "cut": PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=False
            ),
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(),
        }
        model = parallelize_module(model, mesh, plan)
    optimizer = sgd(model)
    world.start(model, optimizer)
    return learn(world, model, optimizer, by_two=by_two)


@case(LONE, ranks=(2, 2), beside=APART)
def sequence_parallel(world: World) -> Any:
    """Sequence parallelism alone: each rank has some of a norm's gradient"""
    return _in_sequence(world, by_two=False)


@case(LONE, ranks=(2, 2), beside=APART)
def sequence_parallel_accumulation(world: World) -> Any:
    """Sequence parallelism alone, and accumulation under `site.no_sync()`"""
    return _in_sequence(world, by_two=True)
