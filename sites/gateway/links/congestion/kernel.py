"""What the kernel knows of this process's TCP connections, and what it is told about them.

gRPC hands out neither its sockets nor what TCP counts. So the sockets are found among the process's
open files, by where they lead. Each is asked through a duplicate that lives for one call: gRPC's
own is neither closed nor kept. The kernel is

- told what to follow on a connection, and how fast it may send (`set_up`);
- asked how many segments were sent, sent again and delivered, and for round trips (`segments_to`);
- told to have BBR begin anew, in a link's pauses (`use_pauses`) or on a link that is faster than
  described (`connections.py`).
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import math
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from sites.gateway.config import PeerLink
from sites.gateway.links.entrance import Entrance
from sites.gateway.links.send_queue import Outbox
from sites.gateway.links.transport import Peer

_log = logging.getLogger(__name__)

_MSS_AT: Final = 16  # linux/tcp.h, struct tcp_info
_UNACKED_AT: Final = 24
_RTT_US_AT: Final = 68
_TOTAL_RETRANS_AT: Final = 100
_MIN_RTT_US_AT: Final = 148
_DATA_SEGS_OUT_AT: Final = 156
_DELIVERED_AT: Final = 192
_INFO_BYTES: Final = 160
"""Linux 4.6."""
_INFO_WITH_DELIVERED_BYTES: Final = 196
"""Linux 4.18."""
_NAME_BYTES: Final = 16
_SO_MAX_PACING_RATE: Final = 47  # asm-generic/socket.h; Python has no name for it
_PACE_MAX: Final = 10**12
"""Bytes a second, far more than any link has. It is a limit all the same, so TCP spreads what its
window permits over the round trip (Linux, sk_pacing_status), which BBR does by itself."""
_UNSENT_BYTES: Final = 256 << 10
"""What may lie in a connection's send buffer beyond its window. More would be in the way of frames
that are to leave earlier."""
_PREFERRED: Final = "bbr"
LOCAL_RTT_S: Final = 0.001
"""A link that is said to be shorter can be this host's own; a longer one is an emulated one."""
_EVERYWHERE: Final = b"reno"
"""Every Linux has it, and lets everybody use it."""
_OPEN_FILES = Path("/proc/self/fd")
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
Addresses = frozenset[tuple[str, int]]
"""Where connections lead: hosts as numbers, and ports."""


@dataclass(frozen=True, slots=True)
class Segments:
    """What the kernel has counted, over all open connections to a peer."""

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


