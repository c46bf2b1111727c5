"""The agent's session with the coordinator: dialling, the lease, and messages both ways.

A session outlives its connections. Messages are numbered (protos/numbered.py) and kept in an
`Outbox`, in bounded space, until the coordinator has them. When a connection breaks, the agent
dials again and both sides resend missing messages. Heartbeats are not numbered and overtake
everything: a slow link must not look like a dead site. Metrics are dropped, and counted, rather
than fill the memory, except the few on which the outcome of a run depends.

The lease counts from the *sending* of the latest answered heartbeat. When it ends, the connection
is given up. The session then goes on without a coordinator for `failure.coordinator_within`. An
agent that was itself suspended, perhaps together with the coordinator, restarts this time once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import grpc

from isthmus.protos import metrics
from isthmus.protos.control.v1.control_pb2 import (
    AgentMessage,
    BlobNames,
    BlobPart,
    CoordinatorMessage,
    Digest,
    Heartbeat,
    Hello,
    Leave,
    Metric,
    MetricBatch,
    RunReport,
    ShipLogsRequest,
    Welcome,
)
from isthmus.protos.error_statuses import error_for
from isthmus.protos.errors import IsthmusError, LocalProtocolError, StaleGenerationError
from isthmus.protos.limits import CONTROL_CHANNEL_BYTES, CONTROL_MESSAGE_BYTES
from isthmus.protos.numbered import Numbered
from isthmus.protos.proxies import proxy_options
from isthmus.protos.security import explained
from isthmus.sites.agent.coordinator_channel import CoordinatorChannel
from isthmus.sites.agent.known_coordinator import KnownCoordinator
from isthmus.sites.silence import Silence, Standstills
from isthmus.topology.spec.timeouts import Timeouts

if TYPE_CHECKING:
    from isthmus.protos.control.v1.control_pb2_grpc import CoordinatorAsyncStub

    Call: TypeAlias = grpc.aio.StreamStreamCall[AgentMessage, CoordinatorMessage]

ANSWER_S = 10.0
"""Time for a connected coordinator to answer Hello."""
_ATTEMPT_S = 5.0
"""Time to open a connection: TCP, TLS and HTTP/2's settings take three round trips."""
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
"""Statuses for which a retry is useless.

ABORTED is not among them: an old session may still hold the site.
"""

BULK_BYTES = 4 << 20
"""Limit on waiting metrics and digests; beyond it digests are shortened."""
_OVERHEAD_BYTES = 8
"""Bytes of a field's tag and length inside a batch."""
_HEADER_BYTES = 256
"""Bytes of a message's other fields: run, generation, and the session's numbers."""

log = logging.getLogger(__name__)


class UnreachableError(IsthmusError):
    """No coordinator answered in time."""

    code = "COORDINATOR_UNREACHABLE"


class RefusedError(IsthmusError):
    """The coordinator refused this agent for good."""

    code = "REFUSED"


class SessionLostError(IsthmusError):
    """The coordinator was away for longer than this agent waits."""

    code = "COORDINATOR_LOST"


def _backoff_max_s(timeouts: Timeouts) -> float:
    """Return the longest pause between two attempts: several fit into a lease."""
    return min(_BACKOFF_MAX_S, timeouts.heartbeat_s / 2)


