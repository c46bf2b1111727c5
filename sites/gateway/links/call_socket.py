"""The socket of a call: bytes of its frames, in both directions.

The event loop's engine (`wire/connection.py`) reads and writes. Where it cannot reach the TLS
session of Python's `ssl`, that does so here.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Collection, Mapping
from typing import Final

from isthmus.protos.failure import text_of
from isthmus.sites.gateway.links.congestion.kernel import traffic_of
from isthmus.sites.gateway.links.http2 import Begun, Event, Http2
from isthmus.sites.gateway.links.progress import Traffic
from isthmus.sites.gateway.wire import tls
from isthmus.sites.gateway.wire.connection import Line

_READS_MAX: Final = 4
"""Reads of one connection before others have their turn."""
_TLS_READS_MAX: Final = 16
"""The same with TLS, which gives one record at a time."""
_DROPPED_BYTES: Final = 64 << 10
_NOT_NOW: Final = (
    BlockingIOError,
    InterruptedError,
    ssl.SSLWantReadError,
    ssl.SSLWantWriteError,
)


class CallSocket:
    """A connected, non-blocking socket with the HTTP/2 state of its call."""

    def __init__(self, connection: socket.socket, http2: Http2) -> None:
        """Take ownership of the connection, whose TLS handshake is done."""
        self.socket = connection
        self._http2 = http2
        self._session = tls.session_of(connection) if isinstance(connection, ssl.SSLSocket) else 0
        """The TLS session, if there is one whose address is known."""
        http2.reader.session = http2.writer.session = self._session
        is_tls = isinstance(connection, ssl.SSLSocket)
        self._is_by_hand = is_tls and not self._session
        self.line = Line(connection.fileno(), http2.reader, http2.writer)
        self.line.is_by_hand = self._is_by_hand
        self.line.reads_max = _TLS_READS_MAX if is_tls else _READS_MAX
        self.is_closed = False
        self.address, self._certificate = _name_of(connection), b""
        self._uris: list[bytes] = []
        if isinstance(connection, ssl.SSLSocket):
            self._certificate = connection.getpeercert(binary_form=True) or b""
            names = (connection.getpeercert() or {}).get("subjectAltName", ())
            self._uris = [str(name[1]).encode() for name in names if name[0] == "URI"]

    def auth_context(self) -> Mapping[str, Collection[bytes]]:
        """Return the other end's certificate, and the identities in it; nothing without TLS."""
        if not self._certificate:
            return {}
        shown = ssl.DER_cert_to_PEM_cert(self._certificate).encode()
        return {"peer_uri": self._uris, "x509_pem_cert": (shown,)}

    def traffic(self) -> Traffic:
        """Return the bytes acknowledged and left on the connection.

        Raises:
            OSError: the connection has ended.
        """
        return traffic_of(self.socket, self._http2.writer.left_bytes)

    def limit(self, window_bytes: int, look_s: float) -> None:
        """Limit the bytes that TCP has not acknowledged to `window_bytes`.

        The kernel wakes nobody when bytes are acknowledged. So while the window is full, it is
        looked at every `look_s`. May be called from any thread.
        """
        self.line.look_s = look_s
        self.line.window_bytes = window_bytes

    def read(self, act: Callable[[Event | Begun], bool]) -> None:
        """Read what has come, for as long as `act`, which gets each event, returns True.

        Raises:
            OSError: the connection has ended.
            RemoteProtocolError: the bytes are not HTTP/2 or gRPC, or exceed a limit.
        """
        try:
            if self._is_by_hand:
                self._read_by_hand(act)
                return
            http2, descriptor = self._http2, self.line.descriptor
            http2.begin_turn(self.line.reads_max)
            while (event := http2.read(descriptor)) is not None:
                goes_on = act(event)
                if self.is_closed:
                    return
                if not goes_on:
                    http2.begin_turn(0)  # what was read with these is parsed, too
        except _NOT_NOW:
            self._http2.reader.is_dry = True

    def _read_by_hand(self, act: Callable[[Event | Begun], bool]) -> None:
        http2 = self._http2
        for _ in range(self.line.reads_max):
            count = self.socket.recv_into(http2.room())
            if not count:
                raise ConnectionAbortedError("it was closed")
            num_events, goes_on = 0, True
            for event in http2.filled(count):
                num_events += 1
                goes_on = act(event)
                if self.is_closed:
                    return
            if http2.under_way_bytes:
                goes_on = act(Begun())
            elif not num_events:
                return  # maybe thousands of tiny frames: others have their turn
            if self.is_closed or not goes_on:
                return

    def drop(self) -> bool:
        """Read and drop what has come; return whether the peer has closed the connection."""
        try:
            for _ in range(self.line.reads_max):
                if not self.socket.recv(_DROPPED_BYTES):
                    return True
        except _NOT_NOW:
            self._http2.reader.is_dry = True
        except OSError:
            return True
        return False

    def drop_from_now(self) -> None:
        """Drop everything that arrives from now on: `drop` when the socket is readable."""
        self.line.is_by_hand = True
        self.line.unmark()

    def send(self) -> None:
        """Write as much as TCP and the window take now.

        Raises:
            OSError: the connection has ended.
        """
        if not self._is_by_hand:
            self.line.flush()
            return
        room, writer = self.line.room(), self._http2.writer
        try:
            while room > 0 and writer.load():
                num_bytes = self.socket.send(writer.first(room))
                writer.skip(num_bytes)
                room -= num_bytes
        except _NOT_NOW:
            self.line.is_stuck = True
        else:
            self.line.is_full = bool(writer)

    def say_end(self) -> None:
        """Shut down the writing half of the connection."""
        with contextlib.suppress(OSError):
            # TLS's own shutdown would also end reading.
            socket.socket.shutdown(self.socket, socket.SHUT_WR)

    def why(self, error: OSError) -> str:
        """Return what an error of `read` or `send` says."""
        if self._session and error.errno == errno.EPROTO:
            return tls.reason()
        return error.strerror or text_of(error)

    def close(self) -> None:
        """Close the connection, with all that was not sent."""
        self.line.detach()
        self.line.wants_read = False
        self.is_closed = True
        self._http2.writer.clear()
        self._http2.forget()
        self.socket.close()


def _name_of(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        host, port = connection.getpeername()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "nobody"
