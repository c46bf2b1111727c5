"""What TCP's slow start leaves unused of a link. Pure.

After a pause longer than its time-out a connection begins with a small window and doubles it each round
trip (RFC 5681, 3.1 and 4.1). A window of w bytes, of all connections together, takes a round trip t
where the link, of r bytes a second, needs w / r for it: t - w / r is lost, until a window is r t.
"""

from __future__ import annotations

from collections.abc import Iterator

FIRST_WINDOW_PACKETS = 10
"""Of a connection: RFC 6928. Linux starts again from it once one was idle for longer than its time-out."""


def unused_s(
    num_bytes: float, bytes_per_s: float, rtt_s: float, first_window_bytes: float
) -> float:
    """Return how long a link waits for windows while it sends so many bytes, the first of a burst."""
    lost_s, sent_bytes = 0.0, 0.0
    for window_bytes in windows(bytes_per_s, rtt_s, first_window_bytes):
        sent_bytes += window_bytes
        if sent_bytes >= num_bytes:
            break  # what a burst's last window leaves unused, nobody waits for
        lost_s += rtt_s - window_bytes / bytes_per_s
    return lost_s


def windows(bytes_per_s: float, rtt_s: float, first_window_bytes: float) -> Iterator[float]:
    """Yield the windows that do not fill the link, in bytes."""
    window_bytes = first_window_bytes
    while window_bytes < bytes_per_s * rtt_s:
        yield window_bytes
        window_bytes *= 2
