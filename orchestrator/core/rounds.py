"""How far a run's rounds have got, by what gateways report: for choosing one that none has begun.

Pure.
"""

from __future__ import annotations

import math
from collections import deque

_LOOK_BACK_S = 30.0
ROUND_MAX = 1 << 40
"""No run gets so far.

Whoever says that it has is not believed, for a message could not even name what comes after.
"""


class RoundClock:
    """Takes the reports of all gateways of a run."""

    def __init__(self) -> None:
        self.newest = -1
        """The latest round that any gateway has said to have begun; -1 before the first."""
        self._seen: deque[tuple[float, int]] = deque()
        """When each newest round was heard of first, over the last while."""

    def note(self, round_: int, now_s: float) -> None:
        """A gateway says which round it is in."""
        if self.newest < round_ <= ROUND_MAX:
            self.newest = round_
            self._seen.append((now_s, round_))
        while len(self._seen) > 2 and self._seen[0][0] < now_s - _LOOK_BACK_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float:
        """Rounds a second, lately; 0 while nobody knows."""
        if len(self._seen) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def after(self, ahead_s: float) -> int:
        """Return a round that nobody begins within `ahead_s`, as far as rounds go on as they did.

        One that is about to begin is not it: reports are half a second old.
        """
        return self.newest + 2 + math.ceil(min(self.per_s * ahead_s, ROUND_MAX))
