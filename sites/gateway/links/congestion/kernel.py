"""Reads and sets the kernel's state of TCP connections (Linux).

The kernel is

- told a connection's congestion control and pace (`set_up`);
- asked how many segments were sent, sent again and delivered, and for round trips (`segments_of`);
- asked how many bytes have crossed, either way (`traffic_of`);
- told to restart BBR, in a link's pauses (`use_pauses`) or on a link that is faster than described
  (`connections.py`).

Connections are the event loop's (`frame_calls.py`), which may close them meanwhile. Then they are
left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import math
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from isthmus.sites.gateway.config import PeerLink
from isthmus.sites.gateway.links.progress import Traffic
from isthmus.sites.gateway.links.send_queue import Outbox

_log = logging.getLogger(__name__)

_INT: Final = struct.Struct("i")
_MSS_AT: Final = 16  # linux/tcp.h, struct tcp_info
_UNACKED_AT: Final = 24
_RTT_US_AT: Final = 68
_TOTAL_RETRANS_AT: Final = 100
_BYTES_ACKED_AT: Final = 120
_BYTES_RECEIVED_AT: Final = 128
_MIN_RTT_US_AT: Final = 148
_DATA_SEGS_OUT_AT: Final = 156
_DELIVERED_AT: Final = 192
_INFO_BYTES: Final = 160
"""Length of `tcp_info` up to the fields that are read first; Linux 4.6 has them."""
_INFO_WITH_DELIVERED_BYTES: Final = 196
"""Length of `tcp_info` up to `tcpi_delivered`; Linux 4.18 has it."""
_NAME_BYTES: Final = 16
_SO_MAX_PACING_RATE: Final = 47  # asm-generic/socket.h; Python has no name for it
_UNSENT_BYTES: Final = 256 << 10
"""Unsent bytes in a connection's send buffer. More would delay frames with a higher priority."""
_PREFERRED: Final = "bbr"
_LOCAL_RTT_S: Final = 0.001
"""A loopback link described with a longer round trip is an emulated one."""
_EVERYWHERE: Final = b"reno"
"""Congestion control that every Linux offers to every user."""
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_SEND_BUFFER_MAX = Path("/proc/sys/net/ipv4/tcp_wmem")
_SLOW_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_PAYLOAD_SHARE: Final = 0.75
"""Share of a send buffer's limit that is payload; the rest is the kernel's bookkeeping. Measured:
0.6 to 0.85."""
_LONGER: Final = 2.0
"""BBR keeps twice a round trip in flight. If the path's round trip grew beyond this factor, BBR
must find out by itself."""

_PAUSES_EVERY_S = 2.0
"""Interval of restarts: several within the ten seconds after which BBR (five for BBRv3) drains its
queue."""
_PAUSES_LOOK_S = 0.1

Answer = TypeVar("Answer")
Connections = Iterable[socket.socket]


@dataclass(frozen=True, slots=True)
class Segments:
    """The kernel's segment counters, summed over some open connections."""

    sent: int = 0
    """Segments with data, retransmissions included."""
    sent_again: int = 0
    congestion_control: str = ""
    """Congestion control of the connections, by Linux's name; empty without a connection."""
    rtt_s: float = 0.0
    """Longest smoothed round trip of connections with bytes in flight; 0: none has any."""
    shortest_rtt_s: float = math.inf
    """Shortest round trip of any packet in the last minutes (Linux, tcp_min_rtt_wlen)."""
    is_local: bool = False
    """Whether a connection is a loopback one."""
    delivered: int = 0
    """Segments that have arrived, also out of order; 0: the kernel does not count them."""
    segment_bytes: int = 0
    """Largest payload of a segment."""


def segments_of(connections: Connections) -> Segments:
    """Sum the kernel's counters over `connections`."""
    samples = _ask(connections, _segments)
    return Segments(
        sum(each.sent for each in samples),
        sum(each.sent_again for each in samples),
        samples[-1].congestion_control if samples else "",
        max((each.rtt_s for each in samples), default=0.0),
        min((each.shortest_rtt_s for each in samples), default=math.inf),
        any(each.is_local for each in samples),
        sum(each.delivered for each in samples),
        max((each.segment_bytes for each in samples), default=0),
    )


