"""Checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.conformance.case import APART, BOTH, DDP, STEPS, case
from tests.conformance.cases.data import Numbers, by_epochs
from tests.conformance.cases.loops import sgd
from tests.conformance.cases.optimizers import ScheduleFree
from tests.conformance.world import BATCH, HIDDEN, OUTPUTS, WIDTH, World, loss_of, net

AT = 2
WIDE = 300_000
"""Outputs of a layer that takes a while to copy."""


@case((*BOTH, "average"), quick=True, resumes_at=AT)
def resumed(world: World) -> Any:
    """A run that goes on from a checkpoint, with its scheduler"""
    model = world.wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    world.start(model, optimizer)
    start = world.site.checkpoint(model, optimizer, scheduler=scheduler)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        loss_of(model, world.batch(step)).backward()
        optimizer.step()
        scheduler.step()
    return model


@case(BOTH, resumes_at=AT, beside=APART)
def resumed_sampler(world: World) -> Any:
    """A run that goes on with the samples that were not used"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    sampler = world.site.sampler(Numbers(), global_batch=2 * BATCH)
    start = world.site.checkpoint(model, optimizer)
    loader: Any = DataLoader(Numbers(), batch_sampler=sampler)
    for _, batch in zip(range(start, STEPS), loader, strict=False):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(DDP, resumes_at=AT + 1, oracle=resumed_sampler, beside=APART)
def resumed_epochs(world: World) -> Any:
    """A run that goes on amid epochs that end by `break`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    sampler = world.site.sampler(Numbers(), global_batch=2 * BATCH)
    loader: Any = DataLoader(
        Numbers(), batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"
    )
    next(iter(loader))
    start = world.site.checkpoint(model, optimizer)
    by_epochs(model, optimizer, loader, STEPS - start)
    return model


@case(BOTH, resumes_at=AT)
def resumed_extra(world: World) -> Any:
    """What a script counts itself (`extra=`)"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    mean = nn.Linear(1, 1)
    nn.init.zeros_(mean.weight)
    nn.init.zeros_(mean.bias)
    start = world.site.checkpoint(model, optimizer, extra={"mean": mean})
    for step in range(start, STEPS):
        optimizer.zero_grad()
        (loss_of(model, world.batch(step)) * (1 + float(mean.weight.detach()))).backward()
        optimizer.step()
        with torch.no_grad():
            mean.weight += 0.5
    return [model, mean]


@case(BOTH, resumes_at=AT)
def resumed_schedule_free(world: World) -> Any:
    """A schedule-free optimizer, whose weights are others in evaluations"""
    model = world.wrap(net())
    optimizer = ScheduleFree(model.parameters())
    world.start(model, optimizer)
    start = world.site.checkpoint(model, optimizer)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        loss_of(model, world.batch(step)).backward()
        optimizer.step()
        optimizer.eval()
        optimizer.train()
    return model


@case(DDP, resumes_at=AT)
def swapped_after_step(world: World) -> Any:
    """Weights that are swapped for an evaluation right after each step (EMA)"""
    model = world.wrap(nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, OUTPUTS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    world.start(model, optimizer)
    start = world.site.checkpoint(model, optimizer)
    kept = [each.detach().clone() for each in model.parameters()]
    for step in range(start, STEPS):
        optimizer.zero_grad()
        loss_of(model, world.batch(step)).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, each in zip(kept, model.parameters(), strict=True):
                mean.copy_(each)
                each.zero_()
            loss_of(model, world.batch(step))
            for mean, each in zip(kept, model.parameters(), strict=True):
                each.copy_(mean)
    return model


@case(DDP, resumes_at=AT)
def resumed_optimizers(world: World) -> Any:
    """Several optimizers: `site.checkpoint(model, [a, b])`"""
    model = world.wrap(net())
    every = [*model.parameters()]
    optimizers = [torch.optim.SGD(every[:4], lr=0.1), torch.optim.Adam(every[4:], lr=0.05)]
    world.start(model, optimizers)
    start = world.site.checkpoint(model, optimizers)
    for step in range(start, STEPS):
        model.zero_grad()
        loss_of(model, world.batch(step)).backward()
        for each in optimizers:
            each.step()
    return model


@case(DDP, resumes_at=AT)
def resumed_gan(world: World) -> Any:
    """The optimizer of a second model in `extra=`"""
    maker = world.wrap(net())
    critic = world.wrap(nn.Sequential(nn.Linear(OUTPUTS, HIDDEN), nn.Linear(HIDDEN, 1)))
    optimizers = [sgd(maker, lr=0.02), torch.optim.Adam(critic.parameters(), lr=0.01)]
    world.start([maker, critic], optimizers)
    extra = {"critic": critic, "adam": optimizers[1]}
    start = world.site.checkpoint(maker, optimizers[0], extra=extra)
    for step in range(start, STEPS):
        inputs, real = world.batch(step)
        optimizers[1].zero_grad()
        made = maker(inputs)
        (critic(made.detach()).mean() - critic(real).square().mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(made).mean()).backward()
        optimizers[0].step()
    return copy.deepcopy([maker.module, critic.module])
