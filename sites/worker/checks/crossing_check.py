"""Refuses optimizer steps that take gradients of parameters of which nothing has ever crossed.

Each rank would change such a parameter by its own data alone. It was thawed after the model was
wrapped, belongs to a layer or an adapter that was added later, has taken another one's place, or is
of a model that `site.attach` was not given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from itertools import chain
from typing import Any

import torch

from isthmus.protos.errors import NotAttachedError
from isthmus.sites.worker.checks.torch_calls import has_closure
from isthmus.sites.worker.exchange.sharding import local_of

Named = Iterable[tuple[str, torch.Tensor]]
_SHOWN = 3
"""So many parameters an error names."""


class CrossingCheck:
    """Compares, at each step of an optimizer, what it trains with what has crossed."""

    def __init__(
        self,
        named_now: Callable[[], Named],
        crossed: set[int],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_due: Callable[[], bool],
        former: Collection[torch.optim.Optimizer] = (),
    ) -> None:
        """Hook into the optimizers.

        Args:
            named_now: returns the parameters that the models have now, by name.
            crossed: ids of all parameters whose gradients have crossed; grows.
            optimizers: that `site.attach` was given.
            is_due: gradients are to cross now.
            former: optimizers that it was given when it was called before.
        """
        self._named_now = named_now
        self._crossed = crossed
        self._given = {id(each) for each in optimizers}
        self._is_due = is_due
        self._former = former
        self._averaged_numel = 0
        """Elements that the script has averaged since the latest step, which may be gradients."""
        self._other_models: weakref.WeakKeyDictionary[torch.optim.Optimizer, Set[int]] = (
            weakref.WeakKeyDictionary()
        )
        """By optimizer that was not given, ids of its parameters that no given model has."""
        self._handles = [each.register_step_pre_hook(self._before_step) for each in optimizers]
        self._handles += [each.register_step_post_hook(self._after_step) for each in optimizers]

    def note_average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the script averages tensors, which may be gradients."""
        self._averaged_numel += sum(each.numel() for each in tensors)

    def close(self) -> None:
        """Take the hooks off."""
        for each in self._handles:
            each.remove()

    def after_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that may not have been given: of the models' parameters only.

        It may train another model, of this rank alone.

        Raises:
            NotAttachedError: it trains what the models have, and what does not cross.
        """
        if id(optimizer) in self._given:
            return
        missing = self._missing(optimizer)
        if optimizer in self._former:
            self._refuse(optimizer, missing)
        others = self._other_models.get(optimizer, frozenset())
        if all(id(each) in others for each in missing):
            return
        own = {id(each) for _, each in self._named_now()}
        self._refuse(optimizer, [each for each in missing if id(each) in own])
        self._other_models[optimizer] = {id(each) for each in missing} - own

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not has_closure(args, kwargs):
            self._refuse(optimizer, self._missing(optimizer))

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if has_closure(args, kwargs):  # which has computed the gradients
            self._refuse(optimizer, self._missing(optimizer))
        self._averaged_numel = 0

    def _missing(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return what has a gradient that has not crossed, may it be zeros."""
        parameters = [*chain.from_iterable(each["params"] for each in optimizer.param_groups)]
        if not self._crossed or self._crossed.issuperset(map(id, parameters)):
            return []  # without any round StepWatch knows more
        found = [
            each for each in parameters if id(each) not in self._crossed and each.grad is not None
        ]
        return found if found and self._is_due() else []

    def _refuse(self, optimizer: torch.optim.Optimizer, missing: Sequence[torch.Tensor]) -> None:
        """Refuse gradients that are not zeros, unless the script may have averaged them itself.

        Raises:
            NotAttachedError: and what to do.
        """
        missing = [each for each in missing if _is_not_zero(each)]
        if not missing or sum(each.numel() for each in missing) <= self._averaged_numel:
            return
        names = {id(each): name for name, each in self._named_now()}
        shown = [
            f"{names.get(id(each)) or place} {[*each.shape]}"
            for place, each in places_of(optimizer)
            if any(each is one for one in missing)
        ]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        raise NotAttachedError(
            f"the optimizer steps with gradients of {', '.join(shown[:_SHOWN])}{more}, which do not "
            "cross: this was not trained when the model was wrapped and site.attach called, "
            "or has come since. At the same step at all sites, wrap the model anew and call "
            "site.attach again, with all models and optimizers"
        )


def _is_not_zero(parameter: torch.Tensor) -> bool:
    """Whether there is a gradient to take; those that zero_grad has left may be zeros."""
    return parameter.grad is not None and bool(local_of(parameter.grad).count_nonzero())


def places_of(optimizer: torch.optim.Optimizer) -> Named:
    """Return all parameters of an optimizer, each with words for its place."""
    for number, group in enumerate(optimizer.param_groups):
        for index, each in enumerate(group["params"]):
            name = group["param_names"][index] if "param_names" in group else f"parameter {index}"
            yield f"{name} of group {number}", each
