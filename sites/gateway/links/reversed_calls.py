"""Calls to a gateway that accepts no connections, over those that it has dialled itself.

It keeps some calls of Reverse open at each peer. A peer that wants to make a call takes one of them
and names the method. From then on messages travel as in a call the other way round. The side that
dialled cannot end a gRPC call with a status, so each of its messages begins with a byte: a message,
or the end with its status. As one Reverse is taken, another one is opened.

To a link, an `InboundProxy` looks like a `Peer`. `Offers` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from isthmus.protos.exchange.v1.exchange_pb2 import End
from isthmus.protos.identities import GATEWAY, Identity
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.links.calls import Serve, serve_call
from isthmus.sites.gateway.links.congestion.connections import CHANNELS_MAX
from isthmus.sites.gateway.links.frame_calls import FrameCall
from isthmus.sites.gateway.links.inbox import Taker
from isthmus.sites.gateway.links.status import CallError, Status
from isthmus.sites.gateway.links.transport import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    REVERSE_METHOD,
    SESSION_KEY,
    Peer,
    details,
    patience,
)

_log = logging.getLogger(__name__)

OFFERED: Final = 4
"""Calls of Reverse that wait at each peer. More are opened as fast as these are taken."""
_SERVED_MAX: Final = CHANNELS_MAX + 32
"""Calls of a peer served at a time: those with frames, and some others."""
_MESSAGE: Final = b"\0"
_END: Final = b"\1"
_METHOD_BYTES_MAX: Final = 200
_LINGER_S: Final = 2.0
"""Time for the peer to read the end of a call before its connection is closed."""


# -------------------------------------------------------------------- the side that was dialled


class InboundProxy:
    """Stands for a gateway that only dials out; its connections may come and go."""

    def __init__(self, site: str, gateway: int) -> None:
        self.site = site
        self.gateway = gateway
        self._waiting: asyncio.Queue[_Offered] = asyncio.Queue()

    def __str__(self) -> str:
        return f"site {self.site} (gateway {self.gateway}, which dials in)"

    @asynccontextmanager
    async def dial(
        self, config: GatewayConfig, session: str, method: str
    ) -> AsyncIterator[ReversedCall]:
        """Make a call over a connection that the other side has opened, and may open soon.

        It knows this side's session.

        Raises:
            CallError: it has opened none.
        """
        wait_s = patience(config).connect_s
        try:
            async with asyncio.timeout(wait_s):
                offered = await self._next()
        except TimeoutError:
            why = f"it has opened no connection for calls to it within {wait_s:.1f} s"
            raise CallError(Status.UNAVAILABLE, why) from None
        try:
            await offered.call.write(method.encode())
            yield ReversedCall(offered.call)
        finally:
            offered.is_done.set()

    async def refuses_connections(self) -> bool:
        """Return False: unknown, because the gateway is not dialled."""
        return False

    async def serve(self, call: FrameCall) -> None:
        """Serve a call of Reverse until it breaks, or the call that uses it is over."""
        offered = _Offered(call, asyncio.Event())
        self._waiting.put_nowait(offered)
        ends = [asyncio.create_task(each.wait()) for each in (offered.is_done, call.over)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ends:
                each.cancel()

    async def _next(self) -> _Offered:
        """Return an intact call of Reverse that waits."""
        while (offered := await self._waiting.get()).call.over.is_set():
            pass
        return offered


@dataclass(frozen=True, slots=True)
class _Offered:
    """A call of Reverse that waits to be used."""

    call: FrameCall
    is_done: asyncio.Event
    """Set once the call that uses it is over."""


class _EndedError(Exception):
    """A reversed call has ended well."""


class ReversedCall:
    """A call to the side that dialled, as its client has it (`calls.Call`)."""

    def __init__(self, call: FrameCall) -> None:
        self._call = call
        self.socket = call.socket
        self.write = call.write
        self.post = call.post
        self.break_off = call.break_off
        self.limit = call.limit
        self.traffic = call.traffic

    async def read(self) -> memoryview | None:
        """Return the next message; None at the end.

        Raises:
            CallError: the call was refused, or broke.
        """
        message = await self._call.read()
        if message is None:
            raise CallError(Status.UNAVAILABLE, "it ended without a status")
        return unwrapped(message)

    async def take_each(self, take: Taker) -> None:
        """Have `take` called with each message, as `Call.take_each`."""

        def unwrap(message: memoryview) -> bytes | None:
            carried = unwrapped(message)
            if carried is None:
                raise _EndedError
            return take(carried)

        with contextlib.suppress(_EndedError):
            await self._call.take_each(unwrap)
            raise CallError(Status.UNAVAILABLE, "it ended without a status")

    def finish(self) -> None:
        """Do nothing: the other side answers what has come."""


def unwrapped(message: memoryview) -> memoryview | None:
    """Return what a message of a reversed call carries; None: the call has ended.

    Raises:
        CallError: the call has ended with an error, or the message cannot be read.
    """
    kind, carried = bytes(message[:1]), message[1:]
    if kind == _MESSAGE:
        return carried
    if kind != _END:
        raise CallError(Status.INTERNAL, f"an answer begins with {kind!r}")
    try:
        end = End.FromString(bytes(carried))
    except DecodeError as error:
        why = f"the end of a call cannot be read: {error}"
        raise CallError(Status.INTERNAL, why) from error
    if end.status:
        is_known = end.status in Status.__members__.values()
        raise CallError(Status(end.status) if is_known else Status.UNKNOWN, end.details)
    return None


# ---------------------------------------------------------------------- the side that dials


class Servant(Protocol):
    """Serves the calls of a peer that this side has dialled."""

    @property
    def methods(self) -> Mapping[str, Serve]:
        """Handlers by path."""

    def session_of(self, sender: GatewayId) -> str:
        """Return a gateway's session here."""


