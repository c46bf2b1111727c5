"""Optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.case import BOTH, DDP, STEPS, Refused, case
from tests.conformance.cases.loops import sgd
from tests.conformance.world import World, loss_of, net


def train(world: World, make: Callable[[Any], torch.optim.Optimizer], steps: int = STEPS) -> Any:
    """Train the small model with an optimizer."""
    model = world.wrap(net())
    optimizer = make(model)
    world.start(model, optimizer)
    for batch in world.batches(steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(BOTH, quick=True)
def adamw_groups(world: World) -> Any:
    """AdamW with groups: no weight decay for biases"""

    def make(model: Any) -> torch.optim.Optimizer:
        every = [*model.parameters()]
        return torch.optim.AdamW(
            [
                {"params": [each for each in every if each.ndim > 1], "weight_decay": 0.1},
                {"params": [each for each in every if each.ndim == 1], "weight_decay": 0.0},
            ],
            lr=0.01,
        )

    return train(world, make)


@case(DDP)
def foreach_optimizer(world: World) -> Any:
    """`foreach=True`"""
    return train(world, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True))


@case(DDP)
def fused_optimizer(world: World) -> Any:
    """`fused=True`"""
    return train(world, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True))


@case(
    DDP,
    Refused("LOCAL_PROTOCOL|TypeError|RuntimeError", "step"),
    broken="steps of a wrapper's base optimizer are not counted: no verify, rounds pile up",
)
def sam(world: World) -> Any:
    """Sharpness-aware minimisation that steps by its base optimizer"""

    class Sam(torch.optim.Optimizer):
        def __init__(self, params: Any, rho: float = 0.05) -> None:
            super().__init__(params, {"rho": rho})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)

        @torch.no_grad()
        def first_step(self) -> None:
            grads = [each.grad for group in self.param_groups for each in group["params"]]
            norm = torch.stack([each.norm() for each in grads]).norm()
            for group in self.param_groups:
                for each in group["params"]:
                    self.state[each]["moved"] = each.grad * 0.05 / norm
                    each += self.state[each]["moved"]
            self.zero_grad()

        @torch.no_grad()
        def second_step(self) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    each -= self.state[each]["moved"]
            self.base.step()
            self.zero_grad()

    model = world.wrap(net())
    optimizer = Sam(model.parameters())
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        loss_of(model, batch).backward()
        optimizer.first_step()
        loss_of(model, batch).backward()
        optimizer.second_step()
    return model


@case(BOTH, quick=True)
def schedulers(world: World) -> Any:
    """A scheduler of warm-up and cosine"""
    model = world.wrap(net())
    optimizer = sgd(model)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[2])
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
    return model
