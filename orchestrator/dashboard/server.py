"""The dashboard's server: from an address to the end of its process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.orchestrator.dashboard.access import Access, Guard
from isthmus.orchestrator.dashboard.actions import RunActions
from isthmus.orchestrator.dashboard.application import make_application
from isthmus.orchestrator.dashboard.prepared import PreparedAnswers
from isthmus.orchestrator.dashboard.run_library import RunLibrary

END_S = 2.0
"""Time for answers that are on their way when the server ends."""
IDLE_S = 300.0
"""The dashboard of one run stays so long after its end for somebody who comes back to the page."""
SWITCH_S = 0.0005
"""An answer waits at most so long, each time, for the thread that reads a history."""
LOOK_S = 1.0
"""Between two looks whether the run is over."""


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


async def serve(
    listener: socket.socket,
    access: Access,
    home: Path,
    state: Path | None,
    run_id: str = "",
    idle_s: float = IDLE_S,
) -> None:
    """Answer until this is cancelled. The socket is closed with it.

    With a `run_id`, return once that run is over and nobody has asked for `idle_s`.
    """
    sys.setswitchinterval(SWITCH_S)
    with contextlib.ExitStack() as held:
        library = held.enter_context(RunLibrary(home, state))
        prepared = held.enter_context(contextlib.closing(PreparedAnswers()))
        actions = None
        if access.allows_actions:
            actions = held.enter_context(contextlib.closing(RunActions(home, state)))
        application = make_application(library, prepared, actions, access)
        visits = _Visits(Guard(application, access))
        config = uvicorn.Config(
            visits,
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
            if run_id:
                await _until_over(serving, library, run_id, visits, idle_s)
            else:
                await asyncio.shield(serving)
        finally:
            server.should_exit = True
            await serving


async def _until_over(
    serving: asyncio.Task[None], library: RunLibrary, run_id: str, visits: _Visits, idle_s: float
) -> None:
    """Return once a run is over, and nobody has looked for a while; or if the server has ended."""
    while not (await asyncio.to_thread(library.is_over, run_id) and visits.idle_s() >= idle_s):
        await asyncio.wait([serving], timeout=LOOK_S)
        if serving.done():
            return


class _Visits:
    """The application that notes when somebody has asked for something."""

    def __init__(self, application: ASGIApp) -> None:
        self._application, self._last_s = application, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request."""
        self._last_s = time.monotonic()
        await self._application(scope, receive, send)

    def idle_s(self) -> float:
        """How long nobody has asked for anything."""
        return time.monotonic() - self._last_s


class _Server(uvicorn.Server):
    """A server that leaves signals to the command."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers as they are."""
        yield
