"""Training loops."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.conformance.case import (
    APART,
    AVERAGE,
    BOTH,
    DDP,
    FINITE,
    STEPS,
    Refused,
    case,
    in_regimes,
)
from tests.conformance.world import HIDDEN, OUTPUTS, WIDTH, F, World, loss_of, net


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@case((*BOTH, *AVERAGE), quick=True)
def plain_loop(world: World) -> Any:
    """A plain loop"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        world.note(loss)
        world.site.log(loss=loss)
    return model


@case(BOTH, ranks=(1, 2))
def unequal_sites(world: World) -> Any:
    """One site has twice the ranks of the other"""
    return plain_loop(world)


@case((*BOTH, *AVERAGE), quick=True)
def accumulation(world: World) -> Any:
    """Gradient accumulation under `no_sync`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        with world.no_sync(model):
            (loss_of(model, world.batch(2 * step)) / 2).backward()
        (loss_of(model, world.batch(2 * step + 1)) / 2).backward()
        optimizer.step()
    return model


@case((*BOTH, *AVERAGE))
def accumulation_with_sync(world: World) -> Any:
    """Gradient accumulation that synchronises each micro-batch"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in (0, 1):
            (loss_of(model, world.batch(2 * step + micro)) / 2).backward()
        optimizer.step()
    return model


@case(BOTH)
def accumulation_of_unequal_numbers(world: World) -> Any:
    """Steps of one, two and three micro-batches, with `zero_grad(set_to_none=False)`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step in range(STEPS):
        num_micro = 1 + step % 3
        for micro in range(num_micro - 1):
            with world.no_sync(model):
                (loss_of(model, world.batch(3 * step + micro)) / num_micro).backward()
        (loss_of(model, world.batch(3 * step + 2)) / num_micro).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


@case(
    DDP,
    Refused("STEP_WITHOUT_ROUND", "leave no_sync"),
    steps=None,
)
def step_under_no_sync(world: World) -> Any:
    """A whole step under `no_sync`: nothing crosses"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        with world.no_sync(model):
            loss_of(model, batch).backward()
            optimizer.step()
    return model


@case((*BOTH, *AVERAGE), steps=STEPS - 1)
def zero_grad_after_step(world: World) -> Any:
    """`zero_grad` after the step, and batches that all sites skip"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 1:
            continue
        loss_of(model, batch).backward()
        optimizer.step()
        model.zero_grad()
    return model


@case(DDP, quick=True)
def clip_by_norm(world: World) -> Any:
    """`torch.nn.utils.clip_grad_norm_`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        world.note(norm)
        optimizer.step()
    return model


@case(BOTH, ranks=(1, 2))
def clip_by_site_norm(world: World) -> Any:
    """`site.clip_grad_norm_`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norm = world.site.clip_grad_norm_(0.1)
        world.note(torch.tensor(norm))
        optimizer.step()
    return model


@case(BOTH)
def clip_by_value(world: World) -> Any:
    """`clip_grad_value_`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
    return model


@case(DDP)
def gradient_noise(world: World) -> Any:
    """Noise added to gradients, from a generator that is seeded alike"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    generator = torch.Generator().manual_seed(3)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for each in model.parameters():
            each.grad += 0.01 * torch.randn(each.shape, generator=generator)
        optimizer.step()
    return model


@case(
    DDP,
    Refused("PARAMETERS_DIFFER", "differs"),
    oracle=lambda world: plain_loop(world),
)
def unseeded_noise(world: World) -> Any:
    """Noise added to gradients, of each rank's own"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for each in model.parameters():
            each.grad += 0.01 * torch.randn(each.shape)
        optimizer.step()
    return model


@case(BOTH)
def evaluation_between(world: World) -> Any:
    """An evaluation between steps, in `eval()` and `no_grad`, through the wrapper and past it"""
    model = world.wrap(nn.Sequential(*net(), nn.Dropout(0.0), nn.LayerNorm(3)))
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        model.train()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if step % 2:
            model.eval()
            with torch.no_grad():
                world.note(loss_of(model, world.batch(100 + step)))
            with torch.inference_mode():
                world.note(loss_of(getattr(model, "module", model), world.batch(200 + step)))
    return model


