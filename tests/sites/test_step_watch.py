"""Which steps and rounds belong together, and what is let through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from isthmus.protos.errors import RoundWithoutStepError, ScriptError, StepWithoutRoundError
from isthmus.sites.worker.checks.step_watch import MAX_UNCOUNTED, StepWatch

Optimizer = torch.optim.SGD


def watched(
    *, is_due: bool = True, embedding: bool = False
) -> tuple[nn.Module, Optimizer, Optimizer, StepWatch]:
    """Return a model with gradients, its optimizer, another one beside that, and what watches."""
    first = nn.Embedding(4, 3, max_norm=0.1) if embedding else nn.Linear(3, 3)
    model = nn.Sequential(first, nn.Linear(3, 2))
    counted, other = (Optimizer(model.parameters(), lr=0.1) for _ in range(2))
    backward(model)
    watch = StepWatch(model.named_parameters(), [counted, other], is_due=lambda: is_due)
    return model, counted, other, watch


def backward(model: nn.Module) -> None:
    """Make gradients anew."""
    model.zero_grad()
    for each in model.parameters():
        each.grad = torch.ones_like(each)


@torch.no_grad()
def change(model: nn.Module) -> None:
    """Do what an optimizer that nobody knows of does."""
    for each in model.parameters():
        each.sub_(each.grad, alpha=0.1)  # type: ignore[arg-type] # there is one


def test_a_step_takes_gradients_of_a_round() -> None:
    model, optimizer, _, watch = watched()
    watch.note_round()
    optimizer.step()
    optimizer.step()  # the same gradient once more: that has crossed
    backward(model)
    with pytest.raises(StepWithoutRoundError, match=r"a gradient of 0\.weight that has not"):
        optimizer.step()


def test_gradients_that_grow_without_a_round_have_not_crossed() -> None:
    model, optimizer, _, watch = watched()
    watch.note_round()
    optimizer.step()
    for each in model.parameters():
        each.grad.add_(1.0)  # type: ignore[union-attr] # there is one
    with pytest.raises(StepWithoutRoundError):
        optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_of_nothing_needs_no_round(to_none: bool) -> None:
    _, optimizer, _, watch = watched()
    watch.note_round()
    optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)
    optimizer.step()


def test_another_optimizer_may_step_at_any_time() -> None:
    model, optimizer, other, watch = watched()
    for _ in range(2 * MAX_UNCOUNTED):
        watch.note_round()
        other.step()
        backward(model)
    other.step()
    watch.note_round()
    optimizer.step()


@pytest.mark.parametrize("exact", [True, False])
def test_what_the_script_averages_may_be_gradients_unless_it_is_exact(exact: bool) -> None:
    _, optimizer, _, watch = watched()
    watch.note_average(exact=exact)
    if exact:
        with pytest.raises(StepWithoutRoundError):
            optimizer.step()
    else:
        optimizer.step()


def test_where_nothing_has_to_cross_nothing_is_refused() -> None:
    model, optimizer, _, watch = watched(is_due=False)
    optimizer.step()
    for _ in range(2 * MAX_UNCOUNTED):
        watch.note_round()
        change(model)


def test_parameters_that_change_with_no_step_are_a_mistake() -> None:
    model, optimizer, _, watch = watched()
    for _ in range(2):
        for _ in range(MAX_UNCOUNTED):
            watch.note_round()
            change(model)
        optimizer.step()
    for _ in range(MAX_UNCOUNTED):
        watch.note_round()
        change(model)
    with pytest.raises(RoundWithoutStepError, match="took no step"):
        watch.note_round()


def test_gradients_may_add_up_over_any_number_of_rounds() -> None:
    _, optimizer, _, watch = watched()
    for _ in range(100):
        watch.note_round()
    optimizer.step()


def test_parameters_that_come_back_are_not_trained() -> None:
    model, optimizer, _, watch = watched()
    kept = [each.detach().clone() for each in model.parameters()]
    for _ in range(5):
        watch.note_round()
        change(model)
        watch.note_round()
        with torch.no_grad():
            for each, value in zip(model.parameters(), kept, strict=True):
                each.copy_(value)
    optimizer.step()


def test_a_layer_that_bounds_its_own_weights_does_not_train_them() -> None:
    model, optimizer, _, watch = watched(embedding=True)
    for _ in range(2 * MAX_UNCOUNTED):
        with torch.no_grad():
            next(model.parameters()).mul_(2.0)
        model(torch.arange(4))
        watch.note_round()
    optimizer.step()


def test_a_step_in_the_backward_pass_is_refused() -> None:
    model, optimizer, _, _ = watched()
    *_, weight, _ = model.parameters()
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())  # type: ignore[no-untyped-call]
    with pytest.raises(ScriptError, match="SGD steps in the backward pass"):
        model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("averages", [True, False])
def test_a_line_search_goes_by_a_loss_of_all_ranks(averages: bool) -> None:
    model = nn.Linear(3, 1)
    optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=3)
    watch = StepWatch(model.named_parameters(), [optimizer], is_due=lambda: True)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        watch.note_round()
        if averages:
            watch.note_average(exact=True)
        return float(loss.detach())

    if averages:
        optimizer.step(closure)
    else:
        with pytest.raises(ScriptError, match=r"as often as this rank's own loss wants"):
            optimizer.step(closure)


def test_searches_of_a_number_of_evaluations_known_before_go_by_any_loss() -> None:
    model = nn.Linear(3, 1)
    optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=3, tolerance_change=0)
    watch = StepWatch(model.named_parameters(), [optimizer], is_due=lambda: True)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 3)) - 1).square().sum()
        loss.backward()
        watch.note_round()
        return float(loss.detach())

    optimizer.step(closure)
