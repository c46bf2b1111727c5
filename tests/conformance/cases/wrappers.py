"""DistributedDataParallel, fully_shard, and what wraps models and losses."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from tests.conformance.case import BOTH, DDP, STEPS, Refused, case
from tests.conformance.cases.loops import sgd
from tests.conformance.world import OUTPUTS, WIDTH, F, World, loss_of, net


def train(world: World, **options: Any) -> Any:
    """Train the small model with DDP of these options."""
    model = world.wrap(net(), **options)
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(DDP, quick=True)
def static_graph(world: World) -> Any:
    """`static_graph=True`"""
    return train(world, static_graph=True)


@case(DDP)
def bucket_views(world: World) -> Any:
    """`gradient_as_bucket_view=True`"""
    return train(world, gradient_as_bucket_view=True)


def _by_parts_in_bf16(world: World) -> Any:
    model = net()
    optimizer = sgd(model)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        for part in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, part) / 2
            loss.backward()
        optimizer.step()
    return model


@case(DDP, quick=True, oracle=_by_parts_in_bf16)
def autocast_bf16(world: World) -> Any:
    """AMP: autocast to bf16, float32 weights"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    return model


@case(BOTH, quick=True)
def gan(world: World) -> Any:
    """A GAN: two models and two optimizers"""
    judge = nn.Sequential(nn.Linear(OUTPUTS, 5), nn.Tanh(), nn.Linear(5, 1))
    maker = world.wrap(nn.Sequential(OrderedDict(maker=net())))
    critic = world.wrap(nn.Sequential(OrderedDict(critic=judge)))
    optimizers = [sgd(maker), sgd(critic)]
    world.start([maker, critic], optimizers)
    for inputs, real in world.batches(STEPS):
        optimizers[1].zero_grad()
        made = maker(inputs)
        (critic(made.detach()).mean() - critic(real).square().mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(made).mean()).backward()
        optimizers[0].step()
    return [maker, critic]


@case(
    DDP,
    Refused("RuntimeError", "channels_last|memory format|strides"),
    broken="the layout's hash has no strides: elements are added in another order",
)
def channels_last_at_one_site(world: World) -> Any:
    """`channels_last` at one site only"""
    model: Any = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.LazyLinear(OUTPUTS))
    model(torch.zeros(1, 2, 2, WIDTH // 2))
    if world.rank == 1:
        model = model.to(memory_format=torch.channels_last)
    model = world.wrap(model)
    optimizer = sgd(model)
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        images = inputs.repeat(1, 2).view(-1, 2, 2, WIDTH // 2)
        F.mse_loss(model(images), targets).backward()
        optimizer.step()
    return model
