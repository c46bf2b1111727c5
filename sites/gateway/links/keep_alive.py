"""Breaks off calls whose peer is silent, or shows a certificate that is revoked.

The kernel's keepalive is not enough: a proxy may answer it.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Final, Protocol

from isthmus.protos.mutual_tls import Caller
from isthmus.protos.security import Security
from isthmus.sites.gateway.links.progress import Progress, Traffic

_LOOKS: Final = 4
"""Checks for a silent peer in each `Patience.idle_s`."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a connection waits for a silent peer."""

    connect_s: float
    """Time to connect, TLS included."""
    idle_s: float
    """Silence after which the peer is pinged."""
    lost_s: float
    """Silence after which the connection is broken."""

    def set_up(self, connection: socket.socket) -> None:
        """Have the kernel break a connection whose peer is gone."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle_s = max(1, round(self.idle_s))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, idle_s)
        lost_ms = max(1, int(1000 * self.lost_s))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_ms)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Pinged(Caller, Protocol):
    """A call, which can be pinged and broken off."""

    @property
    def is_read(self) -> bool:
        """Whether answers would be read now."""

    def traffic(self) -> Traffic:
        """Return the bytes acknowledged and left on the connection.

        Raises:
            OSError: the connection has ended.
        """

    def ping(self) -> None:
        """Send what the other end has to answer."""

    def break_off(self, why: str) -> None:
        """End the connection at once."""


class KeepAlive:
    """Pings the peer of a call when it is silent, and breaks off if it does not answer."""

    def __init__(
        self,
        call: Pinged,
        loop: asyncio.AbstractEventLoop,
        patience: Patience,
        security: Security,
    ) -> None:
        self._call = call
        self._loop = loop
        self._patience = patience
        self._security = security
        self._progress = Progress(loop.time(), patience.lost_s)
        self._is_asked = False
        """The peer was pinged, and nothing has come since."""
        self._timer = loop.call_later(patience.idle_s / _LOOKS, self._look)

    def end(self) -> None:
        """Watch the peer no more."""
        self._timer.cancel()

    def _look(self) -> None:
        patience, interval_s = self._patience, self._patience.idle_s / _LOOKS
        self._timer = self._loop.call_later(interval_s, self._look)
        if why := self._security.why_revoked(self._call):
            self._call.break_off(why)
            return
        now_s = self._loop.time()
        try:
            traffic = self._call.traffic()
        except OSError:
            return  # the reader or writer gets the error
        silent_s = self._progress.look(now_s, interval_s, traffic, traffic.received_bytes)
        if not self._call.is_read:
            self._progress.begin_anew(now_s)
        elif silent_s >= patience.lost_s and self._is_asked:
            self._call.break_off(f"the other end has been silent for {silent_s:.1f} s")
        elif silent_s < patience.idle_s:
            self._is_asked = False
        elif not self._is_asked:
            self._is_asked = True
            self._call.ping()
