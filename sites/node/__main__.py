"""`python -m isthmus.sites.node`: the supervisor of one node, on the node's machine.

The supervisor prints GREETING and its build, reads its order as one line, and then answers its
agent's calls (sites/node/stream.py). When stdin ends or is silent for longer than the lease, or a
signal comes, it ends all its processes and itself. It does not rely on signals: killing an SSH
client sends none to the remote processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from isthmus.protos.control.v1.control_pb2 import BlobPart, Prepare
from isthmus.protos.errors import IsthmusError, RemoteProtocolError
from isthmus.protos.failure import Failure, reason_of, text_of
from isthmus.protos.private_files import keep_private, private_folder
from isthmus.protos.save_time import save_within_s
from isthmus.protos.versions import build
from isthmus.sites.gateway.agent_port import Report
from isthmus.sites.local.rank_messages import Metric
from isthmus.sites.node.carried import blobs_of, missing_of
from isthmus.sites.node.children import adopt_orphans, kill_descendants
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.node import Listener
from isthmus.sites.node.order import make_order, read_spec
from isthmus.sites.node.site_data import DataAtSite
from isthmus.sites.node.sockets import socket_folder
from isthmus.sites.node.stream import (
    AGENT_LINES,
    GREETING,
    LINE_BYTES,
    ORDER_S,
    ORDERS,
    Alive,
    Answered,
    Call,
    End,
    Failed,
    ForGateways,
    FromGateway,
    Leave,
    Look,
    MissingBlobs,
    NodeLine,
    NodeOrder,
    ReadLogEnds,
    ReadLogs,
    Refused,
    RunRanks,
    StartGateways,
    TakeBlob,
    WaitConnected,
    WaitJoined,
    WaitProbed,
)
from isthmus.sites.node.supervisor import Supervisor
from isthmus.sites.silence import Silence, Standstills
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.json_lines import line_of
from isthmus.topology.spec.run_spec import RunSpec

_STAGES = (StartGateways, WaitConnected, WaitProbed, WaitJoined, RunRanks, Leave)
"""Calls that last until they are done or the run is to end."""
TERMINATED_S = 5.0
"""Time after SIGTERM for the agent to end this process, beyond its last checkpoint. Slurm sends
SIGTERM to all processes of a site at once, and the agent first has a checkpoint written."""

log = logging.getLogger(__name__)


def main() -> int:
    """Supervise one run on this node; return the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s node: %(message)s")
    keep_private()
    adopt_orphans()
    try:
        return asyncio.run(_serve())
    except (IsthmusError, ValueError, OSError) as error:
        print(f"error: {text_of(error)}", file=sys.stderr)  # noqa: T201
        return 1


async def _serve() -> int:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, ended.set)

    def end_later() -> None:
        loop.call_later(save_within_s(os.environ) + TERMINATED_S, ended.set)

    loop.add_signal_handler(signal.SIGTERM, end_later)
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout)
    writer.write(f"{GREETING}{build()}\n".encode())
    async with asyncio.timeout(ORDER_S):
        line = await reader.readline()
    if not line:
        return 0
    order = ORDERS.read(line)
    if order.build != build():
        raise ValueError(f"this is isthmus {build()}, and the agent's is {order.build}")
    with contextlib.suppress(OSError):
        os.chdir(order.cwd)
    private_folder(Path(order.state))
    with _secrets(order), socket_folder() as sockets:
        async with asyncio.TaskGroup() as tasks:
            service = _Service(order, sockets, writer, tasks)
            await service.serve(reader, ended)
    return 0


