"""A peer of `frame_calls.py` by hand: it says what it likes, and reads when it likes.

Its sockets do not block, and belong to the running event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import hpack

from isthmus.sites.gateway.links.http2 import Kind
from tests.fakes.http2_frames import ANSWER, CALL, PREFACE, header, settings

_HEAD_BYTES = 9
_SMALL_BYTES = 4096
_PIECE_BYTES = 64 << 10


class RawPeer:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._loop = asyncio.get_running_loop()
        self._read = b""
        self._decoder = hpack.Decoder()

    async def send(self, *sent: bytes) -> None:
        await self._loop.sock_sendall(self.socket, b"".join(sent))

    async def receive(self, num_bytes: int) -> bytes:
        """Return exactly so many bytes, or fewer at the end of the connection."""
        while len(self._read) < num_bytes:
            piece = await self._loop.sock_recv(self.socket, _PIECE_BYTES)
            if not piece:
                break
            self._read += piece
        taken, self._read = self._read[:num_bytes], self._read[num_bytes:]
        return taken

    async def frame(self) -> tuple[int, int, int, bytes] | None:
        """Return kind, flags, stream and payload of the next frame; None at the end."""
        head = await self.receive(_HEAD_BYTES)
        if not head:
            return None
        high, low, kind, flags, stream = struct.unpack(">BHBBI", head)
        return kind, flags, stream, await self.receive(high << 16 | low)

    async def fields(self) -> dict[str, str]:
        """Return the next header, and skip what is before it."""
        while (found := await self.frame()) is not None:
            if found[0] == Kind.HEADERS:
                return {str(key): str(value) for key, value in self._decoder.decode(found[3])}
        raise AssertionError("the connection ended without a header")

    async def end(self) -> bytes:
        """Return what comes until the connection ends, or is reset."""
        found, self._read = self._read, b""
        with contextlib.suppress(ConnectionError):
            while piece := await self._loop.sock_recv(self.socket, _PIECE_BYTES):
                found += piece
        return found


@asynccontextmanager
async def raw_client(
    address: tuple[str, int],
    path: str = "",
    shown: Iterable[tuple[str, str]] = (),
    *,
    given: tuple[tuple[int, int], ...] = (),
    receive_bytes: int | None = None,
) -> AsyncIterator[RawPeer]:
    """Connect; with a path, also make a call, with `given` for settings.

    With `receive_bytes` the kernel keeps no more than about that of what nobody reads.
    """
    with socket.socket() as connection:
        connection.setblocking(False)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(connection, address)
        peer = RawPeer(connection)
        if path:
            fields = [each for each in CALL if each[0] != ":path"]
            await peer.send(PREFACE, settings(*given), header([*fields, (":path", path), *shown]))
        yield peer


@asynccontextmanager
async def raw_server() -> AsyncIterator[tuple[tuple[str, int], asyncio.Task[RawPeer]]]:
    """Listen; give the address, and who will have connected once it has."""
    loop = asyncio.get_running_loop()

    async def accepted() -> RawPeer:
        connection, _ = await loop.sock_accept(listening)
        connection.setblocking(False)
        return RawPeer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        accepting = loop.create_task(accepted())
        try:
            yield listening.getsockname(), accepting
        finally:
            accepting.cancel()
            await asyncio.wait([accepting])
            if not accepting.cancelled():
                accepting.result().socket.close()


async def answer_raw(peer: RawPeer) -> None:
    """Accept the call that a client makes."""
    assert await peer.receive(len(PREFACE)) == PREFACE
    await peer.fields()
    await peer.send(settings(), header(ANSWER))


def keep_little(connection: socket.socket, option: int) -> None:
    """Have the kernel keep as little as it can of one direction."""
    connection.setsockopt(socket.SOL_SOCKET, option, _SMALL_BYTES)


def accept_any() -> ssl.SSLContext:
    """Return TLS that believes everybody, and shows nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
