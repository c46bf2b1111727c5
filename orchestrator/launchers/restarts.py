"""How soon something that ends is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

WITHIN_S = 600.0
FIRST_S = 1.0
LONGEST_S = 60.0
_DOUBLINGS = 6


@dataclass
class Restarts:
    """The starts of one part. Each pause is twice the one before, up to LONGEST_S.

    Starts that lie WITHIN_S back or more are forgotten.
    """

    _times_s: list[float] = field(default_factory=list)

    def next_wait_s(self, now_s: float) -> float:
        """Return how long to wait before it is started again."""
        self._times_s = [each for each in self._times_s if now_s - each < WITHIN_S]
        wait_s = min(FIRST_S * 2.0 ** min(len(self._times_s), _DOUBLINGS), LONGEST_S)
        self._times_s.append(now_s)
        return wait_s
