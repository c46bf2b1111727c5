"""What the kernel knows of this process's TCP connections to a peer: gRPC does not tell.

Their sockets are found among the process's open files, by where they lead, and asked; BBR's are
told two things that it cannot know, and all how fast packets may leave. Each is asked through a
duplicate that lives for one call, so that gRPC's own is neither closed nor kept.

Has the kernel spread packets over time, on links that hold but a few frames.

A frame is written to its connection at once, and TCP sends as much of it at once as its window
permits: all of it, once the connection is warm. Where a router holds no more than what is on the
way, the queue of a narrow or short link overflows at each frame, and what was lost is waited for.
BBR does no better: it looks for the link's rate for as long as senders have pauses, at nearly three
times the rate that it knows (Linux, tcp_bbr.c: rounds that were limited by the application do not
end BBR_STARTUP), and frames that leave at a link's pace have pauses between them.

Links that hold more gain little by it, and it costs gateways wake-ups: docs/benchmarks.md.

Uses a link's pauses, so that BBR makes none of its own.

Where BBR has seen no shorter round trip for ten seconds, it sends no more than four packets in
each, for a fifth of a second and one round trip more, to let queues of its own run dry and measure
again (Linux, tcp_bbr.c, PROBE_RTT; draft-ietf-ccwg-bbr, section 5.3.4). In the last parts of a
backward pass all sites wait for that. A link that has just had everything acknowledged has no queue
of its own, and steps leave such moments; but Linux takes them for what they are only if the ten
seconds end in one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from sites.gateway.links.send_queue import Outbox
from sites.gateway.links.transport import Peer

_log = logging.getLogger(__name__)

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


_PACING_LOOK_S = 0.05
"""Half of what a search for the link's rate waits for more (`startup.py`): it must not be held
back by what is set here."""
_AGAIN_S = 1.0
"""Connections that broke are new ones."""
_CHANGE = 0.02
_LITTLE_BYTES = 256 << 10


def holds_little(bytes_per_s: float, rtt_s: float) -> bool:
    """Return whether a link is one of those: described with what it carries, and its round trip."""
    return bytes_per_s * rtt_s <= _LITTLE_BYTES


class Pacing:
    """Of one link. `run` on a thread."""

    def __init__(self, peer: Peer, outbox: Outbox) -> None:
        """Do nothing yet.

        Args:
            peer: where the connections lead.
            outbox: tells how fast packets may leave.
        """
        self._peer = peer
        self._outbox = outbox

    def run(self) -> None:
        """Follow what the link carries, until it is over."""
        paced, paced_s = math.nan, -math.inf
        while not self._outbox.closed.wait(_PACING_LOOK_S) and not self._outbox.is_over:
            if self._outbox.is_empty:
                continue
            rate, now_s = self._outbox.paced_bytes_per_s, time.monotonic()
            wanted = math.inf if rate is None else rate
            if now_s < paced_s + _AGAIN_S and math.isclose(wanted, paced, rel_tol=_CHANGE):
                continue
            try:
                pace(addresses_of(self._peer.host, self._peer.port), rate)
            except OSError as error:  # the connections that there are do without the name
                _log.debug("%s: %s", self._peer, error)
                continue
            paced, paced_s = wanted, now_s


_EVERY_S = 2.0
"""Several times in BBR's ten seconds, and in the five of its third version."""
_PAUSE_LOOK_S = 0.1


class Pauses:
    """Of one link. `run` on a thread."""

    def __init__(self, peer: Peer, outbox: Outbox, rtt_s: float) -> None:
        """Do nothing yet.

        Args:
            peer: where the connections lead.
            outbox: tells whether anything is on the way.
            rtt_s: the configured round trip, until one is measured.
        """
        self._peer = peer
        self._outbox = outbox
        self._rtt_s = rtt_s

    def run(self) -> None:
        """Have BBR begin anew in pauses, until the link is over."""
        used_s = time.monotonic()
        while not self._outbox.closed.wait(
            max(_PAUSE_LOOK_S, used_s + _EVERY_S - time.monotonic())
        ):
            if self._outbox.is_over:
                return
            if self._outbox.is_empty:
                used_s = time.monotonic()
                self._use()

    def _use(self) -> None:
        try:
            addresses = addresses_of(self._peer.host, self._peer.port)
        except OSError as error:  # the connections that there are do without the name
            _log.debug("%s: %s", self._peer, error)
            return
        if not self._outbox.is_empty:  # a resolver can take longer than a pause
            return
        begin_bbr_anew(addresses, self._outbox.totals().idle_rtt_s or self._rtt_s)
