"""The agent's session with the coordinator: dialling, the lease, and messages both ways.

The lease counts from when a heartbeat that was answered was *sent*: then the coordinator cannot
have given the site up later than the site gives itself up. An agent that has itself stood still,
perhaps with its whole machine and the coordinator's, has its lease anew once: if the coordinator
did not stand still, it has ended the session, and that is what this agent reads next.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import grpc

from protos.control.v1.control_pb2 import (
    AgentMessage,
    CoordinatorMessage,
    Hello,
    ShipLogsRequest,
    Welcome,
)
from protos.control.v1.control_pb2_grpc import CoordinatorStub
from protos.errors import IsthmusError, LocalProtocolError, error_for
from protos.limits import CONTROL_CHANNEL_BYTES
from sites.agent.outbox import Outbox
from sites.silence import Silence, Standstills
from topology.timeouts import Timeouts

if TYPE_CHECKING:
    from protos.control.v1.control_pb2_grpc import CoordinatorAsyncStub

    Call: TypeAlias = grpc.aio.StreamStreamCall[AgentMessage, CoordinatorMessage]

ANSWER_S = 10.0
"""A coordinator that was reached answers Hello within this."""
_BACKOFF_FIRST_S = 0.1
_BACKOFF_MAX_S = 2.0
SHIP_S = 5.0
"""For one batch of log lines; a batch that did not arrive is sent again."""
_FATAL = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Answers that asking again does not change.

ABORTED is none: an old session may still hold the site.
"""

log = logging.getLogger(__name__)


class UnreachableError(IsthmusError):
    """No coordinator answered in time."""

    code = "COORDINATOR_UNREACHABLE"


class RefusedError(IsthmusError):
    """The coordinator will not have this agent."""

    code = "REFUSED"


class SessionLostError(IsthmusError):
    """The session has ended, or the lease ran out: nobody may run here in its name."""

    code = "COORDINATOR_LOST"


