"""The coordinator's gRPC service: the wire's calls to `Control`, its answers and errors back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from isthmus.orchestrator.coordinator.control import Control
from isthmus.orchestrator.coordinator.control_messages import event_message
from isthmus.orchestrator.run_folder.log_files import LogReader
from isthmus.protos.blobs import STORE_BYTES, Blobs
from isthmus.protos.control.v1 import control_pb2, control_pb2_grpc
from isthmus.protos.error_statuses import STATUS
from isthmus.protos.errors import (
    IsthmusError,
    PeerLostError,
    PermissionDeniedError,
    RemoteProtocolError,
    StateConflictError,
)
from isthmus.protos.identities import COORDINATOR
from isthmus.protos.join_tokens import holder_of
from isthmus.protos.limits import CONTROL_CHANNEL_BYTES, CONTROL_MESSAGE_BYTES, LOG_BATCH_BYTES
from isthmus.protos.mutual_tls import caller_of, certificate_of
from isthmus.protos.security import control_security, require_own_site
from isthmus.topology.spec.carried_folder import CarriedFolder
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Endpoint

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    AgentContext = grpc.aio.ServicerContext[
        control_pb2.AgentMessage, control_pb2.CoordinatorMessage
    ]

HELLO_S = 5.0
"""Time for the first message of a session."""
UNGREETED_MAX = 128
"""Sessions that may wait for it at once: twice as many as there can be sites."""
WATCH_S = 1.0
"""A watcher hears at least this often."""
FOLLOW_S = 0.2
"""Between two looks for new log lines."""
MAX_CALLS = 512
"""The most calls at once, of all clients."""
MAX_DETAIL_BYTES = 3000
"""An error's text travels in a header, which gRPC limits to 8 KiB, escaped."""

log = logging.getLogger(__name__)


class AddressInUseError(IsthmusError):
    """Something else listens there."""

    code = "ADDRESS_IN_USE"


