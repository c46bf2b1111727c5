"""Optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.conformance.case import AVERAGE, BOTH, DDP, FSDP2, STEPS, Refused, case
from tests.conformance.cases.loops import sgd
from tests.conformance.world import World, loss_of, net

UNCOUNTED = Refused("ROUND_WITHOUT_STEP", "took no step")


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


@case((*BOTH, *AVERAGE), quick=DDP)
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


@case(BOTH)
def foreach_optimizer(world: World) -> Any:
    """`foreach=True`"""
    return train(world, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True))


@case(BOTH)
def fused_optimizer(world: World) -> Any:
    """`fused=True`"""
    return train(world, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True))


def _split(model: Any) -> tuple[list[Any], list[Any]]:
    every = [*model.parameters()]
    return [each for each in every if each.ndim == 2], [each for each in every if each.ndim != 2]


@case(DDP, quick=True)
def muon_and_adamw(world: World) -> Any:
    """Muon for matrices and AdamW for the rest"""
    model = world.wrap(net())
    matrices, vectors = _split(model)
    optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(vectors, lr=0.01)]
    world.start(model, optimizers)
    for batch in world.batches(STEPS):
        loss_of(model, batch).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    return model


class Lamb(torch.optim.Optimizer):
    """Steps of each tensor are as long as the tensor itself, times the rate."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for each in group["params"]:
                size = each.grad.norm() + 1e-6
                each.sub_(each.grad * (each.norm() + 0.1) / size * group["lr"])


@case(BOTH)
def lamb(world: World) -> Any:
    """An optimizer by the norm of each tensor (LAMB), at sites that shard alike"""
    return train(world, lambda m: Lamb(m.parameters()))


@case(FSDP2, Refused("PARAMETERS_DIFFER", "differs"), ranks=(1, 2))
def lamb_over_unlike_shards(world: World) -> Any:
    """An optimizer by the norm of each tensor, over unlike shards: norms round otherwise"""
    return train(world, lambda m: Lamb(m.parameters()), steps=12)


@case(BOTH)
def optimizer_per_layer(world: World) -> Any:
    """One optimizer for the body, another for the head"""
    model = world.wrap(net())
    every = [*model.parameters()]
    optimizers = [torch.optim.SGD(every[:4], lr=0.1), torch.optim.Adam(every[4:], lr=0.01)]
    world.start(model, optimizers)
    for batch in world.batches(STEPS):
        loss_of(model, batch).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    return model


@case(BOTH)
def second_optimizer_steps_rarely(world: World) -> Any:
    """A second optimizer that steps after every second pass"""
    model = world.wrap(net())
    every = [*model.parameters()]
    optimizers = [torch.optim.SGD(every[:4], lr=0.1), torch.optim.Adam(every[4:], lr=0.01)]
    world.start(model, optimizers)
    for step, batch in enumerate(world.batches(STEPS)):
        loss_of(model, batch).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        if step % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()
    return model


@case(DDP)
def one_parameter_in_two_optimizers(world: World) -> Any:
    """A parameter that two optimizers step"""
    model = world.wrap(net())
    every = [*model.parameters()]
    optimizers = [torch.optim.SGD(every, lr=0.1), torch.optim.Adam(every[4:], lr=0.01)]
    world.start(model, optimizers)
    for batch in world.batches(STEPS):
        model.zero_grad()
        loss_of(model, batch).backward()
        for each in optimizers:
            each.step()
    return model