def open_channel(address: str, timeouts: Timeouts) -> grpc.aio.Channel:
    """Return a channel that pings an idle connection and so notices a dead path."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.max_receive_message_length", CONTROL_CHANNEL_BYTES),
            ("grpc.max_send_message_length", CONTROL_CHANNEL_BYTES),
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.keepalive_time_ms", int(timeouts.keepalive_time_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", int(_BACKOFF_FIRST_S * 1000)),
            ("grpc.min_reconnect_backoff_ms", int(_BACKOFF_FIRST_S * 1000)),
            ("grpc.max_reconnect_backoff_ms", int(_BACKOFF_MAX_S * 1000)),
            ("grpc.enable_retries", 0),
            # The environment's HTTP proxy is for the web, not for this.
            ("grpc.enable_http_proxy", 0),
        ],
    )


class Session:
    """One accepted session.

    `serve` it, and put messages into `outbox`; its end ends the session.
    """

    def __init__(self, call: Call, welcome: Welcome, stub: CoordinatorAsyncStub) -> None:
        self.outbox = Outbox()
        self.welcome = welcome
        self._call = call
        self._stub = stub
        self._heard = Silence(time.monotonic())
        self._sent_s: dict[int, float] = {}

    @classmethod
    async def open(cls, channel: grpc.aio.Channel, hello: Hello, deadline_s: float) -> Session:
        """Say Hello until a coordinator welcomes this agent.

        Args:
            channel: to the coordinator; stays the caller's.
            hello: the same at each attempt.
            deadline_s: when to give up, on time.monotonic's clock.

        Raises:
            UnreachableError: nobody welcomed it in time.
            RefusedError: the coordinator said why it never will.
        """
        stub: CoordinatorAsyncStub = CoordinatorStub(channel)  # type: ignore[assignment]
        backoff_s = _BACKOFF_FIRST_S
        reason = "no answer"
        while (left_s := deadline_s - time.monotonic()) > 0:
            call = stub.Session()
            try:
                async with asyncio.timeout(min(ANSWER_S, left_s)):
                    return cls(call, await _greet(call, hello), stub)
            except TimeoutError:
                reason = "no answer"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
                if error.code() in _FATAL:
                    raise _refusal(error.code(), reason) from error
            except UnreachableError as error:
                reason = str(error)
            call.cancel()
            log.info("coordinator not joined yet: %s", reason)
            left_s = max(0.0, deadline_s - time.monotonic())
            await asyncio.sleep(min(left_s, backoff_s * random.uniform(0.5, 1.0)))  # noqa: S311
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
        raise UnreachableError(f"no coordinator welcomed this agent in time: {reason}")

    async def serve(self, on_message: Callable[[CoordinatorMessage], None]) -> None:
        """Keep the lease, send what is in the outbox and hand over what arrives. Never returns.

        Raises:
            SessionLostError: the stream broke, or the lease ran out.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(on_message), name="receive")
                tasks.create_task(self._send(), name="send")
                tasks.create_task(self._keep_lease(), name="lease")
        except* SessionLostError as group:
            raise SessionLostError(str(group.exceptions[0])) from None
        finally:
            self._call.cancel()

    async def ship(self, request: ShipLogsRequest) -> None:
        """Send log lines.

        Raises:
            IsthmusError: they did not arrive.
        """
        try:
            await self._stub.ShipLogs(request, timeout=SHIP_S)
        except grpc.aio.AioRpcError as error:
            raise error_for(error.code(), error.details() or "") from error

    async def _receive(self, on_message: Callable[[CoordinatorMessage], None]) -> None:
        while True:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                raise SessionLostError(error.details() or error.code().name) from error
            if not isinstance(message, CoordinatorMessage):  # grpc.aio.EOF
                raise SessionLostError("the coordinator ended the session")
            if message.HasField("heartbeat_ack"):
                sent_s = self._sent_s.pop(message.heartbeat_ack.sequence, None)
                if sent_s is not None:
                    self._heard.hear(sent_s)
            else:
                on_message(message)

    async def _send(self) -> None:
        while True:
            message = await self.outbox.take()
            if message is None:
                # Not cancelled, for that would overtake what was just written.
                await self._call.done_writing()
                return
            if message.HasField("heartbeat"):
                self._sent_s[message.heartbeat.sequence] = time.monotonic()
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                raise SessionLostError("the coordinator does not take messages any more") from error

    async def _keep_lease(self) -> None:
        sequence = 0
        lease_s = self.welcome.lease_s
        standstills = Standstills(time.monotonic(), lease_s)
        while (left_s := lease_s - self._heard.lasts_s(time.monotonic())) > 0:
            sequence += 1
            self.outbox.put_heartbeat(sequence)
            self._sent_s.pop(sequence - 64, None)
            pause_s = min(self.welcome.heartbeat_s, left_s)
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            if stood_s := standstills.look(now_s, pause_s):
                log.warning("stood still for %.1f s; the coordinator is given time anew", stood_s)
                self._heard.begin_anew(now_s)
        raise SessionLostError(f"the coordinator was silent for {lease_s:g} s")


async def _greet(call: Call, hello: Hello) -> Welcome:
    """Say Hello on a new stream and return the Welcome."""
    await call.write(AgentMessage(hello=hello))
    answer = await call.read()
    if not isinstance(answer, CoordinatorMessage):  # grpc.aio.EOF
        code, details = await call.code(), await call.details()
        if code in _FATAL:
            raise _refusal(code, details or code.name)
        raise UnreachableError(details or code.name)
    welcome = answer.welcome
    if not answer.HasField("welcome") or welcome.lease_s <= 0 or welcome.heartbeat_s <= 0:
        raise _refusal(grpc.StatusCode.INVALID_ARGUMENT, "its first message is no proper Welcome")
    return welcome


def _refusal(status: grpc.StatusCode, reason: str) -> RefusedError:
    """Return the error of a final answer, with the code that the status stands for."""
    error = RefusedError(f"the coordinator refused this agent: {reason}")
    known = error_for(status, reason)
    if not isinstance(known, LocalProtocolError):
        error.code = known.code
    return error
