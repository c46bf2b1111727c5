"""Refuses loops whose optimizer steps and rounds do not belong together.

A step that takes gradients of this rank alone has sites drift apart. Rounds after which something
else than the counted optimizer changes the parameters are steps that nobody counts or verifies.
What may be right is let through.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from isthmus.protos.errors import RoundWithoutStepError, ScriptError, StepWithoutRoundError
from isthmus.sites.worker.checks.torch_calls import has_closure, in_backward
from isthmus.sites.worker.exchange.sharding import is_sharded, local_of

MAX_UNCOUNTED = 4
"""Parameters that change so often from round to round, with no step, change by something else."""
_SAMPLED = 8
"""Parameters that are looked at after each round."""
_COMPARED = 2
"""Number of parameters of which some elements are kept, to see whether they change back."""
_COMPARED_NUMEL = 64


class StepWatch:
    """Watches the optimizers that `attach` was given, of which the first one's steps count."""

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_due: Callable[[], bool],
    ) -> None:
        """Hook into the optimizers, before anything counts their steps.

        `named` are the parameters that are attached. `is_due`: gradients are to cross now.
        """
        counted = {id(each) for group in optimizers[0].param_groups for each in group["params"]}
        self._stepped = [
            (name, each) for name, each in named if id(each) in counted and each.requires_grad
        ]
        self._sample = spread([each for _, each in self._stepped], _SAMPLED)
        self._is_due = is_due
        self._num_rounds = 0
        """Since the latest counted step."""
        self._is_averaged_by_hand = False
        """Since then the script has averaged what may be gradients."""
        self._stepped_with: list[tuple[weakref.ref[torch.Tensor], int]] = []
        """Gradients of the latest counted step, and their versions."""
        self._versions: list[int | None] = []
        """Versions of sampled parameters after the latest round; None: of one without gradient."""
        self._values: list[list[torch.Tensor]] = []
        """Some elements at the end of the latest rounds between which parameters have changed."""
        self._num_evaluations: int | None = None
        """Rounds in the step of a line search that goes on; None: none does."""
        self._has_averaged_loss = False
        """Since the latest round the script has averaged something."""
        self._handles = [each.register_step_pre_hook(self._before_step) for each in optimizers]
        self._handles += [
            each.register_step_post_hook(partial(self._after_step, each is optimizers[0]))
            for each in optimizers
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for each in self._handles:
            each.remove()

    def note_average(self, *, exact: bool) -> None:
        """Note that the script averages tensors; those that are not exact may be gradients."""
        self._has_averaged_loss = True
        self._is_averaged_by_hand = self._is_averaged_by_hand or not exact

    def note_round(self) -> None:
        """Look at what has happened since the round before, at the end of a round.

        Raises:
            RoundWithoutStepError: parameters change from round to round, and no step is counted.
            ScriptError: a line search goes by this rank's own loss.
        """
        self._num_rounds += 1
        if self._is_due():
            self._check_search()
            self._check_unchanged()
        self._has_averaged_loss = False

    def _check_search(self) -> None:
        if self._num_evaluations is None:
            return
        self._num_evaluations += 1
        if self._num_evaluations > 1 and not self._has_averaged_loss:
            raise ScriptError(
                "LBFGS evaluates its closure as often as this rank's own loss wants, which may be "
                "another number at another rank: average the loss over all ranks in the closure "
                "(site.all_reduce([loss], exact=True) of its detached copy, which it returns), or "
                "take line_search_fn=None with tolerance_change=0"
            )

    def _check_unchanged(self) -> None:
        if self._num_evaluations is not None:
            return  # a line search moves the parameters, and its step is counted at its end
        before, self._versions = self._versions, [_version(each) for each in self._sample]
        pairs = [
            (old, now) for old, now in zip(before, self._versions, strict=False) if old is not None
        ]
        if not pairs or any(old == now for old, now in pairs):
            self._values.clear()
            return
        self._values.append([_some_of(each) for each in spread(self._sample, _COMPARED)])
        if len(self._values) < MAX_UNCOUNTED:
            return
        if any(_are_close(*pair) for pair in itertools.combinations(self._values, 2)):
            # Something moves them and puts them back, as SAM does for each of several passes.
            self._values.clear()
            return
        raise RoundWithoutStepError(
            f"{MAX_UNCOUNTED} times in a row, from round to round, all parameters were changed, and the "
            "optimizer that site.attach was given took no step: give it the one whose step() "
            "changes the parameters, once a round or more rarely. For SAM that is the base "
            "optimizer, or call sam.step(closure); for another optimizer in place of the first, "
            "load its settings into the first one"
        )

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if in_backward():
            raise ScriptError(
                f"{type(optimizer).__name__} steps in the backward pass: a parameter has a hook for "
                "that, which runs before the other sites' part has come: take it off, and step "
                "after the backward pass"
            )
        is_search = isinstance(optimizer, torch.optim.LBFGS) and _is_by_loss(optimizer)
        if is_search and has_closure(args, kwargs):
            self._num_evaluations = 0

    def _after_step(self, is_counted: bool, *_: object) -> None:
        self._num_evaluations = None
        self._versions = []
        self._values.clear()
        if not is_counted:
            return
        if self._num_rounds == 0 and not self._is_averaged_by_hand and self._is_due():
            self._check_gradients()
        self._num_rounds = 0
        self._is_averaged_by_hand = False
        grads = (each.grad for each in self._sample)
        self._stepped_with = [
            (weakref.ref(each), each._version) for each in grads if each is not None
        ]

    def _check_gradients(self) -> None:
        """Refuse gradients that have not crossed, but zeros, and those of the step before."""
        grads = [(name, each.grad) for name, each in self._stepped if each.grad is not None]
        held = {id(grad): grad._version for _, grad in grads}
        before = [(each(), version) for each, version in self._stepped_with]
        if before and all(held.get(id(each)) == version for each, version in before):
            return
        for name, grad in grads:
            if bool(local_of(grad).count_nonzero()):
                raise StepWithoutRoundError(
                    f"the optimizer stepped with a gradient of {name} that has not crossed: no "
                    "backward pass since its last step has averaged over the sites. Call the "
                    "wrapped model, not model.module or torch.func.functional_call of it, and "
                    "backward(), not torch.autograd.grad; leave no_sync for the last backward pass "
                    "before each step; give DistributedDataParallel find_unused_parameters=True "
                    "where a pass leaves parameters out; or see site.average_gradients"
                )


def _is_by_loss(optimizer: torch.optim.LBFGS) -> bool:
    """Whether the loss decides how often the closure is evaluated; gradients are alike anyway."""
    group = optimizer.param_groups[0]
    return group["line_search_fn"] is not None or group["tolerance_change"] > 0


def spread(parameters: Sequence[torch.Tensor], most: int) -> Sequence[torch.Tensor]:
    """Return at most so many of these, from all over."""
    return parameters[:: max(1, -(-len(parameters) // most))]


def _version(parameter: torch.Tensor) -> int | None:
    if parameter.grad is None:
        return None
    return (parameter.to_local() if is_sharded(parameter) else parameter)._version


def _some_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of some elements: those of a row."""
    values = local_of(parameter)
    if values.numel() and values.ndim:
        values = values[(0,) * (values.ndim - 1)][:_COMPARED_NUMEL]
    return values.clone()


def _are_close(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other) for one, other in zip(some, others, strict=True))
