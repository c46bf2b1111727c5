"""Link time that TCP's slow start leaves unused. Pure.

A connection begins with a small window and doubles it each round trip (RFC 5681, 3.1). A window of
w bytes, of all connections together, takes a round trip t where the link, of r bytes a second,
needs w / r for it: t - w / r is lost, until a window is r t.

RFC 5681, 4.1, begins so again after a pause longer than the time-out. Linux halves the window once
per time-out within the pause, but not below the first window (RFC 2861; net/ipv4/tcp_output.c,
tcp_cwnd_restart); its threshold remembers 3/4 of the old window (tcp_current_ssthresh), up to which
the window doubles again. Beyond that CUBIC's curve continues from where it was, which grows by half
per round trip; counted here as doubling, too. The window before the pause is taken as just filling
the link, although queues make it larger.

This applies to congestion controls that leave their window to the kernel. BBR keeps its own model
of the path, and Linux then does not touch the window (net/ipv4/tcp_output.c,
tcp_slow_start_after_idle_check).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator

from isthmus.topology.spec.tcp_constants import RTO_MIN_S


def is_rested_slow(congestion: str) -> bool:
    """Return whether connections of a congestion control start slowly again after a pause."""
    return not congestion.startswith("bbr")


def num_halvings(idle_s: float, rtt_s: float) -> int:
    """Return how often a pause has halved the window: once per time-out within it."""
    return max(0, math.ceil(idle_s / (rtt_s + RTO_MIN_S)) - 1)


def window_after(
    num_bytes: float, bytes_per_s: float, rtt_s: float, first_window_bytes: float
) -> float:
    """Return the window after a burst of `num_bytes`, at most one that fills the link."""
    sent = 0.0
    for window_bytes in windows(bytes_per_s, rtt_s, first_window_bytes):
        sent += window_bytes
        if sent > num_bytes:
            return window_bytes
    return max(first_window_bytes, bytes_per_s * rtt_s)


def unused_s(
    num_bytes: float, bytes_per_s: float, rtt_s: float, first_window_bytes: float
) -> float:
    """Return the seconds that a link waits for windows in a burst's first `num_bytes`."""
    return Ramp(bytes_per_s, rtt_s, first_window_bytes).unused_s(num_bytes)


class Ramp:
    """The windows of a burst until one fills the link; worth keeping for many flows of it."""

    def __init__(self, bytes_per_s: float, rtt_s: float, first_window_bytes: float) -> None:
        """An infinite first window fills any link."""
        sent_bytes, lost_s = 0.0, 0.0
        self._sent_bytes: list[float] = []
        """Bytes sent by the end of each window."""
        self._lost_s = [0.0]
        """Seconds lost before each window, and after all."""
        for window_bytes in windows(bytes_per_s, rtt_s, first_window_bytes):
            sent_bytes += window_bytes
            lost_s += rtt_s - window_bytes / bytes_per_s
            self._sent_bytes.append(sent_bytes)
            self._lost_s.append(lost_s)
        self.num_bytes = sent_bytes
        """Bytes of the burst after which the window fills the link."""

    def unused_s(self, num_bytes: float) -> float:
        """Return the seconds that the link waits for windows in the first `num_bytes`."""
        # The idle time after the last window delays nothing.
        return self._lost_s[bisect_left(self._sent_bytes, num_bytes)]


def windows(bytes_per_s: float, rtt_s: float, first_window_bytes: float) -> Iterator[float]:
    """Yield the windows that do not fill the link, in bytes."""
    window_bytes = first_window_bytes
    while window_bytes < bytes_per_s * rtt_s:
        yield window_bytes
        window_bytes *= 2
