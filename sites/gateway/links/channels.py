"""How many TCP connections a link takes as it is measured, and what a pause costs them. Pure.

Where packets are lost at random, a connection carries what its congestion control believes in, not
what the link could: CUBIC's window is on average 1.054 (RTT / loss)^0.75 packets, and at least
Reno's 1.2 / sqrt(loss) (RFC 9438, section 5.2), be the link as wide as it may. Several connections
carry so much each. BBR does not take a lost packet for a full queue, and needs no help.

A connection that sends nothing loses half its window in each time-out, down to ten packets (RFC
2861; Linux, tcp_cwnd_restart), and doubles it in each round trip once it sends again. BBR keeps it.
"""

from __future__ import annotations

import math

from sites.gateway.links.connections import Segments

CHANNELS_MAX = 64
"""Of one link, whatever its topology allows."""
_RESTART_BYTES = 10 * 1448
_TIMEOUT_MIN_S = 0.2
"""Linux: the time-out is the round trip and at least this."""
_PACKET_BYTES = 1448
_LOST_MIN = 5
_SEGMENTS_MAX = 200_000
"""Fewer losses say nothing, until so much has been sent that they are none worth mentioning."""
_ENOUGH = 0.8
"""Of the configured rate: a link that carries so much needs no more connections."""


def loss_of(before: Segments, now: Segments) -> float | None:
    """Return the share of packets lost between two counts; None: too few to tell."""
    sent, lost = now.sent - before.sent, now.sent_again - before.sent_again
    if lost >= _LOST_MIN and sent > 0:
        return lost / sent
    return 0.0 if sent >= _SEGMENTS_MAX else None


def is_held_back(
    loss: float, congestion_control: str, rate_bytes_per_s: float, bytes_per_s: float
) -> bool:
    """Return whether random losses are why a link carries less than it could."""
    is_slow = rate_bytes_per_s < _ENOUGH * bytes_per_s
    return loss > 0 and not is_bbr(congestion_control) and is_slow


def is_bbr(congestion_control: str) -> bool:
    """Whether an algorithm, by Linux's name, goes by what it measures instead of by losses."""
    return congestion_control.startswith("bbr")


def channels_for(loss: float, bytes_per_s: float, rtt_s: float, most: int) -> int:
    """Return how many connections fill a link that loses a share `loss` > 0 of its packets."""
    cubic = 1.054 * math.pow(rtt_s / loss, 0.75)
    reno = 1.2 / math.sqrt(loss)
    packets = bytes_per_s * rtt_s / _PACKET_BYTES
    return max(1, min(math.ceil(packets / max(cubic, reno)), most))


def idle_cost_s(idle_s: float, bytes_per_s: float, rtt_s: float, num_connections: int) -> float:
    """Return what starting slowly after a pause costs a transfer: the link's time left unused.

    Args:
        idle_s: of the pause.
        bytes_per_s: of the link, which the connections had filled before.
        rtt_s: of the link.
        num_connections: side by side.
    """
    full_bytes = bytes_per_s * rtt_s
    halvings = min(int(idle_s / (rtt_s + _TIMEOUT_MIN_S)), 64)
    window_bytes = full_bytes / 2**halvings
    window_bytes = max(window_bytes, min(num_connections * _RESTART_BYTES, full_bytes))
    cost_s = 0.0
    while 0 < window_bytes < full_bytes:
        cost_s += rtt_s - window_bytes / bytes_per_s
        window_bytes *= 2
    return cost_s
