"""Models that become others, and `attach` again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.conformance.case import AVERAGE, BOTH, DDP, FSDP2, LONE, STEPS, Refused, case
from tests.conformance.cases.loops import sgd
from tests.conformance.cases.models import Adapted, Growing
from tests.conformance.world import HIDDEN, OUTPUTS, F, World, loss_of, net

AT = 2
"""The step before which the model changes."""


def filled(module: Any, value: float = 0.1) -> Any:
    """Give parameters the same values wherever the script runs."""
    with torch.no_grad():
        for each in module.parameters():
            each.fill_(value)
    return module


def take_step(world: World, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take one step."""
    optimizer.zero_grad()
    loss_of(model, world.batch(step)).backward()
    optimizer.step()


@case((*DDP, *AVERAGE), quick=DDP)
def adapters_and_attached_again(world: World) -> Any:
    """LoRA adapters put in, the rest frozen, another optimizer, and `attach` again"""
    model = net()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step in range(STEPS):
        if step == AT:
            model.requires_grad_(False)
            model[4] = Adapted(model[4])
            wrapped = world.wrap(model)
            optimizer = torch.optim.Adam([model[4].down, model[4].up], lr=0.01)
            world.start(wrapped, optimizer)
        take_step(world, wrapped, optimizer, step)
    return wrapped


@case(BOTH, ranks=(1, 2))
def thawed_at_unlike_sites(world: World) -> Any:
    """A layer that is thawed, and `attach` again, at sites of one and two ranks"""
    model = net()
    model[0].requires_grad_(False)
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step in range(STEPS):
        if step == AT:
            model[0].requires_grad_(True)
            if world.way == "ddp":
                wrapped = world.wrap(model)
            world.start(wrapped, optimizer)
        take_step(world, wrapped, optimizer, step)
    return wrapped


@case(DDP)
def thawed_layer_by_layer(world: World) -> Any:
    """One layer more is thawed before each step, and `attach` called again"""
    model = net()
    model.requires_grad_(False)
    model[4].requires_grad_(True)
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step in range(STEPS):
        if step in (1, 2):
            model[4 - 2 * step].requires_grad_(True)
            wrapped = world.wrap(model)
            world.start(wrapped, optimizer)
        take_step(world, wrapped, optimizer, step)
    return wrapped


@case(BOTH)
def frozen_and_attached_again(world: World) -> Any:
    """A layer that is frozen, and `attach` again"""
    model = net()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step in range(STEPS):
        if step == AT:
            optimizer.zero_grad()
            model[0].requires_grad_(False)
            if world.way == "ddp":
                wrapped = world.wrap(model)
            world.start(wrapped, optimizer)
        take_step(world, wrapped, optimizer, step)
    return wrapped


@case(FSDP2)
def sharded_layer_and_attached_again(world: World) -> Any:
    """A layer added to a sharded model, sharded itself, and `attach` again"""
    model = Growing()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    head = filled(nn.Linear(OUTPUTS, OUTPUTS))
    for step in range(STEPS):
        if step == AT:
            model.head = world.wrap(head)
            optimizer.add_param_group({"params": [*head.parameters()]})
            world.start(wrapped, optimizer)
        take_step(world, wrapped, optimizer, step)
    return {"head": head.weight, "body": model.body[0].weight}


def _added_layer(world: World, *, broadcasts: bool) -> Any:
    model = Growing()
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step in range(STEPS):
        if step == AT:
            model.head = filled(nn.Linear(OUTPUTS, OUTPUTS), 0.1 + world.rank)
            optimizer.add_param_group({"params": [*model.head.parameters()]})
            if broadcasts:
                world.site.broadcast(model)
        take_step(world, model, optimizer, step)
    return model


@case(AVERAGE)
def added_layer_averaged(world: World) -> Any:
    """A layer and a group added, and `site.broadcast` before the first pass with them"""
    return _added_layer(world, broadcasts=True)


