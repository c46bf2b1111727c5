"""Decides after which steps a checkpoint is written, equally at every rank of every site."""

from __future__ import annotations

import time
from collections.abc import Callable

from isthmus.topology.spec.job import Checkpoint

FIRST_STEPS = 8
"""Steps measured before an interval of time is converted to steps."""


class Interval:
    """Counts steps. Clocks differ, so ranks agree on the number of steps in an interval of time.

    They do so after the first steps and with each checkpoint, by one exact average over all ranks
    (a round trip over the WAN).
    """

    def __init__(
        self,
        settings: Checkpoint,
        start_step: int,
        agree: Callable[[float], float],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin after `start_step`. `agree` returns the mean of a number over all ranks."""
        self._every_s = settings.every_s
        self._every_steps = settings.every_steps
        self._agree = agree
        self._now_s = now_s
        self._since_step, self._since_s = start_step, now_s()
        self._next_step = start_step + FIRST_STEPS
        if self._every_steps is not None:
            self._next_step = _after(start_step, self._every_steps)
        self._is_measured = self._every_steps is not None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of `step` is to be written. Ask once after each step, in order."""
        if step < self._next_step:
            return False
        if self._every_steps is not None:
            self._next_step = _after(step, self._every_steps)
            return True
        was_measured, self._is_measured = self._is_measured, True
        now_s = self._now_s()
        step_s = self._agree((now_s - self._since_s) / (step - self._since_step))
        num_steps = max(1, round(self._every_s / max(step_s, 1e-9)))
        if not was_measured:  # these steps count towards the first interval
            num_steps = max(1, num_steps - FIRST_STEPS)
        self._next_step = step + num_steps
        self._since_step, self._since_s = step, now_s
        return was_measured


def _after(step: int, every: int) -> int:
    """Return the next multiple: the same one whether the run began before or goes on from here."""
    return step + every - step % every
