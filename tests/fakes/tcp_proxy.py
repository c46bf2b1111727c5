"""A TCP proxy on loopback that misbehaves: cuts, swallows, damages or adds to what passes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from typing import Self

_READ_BYTES = 1 << 16
_JOIN_S = 10.0
_FIRST_BYTES = 1 << 10
_NO_LINGER = struct.pack("ii", 1, 0)
"""Closing such a socket sends a reset."""


class TcpProxy:
    """Forwards connections to a local port, one thread for all."""

    def __init__(
        self,
        target_port: int,
        *,
        cut_after_bytes: int | None = None,
        damage: bytes | None = None,
        accept_after_s: float = 0.0,
    ) -> None:
        """Start nothing.

        Args:
            target_port: on 127.0.0.1.
            cut_after_bytes: each connection is reset after so many bytes to the target.
            damage: wherever these bytes pass to the target, the first bit of them is flipped.
            accept_after_s: what has come of a connection is passed on so late, as if the target
                were far away.
        """
        self.num_accepted = 0
        self._accept_after_s = accept_after_s
        self.num_cuts = 0
        self._cut_after_bytes = cut_after_bytes
        self._damage = damage
        self._swallowing = False
        self._said: dict[socket.socket, bytes] = {}
        """What each client has said first."""
        self._half_open: tuple[bytes, bool] | None = None
        """What clients say whose connections are to be half open, and whether later ones are."""
        self._dead: set[socket.socket] = set()
        self._injected = b""
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._partner: dict[socket.socket, socket.socket] = {}
        self._is_client: dict[socket.socket, bool] = {}
        self._passed_bytes: dict[socket.socket, int] = {}
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waker.close()
        self._thread.join(_JOIN_S)
        assert not self._thread.is_alive()

    def swallow(self) -> None:
        """From now on everything is read and nothing passed on: silence without an error."""
        self._swallowing = True

    def half_open(self, saying: bytes = b"", *, later_ones: bool = False) -> None:
        """Swallow what comes from clients that have said this first, on connections that there are.

        With `later_ones` on all others, too, that come.
        """
        self._half_open = saying, later_ones
        self._waker.send(b"h")

    def reset(self) -> None:
        """Reset all connections; new ones are passed on, and nothing is swallowed any more."""
        self._swallowing = False
        self._waker.send(b"r")

    def inject(self, data: bytes) -> None:
        """Send bytes to the target on every connection, between what others have sent."""
        self._injected = data
        self._waker.send(b"i")

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._wake:
                    match self._wake.recv(1):
                        case b"":
                            self._end()
                            return
                        case b"i":
                            self._inject()
                        case b"h":
                            self._dead |= {each for each in self._partner if self._is_meant(each)}
                        case _:
                            self._drop_all()
                elif source is self._listener:
                    self._accept()
                elif source in self._partner:
                    self._forward(source)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self.num_accepted += 1
        time.sleep(self._accept_after_s)
        try:
            target = socket.create_connection(("127.0.0.1", self._target_port), timeout=_JOIN_S)
        except OSError:
            client.close()
            return
        for one, other in ((client, target), (target, client)):
            self._partner[one] = other
            self._is_client[one] = one is client
            self._passed_bytes[one] = 0
            one.settimeout(_JOIN_S)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._selector.register(one, selectors.EVENT_READ)
        self._said[client] = b""

    def _is_meant(self, end: socket.socket) -> bool:
        """Whether an end's connection is one that is to be half open."""
        client = end if self._is_client[end] else self._partner[end]
        return self._half_open is not None and self._half_open[0] in self._said[client]

    def _forward(self, source: socket.socket) -> None:
        target = self._partner[source]
        try:
            data = source.recv(_READ_BYTES)
            if not data:
                self._drop(source)
                return
            if self._is_client[source] and len(self._said[source]) < _FIRST_BYTES:
                self._said[source] += data
                if self._half_open is not None and self._half_open[1] and self._is_meant(source):
                    self._dead |= {source, target}
            if self._swallowing or source in self._dead:
                return
            if self._is_client[source] and self._damage is not None:
                data = data.replace(self._damage, bytes([self._damage[0] ^ 1]) + self._damage[1:])
            target.sendall(data)
        except OSError:
            self._drop(source)
            return
        self._passed_bytes[source] += len(data)
        limit = self._cut_after_bytes
        if limit is not None and self._is_client[source] and self._passed_bytes[source] > limit:
            self.num_cuts += 1
            self._drop(source)

    def _inject(self) -> None:
        targets = [self._partner[end] for end, is_client in self._is_client.items() if is_client]
        for target in targets:
            with contextlib.suppress(OSError):
                target.sendall(self._injected)

    def _drop(self, source: socket.socket) -> None:
        """Close both ends at once, with whatever is in their buffers."""
        for end in (source, self._partner[source]):
            self._selector.unregister(end)
            del self._partner[end], self._is_client[end], self._passed_bytes[end]
            self._dead.discard(end)
            self._said.pop(end, None)
            end.close()

    def _drop_all(self) -> None:
        for source in list(self._partner):
            with contextlib.suppress(KeyError):
                self._drop(source)

    def _end(self) -> None:
        self._drop_all()
        self._selector.close()
        self._listener.close()
        self._wake.close()
