"""Data."""

from __future__ import annotations

from typing import Any

from tests.conformance.case import BOTH, STEPS, case
from tests.conformance.cases.loops import sgd
from tests.conformance.world import F, World, loss_of, net

SIZES = (2, 7)


@case(BOTH, quick=True)
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
def summed_losses(world: World) -> Any:
    """Losses that are sums over unequal batches (`loss="sum"`)"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.site.synchronize(model, optimizer, loss="sum")
    for step in range(STEPS):
        inputs, targets = world.batch(step, sizes=SIZES)
        optimizer.zero_grad()
        world.site.count_tokens(len(inputs))
        loss = F.mse_loss(model(inputs), targets, reduction="sum")
        (loss / (len(inputs) if world.is_oracle else 1)).backward()
        optimizer.step()
    return model
