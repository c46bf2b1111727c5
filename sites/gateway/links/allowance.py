"""A budget of processor time for unrequested work, as a token bucket. Pure: times are arguments."""

from __future__ import annotations


class Allowance:
    """A token bucket of seconds: refills at `share` of elapsed time, up to `most_s`."""

    def __init__(self, share: float, most_s: float, now_s: float) -> None:
        """Begin with a full bucket of `most_s` seconds."""
        self._share = share
        self._most_s = most_s
        self._left_s = most_s
        self._since_s = now_s

    def left_s(self, now_s: float) -> float:
        """Return the seconds that may be spent now; 0 or negative: none."""
        earned_s = self._share * (now_s - self._since_s)
        self._left_s = min(self._most_s, self._left_s + earned_s)
        self._since_s = now_s
        return self._left_s

    def spend(self, cost_s: float) -> None:
        """Subtract `cost_s`, even if that makes the budget negative."""
        self._left_s -= cost_s

    def wait_s(self, wanted_s: float, now_s: float) -> float:
        """Return how long to wait until `wanted_s` may be spent."""
        return max(0.0, (wanted_s - self.left_s(now_s)) / self._share)