def traffic_of(connection: socket.socket, unwritten_bytes: int) -> Traffic:
    """Return the bytes acknowledged and left on a connection; `unwritten_bytes` count as left.

    Raises:
        OSError: the connection has ended.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    left_bytes = unacknowledged_bytes(connection)
    (taken_bytes,) = struct.unpack_from("=Q", info, _BYTES_ACKED_AT)
    (received_bytes,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)
    return Traffic(taken_bytes, left_bytes + unwritten_bytes, received_bytes)


def unacknowledged_bytes(connection: socket.socket) -> int:
    """Return the bytes that were written and that the peer's TCP has not acknowledged.

    Raises:
        OSError: the connection has ended.
    """
    (left_bytes,) = _INT.unpack(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return int(left_bytes)


def set_up(connections: Connections, link: PeerLink, pace_bytes_per_s: float) -> None:
    """Set the congestion control that a link asks for (default BBR, if allowed) and the pace.

    Each connection sends at most `pace_bytes_per_s`, also without BBR. Unpaced, TCP would send as
    much of a frame at once as its window permits, and routers with short queues drop such bursts.

    Loopback connections that emulate a longer link are not changed. On real loopback links BBR is
    replaced: its timer spares no queue there, and transfers take up to twice as long.
    """
    _ask(connections, functools.partial(_set_up, link=link, pace_bytes_per_s=pace_bytes_per_s))


def begin_bbr_anew(connections: Connections, rtt_s: float) -> int:
    """Restart BBR on connections that use it; return on how many.

    BBR then counts the kernel's shortest round trip as just measured, keeps its window, and probes
    the link's rate as on a new connection. If the recent `rtt_s` is more than twice that, the path
    has changed and BBR is left to find out.
    """
    begin = functools.partial(_begin_bbr_anew, rtt_s=rtt_s, allowed=_allowed())
    return sum(_ask(connections, begin))


def send_buffer_bytes() -> int | None:
    """Return this host's limit on bytes in flight per connection; None: unknown."""
    try:
        most = int(_SEND_BUFFER_MAX.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return None
    return int(_PAYLOAD_SHARE * most)


def starts_slowly_after_idle() -> bool:
    """Return whether this host's connections forget their window while nothing is sent."""
    try:
        return _SLOW_AFTER_IDLE.read_text().strip() != "0"
    except OSError:
        return False


async def use_pauses(connections: Callable[[], Connections], outbox: Outbox, rtt_s: float) -> None:
    """Restart BBR in a link's pauses until the link ends, so that BBR makes no pause itself.

    BBR lets a connection run dry where it has seen no shorter round trip for ten seconds. It then
    sends four packets a round trip at most, for a fifth of a second and one round trip more, so
    that queues of its own run empty and it can measure again (Linux, tcp_bbr.c, PROBE_RTT;
    draft-ietf-ccwg-bbr, section 5.3.4). If that falls into the last parts of a backward pass, all
    sites wait for it.

    A link whose frames are all acknowledged has no queue of its own, and steps leave such moments.
    Linux uses them only if the ten seconds end in one.

    `connections` returns the open connections; `rtt_s` is the configured round trip, used until one
    is measured.
    """
    used_s = time.monotonic()
    while not outbox.is_over:
        await asyncio.sleep(max(_PAUSES_LOOK_S, used_s + _PAUSES_EVERY_S - time.monotonic()))
        if outbox.is_empty and not outbox.is_over:
            used_s = time.monotonic()
            begin_bbr_anew(connections(), outbox.totals().idle_rtt_s or rtt_s)


def is_bbr(congestion_control: str) -> bool:
    """Whether a congestion control, by Linux's name, is a version of BBR."""
    return congestion_control.startswith("bbr")


def _congestion_control(connection: socket.socket) -> str:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    return name.split(b"\0", 1)[0].decode("ascii", "replace")


def _allowed() -> frozenset[str]:
    """Return the algorithms that this process may choose."""
    try:
        return frozenset(_ALLOWED.read_text().split())
    except OSError:
        return frozenset()


def _segments(connection: socket.socket) -> Segments:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_WITH_DELIVERED_BYTES)
    if len(info) < _INFO_BYTES:
        return Segments()

    def value(offset: int) -> int:
        found: int = struct.unpack_from("=I", info, offset)[0]
        return found

    return Segments(
        value(_DATA_SEGS_OUT_AT),
        value(_TOTAL_RETRANS_AT),
        _congestion_control(connection),
        1e-6 * value(_RTT_US_AT) if value(_UNACKED_AT) else 0.0,
        1e-6 * value(_MIN_RTT_US_AT),
        _is_local(connection),
        value(_DELIVERED_AT) if len(info) >= _INFO_WITH_DELIVERED_BYTES else 0,
        value(_MSS_AT),
    )


def _set_up(connection: socket.socket, link: PeerLink, pace_bytes_per_s: float) -> None:
    if _is_local(connection):
        if link.rtt_s < _LOCAL_RTT_S and is_bbr(_congestion_control(connection)):
            _choose(connection, _EVERYWHERE)
        return
    wanted = link.congestion or _PREFERRED
    if _congestion_control(connection) != wanted:
        try:
            _choose(connection, wanted.encode())
        except OSError as error:  # not loaded, or not allowed to this process
            level = logging.WARNING if link.congestion else logging.DEBUG
            _log.log(level, "TCP to site %s cannot use %s: %s", link.site, wanted, error)
    rate = struct.pack("=Q", int(pace_bytes_per_s))
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def _is_local(connection: socket.socket) -> bool:
    local: bool = connection.getsockname()[0] == connection.getpeername()[0]
    return local


def _begin_bbr_anew(connection: socket.socket, rtt_s: float, allowed: frozenset[str]) -> bool:
    name = _congestion_control(connection)
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    # Do not leave an algorithm that could not be chosen again.
    if not name.startswith("bbr") or name not in allowed or len(info) < _INFO_BYTES:
        return False
    shortest_s = 1e-6 * struct.unpack_from("=I", info, _MIN_RTT_US_AT)[0]
    if rtt_s > _LONGER * shortest_s:
        return False
    _choose(connection, _EVERYWHERE)
    _choose(connection, name.encode())
    return True


def _choose(connection: socket.socket, name: bytes) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)


def _ask(connections: Connections, ask: Callable[[socket.socket], Answer]) -> list[Answer]:
    """Return the answers of all connections that have not ended."""
    answers = []
    for connection in connections:
        with contextlib.suppress(OSError):
            answers.append(ask(connection))
    return answers
