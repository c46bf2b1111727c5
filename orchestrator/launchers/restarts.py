"""Backoff of restarts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

WITHIN_S = 600.0
FIRST_S = 1.0
LONGEST_S = 60.0
_DOUBLINGS = 6


@dataclass
class Restarts:
    """The restarts of one part: each pause is twice the previous one, up to LONGEST_S.

    Starts older than WITHIN_S are forgotten.
    """

    _times_s: list[float] = field(default_factory=list)

    def next_wait_s(self, now_s: float) -> float:
        """Count a restart, and return the pause before it."""
        self._times_s = [each for each in self._times_s if now_s - each < WITHIN_S]
        wait_s = min(FIRST_S * 2.0 ** min(len(self._times_s), _DOUBLINGS), LONGEST_S)
        self._times_s.append(now_s)
        return wait_s