@case(DDP, UNCOUNTED, steps=None)
def replaced_optimizer(world: World) -> Any:
    """Another optimizer made after `attach`, in place of the first"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS + 2)):
        if step == 1:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


# ---------------------------------------------------------------- optimizers of optimizers


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is commonly written."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def _parameters(self) -> list[Any]:
        return [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([each.grad.norm() for each in self._parameters()]).norm()
        for each in self._parameters():
            self.state[each]["moved"] = each.grad * 0.05 / norm
            each += self.state[each]["moved"]
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for each in self._parameters():
            each -= self.state[each]["moved"]
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


@case(DDP, UNCOUNTED, steps=None)
def sam(world: World) -> Any:
    """Sharpness-aware minimisation, in two steps of a wrapper with a base"""
    model = world.wrap(net())
    optimizer = Sam(model.parameters())
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        loss_of(model, batch).backward()
        optimizer.first_step()
        loss_of(model, batch).backward()
        optimizer.second_step()
    return model


@case(DDP)
def sam_base(world: World) -> Any:
    """Sharpness-aware minimisation, whose base is given to `attach`"""
    model = world.wrap(net())
    optimizer = Sam(model.parameters())
    world.start(model, optimizer.base)
    for batch in world.batches(STEPS):
        loss_of(model, batch).backward()
        optimizer.first_step()
        loss_of(model, batch).backward()
        optimizer.second_step()
    return model


@case(DDP)
def sam_of_micro_batches(world: World) -> Any:
    """Sharpness-aware minimisation of micro-batches, each by itself, whose gradients add up"""
    model = world.wrap(net())
    optimizer = Sam(model.parameters())
    world.start(model, optimizer.base)
    for step in range(STEPS):
        total = [torch.zeros_like(each) for each in model.parameters()]
        for batch in world.batches(3, first=3 * step):
            kept = [each.detach().clone() for each in model.parameters()]
            loss_of(model, batch).backward()
            optimizer.first_step()
            loss_of(model, batch).backward()
            with torch.no_grad():
                for each, value, added in zip(model.parameters(), kept, total, strict=True):
                    each.copy_(value)
                    added += each.grad
            optimizer.zero_grad()
        for each, added in zip(model.parameters(), total, strict=True):
            each.grad = added
        optimizer.base.step()
        optimizer.zero_grad()
    return model


@case(DDP)
def sam_with_a_closure(world: World) -> Any:
    """Sharpness-aware minimisation, by `step(closure)`"""
    model = world.wrap(net())
    optimizer = Sam(model.parameters())
    world.start(model, optimizer)
    for batch in world.batches(STEPS):

        def closure(batch: Any = batch) -> None:
            loss_of(model, batch).backward()

        closure()
        optimizer.step(closure)
    return model


class Lookahead(torch.optim.Optimizer):
    """Every second step goes half of the way that a base has gone."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each].setdefault("slow", each.clone())
        self.base.step(closure)
        self.num_steps += 1
        for group in self.param_groups if self.num_steps % 2 == 0 else ():
            for each in group["params"]:
                each.copy_(self.state[each]["slow"].lerp_(each, 0.5))


@case(BOTH)
def lookahead(world: World) -> Any:
    """Lookahead, given to `attach`"""
    return train(world, lambda m: Lookahead(sgd(m)))


@case(BOTH)
def lookahead_base(world: World) -> Any:
    """Lookahead, whose base is given to `attach`"""
    model = world.wrap(net())
    optimizer = Lookahead(sgd(model))
    world.start(model, optimizer.base)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


