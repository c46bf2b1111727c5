"""Notices that this machine's clock was set, by the one beside it that only goes on."""

from __future__ import annotations

STEP_S = 2.0
"""Between two looks the clocks come less far apart, however the one is slewed."""


class ClockWatch:
    """Compares two clocks. Pure: times are arguments. Nothing is counted by the wall's."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None
        """By how much the wall's clock was ahead when it was compared last."""

    def look(self, wall_s: float, now_s: float) -> str:
        """Return what has happened to the wall's clock since the last look; empty: nothing.

        Call it many times a minute. `now_s` is the monotonic clock.
        """
        before_s, self._ahead_s = self._ahead_s, wall_s - now_s
        if before_s is None or abs(by_s := self._ahead_s - before_s) < STEP_S:
            return ""
        if by_s < 0:
            return f"the coordinator's clock was set back by {-by_s:.0f} s"
        return (
            f"the coordinator's clock was set forward by {by_s:.0f} s, or its machine was "
            "suspended for so long"
        )
