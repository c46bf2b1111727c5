"""The agent's session with the coordinator: dialling, the lease, and messages both ways.

What waits to be sent lies in an `Outbox`, in order and in bounded space. Heartbeats overtake
everything: a slow link must not look like a dead site. Measurements are dropped, and counted,
rather than let them hold up the gateway that produces them.

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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import grpc

from protos.control.v1.control_pb2 import (
    AgentMessage,
    CoordinatorMessage,
    Digest,
    Heartbeat,
    Hello,
    Metric,
    MetricBatch,
    ShipLogsRequest,
    Welcome,
)
from protos.control.v1.control_pb2_grpc import CoordinatorStub
from protos.errors import IsthmusError, LocalProtocolError, error_for
from protos.limits import CONTROL_CHANNEL_BYTES, CONTROL_MESSAGE_BYTES
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
"""Time for one batch of log lines; a batch that did not arrive is sent again."""
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

BULK_BYTES = 4 << 20
"""Bytes of metrics and digests that may wait."""
_OVERHEAD_BYTES = 8
"""A field's tag and length inside a batch."""
_HEADER_BYTES = 256
"""The rest of a batch: run and generation."""

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


def channel_options(timeouts: Timeouts) -> list[tuple[str, int]]:
    """Return the arguments of a channel that pings its connection and so notices a dead path."""
    return [
        ("grpc.max_receive_message_length", CONTROL_CHANNEL_BYTES),
        ("grpc.max_send_message_length", CONTROL_CHANNEL_BYTES),
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.keepalive_time_ms", int(timeouts.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
        # Without it gRPC gives a ping that has no answer a minute.
        ("grpc.http2.ping_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", int(_BACKOFF_FIRST_S * 1000)),
        ("grpc.min_reconnect_backoff_ms", int(_BACKOFF_FIRST_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(_BACKOFF_MAX_S * 1000)),
        ("grpc.enable_retries", 0),
        # The environment's HTTP proxy is for the web, not for this.
        ("grpc.enable_http_proxy", 0),
    ]


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
        """Send the same Hello again and again until a coordinator welcomes this agent.

        The channel stays the caller's; `deadline_s` is on time.monotonic's clock.

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
    """Send Hello on a new stream and return the Welcome."""
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


@dataclass(slots=True)
class _Waiting:
    message: AgentMessage
    bulk_bytes: int = 0


class Outbox:
    """Messages in, messages out. One task takes them."""

    def __init__(self) -> None:
        self._heartbeat: Heartbeat | None = None
        self._waiting: deque[_Waiting] = deque()
        self._bulk_bytes = 0
        self._num_dropped = 0
        self._ended = False
        self._filled = asyncio.Event()

    def put(self, message: AgentMessage) -> None:
        """Queue a message that must arrive: there are only a few of these in a run."""
        self._waiting.append(_Waiting(message))
        self._filled.set()

    def put_heartbeat(self, sequence: int) -> None:
        """Queue a heartbeat before everything else; one that still waits is replaced."""
        self._heartbeat = Heartbeat(sequence=sequence)
        self._filled.set()

    def put_metric(self, run_id: str, generation: int, metric: Metric) -> None:
        """Queue a metric; it travels in one batch with its neighbours."""
        size = metric.ByteSize() + _OVERHEAD_BYTES
        if not self._has_room(size):
            return
        last = self._waiting[-1] if self._waiting else None
        if last is None or not _takes(last, run_id, generation, size):
            batch = MetricBatch(run_id=run_id, generation=generation)
            last = _Waiting(AgentMessage(metrics=batch))
            self._waiting.append(last)
        last.message.metrics.metrics.append(metric)
        last.bulk_bytes += size
        self._bulk_bytes += size
        self._filled.set()

    def put_digest(self, digest: Digest) -> None:
        """Queue the hashes of a rank. A list of tensors that no message may hold is left out.

        The combined hash still tells whether ranks differ, only not in which tensor.
        """
        if digest.ByteSize() > CONTROL_MESSAGE_BYTES - _OVERHEAD_BYTES:
            del digest.tensors[:], digest.names[:]
        size = digest.ByteSize()
        if self._has_room(size):
            self._waiting.append(_Waiting(AgentMessage(digest=digest), size))
            self._bulk_bytes += size
            self._filled.set()

    def end(self) -> None:
        """Close the queue: nothing follows what waits now."""
        self._ended = True
        self._filled.set()

    async def take(self) -> AgentMessage | None:
        """Return the next message, waiting for one; None after the last."""
        while not self._waiting:
            if self._ended:
                return None
            if self._heartbeat is not None:
                break
            self._filled.clear()
            await self._filled.wait()
        if self._heartbeat is not None:
            message, self._heartbeat = AgentMessage(heartbeat=self._heartbeat), None
            return message
        waiting = self._waiting.popleft()
        self._bulk_bytes -= waiting.bulk_bytes
        return waiting.message

    def _has_room(self, size: int) -> bool:
        if self._bulk_bytes + size <= BULK_BYTES:
            self._num_dropped = 0
            return True
        self._num_dropped += 1
        if self._num_dropped == 1:
            log.warning("metrics are dropped: the coordinator takes them too slowly")
        return False


def _takes(waiting: _Waiting, run_id: str, generation: int, size: int) -> bool:
    """Whether what waits is a batch of the same run with room for `size` bytes more."""
    batch = waiting.message.metrics
    return (
        waiting.message.HasField("metrics")
        and (batch.run_id, batch.generation) == (run_id, generation)
        # Counted, for asking the message each time would make a long batch quadratic.
        and waiting.bulk_bytes + size + _HEADER_BYTES <= CONTROL_MESSAGE_BYTES
    )
