"""Models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.conformance.case import BOTH, DDP, STEPS, Refused, case
from tests.conformance.cases.loops import sgd
from tests.conformance.world import HIDDEN, OUTPUTS, WIDTH, F, World, loss_of, net


@case(BOTH, quick=True)
def frozen(world: World) -> Any:
    """Layers that are frozen from the start"""
    model = net()
    model[0].requires_grad_(False)
    wrapped = world.wrap(model)
    optimizer = torch.optim.SGD([each for each in wrapped.parameters() if each.requires_grad], 0.1)
    world.start(wrapped, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(
    DDP,
    Refused("LAYOUT_MISMATCH|LOCAL_PROTOCOL|NOT_SYNCHRONISED", r"0\.weight"),
    broken="DDP has hooks only for what was trainable when it was made",
    quick=True,
)
def thawed_later(world: World) -> Any:
    """A layer that is thawed after `synchronize`"""
    model = net()
    model[0].requires_grad_(False)
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(
    DDP,
    Refused("LAYOUT_MISMATCH|LOCAL_PROTOCOL|NOT_SYNCHRONISED", "head"),
    broken="verify hashes what the hook saw at first: the new layer differs between sites",
)
def added_layer(world: World) -> Any:
    """A layer and a parameter group added after `synchronize`"""
    model: Any = nn.Module()
    model.body = net()
    model.forward = lambda inputs: (
        model.head(model.body(inputs)) if hasattr(model, "head") else model.body(inputs)
    )
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model.head = nn.Linear(OUTPUTS, OUTPUTS)
            optimizer.add_param_group({"params": [*model.head.parameters()]})
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


class Tied(nn.Module):
    """Reads out by the matrix that reads in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(self.inner(self.embedding(tokens))))
        return result


@case(DDP, quick=True)
def tied_embedding(world: World) -> Any:
    """An embedding that the head is tied to"""
    model = world.wrap(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        tokens = (inputs.abs() * 5).long() % 7
        labels = (targets[:, :1].abs() * 5).long().expand(-1, WIDTH) % 7
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).transpose(1, 2), labels).backward()
        optimizer.step()
    return model


class Experts(nn.Module):
    """Each sample goes through one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(3))
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        result: torch.Tensor = self.head(self.experts[which](inputs).tanh())
        return result


def _experts_alone(world: World) -> Any:
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, (inputs, targets) in enumerate(
            zip(*(part.chunk(world.num_ranks) for part in world.batch(step)), strict=True)
        ):
            outputs = model(inputs, (step + rank) % 2)
            (F.mse_loss(outputs, targets) / world.num_ranks).backward()
        optimizer.step()
    return model


@case(BOTH, quick=True, oracle=_experts_alone)
def unused_experts(world: World) -> Any:
    """Experts of which each site uses another one, and one that nobody uses"""
    model = world.wrap(
        Experts(), **({"find_unused_parameters": True} if world.way == "ddp" else {})
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    world.start(model, optimizer)
    for step, (inputs, targets) in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        outputs = model(inputs, (step + world.rank) % 2)
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
    return model
