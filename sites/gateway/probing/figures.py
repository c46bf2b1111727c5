"""From timed echoes and counted segments to a link's figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos import metrics
from protos.errors import RemoteProtocolError
from sites.gateway.links.connections import Segments

LOST_MIN = 5
"""Fewer lost segments say how often they are lost only within a factor of two."""
_TRIANGLE_90 = 2 - 0.8**0.5
"""Both directions late by evenly 0 to 1 of their jitter either way: the sum's 90th percentile above
its median, in jitters. P(sum > x) = (2 - x)²/8 = 0.1. Not the 99th: an echo that TCP had to send
again is no jitter, and at 0.5 % loss one in a hundred is."""


@dataclass(kw_only=True, slots=True)
class LinkFigures:
    """What was measured of one direction."""

    rtt_s: Sequence[float]
    """Of each echo."""
    bytes_per_s: dict[int, float] = field(default_factory=dict)
    """Payload, by the number of connections."""
    before: Segments = field(default_factory=Segments)
    after: Segments = field(default_factory=Segments)
    """The kernel's counts around a flow that never fills the link."""

    def values(self) -> dict[str, float]:
        """Return the record's values (protos/metrics.py); what could not be told is not there."""
        median_s, late_s = percentile(self.rtt_s, 0.5), percentile(self.rtt_s, 0.99)
        values = {
            metrics.RTT_S_P50: median_s,
            metrics.RTT_S_P99: late_s,
            metrics.JITTER_S: (percentile(self.rtt_s, 0.9) - median_s) / _TRIANGLE_90,
        }
        for connections, rate in self.bytes_per_s.items():
            values[f"{metrics.BYTES_PER_S}_{connections}"] = rate
        sent = self.after.sent - self.before.sent
        if sent > 0:
            values[metrics.SEGMENTS] = sent
            # A connection that has ended meanwhile takes what it sent again with it.
            values[metrics.LOST_SEGMENTS] = max(0, self.after.sent_again - self.before.sent_again)
        return values


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least a share of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def rate_between(received_bytes: tuple[int, int], now_s: tuple[float, float]) -> float:
    """Return the bytes per second that a peer has counted between two of its answers.

    Args:
        received_bytes: first and last count.
        now_s: when, by the peer's own clock.

    Raises:
        RemoteProtocolError: its clock or its count does not run forwards.
    """
    over_s, num_bytes = now_s[1] - now_s[0], received_bytes[1] - received_bytes[0]
    if not (math.isfinite(over_s) and over_s > 0 and num_bytes >= 0):
        raise RemoteProtocolError(
            f"a peer that counts a flow says {num_bytes} bytes in {over_s:g} s: want time to pass, "
            "and bytes to come"
        )
    return num_bytes / over_s


def is_steady(last: float, rate: float, share: float = 0.03) -> bool:
    """Return whether two pieces of time carried the same."""
    return rate > 0 and abs(rate - last) <= share * rate
