"""Where an optimizer would be one step further, by a gradient that is only a guess.

Under the regime `delayed` the sites' mean of a step is known one step late. The next gradient would
be computed at parameters that lack it: it would be stale by one step. So it is computed where the
optimizer would arrive by this site's own gradient, which is known at once. Neither the parameters
nor the optimizer's state change by that.

The formulas are those of torch.optim: SGD (with momentum, as Nesterov's, too), Adam and AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer


def check_known(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step cannot be looked ahead.

    Raises:
        TypeError: and what to do.
    """
    if isinstance(optimizer, SGD | Adam | AdamW):
        return
    raise TypeError(
        f"site.attach: the regime delayed looks ahead by the steps of SGD, Adam and AdamW, and "
        f"this optimizer is {type(optimizer).__name__}: say `regime: {{kind: delayed, look: false}}` "
        "in the job, which learns a little less from each step"
    )


def settings_of(
    optimizers: Iterable[Optimizer],
) -> Iterator[tuple[Optimizer, torch.Tensor, Mapping[str, Any]]]:
    """Yield each parameter of each optimizer, with its group's settings."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, parameter, group


@torch.no_grad()
def look_ahead(
    target: torch.Tensor,
    value: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, Any],
    optimizer: Optimizer,
    settings: Mapping[str, Any],
) -> None:
    """Write where one step of the optimizer would bring a parameter.

    Args:
        target: overwritten; of the shape and dtype of `value`, and may be `gradient`.
        value: the parameter, of any shape; not modified.
        gradient: the guess, of the same shape; not modified, unless it is the target.
        state: the optimizer's of the parameter, of the same shape; empty before its first step.
        optimizer: one that `check_known` lets pass.
        settings: the optimizer's, of the parameter's group.
    """
    if settings.get("maximize", False):
        gradient = -gradient
    if isinstance(optimizer, SGD):
        _sgd(target, value, gradient, state, settings)
    else:
        is_decoupled = isinstance(optimizer, AdamW) or settings.get("decoupled_weight_decay", False)
        _adam(target, value, gradient, state, settings, is_decoupled=is_decoupled)


def _sgd(
    target: torch.Tensor,
    value: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    lr, momentum = float(settings["lr"]), settings["momentum"]
    if settings["weight_decay"] != 0:
        gradient = gradient.add(value, alpha=settings["weight_decay"])
    direction = gradient
    if momentum != 0:
        buffer = state.get("momentum_buffer")
        if buffer is not None:
            direction = buffer * momentum
            direction.add_(gradient, alpha=1 - settings["dampening"])
        if settings["nesterov"]:
            direction = gradient.add(direction, alpha=momentum)
    torch.add(value, direction, alpha=-lr, out=target)


def _adam(
    target: torch.Tensor,
    value: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    is_decoupled: bool,
) -> None:
    lr, (beta1, beta2) = float(settings["lr"]), settings["betas"]
    decay = settings["weight_decay"]
    if decay != 0 and not is_decoupled:
        gradient = gradient.add(value, alpha=decay)
    step = _number(state["step"]) + 1.0 if "step" in state else 1.0
    mean, square = gradient * (1 - beta1), (gradient * gradient).mul_(1 - beta2)
    if "exp_avg" in state:
        mean.add_(state["exp_avg"], alpha=float(beta1))
        square.add_(state["exp_avg_sq"], alpha=float(beta2))
    if settings["amsgrad"] and "max_exp_avg_sq" in state:
        square = torch.maximum(square, state["max_exp_avg_sq"])
    scale = square.sqrt_().div_((1 - beta2**step) ** 0.5).add_(settings["eps"])
    torch.mul(value, 1 - lr * decay if is_decoupled else 1.0, out=target)
    target.add_(mean.div_(scale).mul_(-lr / (1 - beta1**step)))


def _number(step: torch.Tensor | float) -> torch.Tensor | float:
    """Return a count of steps, as a tensor where reading it would wait for a device."""
    is_elsewhere = isinstance(step, torch.Tensor) and step.device.type != "cpu"
    return step if is_elsewhere else float(step)
