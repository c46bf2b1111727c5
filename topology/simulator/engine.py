"""The clock of a simulation, and a server with a queue. Pure.

The clock runs actions in the order of their times. Two actions of one time run in the order in
which they were scheduled, so a simulation is the same each time.

A server works in the order of arrival: a codec, a collective, a processor. Work arrives in pieces,
from the time of its first piece to that of its last one. The server begins with the first piece,
and needs the time of one piece after the last one came. If pieces arrive at a constant or slowing
pace, as behind other such servers, this is exactly when they leave one by one: piece j leaves at
the maximum over i <= j of a(i) + (j - i + 1) d, which is convex in i if the arrivals a are, so that
an end of the range has it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[..., None]


class SimulationError(ValueError):
    """A simulation would not end, or has no meaning; the message names the figure to change."""


class Engine:
    """Runs actions, each at its time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_actions = 0
        """The number of actions that ran."""
        self._heap: list[tuple[float, int, Action, tuple[object, ...]]] = []
        self._sequence = 0
        self._is_stopped = False

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

    def run_on(self) -> bool:
        """Run actions until one of them calls `stop`; return False once there are none."""
        heap, self._is_stopped = self._heap, False
        while heap:
            self.now_s, _, action, arguments = heapq.heappop(heap)
            self.num_actions += 1
            action(*arguments)
            if self._is_stopped:
                return True
        return False

    def stop(self) -> None:
        """Let `run_on` return after this action."""
        self._is_stopped = True

    def run(self, until_s: float = math.inf) -> None:
        """Run all actions up to and including a time."""
        while self._heap and self._heap[0][0] <= until_s:
            self.step()


@dataclass(slots=True)
class Server:
    """One server and its queue. Call it in the order of arrivals."""

    free_s: float = 0.0
    """Seconds of the clock from which on the server can take new work."""

    def serve(
        self, first_s: float, last_s: float, work_s: float, piece_s: float
    ) -> tuple[float, float]:
        """Return when the first and the last piece are done.

        They arrive at `first_s` and `last_s`. All pieces together take `work_s`, one takes
        `piece_s`.
        """
        begin_s = max(first_s, self.free_s)
        # While it waits for pieces it serves others, so only its own work counts.
        self.free_s = begin_s + work_s
        return begin_s + piece_s, max(self.free_s, last_s + piece_s)
