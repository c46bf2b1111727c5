"""The regime `delayed`."""

# What a script learns there is not what one process does, until its learning rate is 0: then each
# step leaves parameters as the script has made them, and the guess is no other than they are.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.conformance.case import DDP, LONE, STEPS, Refused, Way, case
from tests.conformance.cases.loops import sgd
from tests.conformance.world import WIDTH, World, loss_of, net

ALL: tuple[Way, ...] = ("ddp", "fsdp2", "lone")
JOB = ("regime.kind=delayed",)
LOADED = 0.3

Change = Callable[[World, Any], None]


def _load(_: World, model: Any) -> None:
    state = model.state_dict()
    model.load_state_dict({name: torch.full_like(each, LOADED) for name, each in state.items()})


def _clamp(world: World, model: Any) -> None:
    if world.is_sharded:
        model.reshard()  # else it would clamp what fully_shard has gathered
    with torch.no_grad():
        for each in model.parameters():
            each.clamp_(LOADED, LOADED)


def _changed(world: World, change: Change, *, evaluates: bool) -> Any:
    """Train; change all weights, after a pass that has no backward one; and go on from there."""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == STEPS // 2:
            if evaluates:
                loss_of(model, batch)  # with gradients on, as people forget
            change(world, model)
            optimizer.param_groups[0]["lr"] = 0.0
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        if step >= STEPS // 2:
            world.note(loss)
    return model


@case(ALL, job=JOB, quick=DDP)
def delayed_loads_after_evaluation(world: World) -> Any:
    """Evaluation with gradients on, and then weights are loaded"""
    return _changed(world, _load, evaluates=True)


@case(ALL, job=JOB)
def delayed_loads_between_steps(world: World) -> Any:
    """Weights are loaded between two steps"""
    return _changed(world, _load, evaluates=False)


@case(ALL, job=JOB)
def delayed_clamps_after_evaluation(world: World) -> Any:
    """Evaluation with gradients on, and then weights are clamped"""
    return _changed(world, _clamp, evaluates=True)


@case(ALL, job=JOB, quick=LONE)
def delayed_clamps_between_steps(world: World) -> Any:
    """Weights are clamped between two steps"""
    return _changed(world, _clamp, evaluates=False)


@case(("ddp", "lone"), job=JOB)
def delayed_keeps_an_average(world: World) -> Any:
    """An average of weights is kept between the forward and the backward pass"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    average = [torch.zeros_like(each) for each in model.parameters()]
    kept = []
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        with torch.no_grad():
            before = [each.clone() for each in model.parameters()]
            for mean, each in zip(average, model.parameters(), strict=True):
                mean.lerp_(each, 0.5)
        loss.backward()
        kept += [each - now for each, now in zip(before, model.parameters(), strict=True)]
        optimizer.step()
    if world.is_oracle:
        return {"off": torch.zeros(())}
    return {"off": torch.stack([each.detach().abs().max() for each in kept]).max()}


@case(DDP, Refused("ScriptError", "no optimizer step lies between them"), job=JOB, steps=None)
def delayed_leaves_out_a_step(world: World) -> Any:
    """A step is left out, for the gradient is large"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if step != 1:
            optimizer.step()
    return model


@case(
    ALL,
    Refused("ScriptError", "regime delayed: a GradScaler leaves out steps"),
    job=JOB,
    steps=None,
)
def delayed_with_grad_scaler(world: World) -> Any:
    """AMP: `GradScaler`, whose first step has no gradient"""
    model = world.wrap(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


@case(DDP, Refused("TypeError", "under the regime delayed there can be one"), job=JOB, steps=None)
def delayed_with_two_models(world: World) -> Any:
    """Two models of DDP"""
    models = [world.wrap(nn.Linear(WIDTH, WIDTH)), world.wrap(net())]
    optimizer = torch.optim.SGD([each for one in models for each in one.parameters()], lr=0.1)
    world.start(models, optimizer)
    return models


@case(
    DDP,
    Refused("TypeError", "does not cross under the regime delayed.*say `regime: sync`"),
    job=JOB,
    steps=None,
)
def delayed_with_complex_weights(world: World) -> Any:
    """Complex parameters"""
    model = net()
    model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    wrapped = world.wrap(model, find_unused_parameters=True)
    world.start(wrapped, sgd(wrapped))
    return wrapped


@case(
    DDP,
    Refused("TypeError", "not in row-major order .* under the regime delayed"),
    job=JOB,
    steps=None,
)
def delayed_with_channels_last(world: World) -> Any:
    """Weights in `channels_last`"""
    model: Any = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 1, 2))
    model = world.wrap(model.to(memory_format=torch.channels_last))
    world.start(model, sgd(model))
    return model
