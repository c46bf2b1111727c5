"""Serves a peer over connections dialled here, for a gateway that accepts none.

The gateway keeps a ReverseTunnel stream open for the peer's calls, and as many Pull streams as the
peer asks for, each on its own connection. A broken stream is opened again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio

from isthmus.protos.errors import IsthmusError
from isthmus.protos.exchange.v1.exchange_pb2 import Answer, Ask
from isthmus.protos.exchange.v1.exchange_pb2_grpc import ExchangeStub
from isthmus.protos.failure import one_line, text_of
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.links.congestion.connections import CHANNELS_MAX
from isthmus.sites.gateway.links.frame_calls import CallError
from isthmus.sites.gateway.links.transport import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    PULL_METHOD,
    SESSION_KEY,
    Peer,
    details,
)
from isthmus.sites.gateway.links.wire_loop import WireLoop

if TYPE_CHECKING:
    from isthmus.protos.exchange.v1.exchange_pb2_grpc import ExchangeAsyncStub

_log = logging.getLogger(__name__)

_END_S = 2.0
_ANSWERS_MAX = 16
"""Calls of a peer served at a time."""


class Servant(Protocol):
    """Answers the calls of a peer that this side has dialled; on the loop's thread."""

    async def answer(self, sender: GatewayId, method: str, request: bytes) -> bytes:
        """Return the serialised response to a call.

        Raises:
            CallError: the call is refused.
        """

    def take(self, sender: GatewayId, message: memoryview) -> bytes:
        """Accept a frame without waiting, and return its acknowledgement.

        Raises:
            IsthmusError: the frame is refused; any effect on the run is already handled.
        """


class OutboundTunnel:
    """Keeps a tunnel to one peer. `begin` once it has answered Hello, then `close`."""

    def __init__(
        self, config: GatewayConfig, peer: Peer, servant: Servant, session: Callable[[], str]
    ) -> None:
        """`session` returns this side's session at the peer."""
        self._config = config
        self._peer = peer
        self._servant = servant
        self._session = session
        self._sender = config.index_of(peer.site), peer.gateway
        self._lock = threading.Lock()
        self._wire: WireLoop | None = None
        self._is_closed = False
        self._tasks: list[asyncio.Task[None]] = []  # used on the loop's thread only

    def begin(self) -> None:
        """Dial the peer, from now on."""
        with self._lock:
            if self._is_closed or self._wire is not None:
                return
            self._wire = WireLoop.acquire()
            self._wire.call(lambda: self._keep(self._serve))

    def close(self) -> None:
        """End all streams. Idempotent."""
        with self._lock:
            self._is_closed = True
            wire, self._wire = self._wire, None
        if wire is None:
            return
        wait([wire.run(self._end())], _END_S)
        WireLoop.release()

    # ---------------------------------------------------------------- on the loop's thread

    def _keep(self, serve: Callable[[], Awaitable[bool]]) -> None:
        self._tasks.append(asyncio.create_task(self._again_and_again(serve)))

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _again_and_again(self, serve: Callable[[], Awaitable[bool]]) -> None:
        backoff_s = BACKOFF_FIRST_S
        while True:
            try:
                if await serve():
                    backoff_s = BACKOFF_FIRST_S
            except* grpc.RpcError as group:
                error = _first(group)
                _log.warning("a stream from %s broke: %s", self._peer, details(error))
            except* asyncio.InvalidStateError:
                _log.warning("a stream from %s ended before an answer", self._peer)
            # Full jitter, so that streams which broke together do not reconnect together.
            await asyncio.sleep(random.uniform(0, backoff_s))  # noqa: S311 - not a secret
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _serve(self) -> bool:
        """Serve one ReverseTunnel stream until it ends; return whether anything came."""
        async with self._peer.aio_channel(self._config) as channel:
            return await self._serve_over(channel)

    async def _serve_over(self, channel: grpc.aio.Channel) -> bool:
        stub: ExchangeAsyncStub = ExchangeStub(channel)  # type: ignore[assignment]
        call = stub.ReverseTunnel(metadata=self._metadata)
        came = False
        answers = asyncio.Semaphore(_ANSWERS_MAX)
        writing = asyncio.Lock()

        async def reply(ask: Ask) -> None:
            try:
                answer = await self._answer(ask)
                async with writing:
                    await call.write(answer)
            finally:
                answers.release()

        async with asyncio.TaskGroup() as tasks:
            while isinstance(ask := await call.read(), Ask):
                came = True
                while len(self._tasks) <= min(ask.streams, CHANNELS_MAX):
                    self._keep(self._pull)
                if ask.method:
                    await answers.acquire()
                    tasks.create_task(reply(ask))
        return came

    async def _answer(self, ask: Ask) -> Answer:
        try:
            response = await self._servant.answer(self._sender, ask.method, ask.request)
        except CallError as error:
            _log.warning("refused %s of %s: %s", ask.method, self._peer, error)
            status: int = error.code().value[0]
            return Answer(number=ask.number, status=status, details=error.details())
        except Exception as error:  # noqa: BLE001 - a call's root: told as gRPC's server tells it
            _log.exception("%s of %s was not answered", ask.method, self._peer)
            unknown: int = grpc.StatusCode.UNKNOWN.value[0]
            return Answer(number=ask.number, status=unknown, details=one_line(text_of(error)))
        return Answer(number=ask.number, response=response)

    async def _pull(self) -> bool:
        """Serve one Pull until it ends; return whether anything came."""
        came = False
        async with self._peer.dial(self._config, self._session(), PULL_METHOD) as call:
            while (message := await call.read()) is not None:
                came = True
                try:
                    acknowledgement = self._servant.take(self._sender, message)
                except IsthmusError:
                    return came  # the peer sends it again, unless this was the run's end
                await call.write(acknowledgement)
        return came

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((SESSION_KEY, self._session()),)


def _first(group: BaseExceptionGroup[grpc.RpcError]) -> grpc.RpcError:
    """Return one error of a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, grpc.RpcError)
    return error
