"""Calls between gateways, as those who make and serve them use them.

Each call has a connection of its own (`frame_calls.py`), in the one or the other direction
(`reversed_calls.py`). A call carries raw messages, or questions: each is a message of protobuf, and
is answered before the next one. A method that the .proto files describe with one question a call is
served in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from isthmus.protos.errors import IsthmusError, RemoteProtocolError
from isthmus.protos.failure import text_of
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.inbox import Taker
from isthmus.sites.gateway.links.progress import Traffic
from isthmus.sites.gateway.links.status import CallError, Status, status_of

_log = logging.getLogger(__name__)

Asked = TypeVar("Asked", bound=Message)
Served = TypeVar("Served", bound="ServedCall")
Answer = TypeVar("Answer", bound=Message)


class Call(Protocol):
    """A call as its client has it; used on the event loop's thread."""

    socket: socket.socket
    """The call's connection, whose congestion control may be set and read."""

    async def read(self) -> memoryview | None:
        """Return the next message; None at the end.

        Raises:
            CallError: the call was refused, or broke.
        """

    async def take_each(self, take: Taker) -> None:
        """Have `take` called with each message as it comes, until the end; send what it returns.

        Raises:
            CallError: as `read`.
            Exception: whatever `take` raises; nothing more is taken then.
        """

    async def write(self, message: bytes | memoryview) -> None:
        """Write a message; return when TCP has taken all of it.

        Raises:
            CallError: the call is over.
        """

    def post(self, message: bytes | memoryview, on_written: Callable[[], None]) -> None:
        """Begin to write a message; `on_written` is called when TCP has taken it, maybe at once.

        Raises:
            CallError: the call is over.
        """

    def finish(self) -> None:
        """Say that no more messages will come."""

    def break_off(self, why: str) -> None:
        """End the connection at once, because the peer breaks the rules."""

    def limit(self, window_bytes: int, look_s: float) -> None:
        """Have at most `window_bytes` on the way that TCP has not acknowledged."""

    def traffic(self) -> Traffic:
        """Return the bytes acknowledged and left on the connection.

        Raises:
            OSError: the connection has ended.
        """


class Target(Protocol):
    """A gateway of another site, and how to make calls to it."""

    @property
    def site(self) -> str:
        """The gateway's site."""

    @property
    def gateway(self) -> int:
        """The gateway's number at its site."""

    def dial(
        self, config: GatewayConfig, session: str, method: str
    ) -> AbstractAsyncContextManager[Call]:
        """Make a call on a connection of its own, which is cancelled at the end of the block.

        Raises:
            CallError: the connection cannot be made; raised on entering.
        """

    async def refuses_connections(self) -> bool:
        """Whether the gateway's host refuses connections to its port."""


class ServedCall(Protocol):
    """A call as its server has it; used on the event loop's thread."""

    over: asyncio.Event
    """Set once no more messages will come."""

    async def read(self) -> memoryview | None:
        """Return the next message; None at the end; raises as `Call.read`."""

    async def take_each(self, take: Taker) -> None:
        """Have `take` called with each message, and send what it returns, as `Call.take_each`."""

    async def write(self, message: bytes | memoryview) -> None:
        """Write a message; raises as `Call.write`."""

    async def end(self, status: Status, why: str) -> None:
        """Send the end of the call."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of the call."""

    def auth_context(self) -> Mapping[str, Collection[bytes]]:
        """Return the identities in the caller's certificate, under `peer_uri`."""

    def peer(self) -> str:
        """Return the address of the other end."""


Serve = Callable[[ServedCall], Coroutine[Any, Any, None]]
"""Serves a call until the peer ends it; raises IsthmusError to refuse it, or to end it."""


async def serve_call(call: Served, method: str, serve: Callable[[Served], Awaitable[None]]) -> None:
    """Serve a call, and tell its client how it ended."""
    try:
        await serve(call)
    except IsthmusError as error:
        await call.end(status_of(error), str(error))
    except CallError as error:
        _log.debug("a call from %s ended: %s", call.peer(), error)
    except Exception as error:  # noqa: BLE001 - a call's root: as gRPC's server has it
        _log.exception("%s was not served", method)
        await call.end(Status.UNKNOWN, text_of(error))
    else:
        await call.end(Status.OK, "")


def answering(
    handler: Callable[[Asked, ServedCall], Awaitable[Message | bytes]], asked: type[Asked]
) -> Serve:
    """Return what serves a method whose questions a handler answers, one after another.

    The handler returns the answer, or its bytes, and raises IsthmusError to end the call.
    """

    async def serve(call: ServedCall) -> None:
        while (message := await call.read()) is not None:
            try:
                question = asked.FromString(bytes(message))
            except DecodeError as error:
                raise RemoteProtocolError(f"a question cannot be read: {error}") from error
            answer = await handler(question, call)
            await call.write(answer if isinstance(answer, bytes) else answer.SerializeToString())

    return serve


async def ask(
    call: Call, question: Message, answer: type[Answer], *, is_last: bool = False
) -> Answer:
    """Return the answer to a question; with `is_last` it is the call's only one, or the last.

    Raises:
        CallError: the question was refused, or the call broke.
    """
    return parsed(await ask_for_bytes(call, question, is_last=is_last), answer)


async def ask_for_bytes(call: Call, question: Message, *, is_last: bool = False) -> memoryview:
    """Return the serialised answer to a question; raises as `ask`."""
    await call.write(question.SerializeToString())
    if is_last:
        call.finish()
    message = await call.read()
    if message is None:
        raise CallError(Status.UNAVAILABLE, "it ended before an answer")
    return message


def parsed(message: memoryview, answer: type[Answer]) -> Answer:
    """Return the answer in a message.

    Raises:
        CallError: it cannot be read.
    """
    try:
        return answer.FromString(bytes(message))
    except DecodeError as error:
        why = f"the answer cannot be read: {error}"
        raise CallError(Status.INTERNAL, why) from error


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Limit the time of calls made in the block.

    Raises:
        CallError: they took longer.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        why = f"no answer within {seconds:.1f} s"
        raise CallError(Status.DEADLINE_EXCEEDED, why) from None
