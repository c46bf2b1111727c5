"""How much processor time may go to what nobody has asked for. Pure: times are arguments."""

from __future__ import annotations


class Allowance:
    """Seconds that may be spent: a share of all time, of which some can be saved up."""

    def __init__(self, share: float, most_s: float, now_s: float) -> None:
        """Begin with `most_s`, the most that is saved up."""
        self._share = share
        self._most_s = most_s
        self._left_s = most_s
        self._since_s = now_s

    def left_s(self, now_s: float) -> float:
        """Return what may be spent now; nothing and less: not now."""
        earned_s = self._share * (now_s - self._since_s)
        self._left_s = min(self._most_s, self._left_s + earned_s)
        self._since_s = now_s
        return self._left_s

    def spend(self, cost_s: float) -> None:
        """Count what was spent, though it may be more than there was."""
        self._left_s -= cost_s

    def wait_s(self, wanted_s: float, now_s: float) -> float:
        """Return after how long so much may be spent."""
        return max(0.0, (wanted_s - self.left_s(now_s)) / self._share)
