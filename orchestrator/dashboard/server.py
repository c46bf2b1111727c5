"""The dashboard's server: from an address to the end of its process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from isthmus.orchestrator.dashboard.access import Access, Guard
from isthmus.orchestrator.dashboard.application import make_application
from isthmus.orchestrator.dashboard.run_library import RunLibrary

END_S = 2.0
"""Time for answers that are on their way when the server ends."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 lets the system choose.

    Raises:
        OSError: the address is not this machine's, or its port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


async def serve(listener: socket.socket, access: Access, home: Path, state: Path | None) -> None:
    """Answer until this is cancelled. The socket is closed with it."""
    with RunLibrary(home, state) as library:
        config = uvicorn.Config(
            Guard(make_application(library), access),
            access_log=False,  # it would have the token
            log_level="warning",
            server_header=False,
            date_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=int(END_S),
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listener]), name="server")
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            server.should_exit = True
            await serving
            raise


class _Server(uvicorn.Server):
    """A server that leaves signals to the command."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers as they are."""
        yield
