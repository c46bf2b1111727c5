"""The rate of TCP connections over long distances. Pure.

This is what one connection sends in the steady state. p is the loss probability of a packet, R the
round trip and S the payload of a packet. Windows W are in packets, and the rate is W S / R:

    Reno, Mathis et al. 1997     W = C / sqrt(p), C = 1.2 (RFC 8312, eq. 5)
    CUBIC, RFC 8312, eq. 6       W = 1.054 (R / p)^(3/4), never less than Reno
    BBR, Cardwell et al. 2016    losses below its threshold do not slow it: (1-p) of the link

One connection carries the least of the link, of the receiver's window / R, and of that rate. n
connections carry n times as much, up to the share of the link that is payload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.topology.spec.tcp_constants import cubic_window, reno_window

BBR_LOSS_LIMIT = 0.15
"""The loss above which BBR's throughput collapses; Cardwell et al. report 15 to 20 %."""
WIRE_SHARE = 1460 / 1538
"""Payload's share of an Ethernet link: 1500 bytes less 40 of headers, on a wire with 38 more for
each frame."""
CONGESTION_CONTROLS = ("cubic", "reno", "bbr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The path that connections cross."""

    bytes_per_s: float
    """Bytes per second of the link on the wire, all connections together."""
    rtt_s: float
    loss: float = 0.0
    """Probability that a packet is lost at random, 0 to 1."""
    segment_bytes: int = 1460
    """Payload bytes of a packet."""


def connection_bytes_per_s(
    path: Path, window_bytes: float = math.inf, congestion: str = "cubic"
) -> float:
    """Return the payload bytes per second of one connection.

    `window_bytes` is the smaller of the sender's and the receiver's buffer.

    Raises:
        ValueError: `congestion` is none of CONGESTION_CONTROLS.
    """
    link = WIRE_SHARE * path.bytes_per_s
    window_limit = window_bytes / path.rtt_s if path.rtt_s > 0 else math.inf
    return min(link, window_limit, _loss_limit(path, congestion))


def _loss_limit(path: Path, congestion: str) -> float:
    """Return the payload bytes per second that the congestion control allows."""
    if congestion == "bbr":
        if path.loss > BBR_LOSS_LIMIT:
            return _rate(path, cubic_window(path.rtt_s, path.loss))
        return WIRE_SHARE * path.bytes_per_s * (1 - path.loss)
    if congestion == "reno":
        return _rate(path, reno_window(path.loss))
    if congestion == "cubic":
        return _rate(path, cubic_window(path.rtt_s, path.loss))
    raise ValueError(
        f"congestion: want one of {', '.join(CONGESTION_CONTROLS)}; got {congestion!r}"
    )


def _rate(path: Path, window: float) -> float:
    return window * path.segment_bytes / path.rtt_s if path.rtt_s > 0 else math.inf


def link_bytes_per_s(
    path: Path, num_connections: int, window_bytes: float = math.inf, congestion: str = "cubic"
) -> float:
    """Return the payload bytes per second of parallel connections."""
    one = connection_bytes_per_s(path, window_bytes, congestion)
    return min(WIRE_SHARE * path.bytes_per_s, num_connections * one)


def connections_needed(
    path: Path, window_bytes: float = math.inf, congestion: str = "cubic"
) -> int:
    """Return how many connections fill the link: its payload over that of one, rounded up."""
    one = connection_bytes_per_s(path, window_bytes, congestion)
    return math.ceil(WIRE_SHARE * path.bytes_per_s / one - 1e-9)
