"""What a link carried while it was the limit, and not whoever had nothing to send. Pure.

A frame that left a round trip before the acknowledgement of the one before it was at the link when
that one was through: from then until its own acknowledgement the link had something to carry all
the time. What passes between two such acknowledgements is what the link carries, whatever window or
sender were up to. After a pause, the first round trips do not count: connections start slowly, and
plans know that.
"""

from __future__ import annotations

WARM_ROUND_TRIPS = 8
"""Ten packets, doubled in each, are 2 MB in the last of them."""


class LimitedRate:
    """Sums over one link's time. Times are monotonic."""

    def __init__(self) -> None:
        self.limited_bytes = 0
        self.limited_s = 0.0
        self._warm_s = 0.0
        self._acknowledged_s = 0.0
        """The latest."""

    def begin(self, now_s: float, rtt_s: float) -> None:
        """A frame leaves, and nothing else is on the way."""
        self._warm_s = now_s + WARM_ROUND_TRIPS * rtt_s

    def arrive(self, size_bytes: int, left_s: float, now_s: float, rtt_s: float) -> None:
        """A frame was acknowledged.

        Args:
            size_bytes: of the frame.
            left_s: when it had left.
            now_s: now.
            rtt_s: the idle link's round trip.
        """
        before_s, self._acknowledged_s = self._acknowledged_s, now_s
        if before_s >= max(self._warm_s, left_s + rtt_s):
            self.limited_bytes += size_bytes
            self.limited_s += now_s - before_s
