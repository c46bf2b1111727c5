"""What a link carried while it was the limit, and not whoever had nothing to send. Pure.

Time is cut into stretches with something on the way, of STRETCH_S at most. After a pause, the first round trips do
not count: connections start slowly, and plans know that. In a stretch that counts, either frames left as the window or
their turn let them, most of the bytes; or a burst left faster than the link takes it, so that the last frame
waited for half of the stretch: then its window, made for a faster link, holds nothing back. Short stretches say more
of processors than of links, and do not count.
"""

from __future__ import annotations

STRETCH_S = 1.0
WARM_ROUND_TRIPS = 8
"""Ten packets, doubled in each, are 2 MB in the last of them."""
SHORT_S = 0.05
"""A turn of a thread on a busy machine takes some milliseconds of it."""


class LimitedRate:
    """Sums over one link's stretches that count. Times are monotonic."""

    def __init__(self) -> None:
        self.limited_bytes = 0
        self.limited_s = 0.0
        self._warm_s = 0.0
        self._began_s: float | None = None
        """None until connections are warm."""
        self._bytes = 0
        self._held_bytes = 0

    def begin(self, now_s: float, rtt_s: float) -> None:
        """A frame leaves, and nothing else is on the way."""
        self._warm_s, self._began_s = now_s + WARM_ROUND_TRIPS * rtt_s, None

    def arrive(
        self,
        size_bytes: int,
        left_s: float,
        now_s: float,
        *,
        rtt_s: float,
        was_held: bool,
        is_last: bool,
    ) -> None:
        """A frame was acknowledged.

        Args:
            size_bytes: of the frame.
            left_s: when it had left.
            now_s: now.
            rtt_s: the idle link's round trip.
            was_held: it had to wait for the window or its turn, and so had all of a round trip before it.
            is_last: nothing is on the way any more.
        """
        if self._began_s is None:
            if now_s >= self._warm_s:
                self._restart(now_s)
            return
        self._bytes += size_bytes
        self._held_bytes += size_bytes * was_held
        carried_s = now_s - self._began_s
        if not is_last and carried_s < STRETCH_S:
            return
        waited_s = now_s - left_s - rtt_s
        is_limit = 2 * self._held_bytes >= self._bytes or 2 * waited_s >= carried_s
        if carried_s >= SHORT_S and is_limit:
            self.limited_bytes += self._bytes
            self.limited_s += carried_s
        self._restart(now_s)

    def _restart(self, now_s: float) -> None:
        self._began_s = now_s
        self._bytes = self._held_bytes = 0
