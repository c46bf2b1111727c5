"""Where a plain training loop hands gradients over: before the optimizer's step."""

from __future__ import annotations

from typing import Any

import torch

from sites.worker.arguments import why_not_averaged
from sites.worker.average import TensorAverage
from sites.worker.rounds import Round
from sites.worker.tokens import TokenCount


class OptimizerHook:
    """Averages all gradients of an optimizer's parameters, once a step."""

    def __init__(
        self, average: TensorAverage, tokens: TokenCount, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check the parameters.

        Raises:
            TypeError: one of them cannot be averaged.
        """
        self._average = average
        self._tokens = tokens
        self._optimizer = optimizer
        self._rounds: list[Round] = []
        for name, parameter in self.parameters():
            problem = why_not_averaged(parameter)
            if problem is not None:
                raise TypeError(f"site.average_gradients: parameter {name} is {problem}")

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
        tokens count), it stays without, so that the optimizer leaves the parameter alone
        everywhere.
        """
        if any(callable(each) for each in (*args, kwargs.get("closure"))):
            raise RuntimeError(
                "site.average_gradients: optimizer.step was called with a closure, which computes "
                "gradients that would not be averaged: compute them before optimizer.step()"
            )
        trained = [(name, each) for name, each in self.parameters() if each.requires_grad]
        grads = [_gradient(name, each) for name, each in trained]
        is_used = torch.tensor([float(each.grad is not None) for _, each in trained])
        names = [name for name, _ in trained]
        named = [*zip(names, grads, strict=True), ("is_used", is_used)]
        finished = self._average.average(named, self._tokens.take())
        if finished is not None:
            self._rounds.append(finished)
        for (_, parameter), grad, used in zip(trained, grads, is_used.tolist(), strict=True):
            if parameter.grad is None and used > 0.0:
                parameter.grad = grad

    def take_rounds(self) -> list[Round]:
        """Return the rounds since the last call: one a step."""
        rounds, self._rounds = self._rounds, []
        return rounds


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
