"""What the kernel knows of this process's TCP connections to a peer: gRPC does not tell.

Their sockets are found among the process's open files, by where they lead, and asked; of those that
stay on the host one setting is changed. Each is asked through a duplicate that lives for one call, so that gRPC's own is neither closed nor kept.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TOTAL_RETRANS_AT: Final = 100  # linux/tcp.h, struct tcp_info
_DATA_SEGS_OUT_AT: Final = 156
_INFO_BYTES: Final = 160
_NAME_BYTES: Final = 16
_EVERYWHERE: Final = b"reno"
"""Every Linux has it, and lets everybody use it."""
_OPEN_FILES = Path("/proc/self/fd")
_SEND_BUFFER_MAX = Path("/proc/sys/net/ipv4/tcp_wmem")
_SLOW_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_PAYLOAD_SHARE: Final = 0.75
"""Of a send buffer's limit; the rest is the kernel's bookkeeping. Measured: 0.6 to 0.85."""


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
    sent, sent_again, name = 0, 0, ""
    for duplicate in _sockets():
        with contextlib.suppress(OSError), duplicate:  # not connected, or no longer
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                continue  # a rank's, or one of netlink that the resolver has open for a moment
            remote = duplicate.getpeername()
            if (_plain(remote[0]), remote[1]) not in addresses:
                continue
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            if len(info) == _INFO_BYTES:
                sent += struct.unpack_from("=I", info, _DATA_SEGS_OUT_AT)[0]
                sent_again += struct.unpack_from("=I", info, _TOTAL_RETRANS_AT)[0]
                name = _congestion_control(duplicate)
    return Segments(sent, sent_again, name)


def free_local(addresses: frozenset[tuple[str, int]]) -> bool:
    """Take BBR from connections to `addresses` that stay on this host; return whether there are such.

    BBR spreads what is sent over time, by a timer. Between two processes of a host no queue is spared by
    that, and a transfer takes up to twice as long.
    """
    is_local = False
    for duplicate in _sockets():
        with contextlib.suppress(OSError), duplicate:  # not connected, no longer, or not allowed
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own, remote = duplicate.getsockname(), duplicate.getpeername()
            if (_plain(remote[0]), remote[1]) not in addresses or own[0] != remote[0]:
                continue
            is_local = True
            if _congestion_control(duplicate).startswith("bbr"):
                duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _EVERYWHERE)
    return is_local


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
