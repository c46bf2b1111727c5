"""Which steps take gradients of parameters that do not cross, and what is let through."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from isthmus.protos.errors import NotAttachedError
from isthmus.sites.worker.checks.crossing_check import CrossingCheck

Optimizer = torch.optim.SGD


class Watched:
    """A model of which two layers cross, its optimizer, and what checks that."""

    def __init__(self, *, is_due: bool = True) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        self.crossed: set[int] = set()
        self.optimizer = Optimizer(self.model.parameters(), lr=0.1)
        self.check = CrossingCheck(
            lambda: self.model.named_parameters(),
            self.crossed,
            [self.optimizer],
            is_due=lambda: is_due,
        )

    def cross(self) -> None:
        """Have a round."""
        self.give(*self.model.parameters())
        self.crossed.update(map(id, self.model.parameters()))

    def give(self, *parameters: torch.Tensor) -> None:
        """Make gradients."""
        for each in parameters:
            each.grad = torch.ones_like(each)


@pytest.fixture
def watched() -> Watched:
    made = Watched()
    made.cross()
    return made


def add_layer(watched: Watched) -> torch.Tensor:
    """Add a layer without a bias, and a group for it."""
    layer = nn.Linear(2, 2, bias=False)
    watched.model.append(layer)
    watched.optimizer.add_param_group({"params": [layer.weight]})
    watched.give(layer.weight)
    return layer.weight


def test_what_has_crossed_is_taken(watched: Watched) -> None:
    watched.optimizer.step()
    watched.model.zero_grad()
    watched.optimizer.step()


def test_a_layer_that_came_later_is_refused_by_its_name_shape_and_cure(watched: Watched) -> None:
    add_layer(watched)
    with pytest.raises(NotAttachedError, match=r"2\.weight \[2, 2\], which .*attach again"):
        watched.optimizer.step()


def test_it_is_refused_before_anything_is_changed(watched: Watched) -> None:
    before = copy.deepcopy(watched.model.state_dict())
    add_layer(watched)
    with pytest.raises(NotAttachedError):
        watched.optimizer.step()
    for name, each in before.items():
        assert torch.equal(each, watched.model.state_dict()[name]), name


def test_what_is_in_no_model_is_called_by_its_place(watched: Watched) -> None:
    temperature = nn.Parameter(torch.ones(()))
    watched.optimizer.add_param_group({"params": [temperature]})
    watched.give(temperature)
    with pytest.raises(NotAttachedError, match=r"parameter 0 of group 1 \[\]"):
        watched.optimizer.step()


def test_gradients_of_a_closure_are_seen(watched: Watched) -> None:
    new = add_layer(watched)
    new.grad = None

    def closure() -> float:
        watched.give(new)
        return 0.0

    with pytest.raises(NotAttachedError, match=r"2\.weight"):
        watched.optimizer.step(closure)


@pytest.mark.parametrize("grad", [None, torch.zeros(2, 2)])
def test_a_new_parameter_without_a_gradient_may_wait(
    watched: Watched, grad: torch.Tensor | None
) -> None:
    add_layer(watched).grad = grad
    watched.optimizer.step()


def test_gradients_that_the_script_may_have_averaged_are_taken_once(watched: Watched) -> None:
    new = add_layer(watched)
    assert new.grad is not None
    watched.check.note_average([new.grad])
    watched.optimizer.step()
    with pytest.raises(NotAttachedError):
        watched.optimizer.step()


def test_an_average_of_less_than_the_gradient_is_not_its_own(watched: Watched) -> None:
    add_layer(watched)
    watched.check.note_average([torch.ones(1)])  # a loss
    with pytest.raises(NotAttachedError):
        watched.optimizer.step()


def test_where_nothing_is_to_cross_or_nothing_has_yet_it_is_quiet() -> None:
    follower, first = Watched(is_due=False), Watched()
    follower.cross()
    for each in (follower, first):
        add_layer(each)
        each.optimizer.step()


def test_another_optimizer_may_train_another_model_and_not_this_one(watched: Watched) -> None:
    other, adapter = nn.Linear(2, 2), nn.Linear(2, 2)
    watched.give(*other.parameters(), *adapter.parameters())
    optimizer = Optimizer([*other.parameters(), *adapter.parameters()], lr=0.1)
    watched.check.after_any_step(optimizer)
    watched.check.after_any_step(optimizer)
    watched.model.append(adapter)
    late = Optimizer(adapter.parameters(), lr=0.1)
    with pytest.raises(NotAttachedError, match=r"2\.weight"):
        watched.check.after_any_step(late)


def test_after_close_nothing_is_checked(watched: Watched) -> None:
    watched.check.close()
    add_layer(watched)
    watched.optimizer.step()