@case(AVERAGE, Refused("NOT_ATTACHED", r"1\.0 \[3, 3\] and 1 more"), quick=True)
def added_layer_of_other_values(world: World) -> Any:
    """A layer and a group added, of which each rank has other values"""
    return _added_layer(world, broadcasts=False)


@case(AVERAGE)
def another_optimizer_averages(world: World) -> Any:
    """`site.average_gradients` again, of another optimizer"""
    model = net()
    optimizer: torch.optim.Optimizer = sgd(model)
    world.start(model, optimizer)
    for step in range(STEPS):
        if step == AT:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            world.start(model, optimizer)
        take_step(world, model, optimizer, step)
    return model


@case((*BOTH, *LONE))
def another_optimizer_of_the_same_wrapper(world: World) -> Any:
    """Another optimizer of the same wrapped model, and `attach` again"""
    model = world.wrap(net())
    optimizer: torch.optim.Optimizer = sgd(model)
    world.start(model, optimizer)
    for step in range(STEPS):
        if step == AT:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            world.start(model, optimizer)
        take_step(world, model, optimizer, step)
    return model


@case((*BOTH, *LONE))
def another_model(world: World) -> Any:
    """Another model after the first one, with an optimizer of its own"""
    models = [world.wrap(net()), world.wrap(nn.Sequential(filled(nn.Linear(6, OUTPUTS))))]
    for index, model in enumerate(models):
        optimizer = sgd(model)
        world.start(model, optimizer)
        for step in range(2 * index, 2 * index + 2):
            take_step(world, model, optimizer, step)
    return models


