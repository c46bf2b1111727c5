"""Reaches a gateway that accepts no connections over those that it has dialled itself.

That gateway keeps a ReverseTunnel stream open, over which calls travel to it and answers back. Its
Pull streams carry frames to it, as a Push would. To a link, an `InboundProxy` looks like a `Peer`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Never, Self, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from isthmus.protos.exchange.v1.exchange_pb2 import Answer, Ask
from isthmus.protos.identities import GATEWAY, Identity
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.frame_calls import CallError, FrameCall
from isthmus.sites.gateway.links.transport import SESSION_KEY
from isthmus.sites.gateway.links.wire_loop import WireLoop

Context = grpc.aio.ServicerContext[Any, Any]

_ASKS_MAX = 256
"""Calls that may wait for an answer at a time: some greetings, and one farewell."""
_STATUS = {each.value[0]: each for each in grpc.StatusCode}


class InboundProxy:
    """Stands for a gateway that only dials out; its connections may come and go."""

    def __init__(self, site: str, gateway: int, wire: WireLoop) -> None:
        self.site = site
        self.gateway = gateway
        self._wire = wire
        # Used on the loop's thread only.
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._asks: asyncio.Queue[Ask] = asyncio.Queue(_ASKS_MAX)
        self._serving: asyncio.Task[None] | None = None
        self._num_streams = 0
        self._waiting: asyncio.Queue[_Pulled] = asyncio.Queue()

    def __str__(self) -> str:
        return f"site {self.site} (gateway {self.gateway}, which dials in)"

    # ---------------------------------------------------------------- what a link uses

    def channel(self, config: GatewayConfig) -> grpc.Channel:
        """Return a channel for stubs, whose calls travel through the tunnel."""
        return cast("grpc.Channel", _CarriedChannel(self))

    @asynccontextmanager
    async def stream(self, config: GatewayConfig, session: str) -> AsyncIterator[FrameCall]:
        """Yield a call that carries frames, once the other side has opened one."""
        self._num_streams += 1
        try:
            self._tell(Ask(streams=self._num_streams))
            pulled = await self._next()
            try:
                yield pulled.call
            finally:
                pulled.is_done.set()
        finally:
            self._num_streams -= 1

    def refuses_connections(self) -> bool:
        """Return False: unknown, because the gateway is not dialled."""
        return False

    def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """Make a call, and return the serialised response; for any thread but the loop's.

        Raises:
            CallError: the call was refused, or not answered in time.
        """
        answering: Future[Answer] = self._wire.run(self._ask(method, request))
        try:
            answer = answering.result(timeout_s)
        except TimeoutError:
            answering.cancel()
            raise CallError(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"{self} did not answer for {timeout_s:.1f} s"
            ) from None
        if answer.status:
            status = _STATUS.get(answer.status, grpc.StatusCode.UNKNOWN)
            raise CallError(status, answer.details)
        return answer.response

    # ---------------------------------------------------------------- what the server hands over

    async def serve_tunnel(self, context: Context) -> None:
        """Serve a ReverseTunnel stream until it breaks, or the gateway opens another."""
        if self._serving is not None:
            self._serving.cancel()
        own = self._serving = asyncio.create_task(self._carry(context), name="reverse-tunnel")
        try:
            await asyncio.wait([own])
        finally:
            own.cancel()
            if self._serving is own:
                self._serving = None

    async def pull(self, call: FrameCall) -> None:
        """Serve a Pull until it breaks, or its link no longer needs it."""
        pulled = _Pulled(call, asyncio.Event())
        self._waiting.put_nowait(pulled)
        ends = [asyncio.create_task(each.wait()) for each in (pulled.is_done, call.over)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ends:
                each.cancel()

    async def _next(self) -> _Pulled:
        """Return an intact Pull that waits for a link."""
        while (pulled := await self._waiting.get()).call.over.is_set():
            pass
        return pulled

    async def _carry(self, context: Context) -> None:
        sending = asyncio.create_task(self._send(context), name="asks")
        try:
            while isinstance(answer := await context.read(), Answer):
                asked = self._asked.pop(answer.number, None)
                if asked is not None and not asked.done():
                    asked.set_result(answer)
        finally:
            sending.cancel()

    async def _send(self, context: Context) -> None:
        await context.write(Ask(streams=self._num_streams))
        while True:
            ask = await self._asks.get()
            if not ask.method or ask.number in self._asked:  # else the caller has given up
                await context.write(ask)

    async def _ask(self, method: str, request: bytes) -> Answer:
        number = next(self._numbers)
        asked: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        try:
            self._tell(Ask(number=number, method=method, request=request))
            return await asked
        finally:
            self._asked.pop(number, None)

    def _tell(self, ask: Ask) -> None:
        """Send a call over the ReverseTunnel stream, or over the next one that opens."""
        ask.streams = self._num_streams
        if self._asks.full():
            self._asks.get_nowait()
        self._asks.put_nowait(ask)


@dataclass(frozen=True, slots=True)
class _Pulled:
    """One Pull, as a link uses it."""

    call: FrameCall
    is_done: asyncio.Event
    """Set once the link no longer needs the Pull."""


class CarriedContext:
    """The context of a call that came through a tunnel, as servicers need it.

    The caller is the site that was dialled: TLS has verified that.
    """

    def __init__(self, site: str, session: str) -> None:
        self._site, self._session = site, session

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return metadata with the caller's session at this gateway."""
        return ((SESSION_KEY, self._session),)

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return the caller's identity in the form of a certificate's."""
        return {"peer_uri": [Identity("carried", GATEWAY, self._site).uri.encode()]}

    async def abort(self, code: grpc.StatusCode, details: str = "") -> Never:
        """Refuse the call."""
        raise CallError(code, details)


class _CarriedChannel:
    """A channel as far as generated stubs need it, for unary methods."""

    def __init__(self, inbound_proxy: InboundProxy) -> None:
        self._proxy = inbound_proxy

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Callable[..., Any]:
        """Return a method's callable, which blocks."""

        def call(request: Any, timeout: float, **_: object) -> Any:  # noqa: ANN401 - any message
            name = method.rpartition("/")[2]
            answer = self._proxy.call(name, request_serializer(request), timeout)
            try:
                return response_deserializer(answer)
            except DecodeError as error:
                why = f"the answer to {name} cannot be read"
                raise CallError(grpc.StatusCode.INTERNAL, why) from error  # as gRPC does

        return call

    def stream_stream(self, method: str, *_: object, **__: object) -> str:
        """Return a value that cannot be called: streams do not pass through a tunnel."""
        return method

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