def addresses_of(host: str, port: int) -> Addresses:
    """Return where connections to a host lead.

    Raises:
        OSError: the name is not known.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset((_plain(str(address[0])), port) for *_, address in found)


def addresses_now(peer: Peer | Entrance) -> Addresses | None:
    """Return where connections to a peer lead; None: its name is not known just now.

    The connections that there are do without it.
    """
    if isinstance(peer, Entrance):
        return frozenset((_plain(host), port) for host, port in peer.addresses())
    try:
        return addresses_of(peer.host, peer.port)
    except OSError as error:
        _log.debug("%s: %s", peer, error)
        return None


def segments_to(addresses: Addresses) -> Segments:
    """Count the segments of all connections that lead to one of `addresses`."""
    found = _ask(addresses, _segments)
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


def set_up(peer: Peer | Entrance, link: PeerLink, pace_bytes_per_s: float) -> None:
    """Have the connections to a peer follow what its link asks for, or BBR where it may be chosen.

    Each sends at most `pace_bytes_per_s`, which may be infinite. Any limit has the kernel spread
    packets over time without BBR, too. A frame is written to its connection at once, and TCP would
    send as much of it at once as its window permits. In routers whose queues hold less than a round
    trip carries, such bursts are lost.

    Connections that stay on this host are an emulated link's and left alone, unless the link is
    said to be as short as they are. From those BBR is taken: it sends by a timer, which spares no
    queue there, and a transfer takes up to twice as long.
    """
    addresses = addresses_now(peer)
    if addresses is not None:
        _ask(addresses, functools.partial(_set_up, link=link, pace_bytes_per_s=pace_bytes_per_s))


def stay_local(addresses: Addresses) -> bool:
    """Return whether there are connections to `addresses` that stay on this host."""
    return any(_ask(addresses, _is_local))


def begin_bbr_anew(addresses: Addresses, rtt_s: float) -> int:
    """Have BBR begin anew on connections to `addresses`; return on how many.

    It then takes the shortest round trip that the kernel has seen for just measured, keeps its
    window, and looks for the link's rate as on a new connection. Where the path has become more
    than twice as long as that, by `rtt_s`, which was measured lately, BBR is left to find out.
    """
    return sum(_ask(addresses, functools.partial(_begin_bbr_anew, rtt_s=rtt_s, allowed=_allowed())))


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


def use_pauses(peer: Peer | Entrance, outbox: Outbox, rtt_s: float) -> None:
    """Have BBR begin anew in one link's pauses, until the link is over: it then makes none itself.

    BBR lets a connection run dry where it has seen no shorter round trip for ten seconds. It then
    sends four packets a round trip at most, for a fifth of a second and one round trip more, so
    that queues of its own run empty and it can measure again (Linux, tcp_bbr.c, PROBE_RTT;
    draft-ietf-ccwg-bbr, section 5.3.4). If that falls into the last parts of a backward pass, all
    sites wait for it.

    A link that has just had everything acknowledged has no queue of its own, and steps leave such
    moments. But Linux takes them for what they are only if the ten seconds end in one.

    `rtt_s` is the configured round trip, until one is measured.
    """
    used_s = time.monotonic()
    while not outbox.closed.wait(max(_PAUSES_LOOK_S, used_s + _PAUSES_EVERY_S - time.monotonic())):
        if outbox.is_over:
            return
        if not outbox.is_empty:
            continue
        used_s = time.monotonic()
        addresses = addresses_now(peer)
        if addresses is not None and outbox.is_empty:  # a resolver can take longer than a pause
            begin_bbr_anew(addresses, outbox.totals().idle_rtt_s or rtt_s)


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
        if link.rtt_s < LOCAL_RTT_S and is_bbr(_congestion_control(connection)):
            _choose(connection, _EVERYWHERE)
        return
    wanted = link.congestion or _PREFERRED
    if _congestion_control(connection) != wanted:
        try:
            _choose(connection, wanted.encode())
        except OSError as error:  # not loaded, or not allowed to this process
            level = logging.WARNING if link.congestion else logging.DEBUG
            _log.log(level, "TCP to site %s cannot follow %s: %s", link.site, wanted, error)
    rate = struct.pack("=Q", int(min(pace_bytes_per_s, _PACE_MAX)))
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


def _ask(addresses: Addresses, ask: Callable[[socket.socket], Answer]) -> list[Answer]:
    """Return the answers of all connections that lead to one of `addresses`.

    Connections that end meanwhile, or may not be asked, are left out.
    """
    answers = []
    for duplicate in _sockets():
        with contextlib.suppress(OSError), duplicate:  # not connected, or no longer
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                continue  # a rank's, or one of netlink that the resolver has open for a moment
            remote = duplicate.getpeername()
            if (_plain(remote[0]), remote[1]) in addresses:
                answers.append(ask(duplicate))
    return answers


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each of this process's sockets, which the caller closes.

    Threads that follow other links have duplicates open, too. Each socket is taken once.
    """
    taken = set()
    with contextlib.suppress(OSError):  # no such file system here
        for file in os.listdir(_OPEN_FILES):  # noqa: PTH208 - ten times a second for each peer
            with contextlib.suppress(OSError):  # closed meanwhile
                if not stat.S_ISSOCK(os.fstat(int(file)).st_mode):
                    continue
                duplicate = os.dup(int(file))
                try:
                    found = socket.socket(fileno=duplicate)
                except OSError:
                    os.close(duplicate)
                    continue
                # Not of the file: meanwhile another thread may have another one under its number.
                number = os.fstat(duplicate).st_ino
                if number in taken:
                    found.close()
                    continue
                taken.add(number)
                yield found


@functools.lru_cache(maxsize=1024)
def _plain(host: str) -> str:
    """Return an address; IPv4 that is wrapped in IPv6 is unwrapped."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.split("%", 1)[0])
        return str(getattr(address, "ipv4_mapped", None) or address)
    return host