class Offers:
    """Keeps calls of Reverse open at one peer. `keep` once it has answered Hello."""

    def __init__(
        self, config: GatewayConfig, peer: Peer, servant: Servant, session: Callable[[], str]
    ) -> None:
        """`session` returns this side's session at the peer."""
        self._config = config
        self._peer = peer
        self._servant = servant
        self._session = session
        self._room = asyncio.Semaphore(_SERVED_MAX)
        self._said: set[str] = set()

    async def keep(self) -> None:
        """Offer and serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(OFFERED):
                tasks.create_task(self._offer(tasks))

    async def _offer(self, tasks: asyncio.TaskGroup) -> None:
        """Keep one call of Reverse open, and a task for each that the peer has taken."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            await self._room.acquire()
            async with AsyncExitStack() as stack:
                stack.callback(self._room.release)
                try:
                    call = await stack.enter_async_context(
                        self._peer.dial(self._config, self._session(), REVERSE_METHOD)
                    )
                    method = await call.read()
                    if method is not None:
                        backoff_s = BACKOFF_FIRST_S
                        name = bytes(method[:_METHOD_BYTES_MAX]).decode(errors="replace")
                        self._said.clear()
                        serving = tasks.create_task(self._serve(call, name, stack.pop_all()))
                        # If it is cancelled before its first step, it ends nothing.
                        serving.add_done_callback(functools.partial(_cancel, call))
                        continue
                except CallError as error:
                    self._broke(details(error))
            # Full jitter, so that streams which broke together do not reconnect together.
            await asyncio.sleep(random.uniform(0, backoff_s))  # noqa: S311 - not a secret
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _broke(self, why: str) -> None:
        """Log a broken connection: a cause once, until the peer makes a call again."""
        level = logging.DEBUG if why in self._said else logging.WARNING
        _log.log(level, "a connection for calls from %s broke: %s", self._peer, why)
        self._said.add(why)

    async def _serve(self, call: FrameCall, method: str, stack: AsyncExitStack) -> None:
        """Serve a call of the peer; `stack` ends its connection."""
        async with stack:
            sender = self._config.index_of(self._peer.site), self._peer.gateway
            served = _Served(call, self._peer, self._servant.session_of(sender))
            serve = self._servant.methods.get(method)
            if serve is None:
                why = f"no such method here: {method[:80]!r}"
                await served.end(Status.UNIMPLEMENTED, why)
            else:
                await serve_call(served, method, serve)


def _cancel(call: FrameCall, _: object) -> None:
    call.cancel()


class _Served:
    """A call of the side that was dialled, as its server has it (`calls.ServedCall`).

    The caller is the gateway that was dialled: TLS has verified that.
    """

    def __init__(self, call: FrameCall, peer: Peer, session: str) -> None:
        self._call, self._peer, self._session = call, peer, session
        self.over = call.over
        self.read = call.read

    async def take_each(self, take: Taker) -> None:
        """Have `take` called with each message, as `ServedCall.take_each`."""

        def wrap(message: memoryview) -> bytes | None:
            answer = take(message)
            return None if answer is None else _MESSAGE + answer

        await self._call.take_each(wrap)

    async def write(self, message: bytes | memoryview) -> None:
        """Write a message.

        Raises:
            CallError: the call is over.
        """
        await self._call.write(b"".join((_MESSAGE, message)))

    async def end(self, status: Status, why: str) -> None:
        """Send the end of the call, and give the peer time to read it."""
        end = End(status=int(status), details=why)
        with contextlib.suppress(CallError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._call.write(_END + end.SerializeToString())
                while await self._call.read() is not None:
                    pass

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return metadata with the caller's session at this gateway."""
        return ((SESSION_KEY, self._session),)

    def auth_context(self) -> Mapping[str, Collection[bytes]]:
        """Return the caller's identity in the form of a certificate's."""
        return {"peer_uri": [Identity("carried", GATEWAY, self._peer.site).uri.encode()]}

    def peer(self) -> str:
        """Return the address of the other end."""
        return self._call.peer()