@case(DDP, steps=STEPS + 3)
def learning_rate_finder(world: World) -> Any:
    """A learning-rate finder: some steps at rising rates, then everything is put back"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for step, batch in enumerate(world.batches(3, first=50)):
        optimizer.param_groups[0]["lr"] = 0.01 * 10**step
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(BOTH, steps=None)
def early_stopping(world: World) -> Any:
    """Early stopping by a loss that is averaged over all sites"""
    model = world.wrap(net())
    optimizer = sgd(model, lr=0.3)
    world.start(model, optimizer)
    for batch in world.batches(20):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            loss = loss_of(model, world.batch(500))
        world.site.all_reduce([loss], exact=True)
        world.note(loss)
        if loss < 1.35:
            break
    return model


SECOND_PASS = Refused("ScriptError", "has not reduced it: it was a second one through the same")
TWO_FORWARDS = Refused("ScriptError", "the second of two after two forward passes")


@case(DDP, SECOND_PASS, quick=True, steps=None, beside=in_regimes(SECOND_PASS))
def retained_graph(world: World) -> Any:
    """A second backward pass through one forward pass (`retain_graph`)"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch
        outputs = model(inputs)
        F.mse_loss(outputs, targets).backward(retain_graph=True)
        outputs.square().mean().backward()
        optimizer.step()
    return model


@case(DDP, SECOND_PASS, steps=None, beside=in_regimes(SECOND_PASS))
def second_pass_past_the_wrapper(world: World) -> Any:
    """A backward pass through the wrapper, and one past it, through `model.module`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        loss_of(getattr(model, "module", model), batch).backward()
        optimizer.step()
    return model


@case(DDP, SECOND_PASS, steps=None, beside=in_regimes(SECOND_PASS))
def retained_graph_late_in_the_run(world: World) -> Any:
    """Such a second pass in the third step only, of micro-batches under `no_sync`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        with world.no_sync(model):
            loss_of(model, batch).backward()
        loss = loss_of(model, batch)
        loss.backward(retain_graph=step == 2)
        if step == 2:
            loss.backward()
        optimizer.step()
    return model


@case(DDP)
def retained_graph_under_no_sync(world: World) -> Any:
    """A backward pass under `no_sync`, and one that retains its graph"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        with world.no_sync(model):
            model(batch[0]).square().mean().backward()
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        optimizer.step()
    return model


@case(DDP)
def retained_graph_and_zeroed(world: World) -> Any:
    """A second backward pass whose gradients are read and zeroed, before the step's own"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(DDP, TWO_FORWARDS, steps=None, beside=in_regimes(TWO_FORWARDS))
def two_forwards_two_backwards(world: World) -> Any:
    """Two forward passes, then two backward passes"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        first, second = loss_of(model, batch), model(batch[0]).square().mean()
        first.backward()
        second.backward()
        optimizer.step()
    return model


@case(DDP)
def two_losses_of_two_passes(world: World) -> Any:
    """Two losses, each with its own forward and backward pass, before one step"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        model(batch[0]).square().mean().backward()
        optimizer.step()
    return model


@case(DDP, quick=True, steps=0)
def manual_sgd(world: World) -> Any:
    """SGD by hand: `site.all_reduce` of gradients, and no optimizer at all"""
    model: Any = net()
    world.site.broadcast(model)
    for batch in world.batches(STEPS):
        loss_of(model, batch).backward()
        world.site.all_reduce([each.grad for each in model.parameters()])
        with torch.no_grad():
            for each in model.parameters():
                each.sub_(each.grad, alpha=0.1)
                each.grad = None
    return model


