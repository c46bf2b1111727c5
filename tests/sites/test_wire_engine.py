"""The engine that reads and writes on the connections of an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Final

import pytest

from isthmus.sites.gateway.wire import connection
from tests.fakes.compiled_modules import WAYS, load

DEADLINE_S: Final = 10.0
MESSAGE_BYTES: Final = 4 << 20
WINDOW_BYTES: Final = 32 << 10


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over loopback, whose buffers hold far less than a message."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        sender = stack.enter_context(socket.create_connection(listener.getsockname(), DEADLINE_S))
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
        sender.setblocking(False)
        receiver = stack.enter_context(listener.accept()[0])
        receiver.settimeout(DEADLINE_S)
        yield sender, receiver


@pytest.mark.parametrize("way", WAYS)
def test_a_window_that_is_full_when_the_socket_has_room_is_looked_at(
    way: str, ends: tuple[socket.socket, socket.socket]
) -> None:
    """The socket tells nothing more then: no write has failed since it told of room."""
    wire: ModuleType = load(connection, way)
    sender, receiver = ends

    async def story() -> int:
        writer = wire.Writer()
        line = wire.Line(sender.fileno(), wire.Reader(1 << 16, 1 << 30), writer)
        line.attach(asyncio.get_running_loop(), line.flush)
        try:
            writer.push(bytes(MESSAGE_BYTES))
            line.flush()
            assert line.is_stuck
            line.window_bytes, line.look_s = WINDOW_BYTES, 0.001
            num_read = 0
            while not line.is_full:
                num_read += len(receiver.recv(16 << 10))
                await asyncio.sleep(0)
            return num_read + await asyncio.to_thread(received, MESSAGE_BYTES - num_read)
        finally:
            line.detach()

    def received(num_bytes: int) -> int:
        """Return how many of so many bytes come."""
        num_read = 0
        while num_read < num_bytes:
            num_read += len(receiver.recv(num_bytes - num_read))
        return num_read

    assert asyncio.run(story()) == MESSAGE_BYTES