class Scheduled:
    """A wrapper that is no optimizer, as some courses have it."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def step(self) -> None:
        self.base.param_groups[0]["lr"] *= 0.9
        self.base.step()


@case(BOTH, Refused("TypeError", r"want a torch\.optim\.Optimizer, got Scheduled"))
def wrapper_that_is_no_optimizer(world: World) -> Any:
    """A wrapper that is no `torch.optim.Optimizer`"""
    make: Any = lambda model: Scheduled(sgd(model))  # noqa: E731 - of the wrong type
    return train(world, make)


@case(BOTH)
def base_of_no_optimizer(world: World) -> Any:
    """The optimizer inside a wrapper that is none"""
    model = world.wrap(net())
    optimizer = Scheduled(sgd(model))
    world.start(model, optimizer.base)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule: weights are put to the mean for an evaluation, and back."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _swap(self, is_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != is_training:
                weight = 1 - 1 / group["beta"] if not is_training else 1 - group["beta"]
                for each in group["params"]:
                    each.lerp_(self.state[each]["z"], weight)
                group["train_mode"] = is_training

    def eval(self) -> None:
        self._swap(is_training=False)

    def train(self) -> None:
        self._swap(is_training=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            group["k"] += 1
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, 1 / group["k"])
                each.sub_(each.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"])))
                z.sub_(each.grad, alpha=group["lr"])


@case(BOTH, quick=DDP)
def schedule_free(world: World) -> Any:
    """A schedule-free optimizer with evaluations in between"""
    model = world.wrap(net())
    optimizer = ScheduleFree(model.parameters())
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if step % 2:
            optimizer.eval()
            with torch.no_grad():
                world.note(loss_of(model, batch))
            optimizer.train()
    optimizer.eval()
    return model


@case(DDP, quick=True)
def ema(world: World) -> Any:
    """A moving average of the weights (`AveragedModel`), swapped in for evaluations"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    swa: Any = torch.optim.swa_utils
    mean = swa.AveragedModel(model.module, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        mean.update_parameters(model.module)
        kept = copy.deepcopy(model.module.state_dict())
        model.module.load_state_dict(mean.module.state_dict())
        with torch.no_grad():
            world.note(loss_of(model, batch))
        model.module.load_state_dict(kept)
    return [model, mean.module]


# ---------------------------------------------------------------- what evaluates by itself


@case(
    DDP,
    Refused("ScriptError", "LBFGS evaluates its closure as often"),
    steps=None,
    within_s=15,
)
def lbfgs(world: World) -> Any:
    """LBFGS, whose line search goes by each site's own loss"""
    model = world.wrap(net())
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    world.start(model, optimizer)
    for batch in world.batches(STEPS):

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


@case(DDP)
def lbfgs_by_the_mean_loss(world: World) -> Any:
    """LBFGS whose closure returns the loss averaged over all sites"""
    model = world.wrap(net())
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            mean = loss.detach().clone()
            world.site.all_reduce([mean], exact=True)
            return mean

        optimizer.step(closure)
    return model


@case(AVERAGE, Refused("RuntimeError", "called with a closure"), steps=None)
def lbfgs_on_averages(world: World) -> Any:
    """LBFGS with `site.average_gradients`"""
    return lbfgs(world)


@case(
    BOTH,
    {
        "ddp": Refused("ScriptError", "steps in the backward pass"),
        "fsdp2": Refused("TypeError", "has a hook that runs when its gradient"),
    },
    steps=None,
)
def steps_in_backward(world: World) -> Any:
    """Optimizers that step in backward (`register_post_accumulate_grad_hook`)"""
    model = world.wrap(net())
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    world.start(model, [*optimizers.values()])
    for batch in world.batches(STEPS):
        loss_of(model, batch).backward()
    return model


@case(AVERAGE)
def clip_in_a_step_hook(world: World) -> Any:
    """Clipping in a hook of the optimizer's, with `site.average_gradients`"""
    model = net()
    optimizer = sgd(model)
    world.start(model, optimizer)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


# ---------------------------------------------------------------- learning rates


@case((*BOTH, *AVERAGE), quick=DDP)
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


def _plateau(world: World, is_averaged: bool) -> Any:
    model = world.wrap(net())
    optimizer = sgd(model, lr=0.6)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    world.start(model, optimizer)
    for batch in world.batches(12):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        value = loss.detach().clone()
        if is_averaged:
            world.site.all_reduce([value], exact=True)
        scheduler.step(value)
    return model


@case(BOTH, steps=12)
def plateau_of_all(world: World) -> Any:
    """`ReduceLROnPlateau` by a loss that is averaged over all sites"""
    return _plateau(world, is_averaged=True)


@case(BOTH, Refused("PARAMETERS_DIFFER", "differs"), steps=12)
def plateau_of_each(world: World) -> Any:
    """`ReduceLROnPlateau` by each site's own loss"""
    return _plateau(world, is_averaged=False)
