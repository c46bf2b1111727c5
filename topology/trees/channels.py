"""The number of TCP connections that a link begins with: for gateways, and for predictions.

Pure: gateways open them, predictions count with them.

One connection has no more on the way than its sender's buffer holds, so a link takes as many as its
bandwidth times round trip needs. It takes at least two where it is wide enough for both: while one
waits for a lost packet, the other carries on. On a narrow link two only crowd each other out. With
CUBIC and 40 ms two take 1.3 times as long as one at 10 Mbit/s, 1.13 times at 30 Mbit/s, and as long
as one at 100 Mbit/s (`python -m scripts.bench gateways`).
"""

from __future__ import annotations

import math

from isthmus.topology.spec.tcp_constants import SEGMENT_BYTES

FLOWS_MAX = 64
"""The most TCP connections of a link whose topology does not limit them."""
_ENOUGH_FOR_TWO_BYTES = 2 * 128 * SEGMENT_BYTES
"""Bytes on the way that make two connections worth while: about a hundred packets for each."""
SEND_BUFFER_BYTES = 3 << 20
"""Bytes of one connection's send buffer where nothing is known: 3/4 of Linux's default of 4 MiB."""


def first_channels(
    wanted: int | None,
    most: int,
    bytes_per_s: float,
    rtt_s: float,
    send_buffer_bytes: int | None = SEND_BUFFER_BYTES,
) -> int:
    """Return how many connections a link begins with: exactly the wanted, or what fills it.

    Args:
        wanted: as the job says; None: auto.
        most: at most so many, where the job leaves it open.
        bytes_per_s: of the link.
        rtt_s: of the link.
        send_buffer_bytes: what one connection can have on the way at most; None: no limit known.
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
    """Return how many chunks are side by side on a link, in the mean; arguments: `first_channels`.

    As many as it has connections, once it holds that many times what makes a further one worth
    while. In between fewer: of a chunk on each of two, the second begins when the first one has
    left its sender. So chunks never take longer on a link for its being wider.
    """
    if wanted is not None:
        return wanted
    held_bytes = bytes_per_s * rtt_s
    in_flight = min(2.0, held_bytes / _ENOUGH_FOR_TWO_BYTES)
    if send_buffer_bytes is not None:
        in_flight = max(in_flight, held_bytes / send_buffer_bytes)
    return max(1.0, min(in_flight, most))
