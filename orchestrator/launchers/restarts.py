"""How often something that ends is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

LIMIT = 5
WITHIN_S = 600.0
FIRST_S = 1.0


@dataclass
class Restarts:
    """At most LIMIT within WITHIN_S, each after twice the wait of the one before."""

    _times_s: list[float] = field(default_factory=list)

    def next_wait_s(self, now_s: float) -> float | None:
        """Return how long to wait before it is started again; None: no more."""
        self._times_s = [each for each in self._times_s if now_s - each < WITHIN_S]
        if len(self._times_s) >= LIMIT:
            return None
        self._times_s.append(now_s)
        return FIRST_S * float(2 ** (len(self._times_s) - 1))
