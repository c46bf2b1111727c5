"""Learning rates that go with the size of the batch: of optimizers, and of what schedules them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_RATES = frozenset({"lr", "initial_lr", "max_lr", "min_lr"})
"""What an optimizer's groups have of learning rates; OneCycleLR keeps its ends there."""
_SCHEDULER_RATES = frozenset({"base_lrs", "max_lrs", "eta_min"})
"""What schedulers have of them."""


class LearningRates:
    """The learning rates of what a script has saved."""

    def __init__(self) -> None:
        """Hold none, unscaled."""
        self.scale = 1.0
        """By which those of the full batch are multiplied."""
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._objects: Sequence[object] = ()
        """Schedulers are among these."""

    def hold(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        objects: Sequence[object],
        *,
        scales_new: bool,
    ) -> None:
        """Scale the rates of these from now on; with `scales_new`, new ones at once."""
        if scales_new:
            scale_learning_rates(
                [each for each in optimizers if all(each is not one for one in self._optimizers)],
                [each for each in objects if all(each is not one for one in self._objects)],
                self.scale,
            )
        self._optimizers, self._objects = optimizers, objects

    def scale_to(self, scale: float) -> None:
        """Have all rates be those of the full batch times `scale`."""
        if scale != self.scale:
            scale_learning_rates(self._optimizers, self._objects, scale / self.scale)
        self.scale = scale


def scale_learning_rates(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[object], scale: float
) -> None:
    """Multiply all learning rates by `scale`: those now, and those that schedulers begin with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in _RATES & group.keys():
                group[key] = group[key] * scale
    for each in schedulers:
        _scale_scheduler(each, scale)


def _scale_scheduler(scheduler: object, scale: float) -> None:
    """Scale what torch's schedulers keep of learning rates, those of each that one consists of."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return
    for each in getattr(scheduler, "_schedulers", ()):
        _scale_scheduler(each, scale)
    for name in _SCHEDULER_RATES & vars(scheduler).keys():
        rates = getattr(scheduler, name)
        scaled = [each * scale for each in rates] if isinstance(rates, list) else rates * scale
        setattr(scheduler, name, scaled)