class CoordinatorService(control_pb2_grpc.CoordinatorServicer):
    """Translates the wire's calls to `Control`. Whoever makes it also runs `Control.run`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._num_streams = 0
        self._num_ungreeted = 0
        self._streams_changed = asyncio.Event()

    async def _read_hello(self, context: AgentContext) -> control_pb2.Hello:
        if self._num_ungreeted >= UNGREETED_MAX:
            raise PeerLostError(f"{UNGREETED_MAX} sessions have not said Hello yet: try again")
        self._num_ungreeted += 1
        try:
            async with asyncio.timeout(HELLO_S):
                message = await _read(context)
        except TimeoutError:
            raise RemoteProtocolError(f"no Hello within {HELLO_S:g} s") from None
        finally:
            self._num_ungreeted -= 1
        if message is None or not message.HasField("hello"):
            raise RemoteProtocolError("the first message of a session is Hello")
        if message.ByteSize() > CONTROL_MESSAGE_BYTES:
            raise RemoteProtocolError(
                f"a Hello of {message.ByteSize()} bytes; the limit is {CONTROL_MESSAGE_BYTES}"
            )
        return message.hello

    def on_refused(self, why: str) -> None:
        """Note a call that was refused for who makes it."""
        self._control.refused(why)

    def _require_own_site(self, context: Context | AgentContext, site: str) -> None:
        try:
            require_own_site(context, site)
        except PermissionDeniedError as error:
            self._control.refused(str(error))
            raise

    async def wait_for_streams(self, timeout_s: float) -> None:
        """Return when no operator reads a stream any more, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_streams > 0:
                    self._streams_changed.clear()
                    await self._streams_changed.wait()
        except TimeoutError:
            return

    # ------------------------------------------------------------ agents

    # grpc.aio also takes a coroutine that writes to its context; the stubs know generators only.
    async def Session(  # type: ignore[override]
        self, request_iterator: object, context: AgentContext
    ) -> None:
        """Serve an agent's connection until it breaks, or one side ends the session."""
        async with _answering(context):
            hello = await self._read_hello(context)
            self._require_own_site(context, hello.site)
            connection = self._control.join(hello, certificate_of(context))
            try:
                await connection.serve(
                    lambda: _read(context),
                    context.write,
                    lambda message: self._control.receive(connection.session, message),
                )
            except IsthmusError as error:
                self._control.leave(connection, str(error))
                raise
            except BaseException:  # gRPC cancels what serves a connection that is gone
                self._control.broke(connection)
                raise
            # Or it calls a reset the end of the stream.
            self._control.broke(connection)

    async def ShipLogs(
        self, request: control_pb2.ShipLogsRequest, context: Context
    ) -> control_pb2.ShipLogsResponse:
        """Append log lines; those that came before are skipped."""
        async with _answering(context):
            self._require_own_site(context, request.site)
            run = self._control.runs.fenced(request.run_id, request.generation)
            if request.site not in run.view.sites:
                raise RemoteProtocolError(f"log lines of {request.site!r}, which is no site")
            if request.ByteSize() > LOG_BATCH_BYTES:
                raise RemoteProtocolError(
                    f"{request.ByteSize()} bytes of log lines; the limit is {LOG_BATCH_BYTES}"
                )
            if not run.add_logs(request.site, request.lines):
                raise PeerLostError("the coordinator's disk takes no log lines now")
        return control_pb2.ShipLogsResponse()

    # ------------------------------------------------------------ operators

    async def Submit(
        self, request: control_pb2.SubmitRequest, context: Context
    ) -> control_pb2.SubmitResponse:
        """Start a run; INVALID_ARGUMENT tells every mistake of both documents."""
        async with _answering(context):
            if not self._control.runs.is_known(request.run_id):
                # Meanwhile the sites of other runs are heard.
                submission = await asyncio.to_thread(
                    self._control.runs.decide, request, self._control.machines()
                )
                self._control.runs.submit(submission)
                if submission.spec.carried is not None:
                    used = self._control.runs.carried_by_runs()
                    await asyncio.to_thread(_clear, self._control.runs.blobs, used)
            state = str(self._control.state)
            return control_pb2.SubmitResponse(run_id=request.run_id, state=state)

    async def MissingBlobs(
        self, request: control_pb2.BlobNames, context: Context
    ) -> control_pb2.BlobNames:
        """Return which contents have yet to be put."""
        async with _answering(context):
            names = [name.hex() for name in request.digests]
            missing = await asyncio.to_thread(self._control.runs.blobs.missing, names)
        return control_pb2.BlobNames(digests=map(bytes.fromhex, missing))

    async def PutBlobs(
        self, request_iterator: AsyncIterator[control_pb2.BlobPart], context: Context
    ) -> control_pb2.PutBlobsResponse:
        """Keep contents; those that came as a whole stay when the call breaks."""
        async with _answering(context), self._streaming():
            blobs = Blobs(self._control.runs.blobs.folder)
            async for part in request_iterator:
                await asyncio.to_thread(blobs.take, part)
        return control_pb2.PutBlobsResponse()

    async def GetBlobs(
        self, request: control_pb2.BlobNames, context: Context
    ) -> AsyncIterator[control_pb2.BlobPart]:
        """Yield contents in parts."""
        async with _answering(context):
            parts = self._control.runs.blobs.parts(name.hex() for name in request.digests)
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                yield part

    async def GetRun(self, request: control_pb2.GetRunRequest, context: Context) -> control_pb2.Run:
        """Return a run as it is."""
        async with _answering(context):
            return self._control.runs.message(self._control.runs.find(request.run_id))

    async def ListRuns(
        self, request: control_pb2.ListRunsRequest, context: Context
    ) -> control_pb2.ListRunsResponse:
        """Return the newest runs."""
        async with _answering(context):
            return control_pb2.ListRunsResponse(runs=self._control.runs.messages())

    async def CancelRun(
        self, request: control_pb2.CancelRunRequest, context: Context
    ) -> control_pb2.Run:
        """Stop a run everywhere; the answer does not wait for that."""
        async with _answering(context):
            return self._control.runs.cancel(request.run_id, "cancelled by an operator")

    async def DropSite(self, request: control_pb2.SiteRequest, context: Context) -> control_pb2.Run:
        """Have a run go on without a site; the answer does not wait for that."""
        async with _answering(context):
            return self._control.runs.drop_site(request.run_id, request.site)

    async def AddSite(self, request: control_pb2.SiteRequest, context: Context) -> control_pb2.Run:
        """Have a site take part in a run again; the answer does not wait for that."""
        async with _answering(context):
            return self._control.runs.add_site(request.run_id, request.site)

    async def OfferJoin(
        self, request: control_pb2.OfferJoinRequest, context: Context
    ) -> control_pb2.OfferJoinResponse:
        """Keep what a join token is good for."""
        async with _answering(context):
            self._control.offer_join(request)
        return control_pb2.OfferJoinResponse()

    async def Join(
        self, request: control_pb2.JoinRequest, context: Context
    ) -> control_pb2.JoinResponse:
        """Hand out what is kept for the token that the caller shows."""
        async with _answering(context):
            caller, shown = caller_of(context), certificate_of(context)
            if caller is None or not shown:
                raise PermissionDeniedError("joining takes the certificate of a join token")
            sealed = self._control.use_join(holder_of(shown), caller.site)
        return control_pb2.JoinResponse(sealed=sealed)

    async def WatchRun(
        self, request: control_pb2.GetRunRequest, context: Context
    ) -> AsyncIterator[control_pb2.Run]:
        """Yield a run now, at each change of its state and each second, until it has ended."""
        async with _answering(context), self._streaming():
            run_id = self._control.runs.find(request.run_id)
            while (changed := self._control.runs.change_of(run_id)) is not None:
                yield self._control.runs.message(run_id)
                await _wait(changed, WATCH_S)
            yield self._control.runs.message(run_id)

    async def ReadLogs(
        self, request: control_pb2.ReadLogsRequest, context: Context
    ) -> AsyncIterator[control_pb2.LogLine]:
        """Yield log lines; with `follow` until the run has ended and all have been read."""
        async with _answering(context), self._streaming():
            run_id = self._control.runs.find(request.run_id)
            folder = self._control.runs.folder_of(run_id)
            reader = LogReader(folder, site=request.site, rank=request.rank)
            if request.tail:
                # All that was written is read: of a long run seconds, in which agents wait.
                await asyncio.to_thread(reader.skip_to_tail, request.tail)
            while (changed := self._control.runs.change_of(run_id)) and request.follow:
                for line in reader.read():
                    yield line
                await _wait(changed, FOLLOW_S)
            for line in reader.read():
                yield line

    async def ReadEvents(
        self, request: control_pb2.ReadEventsRequest, context: Context
    ) -> AsyncIterator[control_pb2.Event]:
        """Yield events; with `follow` until the run has ended."""
        async with _answering(context), self._streaming():
            run_id, after = self._control.runs.find(request.run_id), request.after
            while (changed := self._control.runs.change_of(run_id)) and request.follow:
                for event in self._control.runs.events_of(run_id, after):
                    after = event.sequence
                    yield event_message(event)
                await _wait(changed, WATCH_S)
            for event in self._control.runs.events_of(run_id, after):
                yield event_message(event)

    @asynccontextmanager
    async def _streaming(self) -> AsyncIterator[None]:
        """Count an operator's stream for as long as it is read."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1
            self._streams_changed.set()


def make_server(service: CoordinatorService, timeouts: Timeouts) -> grpc.aio.Server:
    """Return a server with the limits of the control channel; it listens on nothing yet."""
    server = control_security(COORDINATOR).server(
        server_options(timeouts), MAX_CALLS, service.on_refused
    )
    control_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
    return server


def listen(server: grpc.aio.Server, host: str, port: int) -> str:
    """Bind an address and return it as `host:port`; port 0 lets the system choose one.

    Raises:
        AddressInUseError: somebody else listens there.
        ConfigError: this machine has no such address, or may not use the port.
    """
    address = str(Endpoint(host=host, port=port))
    try:
        # gRPC's own error does not say what was wrong, so it is asked for first.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
        bound = control_security(COORDINATOR).listen(server, address)
        return str(Endpoint(host=host, port=bound))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"something else listens on {address}") from error
        raise ConfigError(f"--bind: cannot listen on {address}: {error.strerror}") from error
    except RuntimeError as error:
        raise AddressInUseError(f"cannot listen on {address}") from error


def server_options(timeouts: Timeouts) -> list[tuple[str, int]]:
    """Return the arguments of the server: it pings connections, and notices a dead path."""
    keepalive_time_ms = int(timeouts.keepalive_time_s * 1000)
    return [
        ("grpc.max_receive_message_length", CONTROL_CHANNEL_BYTES),
        ("grpc.max_send_message_length", CONTROL_CHANNEL_BYTES),
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Two coordinators on one port would share its connections: the second must fail to bind.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
        # Without it gRPC gives a ping that has no answer a minute.
        ("grpc.http2.ping_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Agents ping as often as this server does; half of that leaves room for jitter.
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_time_ms // 2),
    ]


async def _read(context: AgentContext) -> control_pb2.AgentMessage | None:
    """Return the next message; None when the agent has nothing more to say."""
    message = await context.read()
    return message if isinstance(message, control_pb2.AgentMessage) else None


def _clear(blobs: Blobs, folders: Collection[str]) -> None:
    """Forget contents that nothing has used for long, but none of `folders`."""
    used = set(folders)
    for digest in folders:
        used |= {file.digest for file in CarriedFolder.from_bytes(blobs.read(digest)).files}
    blobs.keep_within(STORE_BYTES, used)


async def _wait(changed: asyncio.Event, timeout_s: float) -> None:
    """Return when it is set, or after `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await changed.wait()


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    """Turn errors into their status and one text; what nobody foresaw into INTERNAL, logged."""
    try:
        yield
    except ConfigError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _cut(str(error)))
    except IsthmusError as error:
        status = next((STATUS[each] for each in type(error).__mro__ if each in STATUS), None)
        await context.abort(status or grpc.StatusCode.INTERNAL, _cut(str(error)))
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        log.exception("a call failed")
        if isinstance(error, OSError) and error.filename:
            told = f"at the coordinator: {error.filename}: {error.strerror}"
            await context.abort(STATUS[StateConflictError], _cut(told))
        message = f"{type(error).__name__}; the coordinator's log has more"
        await context.abort(grpc.StatusCode.INTERNAL, message)


def _cut(text: str) -> str:
    """Return as many whole lines as fit into an error's text."""
    kept, size = [], 0
    lines = text.split("\n")
    for line in lines:
        # A header escapes each byte that is not printable ASCII as three.
        size += sum(1 if 0x20 <= byte < 0x7F else 3 for byte in line.encode()) + 3
        if size > MAX_DETAIL_BYTES:
            break
        kept.append(line)
    left_out = len(lines) - len(kept)
    return "\n".join([*kept, f"... and {left_out} more lines"] if left_out else kept)