def channel_options(timeouts: Timeouts) -> list[tuple[str, int | str]]:
    """Return options of a channel that notices a dead path by pings."""
    return [
        ("grpc.max_receive_message_length", CONTROL_CHANNEL_BYTES),
        ("grpc.max_send_message_length", CONTROL_CHANNEL_BYTES),
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.keepalive_time_ms", int(timeouts.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
        # Without it gRPC waits a minute for the answer to a ping.
        ("grpc.http2.ping_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", int(_BACKOFF_FIRST_S * 1000)),
        # Not a pause, but gRPC's minimum time for an attempt.
        ("grpc.min_reconnect_backoff_ms", int(_ATTEMPT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(_backoff_max_s(timeouts) * 1000)),
        ("grpc.enable_retries", 0),
        *proxy_options(),
    ]


class Dialler:
    """Connects to the coordinator's address, where coordinators may come and go."""

    def __init__(
        self,
        channel: CoordinatorChannel,
        hello: Hello,
        known: KnownCoordinator,
        timeouts: Timeouts,
        report: Callable[[], RunReport | None],
    ) -> None:
        """The channel stays the caller's; `report` returns the site's run in progress."""
        self._channel = channel
        self._hello = hello
        self._known = known
        self._backoff_max_s = _backoff_max_s(timeouts)
        self._report = report

    @property
    def stub(self) -> CoordinatorAsyncStub:
        """The coordinator's calls."""
        return self._channel.stub

    async def dial(
        self, deadline_s: float, session: str = "", received: int = 0
    ) -> tuple[Call, Welcome]:
        """Repeat Hello until a coordinator welcomes this agent.

        Args:
            deadline_s: on time.monotonic's clock.
            session: the session to resume; empty: none.
            received: the last number received in it.

        Raises:
            UnreachableError: no coordinator welcomed it in time.
            RefusedError: the coordinator refused it for good.
        """
        backoff_s = _BACKOFF_FIRST_S
        reason, logged = "no answer", ""
        while (left_s := deadline_s - time.monotonic()) > 0:
            await self._channel.refresh()
            call = self.stub.Session()
            try:
                async with asyncio.timeout(min(ANSWER_S, left_s)):
                    welcome = await _greet(call, self._hello_now(session, received))
                self._known.meet(welcome.journal, welcome.generation, is_running=self._runs)
            except TimeoutError:
                reason = "no answer"
            except grpc.aio.AioRpcError as error:
                reason = explained(error.details() or error.code().name)
                if error.code() in _FATAL:
                    raise _refusal(error.code(), reason) from error
            except (StaleGenerationError, UnreachableError) as error:
                reason = explained(str(error))
            else:
                return call, welcome
            call.cancel()
            if reason != logged:
                log.info("coordinator not joined yet: %s", reason)
            logged = reason
            left_s = max(0.0, deadline_s - time.monotonic())
            await asyncio.sleep(min(left_s, backoff_s * random.uniform(0.5, 1.0)))  # noqa: S311
            backoff_s = min(2 * backoff_s, self._backoff_max_s)
        raise UnreachableError(f"no coordinator welcomed this agent in time: {reason}")

    @property
    def _runs(self) -> bool:
        return self._report() is not None

    def _hello_now(self, session: str, received: int) -> Hello:
        hello = Hello(
            session=session,
            received=received,
            journal=self._known.journal,
            generation=self._known.generation,
            run=self._report(),
        )
        hello.MergeFrom(self._hello)
        return hello


async def _side_by_side(
    ends: tuple[type[Exception], ...], **works: Coroutine[None, None, None]
) -> None:
    """Run named coroutines until one raises; raise an error in `ends` without its group."""
    ended: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            for name, work in works.items():
                tasks.create_task(work, name=name)
    except* ends as group:
        ended = group  # Python before 3.11.4 wraps an error raised here in a group
    while isinstance(ended, ExceptionGroup):  # of works that have works side by side
        ended = ended.exceptions[0]
    if ended is not None:
        raise ended from None


class Session:
    """The conversation of an agent and a coordinator, over successive connections.

    `serve` it, and put messages into `outbox`.
    """

    def __init__(
        self,
        call: Call,
        welcome: Welcome,
        dialler: Dialler,
        patience_s: Callable[[], float] | None = None,
        certificates_left_s: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Begin with a coordinator that has just welcomed this agent.

        Args:
            call: The connection.
            welcome: What the coordinator has said.
            dialler: Makes further connections.
            patience_s: Returns how long the session goes on without one; None: the lease.
            certificates_left_s: Returns until when the site's certificates are valid, by name.
        """
        self.outbox = Outbox()
        self.welcome = welcome
        self._call = call
        self._dialler = dialler
        self._patience_s = patience_s or (lambda: self.welcome.lease_s)
        self._certificates_left_s = certificates_left_s
        self._heard = Silence(time.monotonic())
        self._sent_s: dict[int, float] = {}
        self._is_left = False

    async def serve(self, on_message: Callable[[CoordinatorMessage], None]) -> None:
        """Keep the lease, send the outbox, and deliver messages that arrive. Never returns.

        Raises:
            SessionLostError: the coordinator was away for too long, or the agent has left.
            RefusedError: a coordinator came that refused this agent for good.
        """
        ends = (SessionLostError, RefusedError)
        try:
            await _side_by_side(ends, carry=self._carry(on_message), lease=self._keep_lease())
        finally:
            self._call.cancel()

    async def ship(self, request: ShipLogsRequest) -> None:
        """Send log lines.

        Raises:
            IsthmusError: the lines did not arrive.
        """
        try:
            await self._dialler.stub.ShipLogs(request, timeout=SHIP_S)
        except grpc.aio.AioRpcError as error:
            raise error_for(error.code(), error.details() or "") from error

    async def get_blobs(self, digests: Sequence[str]) -> AsyncIterator[BlobPart]:
        """Yield contents of a carried folder, in parts.

        Raises:
            IsthmusError: the coordinator does not have one, or the connection broke.
        """
        names = BlobNames(digests=[bytes.fromhex(digest) for digest in digests])
        try:
            async for part in self._dialler.stub.GetBlobs(names):
                yield part
        except grpc.aio.AioRpcError as error:
            raise error_for(error.code(), error.details() or "") from error

    async def _carry(self, on_message: Callable[[CoordinatorMessage], None]) -> None:
        """Carry messages over successive connections."""
        while True:
            try:
                await self._converse(on_message)
            except _BrokenError as error:
                if self._is_left:
                    raise SessionLostError("the session is over") from error
                log.warning("the connection to the coordinator broke: %s", error)
            begun_s = time.monotonic()
            number = self.outbox.numbered.received
            self._call, welcome = await self._dialler.dial(math.inf, self.welcome.session, number)
            self._heard.hear(begun_s)
            goes_on = welcome.session == self.welcome.session
            log.info("the coordinator is back, %s", "as it was" if goes_on else "and begins anew")
            self.outbox.go_on(welcome.received if goes_on else None)
            self.welcome = welcome

    async def _converse(self, on_message: Callable[[CoordinatorMessage], None]) -> None:
        """Carry messages both ways until this connection breaks.

        Raises:
            _BrokenError: the connection broke.
        """
        try:
            await _side_by_side(
                (_BrokenError,), receive=self._receive(on_message), send=self._send()
            )
        finally:
            self._call.cancel()

    async def _receive(self, on_message: Callable[[CoordinatorMessage], None]) -> None:
        while True:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
                if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                    raise _refusal(error.code(), reason) from error
                if error.code() in _FATAL:
                    raise SessionLostError(reason) from error
                raise _BrokenError(reason) from error
            except asyncio.CancelledError:
                raise self._unless_ended("silence") from None
            if not isinstance(message, CoordinatorMessage):  # grpc.aio.EOF
                raise _BrokenError("the coordinator ended it")
            self.outbox.acknowledge(message.received)
            if message.HasField("heartbeat_ack"):
                sent_s = self._sent_s.pop(message.heartbeat_ack.sequence, None)
                if sent_s is not None:
                    self._heard.hear(sent_s)
            elif message.sequence and self.outbox.numbered.takes(message.sequence):
                on_message(message)

    async def _send(self) -> None:
        while True:
            message = await self.outbox.take()
            if message is None:
                self._is_left = True
                # Do not cancel: that would overtake the last messages.
                await self._call.done_writing()
                return
            if message.HasField("heartbeat"):
                self._sent_s[message.heartbeat.sequence] = time.monotonic()
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                raise _BrokenError("the coordinator does not take messages any more") from error
            except asyncio.CancelledError:
                raise self._unless_ended("silence") from None

    def _unless_ended(self, why: str) -> BaseException:
        """Return the error of a cancelled read: the lease ended, or the session does."""
        task = asyncio.current_task()
        is_ending = task is not None and task.cancelling() > 0
        return asyncio.CancelledError() if is_ending else _BrokenError(why)

    async def _keep_lease(self) -> None:
        sequence = 0
        is_orphan = False
        standstills = Standstills(time.monotonic(), self.welcome.lease_s)
        while True:
            lease_s, patience_s = self.welcome.lease_s, self._patience_s()
            silent_s = self._heard.lasts_s(time.monotonic())
            if silent_s >= patience_s:
                raise SessionLostError(f"the coordinator was silent for {patience_s:g} s")
            if silent_s >= lease_s:
                # The connection may look alive for longer than any answer takes.
                self._call.cancel()
                if not is_orphan:
                    log.warning(
                        "no coordinator for %.1f s: the site goes on without one for %g s at most",
                        silent_s,
                        patience_s,
                    )
            is_orphan = silent_s >= lease_s
            sequence += 1
            self.outbox.put_heartbeat(sequence, self._certificates_left_s())
            self._sent_s.pop(sequence - 64, None)
            left_s = (patience_s if is_orphan else lease_s) - silent_s
            pause_s = min(self.welcome.heartbeat_s, left_s)
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            if stood_s := standstills.look(now_s, pause_s):
                log.warning("was suspended for %.1f s: restarting the coordinator's time", stood_s)
                self._heard.begin_anew(now_s)


class _BrokenError(Exception):
    """A connection broke; the session goes on."""


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
    """Return the error of a final refusal, with the code of the gRPC status."""
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
    """A queue of messages, kept until the coordinator has them. One task takes them."""

    def __init__(self) -> None:
        self.numbered: Numbered[_Waiting] = Numbered()
        self._heartbeat: Heartbeat | None = None
        self._taken = 0
        """Number of the last message taken for this connection."""
        self._most_taken = 0
        """Highest number taken for any connection; batches with greater numbers may still grow."""
        self._last: _Waiting | None = None
        self._bulk_bytes = 0
        self._num_dropped = 0
        self._ended = False
        self._filled = asyncio.Event()

    def put(self, message: AgentMessage) -> None:
        """Queue a message that must arrive; a run has only a few of them."""
        self._add(message, 0)

    def put_heartbeat(self, sequence: int, left_s: Mapping[str, float] | None = None) -> None:
        """Queue a heartbeat before everything else; replace one that still waits."""
        self._heartbeat = Heartbeat(sequence=sequence, certificates_left_s=left_s)
        self._filled.set()

    def put_metric(self, run_id: str, generation: int, metric: Metric) -> None:
        """Queue a metric; it travels in one batch with its neighbours."""
        size = metric.ByteSize() + _OVERHEAD_BYTES
        is_full = self._bulk_bytes + size > BULK_BYTES
        if is_full and metric.kind not in metrics.FEW:
            self._num_dropped += 1
            if self._num_dropped == 1:
                log.warning("dropping metrics: the coordinator takes none, or too slowly")
            return
        if self._num_dropped and not is_full:
            log.warning("%d metrics were dropped", self._num_dropped)
            self._num_dropped = 0
        last = self._last if self.numbered.last > self._most_taken else None
        if last is not None and _takes(last, run_id, generation, size):
            last.message.metrics.metrics.append(metric)
            last.bulk_bytes += size
            self._bulk_bytes += size
            self._filled.set()
        else:
            batch = MetricBatch(run_id=run_id, generation=generation, metrics=[metric])
            self._add(AgentMessage(metrics=batch), size)

    def put_digest(self, digest: Digest) -> None:
        """Queue the hashes of a rank, which is never dropped.

        The list of tensors is left out if it exceeds a message or the memory limit. The combined
        hash still shows whether ranks differ, only not in which tensor.
        """
        size = digest.ByteSize()
        if size > CONTROL_MESSAGE_BYTES - _HEADER_BYTES or self._bulk_bytes + size > BULK_BYTES:
            del digest.tensors[:], digest.names[:]
        self._add(AgentMessage(digest=digest), digest.ByteSize())

    def end(self) -> None:
        """Close the queue: after the waiting messages, only the agent's farewell follows."""
        self._ended = True
        self.put(AgentMessage(leave=Leave()))

    def acknowledge(self, received: int) -> None:
        """Drop messages that the coordinator has received.

        Raises:
            RemoteProtocolError: `received` was never sent.
        """
        for gone in self.numbered.acknowledge(received):
            self._bulk_bytes -= gone.bulk_bytes
        self._taken = max(self._taken, self.numbered.acknowledged)

    def go_on(self, received: int | None) -> None:
        """Begin a new connection; messages that the coordinator lacks are taken again.

        Args:
            received: the last number that it has; None: it does not know this session.
        """
        if received is None:
            self.numbered.begin_anew()
            # Numbers of batches that may grow restart, too; a batch may have been sent before.
            self._most_taken = self.numbered.last
        else:
            self.acknowledge(received)
        self._taken = self.numbered.acknowledged

    async def take(self) -> AgentMessage | None:
        """Return the next message, waiting for one; None after the last."""
        while self._heartbeat is None and (self._taken >= self.numbered.last):
            if self._ended:
                return None
            self._filled.clear()
            await self._filled.wait()
        if self._heartbeat is not None:
            message, self._heartbeat = AgentMessage(heartbeat=self._heartbeat), None
        else:
            waiting = self.numbered.after(self._taken)
            assert waiting is not None
            message = waiting.message
            self._taken += 1
            self._most_taken = max(self._most_taken, self._taken)
            message.sequence = self._taken
        message.received = self.numbered.received
        return message

    def _add(self, message: AgentMessage, bulk_bytes: int) -> None:
        self._last = _Waiting(message, bulk_bytes)
        self.numbered.add(self._last)
        self._bulk_bytes += bulk_bytes
        self._filled.set()


def _takes(waiting: _Waiting, run_id: str, generation: int, size: int) -> bool:
    """Whether a waiting message is a batch of the same run with room for `size` bytes."""
    batch = waiting.message.metrics
    return (
        waiting.message.HasField("metrics")
        and (batch.run_id, batch.generation) == (run_id, generation)
        # A running count: ByteSize each time would be quadratic.
        and waiting.bulk_bytes + size + _HEADER_BYTES <= CONTROL_MESSAGE_BYTES
    )
