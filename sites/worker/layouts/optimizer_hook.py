"""Averages an optimizer's gradients right before each of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isthmus.protos.errors import NotAttachedError
from isthmus.sites.worker.checks.arguments import why_not_averaged
from isthmus.sites.worker.checks.torch_calls import has_closure
from isthmus.sites.worker.exchange.step_records import TokenCount
from isthmus.sites.worker.exchange.tensor_average import TensorAverage
from isthmus.sites.worker.layouts.gradient_hook import GradientHook


class OptimizerHook(GradientHook):
    """Averages all gradients of an optimizer's parameters, once a step, before the step."""

    def __init__(
        self,
        average: TensorAverage,
        tokens: TokenCount,
        optimizer: torch.optim.Optimizer,
        equalise: Callable[[Sequence[tuple[str, torch.Tensor]]], bool],
    ) -> None:
        """Check the parameters.

        `equalise` gives all sites the first one's values of such, and says whether any differed.

        Raises:
            TypeError: one of them cannot be averaged.
        """
        super().__init__(tokens, is_summed=False)
        self._average = average
        self._optimizer = optimizer
        self._equalise = equalise
        self._known: dict[int, torch.Tensor] = {}
        """Parameters that all sites have alike, by id."""
        self._note(self.parameters())

    def _note(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in named:
            problem = why_not_averaged(parameter)
            if problem is not None:
                raise TypeError(f"site.average_gradients: parameter {name} is {problem}")
            self._known[id(parameter)] = parameter

    def equalise(self) -> None:
        """Give all sites the first one's parameters."""
        self._equalise(self.parameters())

    def _check_new(self) -> None:
        """Refuse parameters that have come since, and that ranks have computed with unlike.

        Raises:
            NotAttachedError: and what to do.
        """
        new = [(name, each) for name, each in self.parameters() if id(each) not in self._known]
        if not new:
            return
        self._note(new)
        if self._equalise(new):
            name, parameter = new[0]
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            raise NotAttachedError(
                f"the optimizer has got {name} {[*parameter.shape]}{more} after "
                "site.average_gradients, with other values at other ranks: call "
                "site.broadcast(model), or site.average_gradients again, before the first forward "
                "pass with what is new"
            )

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return all parameters with the names that the optimizer knows, else their places."""
        named: list[tuple[str, torch.Tensor]] = []
        for group_index, group in enumerate(self._optimizer.param_groups):
            places = [f"{group_index}.{index}" for index in range(len(group["params"]))]
            named += zip(group.get("param_names", places), group["params"], strict=True)
        return named

    def before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Average the gradients in place; what the optimizer calls before each step.

        A parameter without a gradient here counts as zeros. If no rank of any site has one (whose
        tokens count, and whose site takes part), none has: so the optimizer leaves the parameter
        alone everywhere.
        """
        if has_closure(args, kwargs):
            raise RuntimeError(
                "site.average_gradients: optimizer.step was called with a closure, which computes "
                "gradients that would not be averaged: compute them before optimizer.step()"
            )
        self._check_new()
        trained = [(name, each) for name, each in self.parameters() if each.requires_grad]
        grads = [_gradient(name, each) for name, each in trained]
        has_gradient = [float(each.grad is not None) for _, each in trained]
        is_used = torch.tensor(has_gradient, dtype=torch.float32, device="cpu")
        names = [name for name, _ in trained]
        named = [*zip(names, grads, strict=True), ("is_used", is_used)]
        finished = self._average.average(named, self._tokens.take(), is_gradient=True)
        if finished is not None:
            self._rounds.append(finished)
        for (_, parameter), grad, used in zip(trained, grads, is_used.tolist(), strict=True):
            parameter.grad = grad if used > 0.0 else None


def _gradient(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, or zeros.

    Raises:
        TypeError: it cannot be averaged.
    """
    if parameter.grad is None:
        return torch.zeros_like(parameter, requires_grad=False)
    problem = why_not_averaged(parameter.grad)
    if problem is not None:
        raise TypeError(f"site.average_gradients: the gradient of {name} is {problem}")
    return parameter.grad
