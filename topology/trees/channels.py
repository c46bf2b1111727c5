"""The number of TCP connections that a link begins with: for gateways, and for predictions.

Pure. Gateways open that many, and predictions assume it.

One connection has at most its send buffer in flight, so a link needs enough of them to fill its
BDP. A wide link has at least two: while one waits for a lost packet, the other carries on. On a
narrow link two only compete. With CUBIC and 40 ms two take 1.3 times as long as one at 10 Mbit/s,
1.13 times at 30 Mbit/s, and as long as one at 100 Mbit/s (`python -m scripts.bench gateways`).
"""

from __future__ import annotations

import math

from isthmus.topology.spec.tcp_constants import SEGMENT_BYTES

FLOWS_MAX = 64
"""Limit on a link's TCP connections, if the topology sets none."""
_ENOUGH_FOR_TWO_BYTES = 2 * 128 * SEGMENT_BYTES
"""BDP from which two connections pay: about a hundred packets for each."""
SEND_BUFFER_BYTES = 3 << 20
"""Default bytes in a connection's send buffer: 3/4 of Linux's default of 4 MiB."""


def first_channels(
    wanted: int | None,
    most: int,
    bytes_per_s: float,
    rtt_s: float,
    send_buffer_bytes: int | None = SEND_BUFFER_BYTES,
) -> int:
    """Return the initial number of connections: `wanted`, or enough to fill the link.

    Args:
        wanted: the job's number; None: auto.
        most: upper limit for auto.
        bytes_per_s: bandwidth of the link.
        rtt_s: round trip of the link.
        send_buffer_bytes: limit on bytes in flight per connection; None: unknown.
    """
    if wanted is not None:
        return wanted
    held_bytes = bytes_per_s * rtt_s
    least = 2 if held_bytes >= _ENOUGH_FOR_TWO_BYTES else 1
    needed = math.ceil(held_bytes / send_buffer_bytes) if send_buffer_bytes else 1
    return max(1, min(max(needed, least), most))


def chunks_in_flight(
    wanted: int | None,
    most: int,
    bytes_per_s: float,
    rtt_s: float,
    send_buffer_bytes: int | None = SEND_BUFFER_BYTES,
) -> float:
    """Return the mean number of chunks in flight on a link; arguments as in `first_channels`.

    It is the number of connections, once the link's BDP justifies them all. In between it is lower,
    since with two chunks the second begins when the first has left its sender. So a wider link
    never makes chunks take longer.
    """
    if wanted is not None:
        return wanted
    held_bytes = bytes_per_s * rtt_s
    in_flight = min(2.0, held_bytes / _ENOUGH_FOR_TWO_BYTES)
    if send_buffer_bytes is not None:
        in_flight = max(in_flight, held_bytes / send_buffer_bytes)
    return max(1.0, min(in_flight, most))