@case(DDP, Refused("ROUND_WITHOUT_STEP", "took no step"), steps=None)
def rounds_without_steps(world: World) -> Any:
    """Weights changed by hand while `optimizer.step` is never called"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS + 2):
        loss_of(model, batch).backward()
        with torch.no_grad():
            for each in model.parameters():
                each.sub_(each.grad, alpha=0.1)
                each.grad = None
    return model


@case(BOTH, quick=DDP, steps=2)
def many_rounds_a_step(world: World) -> Any:
    """Accumulation without `no_sync`: a round for each micro-batch, and few steps"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step in range(2):
        for batch in world.batches(8, first=8 * step):
            (loss_of(model, batch) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@case(BOTH, steps=STEPS + 2)
def steps_without_gradients(world: World) -> Any:
    """Steps without gradients, with zeros, and with those of the step before"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    optimizer.step()
    for step, batch in enumerate(world.batches(STEPS)):
        optimizer.zero_grad(set_to_none=step > 1)
        if step == 1:
            optimizer.step()
        else:
            loss_of(model, batch).backward()
            optimizer.step()
    optimizer.step()
    return model


@case(DDP, beside=dict.fromkeys(("diloco", "streaming"), Refused("STEP_WITHOUT_ROUND", "no_sync")))
def gradients_averaged_by_hand(world: World) -> Any:
    """Steps under `no_sync`, whose gradients `site.all_reduce` averages"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        with world.no_sync(model):
            loss_of(model, batch).backward()
        world.site.all_reduce([each.grad for each in model.parameters()])
        optimizer.step()
    return model


@case(DDP)
def closure_evaluated_once(world: World) -> Any:
    """`optimizer.step(closure)` of an optimizer that evaluates it once"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):

        def closure(batch: Any = batch) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return float(loss)

        optimizer.step(closure)
    return model


def _without_a_batch(world: World) -> Any:
    """Take the batches of the second site without its second one; it has none for the last step."""
    model = world.wrap(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = world.batch(step)
        later = world.batch(step + 1)
        num = len(inputs) // 2
        if step == STEPS - 1:
            inputs, targets = inputs[:num], targets[:num]
        elif step >= 1:
            inputs = torch.cat([inputs[:num], later[0][num:]])
            targets = torch.cat([targets[:num], later[1][num:]])
        loss_of(model, (inputs, targets)).backward()
        optimizer.step()
    return model


@case(
    (*BOTH, *AVERAGE),
    oracle=_without_a_batch,
    steps=None,
    early_ranks=(1,),
    quick=DDP,
    beside=APART,
)
def one_site_skips_a_batch(world: World) -> Any:
    """One site skips a batch whose loss is bad (`continue`)"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 1 and world.rank == 1:
            continue
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(
    BOTH,
    Refused("STEPS_DIFFER", "of step 2, .* has taken fewer steps"),
    steps=None,
    beside={"diloco": FINITE},
)
def one_site_skips_a_step(world: World) -> Any:
    """One site skips the step after a backward pass (`continue` on a bad gradient)"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if step == 1 and world.rank == 1:
            continue
        optimizer.step()
    return model


def _all_but_one(world: World) -> Any:
    model = world.wrap(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = world.batch(step)
        kept = slice(0, 4) if step == 1 else slice(None)
        loss_of(model, (inputs[kept], targets[kept])).backward()
        optimizer.step()
    return model


@case(BOTH, quick=DDP, oracle=_all_but_one, beside=APART)
def one_site_counts_nothing(world: World) -> Any:
    """One site leaves a batch out by `site.count_tokens(0)`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        is_bad = step == 1 and world.rank == 1
        world.site.count_tokens(0 if is_bad else len(batch[0]))
        (loss_of(model, batch) * (float("nan") if is_bad else 1.0)).backward()
        optimizer.step()
    return model


class OutOfMemory(torch.autograd.Function):
    """Fails in the backward pass, where it is told to."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fails:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return grad, None


class Failing(nn.Module):
    """Two layers, with that between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, inputs: torch.Tensor, fails: bool) -> Any:
        hidden = torch.tanh(self.first(inputs))
        return self.last(OutOfMemory.apply(hidden, fails))  # type: ignore[no-untyped-call]


@case(
    ("ddp", "fsdp2", "lone"),
    Refused("ScriptError", r"broken off while its gradients crossed.*tried to allocate 2\.00 GiB"),
    quick=DDP,
    steps=None,
)
def out_of_memory_amid_backward(world: World) -> Any:
    """A rank runs out of memory amid a backward pass, and leaves that step out"""
    model = world.wrap(Failing())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, (inputs, targets) in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        fails = step == 1 and world.rank == 1
        try:
            F.mse_loss(model(inputs, fails), targets).backward()
        except torch.OutOfMemoryError:
            continue
        optimizer.step()
    return model
