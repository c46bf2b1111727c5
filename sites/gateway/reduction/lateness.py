"""How much of a bucket's time went by because another site was later, and not because of the link.

Pure. A peer's first frame of a bucket is expected half a round trip after this site was ready (a
whole one for a result, which answers what this site sent), plus its transmission; and not before
the link has carried what that peer sent earlier. What goes beyond is the peer's lateness.

A link's channels carry a frame each, side by side, so that the first arrives hardly before the last
of them: its transmission counts for all. Where fewer were under way, up to so much lateness is
taken for the link's time. Of a slower start than the configured rate, the reverse holds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """The first frame of a bucket from one peer. Times are monotonic."""

    at_s: float
    previous_s: float
    """When the frame before it came from the same peer; 0 if it was the first ever."""
    frame_bytes: int
    num_channels: int
    """Frames that may be on the link side by side."""
    is_result: bool
    rtt_s: float
    bytes_per_s: float


def lateness_s(ready_s: float, arrival: Arrival) -> float:
    """Return by how much a peer was later than this site, at least 0.

    Args:
        ready_s: when this site's own contribution was ready.
        arrival: the peer's first frame.
    """
    transmission_s = arrival.num_channels * arrival.frame_bytes / arrival.bytes_per_s
    trips = 2 if arrival.is_result else 1
    answer_s = ready_s + trips * (arrival.rtt_s / 2 + transmission_s)
    expected_s = max(answer_s, arrival.previous_s + transmission_s)
    return max(0.0, arrival.at_s - expected_s)