@contextmanager
def _secrets(order: NodeOrder) -> Iterator[None]:
    """Keep an order's secret files, readable only by the user, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="isthmus-node-") as folder:
        for name, content in order.files.items():
            path = Path(folder, name)
            if path.parent != Path(folder):
                raise ValueError(f"{name!r} is not the name of a file")
            path.write_bytes(content)  # the umask keeps it private
        for name, value in order.env.items():
            os.environ[name] = value.replace("{folder}", folder)
        yield


class _Service:
    """Answers the agent's calls with a Supervisor."""

    def __init__(
        self,
        order: NodeOrder,
        sockets: Path,
        writer: asyncio.WriteTransport,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._order = order
        self._sockets = sockets
        self._writer = writer
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._stages: set[asyncio.Task[None]] = set()
        self._blobs = blobs_of(Path(order.state))
        self._supervisor: Supervisor | None = None
        self._grace_s = 0.0

    async def serve(self, reader: asyncio.StreamReader, ended: asyncio.Event) -> None:
        """Serve until the agent has gone, or a signal comes; leave no process behind."""
        silence = Silence(time.monotonic())
        reading = asyncio.create_task(self._read(reader, silence), name="agent")
        watching = asyncio.create_task(self._watch(silence), name="silence")
        signalled = asyncio.create_task(ended.wait(), name="signal")
        waits = (reading, watching, signalled)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.wait(waits)
            await self._end(self._grace_s)
        if reading.done() and not reading.cancelled() and (error := reading.exception()):
            raise error

    async def _read(self, reader: asyncio.StreamReader, silence: Silence) -> None:
        while line := await reader.readline():
            silence.hear(time.monotonic())
            try:
                message = AGENT_LINES.read(line)
            except RemoteProtocolError as error:
                log.warning("ending: %s", error)
                return
            if isinstance(message, Call):
                call = self._tasks.create_task(self._answer(message), name=message.op)
                if isinstance(message, _STAGES):
                    self._stages.add(call)
                    call.add_done_callback(self._stages.discard)
            elif isinstance(message, ForGateways) and self._supervisor is not None:
                self._supervisor.tell_gateways(message.command)

    async def _watch(self, silence: Silence) -> None:
        """Send heartbeats; return once the agent has been silent for too long."""
        order = self._order
        standstills = Standstills(time.monotonic(), order.lease_s)
        while silence.lasts_s(now_s := time.monotonic()) < order.lease_s:
            if standstills.look(now_s, order.heartbeat_s):
                silence.begin_anew(now_s)
            self._say(Alive())
            await asyncio.sleep(order.heartbeat_s)
        log.warning("the agent has said nothing for %g s", order.lease_s)

    async def _answer(self, call: Call[Any]) -> None:
        try:
            result = await self._call(call)
        except SiteError as error:
            failed = error
        except (KeyError, TypeError, ValueError) as error:
            failed = SiteError("INTERNAL", f"{call.op}: {reason_of(error)}")
        except OSError as error:  # no space or processes: the machine's fault, not a bug
            said = f"{error.filename or 'node'}: {error.strerror or error}"
            failed = SiteError("LAUNCH_FAILED", said)
        else:
            self._say(Answered(id=call.id, result=to_json(result)))
            return
        self._say(Refused(id=call.id, failure=failed.failure))

    async def _call(self, call: Call[Any]) -> object:
        match call:
            case MissingBlobs():
                _, spec = self._run
                return await asyncio.to_thread(missing_of, self._blobs, spec)
            case TakeBlob():
                try:
                    part = BlobPart.FromString(call.part)
                    await asyncio.to_thread(self._blobs.take, part)
                except (IsthmusError, DecodeError) as error:
                    raise SiteError("CORRUPT_DATA", f"a carried file: {text_of(error)}") from error
                return None
            case StartGateways():
                self._supervisor = await self._prepared()
            case End():
                return await self._end(call.grace_s)
        supervisor = self._supervisor
        if supervisor is None:
            raise SiteError("LAUNCH_FAILED", f"{call.op}: nothing was started here")
        match call:
            case StartGateways():
                return tuple(await supervisor.start_gateways())
            case WaitConnected():
                await supervisor.wait_connected()
            case WaitProbed():
                await supervisor.wait_probed()
            case WaitJoined():
                await supervisor.wait_joined()
            case RunRanks():
                await supervisor.run_ranks(call.endpoint)
            case Leave():
                await supervisor.leave()
            case Look():
                return await supervisor.look(call.rank, only_stopped=call.only_stopped)
            case ReadLogs():
                return await supervisor.read_logs(call.budget_bytes)
            case ReadLogEnds():
                return await supervisor.read_log_ends(call.first)
        return None

    @functools.cached_property
    def _run(self) -> tuple[Prepare, RunSpec]:
        """The run, as the coordinator has sent it to the agent."""
        prepare = Prepare.FromString(self._order.prepare)
        return prepare, read_spec(prepare, self._order.site)

    async def _prepared(self) -> Supervisor:
        order, (prepare, spec) = self._order, self._run
        read = await asyncio.to_thread(make_order, prepare, spec, order.site, Path(order.state))

        def told(metric: Metric) -> None:
            self._loop.call_soon_threadsafe(self._on_said, -1, metric)

        data = DataAtSite(read, Path(order.state), told)
        try:
            await asyncio.to_thread(data.provide)
        finally:
            data.stop()
        self._grace_s = read.spec.timeouts.stop_grace_s / 2
        return Supervisor(
            read,
            order.node,
            self._sockets,
            bind_host=order.bind_host,
            dialled_host=order.dialled_host,
            inside_host=order.inside_host,
            namespace=prepare.namespace if prepare.HasField("namespace") else None,
            listener=Listener(self._on_said, self._on_failed),
            tasks=self._tasks,
        )

    async def _end(self, grace_s: float) -> bool:
        """End all processes; a second call finds none."""
        stages = list(self._stages)
        for stage in stages:
            stage.cancel()
        if stages:
            await asyncio.wait(stages)  # a stage may be starting a process
        supervisor = self._supervisor
        if supervisor is None:
            return True
        await supervisor.end(grace_s)
        return await kill_descendants(supervisor.children)

    def _on_said(self, gateway: int, message: Report) -> None:
        self._say(FromGateway(gateway=gateway, message=message))

    def _on_failed(self, failure: Failure) -> None:
        self._say(Failed.of(failure))

    def _say(self, message: NodeLine) -> None:
        self._writer.write(line_of(message))


if __name__ == "__main__":
    sys.exit(main())
