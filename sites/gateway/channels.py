"""How many TCP connections a link takes. Pure.

Where packets are lost at random, a connection carries what its congestion control believes in, not what
the link could: CUBIC's window is on average 1.054 (RTT / loss)^0.75 packets, and at least Reno's
1.2 / sqrt(loss) (RFC 9438, section 5.2), be the link as wide as it may. Several connections carry so much
each. BBR does not take a lost packet for a full queue, and needs no help.
"""

from __future__ import annotations

import math

from sites.gateway.connections import Segments

CHANNELS_MAX = 64
"""Of one link, whatever its topology allows."""
_PACKET_BYTES = 1448
_LOST_MIN = 5
_SEGMENTS_MAX = 200_000
"""Fewer losses say nothing, until so much has been sent that they are none worth mentioning."""
_ENOUGH = 0.8
"""Of the configured rate: a link that carries so much needs no more connections."""


def first_channels(
    configured: int, most: int, bytes_per_s: float, rtt_s: float, send_buffer_bytes: int | None
) -> int:
    """Return how many connections a link begins with: the configured, or what fills it.

    Args:
        configured: at least so many.
        most: at most so many, but never fewer than configured.
        bytes_per_s: of the link.
        rtt_s: of the link.
        send_buffer_bytes: what one connection can have on the way at most; None: no limit known.
    """
    needed = 1
    if send_buffer_bytes:
        needed = math.ceil(bytes_per_s * rtt_s / send_buffer_bytes)
    return max(configured, min(needed, most))


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
    is_deaf = congestion_control.startswith("bbr")
    return loss > 0 and not is_deaf and rate_bytes_per_s < _ENOUGH * bytes_per_s


def channels_for(loss: float, bytes_per_s: float, rtt_s: float, most: int) -> int:
    """Return how many connections fill a link that loses a share `loss` > 0 of its packets."""
    cubic = 1.054 * math.pow(rtt_s / loss, 0.75)
    reno = 1.2 / math.sqrt(loss)
    packets = bytes_per_s * rtt_s / _PACKET_BYTES
    return max(1, min(math.ceil(packets / max(cubic, reno)), most))
