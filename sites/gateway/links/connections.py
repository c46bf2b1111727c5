"""What the kernel knows of this process's TCP connections to a peer: gRPC does not tell.

Their sockets are found among the process's open files, by where they lead, and asked; BBR's are
told two things that it cannot know, and all how fast packets may leave. Each is asked through a
duplicate that lives for one call, so that gRPC's own is neither closed nor kept.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

_TOTAL_RETRANS_AT: Final = 100  # linux/tcp.h, struct tcp_info
_MIN_RTT_US_AT: Final = 148
_DATA_SEGS_OUT_AT: Final = 156
_INFO_BYTES: Final = 160
_NAME_BYTES: Final = 16
_SO_MAX_PACING_RATE: Final = 47  # asm-generic/socket.h; Python has no name for it
_UNPACED: Final = 2**64 - 1
_EVERYWHERE: Final = b"reno"
"""Every Linux has it, and lets everybody use it."""
_OPEN_FILES = Path("/proc/self/fd")
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_SEND_BUFFER_MAX = Path("/proc/sys/net/ipv4/tcp_wmem")
_SLOW_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_PAYLOAD_SHARE: Final = 0.75
"""Of a send buffer's limit; the rest is the kernel's bookkeeping. Measured: 0.6 to 0.85."""
_LONGER: Final = 2.0
"""BBR keeps twice a round trip on the way: where that has become longer than this, it has to
know."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Segments:
    """Counted over all connections to a peer that are open."""

    sent: int = 0
    """Segments with data, those that were sent again included."""
    sent_again: int = 0
    congestion_control: str = ""
    """Of the connections; empty where there is none."""


def addresses_of(host: str, port: int) -> frozenset[tuple[str, int]]:
    """Return where connections to a host lead, as `segments_to` compares it.

    Raises:
        OSError: the name is not known.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset((_plain(str(address[0])), port) for *_, address in found)


def segments_to(addresses: frozenset[tuple[str, int]]) -> Segments:
    """Count the segments of all connections that lead to one of `addresses`."""
    found = _ask(addresses, _segments)
    return Segments(
        sum(each.sent for each in found),
        sum(each.sent_again for each in found),
        found[-1].congestion_control if found else "",
    )


def free_local(addresses: frozenset[tuple[str, int]]) -> bool:
    """Take BBR from connections to `addresses` that stay on this host; return whether some do.

    BBR spreads what is sent over time, by a timer. Between two processes of a host no queue is
    spared by that, and a transfer takes up to twice as long.
    """
    return any(_ask(addresses, _free))


def begin_bbr_anew(addresses: frozenset[tuple[str, int]], rtt_s: float) -> int:
    """Have BBR begin anew where nothing is on the way to `addresses`; return on how many.

    On those connections it takes the shortest round trip that the kernel has seen for just
    measured, and keeps its window. Where the path has become more than twice as long, BBR is left
    to find that out.

    Args:
        addresses: as of `addresses_of`.
        rtt_s: the idle link's round trip of late.
    """
    return sum(_ask(addresses, partial(_begin_bbr_anew, rtt_s=rtt_s, allowed=_allowed())))


def pace(addresses: frozenset[tuple[str, int]], bytes_per_s: float | None) -> int:
    """Have packets leave no faster, connection by connection; return on how many.

    Connections that stay on this host are left alone: no queue is spared there.

    Args:
        addresses: as of `addresses_of`.
        bytes_per_s: of payload; None: as fast as TCP itself would have it.
    """
    rate = _UNPACED if bytes_per_s is None else int(bytes_per_s)
    return sum(_ask(addresses, partial(_pace, rate=rate)))


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
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return Segments()
    return Segments(
        struct.unpack_from("=I", info, _DATA_SEGS_OUT_AT)[0],
        struct.unpack_from("=I", info, _TOTAL_RETRANS_AT)[0],
        _congestion_control(connection),
    )


def _free(connection: socket.socket) -> bool:
    """Take BBR from a connection if it stays on this host; return whether it does."""
    if not _is_local(connection):
        return False
    if _congestion_control(connection).startswith("bbr"):
        _choose(connection, _EVERYWHERE)
    return True


def _pace(connection: socket.socket, rate: int) -> bool:
    if _is_local(connection):
        return False
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))
    return True


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


def _ask(
    addresses: frozenset[tuple[str, int]], ask: Callable[[socket.socket], Answer]
) -> list[Answer]:
    """Return the answers of all connections to one of `addresses`.

    But of those that end meanwhile or may not be asked.
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
    """Yield a duplicate of each of this process's sockets; the caller's to close."""
    with contextlib.suppress(OSError):  # no such file system here
        for file in _OPEN_FILES.iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if not str(file.readlink()).startswith("socket:"):
                    continue
                duplicate = os.dup(int(file.name))
                try:
                    found = socket.socket(fileno=duplicate)
                except OSError:
                    os.close(duplicate)
                    continue
                yield found


def _plain(host: str) -> str:
    """Return an address without the wrapping of IPv4 in IPv6."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.split("%", 1)[0])
        return str(getattr(address, "ipv4_mapped", None) or address)
    return host
