"""What the kernel knows of TCP connections, and what it is told about them.

It is

- told what to follow on a connection, and how fast it may send (`set_up`);
- asked how many segments were sent, sent again and delivered, and for round trips (`segments_of`);
- asked how many bytes have crossed, either way (`traffic_of`);
- told to have BBR begin anew, in a link's pauses (`use_pauses`) or on a link that is faster than
  described (`connections.py`).

Connections are the event loop's (`frame_calls.py`), which may close them meanwhile. Then they are
left out.
"""

from __future__ import annotations

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
"""Linux 4.6."""
_INFO_WITH_DELIVERED_BYTES: Final = 196
"""Linux 4.18."""
_NAME_BYTES: Final = 16
_SO_MAX_PACING_RATE: Final = 47  # asm-generic/socket.h; Python has no name for it
_UNSENT_BYTES: Final = 256 << 10
"""What may lie in a connection's send buffer beyond its window. More would be in the way of frames
that are to leave earlier."""
_PREFERRED: Final = "bbr"
_LOCAL_RTT_S: Final = 0.001
"""A link that is said to be shorter can be this host's own; a longer one is an emulated one."""
_EVERYWHERE: Final = b"reno"
"""Every Linux has it, and lets everybody use it."""
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_SEND_BUFFER_MAX = Path("/proc/sys/net/ipv4/tcp_wmem")
_SLOW_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_PAYLOAD_SHARE: Final = 0.75
"""Share of a send buffer's limit that is payload; the rest is the kernel's bookkeeping. Measured:
0.6 to 0.85."""
_LONGER: Final = 2.0
"""BBR keeps twice a round trip on the way. It has to know where the round trip has become longer
than that."""

_PAUSES_EVERY_S = 2.0
"""Several times in BBR's ten seconds, and in the five of its third version."""
_PAUSES_LOOK_S = 0.1

Answer = TypeVar("Answer")
Connections = Iterable[socket.socket]


@dataclass(frozen=True, slots=True)
class Segments:
    """What the kernel has counted, over some open connections."""

    sent: int = 0
    """Segments with data; those that were sent again count again."""
    sent_again: int = 0
    congestion_control: str = ""
    """The algorithm of the connections, by Linux's name; empty where there is no connection."""
    rtt_s: float = 0.0
    """The longest one, smoothed, of connections with something on the way; 0: there are none."""
    shortest_rtt_s: float = math.inf
    """The shortest of any packet in the last minutes (Linux, tcp_min_rtt_wlen)."""
    is_local: bool = False
    """Some connection stays on this host."""
    delivered: int = 0
    """Segments that have arrived, also behind a lost one; 0: the kernel does not count them."""
    segment_bytes: int = 0
    """Most bytes of data in one segment."""


def segments_of(connections: Connections) -> Segments:
    """Count the segments of some connections."""
    found = _ask(connections, _segments)
    return Segments(
        sum(each.sent for each in found),
        sum(each.sent_again for each in found),
        found[-1].congestion_control if found else "",
        max((each.rtt_s for each in found), default=0.0),
        min((each.shortest_rtt_s for each in found), default=math.inf),
        any(each.is_local for each in found),
        sum(each.delivered for each in found),
        max((each.segment_bytes for each in found), default=0),
    )


def traffic_of(connection: socket.socket, unwritten_bytes: int) -> Traffic:
    """Return what has crossed a connection; what is to be written yet counts as left.

    Raises:
        OSError: it has ended.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    (left_bytes,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    (taken_bytes,) = struct.unpack_from("=Q", info, _BYTES_ACKED_AT)
    (received_bytes,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)
    return Traffic(taken_bytes, left_bytes + unwritten_bytes, received_bytes)


def set_up(connections: Connections, link: PeerLink, pace_bytes_per_s: float) -> None:
    """Have a link's connections follow what it asks for, or BBR where it may be chosen.

    Each sends at most `pace_bytes_per_s`. That has the kernel spread packets over time without BBR,
    too. A frame is written to its connection at once, and TCP would send as much of it at once as
    its window permits. In routers whose queues hold less than a round trip carries, such bursts are
    lost.

    Connections that stay on this host are an emulated link's and left alone, unless the link is
    said to be as short as they are. From those BBR is taken: it sends by a timer, which spares no
    queue there, and a transfer takes up to twice as long.
    """
    _ask(connections, functools.partial(_set_up, link=link, pace_bytes_per_s=pace_bytes_per_s))


def begin_bbr_anew(connections: Connections, rtt_s: float) -> int:
    """Have BBR begin anew on connections that follow it; return on how many.

    It then takes the shortest round trip that the kernel has seen for just measured, keeps its
    window, and looks for the link's rate as on a new connection. Where the path has become more
    than twice as long as that, by `rtt_s`, which was measured lately, BBR is left to find out.
    """
    begin = functools.partial(_begin_bbr_anew, rtt_s=rtt_s, allowed=_allowed())
    return sum(_ask(connections, begin))


def send_buffer_bytes() -> int | None:
    """Return what one connection can have on the way at most, by this host's settings."""
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


def use_pauses(connections: Callable[[], Connections], outbox: Outbox, rtt_s: float) -> None:
    """Have BBR begin anew in one link's pauses, until the link is over: it then makes none itself.

    BBR lets a connection run dry where it has seen no shorter round trip for ten seconds. It then
    sends four packets a round trip at most, for a fifth of a second and one round trip more, so
    that queues of its own run empty and it can measure again (Linux, tcp_bbr.c, PROBE_RTT;
    draft-ietf-ccwg-bbr, section 5.3.4). If that falls into the last parts of a backward pass, all
    sites wait for it.

    A link that has just had everything acknowledged has no queue of its own, and steps leave such
    moments. But Linux takes them for what they are only if the ten seconds end in one.

    `connections` returns those that there are now; `rtt_s` is the configured round trip, until one
    is measured.
    """
    used_s = time.monotonic()
    while not outbox.closed.wait(max(_PAUSES_LOOK_S, used_s + _PAUSES_EVERY_S - time.monotonic())):
        if outbox.is_over:
            return
        if not outbox.is_empty:
            continue
        used_s = time.monotonic()
        begin_bbr_anew(connections(), outbox.totals().idle_rtt_s or rtt_s)


def is_bbr(congestion_control: str) -> bool:
    """Whether an algorithm, by Linux's name, goes by what it measures instead of by losses."""
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
            _log.log(level, "TCP to site %s cannot follow %s: %s", link.site, wanted, error)
    rate = struct.pack("=Q", int(pace_bytes_per_s))
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def _is_local(connection: socket.socket) -> bool:
    local: bool = connection.getsockname()[0] == connection.getpeername()[0]
    return local


def _begin_bbr_anew(connection: socket.socket, rtt_s: float, allowed: frozenset[str]) -> bool:
    name = _congestion_control(connection)
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    # What may not be chosen may not be left either: there would be no way back.
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