@case(DDP)
def assigned_and_attached_again(world: World) -> Any:
    """`load_state_dict(assign=True)` between steps, and `attach` again"""
    model = net()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step in range(STEPS):
        if step == AT:
            state = {name: each.clone() for name, each in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
            wrapped = world.wrap(model)
            optimizer = sgd(wrapped)
            world.start(wrapped, optimizer)
        take_step(world, wrapped, optimizer, step)
    return wrapped


@case((*DDP, *LONE))
def head_of_other_size(world: World) -> Any:
    """A head of another size in the place of the first one, and `attach` again"""
    model = net()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step in range(STEPS):
        if step == AT:
            model[4] = filled(nn.Linear(HIDDEN, 1))
            wrapped = world.wrap(model)
            optimizer = sgd(wrapped)
            world.start(wrapped, optimizer)
        take_step(world, wrapped, optimizer, step)
    return wrapped


@case(DDP)
def sums_then_means(world: World) -> Any:
    """Losses that are sums at first, and means after `attach` again"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.site.attach(model, optimizer, loss="sum")
    for step in range(STEPS):
        if step == AT:
            world.start(model, optimizer)
        inputs, targets = world.batch(step)
        world.site.count_tokens(len(inputs))
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        whole = loss if step >= AT or world.is_oracle else loss * len(inputs)
        whole.backward()
        optimizer.step()
    return model


# ---------------------------------------------------------------- what is refused


@case(BOTH, Refused("RuntimeError", "all models and all optimizers at once"), steps=None)
def attached_one_by_one(world: World) -> Any:
    """`attach` called once for each of two models"""
    models = [world.wrap(net()), world.wrap(net())]
    for model in models:
        world.start(model, sgd(model))
    return models


@case(
    BOTH,
    {
        "ddp": Refused("ScriptError", "was given before"),
        "fsdp2": Refused("NOT_ATTACHED", r"parameter 0 of group 0"),
    },
)
def left_out_later(world: World) -> Any:
    """A model that the second `attach` leaves out, and that trains on"""
    models = [world.wrap(net()), world.wrap(net())]
    optimizers = [sgd(each) for each in models]
    world.start(models[0], optimizers[0])
    for step in range(STEPS):
        if step == AT:
            world.start(models[1], optimizers[1])
        for model, optimizer in zip(models[: 1 if step < AT else 2], optimizers, strict=False):
            take_step(world, model, optimizer, step)
    return models


# ---------------------------------------------------------------- checkpoints


def _grown(world: World, *, says_so: bool = True) -> Any:
    model = Growing()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    start = world.site.checkpoint(wrapped, optimizer)
    for step in range(start, STEPS):
        if step == AT:
            model.head = filled(nn.Linear(OUTPUTS, OUTPUTS))
            wrapped = world.wrap(model)
            optimizer = sgd(wrapped)
            world.start(wrapped, optimizer)
            if says_so:
                world.site.checkpoint(wrapped, optimizer)
        take_step(world, wrapped, optimizer, step)
    return wrapped


@case((*DDP, *AVERAGE), quick=DDP, resumes_at=AT - 1)
def resumed_before_a_change(world: World) -> Any:
    """A run whose model grows, from a checkpoint of before"""
    return _grown(world)


@case(DDP, resumes_at=AT)
def resumed_at_a_change(world: World) -> Any:
    """A run whose model grows, from a checkpoint of right before"""
    return _grown(world)


@case(DDP, Refused("CONFIG_MISMATCH", r"head\.weight of shape"), resumes_at=AT + 1)
def resumed_after_a_change(world: World) -> Any:
    """A run whose model grows, from a checkpoint of after, by a script that builds the first one"""
    return _grown(world)


@case(DDP, resumes_at=AT + 1)
def resumed_as_it_has_become(world: World) -> Any:
    """A run whose model grows, from a checkpoint of after, by a script that builds the grown one"""
    model = Growing()
    has_grown = bool(getattr(world.site, "job", None) and world.site.job.checkpoint.resume)
    if has_grown:
        model.head = nn.Linear(OUTPUTS, OUTPUTS)
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    start = world.site.checkpoint(wrapped, optimizer)
    for step in range(start, STEPS):
        if step == AT and not has_grown:
            model.head = filled(nn.Linear(OUTPUTS, OUTPUTS))
            wrapped = world.wrap(model)
            optimizer = sgd(wrapped)
            world.start(wrapped, optimizer)
            world.site.checkpoint(wrapped, optimizer)
        take_step(world, wrapped, optimizer, step)
    return wrapped


@case(DDP, Refused("RuntimeError", "call it again where site.attach"), resumes_at=AT)
def grown_and_not_saved(world: World) -> Any:
    """A run whose model grows, and that forgets to call `site.checkpoint` again"""
    return _grown(world, says_so=False)


@case(BOTH, resumes_at=AT + 1)
def resumed_with_a_group_added(world: World) -> Any:
    """A group that the optimizer gets later, from a checkpoint of after"""
    model = world.wrap(net())
    every = [*model.parameters()]
    optimizer = torch.optim.SGD(every[4:], lr=0.1, momentum=0.9)
    world.start(model, optimizer)
    is_resumed = bool(getattr(world.site, "job", None) and world.site.job.checkpoint.resume)
    if is_resumed:
        optimizer.add_param_group({"params": every[:4], "lr": 0.05})
    start = world.site.checkpoint(model, optimizer)
    for step in range(start, STEPS):
        if step == AT and not is_resumed:
            optimizer.add_param_group({"params": every[:4], "lr": 0.05})
        model.zero_grad()
        loss_of(model, world.batch(step)).backward()
        optimizer.step()
    return model


@case(BOTH, resumes_at=AT)
def resumed_where_it_thaws(world: World) -> Any:
    """A run that thaws a layer, from a checkpoint of right before"""
    model = net()
    model[0].requires_grad_(False)
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    start = world.site.checkpoint(wrapped, optimizer)
    for step in range(start, STEPS):
        if step == AT:
            model[0].requires_grad_(True)
            if world.way == "ddp":
                wrapped = world.wrap(model)
            world.start(wrapped, optimizer)
            world.site.checkpoint(wrapped, optimizer)
        take_step(world, wrapped, optimizer, step)
    return wrapped
