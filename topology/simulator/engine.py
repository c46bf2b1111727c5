"""The clock of a simulation: actions in the order of their times. Pure.

Two actions of one time run in the order in which they were scheduled: a sequence number decides, so
nothing depends on comparing what is scheduled, and a simulation is the same each time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Action = Callable[..., None]


class SimulationError(ValueError):
    """What was to be simulated cannot end, or has no meaning; says which figure to change."""


class Engine:
    """Runs actions, each at its time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_actions = 0
        """That ran."""
        self._heap: list[tuple[float, int, Action, tuple[object, ...]]] = []
        self._sequence = 0

    def at(self, time_s: float, action: Action, *arguments: object) -> None:
        """Run `action(*arguments)` at a time that has not passed."""
        assert time_s >= self.now_s, f"{time_s} has passed: it is {self.now_s}"
        heapq.heappush(self._heap, (time_s, self._sequence, action, arguments))
        self._sequence += 1

    def step(self) -> bool:
        """Run the next action; False when there is none."""
        if not self._heap:
            return False
        self.now_s, _, action, arguments = heapq.heappop(self._heap)
        self.num_actions += 1
        action(*arguments)
        return True

    def run(self, until_s: float = math.inf) -> None:
        """Run all actions up to a time, those of that very time too."""
        while self._heap and self._heap[0][0] <= until_s:
            self.step()
