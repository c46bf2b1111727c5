"""A node whose supervisor is another process, usually on another machine: the agent's end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any, TypeVar

from isthmus.protos.blobs import Blobs
from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.failure import Failure, text_of
from isthmus.protos.private_files import users_umask
from isthmus.sites.gateway.agent_port import Address, Command
from isthmus.sites.node.children import KILL_S, send, start_leashed, wait_ended
from isthmus.sites.node.failures import SiteError, describe_end
from isthmus.sites.node.log_files import Lines, LogFiles
from isthmus.sites.node.node import Listener
from isthmus.sites.node.rank_stacks import RankStack
from isthmus.sites.node.stream import (
    GREETING,
    LINE_BYTES,
    NODE_LINES,
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
from isthmus.sites.silence import Silence, Standstills
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import Message, read_json
from isthmus.topology.spec.json_lines import line_of

_EXIT_S = 2.0
"""Time between the end of a supervisor's output and that of its process."""
_CLOSE_S = 5.0
"""Time for a supervisor to send its last log lines and end."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class _LostError(Exception):
    """The node no longer answers; the listener has the reason."""


class RemoteNode:
    """Implements `Node` (sites/node/node.py) with a supervisor in another process."""

    def __init__(
        self,
        order: NodeOrder,
        process: asyncio.subprocess.Process,
        listener: Listener,
        log_path: Path,
    ) -> None:
        self.index = order.node
        self.process = process
        self._order = order
        self._listener = listener
        self._log_path = log_path
        self._own_log = LogFiles(lambda: [(f"node{order.node}", log_path)])
        self._calls: dict[int, tuple[Call[Any], asyncio.Future[Any]]] = {}
        self._ids = itertools.count()
        self._silence = Silence(time.monotonic())
        self._ended = False
        self._lost = False
        self._log_ends: Lines = []

    @classmethod
    async def start(
        cls,
        order: NodeOrder,
        command: Sequence[str],
        listener: Listener,
        log_path: Path,
        within_s: float,
    ) -> RemoteNode:
        """Start a supervisor with a command, and send its order. Then run `read`.

        Args:
            order: The run, for this node.
            command: Its stdin and stdout are the supervisor's.
            listener: Receives the node's messages, and its loss.
            log_path: File for the command's stderr.
            within_s: Time limit for the supervisor's greeting.

        Raises:
            SiteError: the supervisor does not start.
        """
        with log_path.open("ab") as log_file:
            process = await start_leashed(
                command,
                env=os.environ,
                log=log_file,
                talks=True,
                umask=users_umask(),
                line_bytes=LINE_BYTES,
            )
        node = cls(order, process, listener, log_path)
        try:
            async with asyncio.timeout(within_s):
                await node._greeted()
        except BaseException as error:
            send(process, SIGKILL)
            await process.wait()
            if isinstance(error, TimeoutError):
                said = f"did not begin within {within_s:g} s"
                raise node._not_started(said) from error
            raise
        node._write(order)
        return node

    async def _greeted(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.startswith(GREETING.encode()):
                return
        raise self._not_started(self._end(await self.process.wait()))

    async def read(self) -> None:
        """Handle the node's messages until it ends."""
        watching = asyncio.create_task(self._watch(), name=f"silence-node{self._order.node}")
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                self._silence.hear(time.monotonic())
                self._handle(line)
        except ValueError:  # longer than any line of the protocol
            self._lose("wrote too long a line")
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        try:
            async with asyncio.timeout(_EXIT_S):
                exit_code = await self.process.wait()
        except TimeoutError:
            self._lose("closed its output")
        else:
            self._lose(self._end(exit_code), exit_code)

    def _handle(self, line: bytes) -> None:
        try:
            match NODE_LINES.read(line):
                case Answered() | Refused() as message:
                    self._answered(message)
                case FromGateway(gateway=gateway, message=message):
                    self._listener.on_said(gateway, message)
                case Failed() as message:
                    self._listener.on_failed(message.here())
        except (RemoteProtocolError, ValueError) as error:
            text = line[:200].decode(errors="replace").strip()
            said = f"said {text!r}: {text_of(error)}"
            log.warning("node %d %s", self._order.node, said)
            self._listener.on_failed(self._failure("INTERNAL", said))

    def _answered(self, message: Answered | Refused) -> None:
        call, answer = self._calls.pop(message.id, (None, None))
        if call is None or answer is None or answer.done():
            return
        if isinstance(message, Refused):
            answer.set_exception(message.error(self._order.node))
            return
        try:
            answer.set_result(call.answer and read_json(call.answer, message.result, call.op))
        except ConfigError as error:
            said = f"the supervisor of {self._name} answered {error.problems[0].message}"
            answer.set_exception(SiteError("INTERNAL", said, node=self._order.node))

    async def _watch(self) -> None:
        """Send heartbeats; give the node up once it has been silent for too long."""
        order = self._order
        standstills = Standstills(time.monotonic(), order.lease_s)
        while self._silence.lasts_s(now_s := time.monotonic()) < order.lease_s:
            if standstills.look(now_s, order.heartbeat_s):
                self._silence.begin_anew(now_s)
            self._write(Alive())
            await asyncio.sleep(order.heartbeat_s)
        self._lose(f"has said nothing for {order.lease_s:g} s")
        send(self.process, SIGKILL)

    def _lose(self, how: str, exit_code: int = 0) -> None:
        """Handle the node's end: report it unless it was requested, and fail pending calls."""
        if not self._lost and not self._ended:
            self._listener.on_failed(self._failure("NODE_LOST", how, exit_code))
        self._lost = True
        for _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(_LostError())
        self._calls.clear()

    def _failure(self, code: str, how: str, exit_code: int = 0) -> Failure:
        return Failure(
            code=code,
            message=f"the supervisor of {self._name} {how}",
            at_s=time.monotonic(),
            site=self._order.site,
            node=self._order.node,
            exit_code=exit_code,
            log_path=str(self._log_path),
        )

    @property
    def _name(self) -> str:
        host = f" ({self._order.inside_host})" if self._order.inside_host else ""
        return f"node {self._order.node} of site {self._order.site}{host}"

    def _not_started(self, how: str) -> SiteError:
        return SiteError(
            "LAUNCH_FAILED",
            f"the supervisor of {self._name} {how}",
            node=self._order.node,
            log_path=str(self._log_path),
        )

    def _end(self, exit_code: int) -> str:
        """Return how the supervisor's process ended, with its last words."""
        lines = [line for _, said in self._own_log.read_ends([]) for line in said if line.strip()]
        last = f": {lines[-1].strip()}" if lines and exit_code >= 0 else ""
        return f"{describe_end(exit_code)}{last}"

    def _write(self, message: Message) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(line_of(message))

    async def _call(self, call: Call[T]) -> T:
        """Call the supervisor, and return its answer.

        Raises:
            SiteError: the supervisor could not do it, or answers something else.
            _LostError: the node is gone.
        """
        if self._lost:
            raise _LostError
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls[call.id] = call, answer
        self._write(call)
        return await answer

    async def _stage(self, call: Call[T]) -> T:
        """Have the node run a stage; if the node is lost meanwhile, never return."""
        try:
            return await self._call(call)
        except _LostError:
            never: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            return await never

    async def carry(self, blobs: Blobs) -> None:
        """Give the node what it lacks of the run's carried folder."""
        while missing := await self._stage(MissingBlobs(id=next(self._ids))):
            for part in blobs.parts(missing):
                await self._stage(TakeBlob(id=next(self._ids), part=part.SerializeToString()))

    async def start_gateways(self) -> Sequence[Address]:
        """Start the node's gateways and return their addresses for other sites."""
        return await self._stage(StartGateways(id=next(self._ids)))

    def tell_gateways(self, message: Command) -> None:
        """Send one command to each gateway."""
        self._write(ForGateways(command=message))

    async def wait_connected(self) -> None:
        """Wait until all gateways have reached the peers that they need."""
        await self._stage(WaitConnected(id=next(self._ids)))

    async def wait_probed(self) -> None:
        """Wait until the node's gateways, and their peers, have measured all links."""
        await self._stage(WaitProbed(id=next(self._ids)))

    async def wait_joined(self) -> None:
        """Wait until all of the node's ranks have joined, however long their script needs."""
        await self._stage(WaitJoined(id=next(self._ids)))

    async def run_ranks(self, endpoint: str) -> None:
        """Start torchrun and wait until it ends, well or not; `endpoint` is node 0's."""
        await self._stage(RunRanks(id=next(self._ids), endpoint=endpoint))

    async def leave(self) -> None:
        """Have the gateways leave after the ranks, and wait until they have ended."""
        await self._stage(Leave(id=next(self._ids)))

    async def look(self, rank: int, *, only_stopped: bool) -> RankStack | None:
        """Return a rank's stack; None if `only_stopped` and the rank is not stopped."""
        try:
            call = Look(id=next(self._ids), rank=rank, only_stopped=only_stopped)
            return await self._call(call)
        except (_LostError, SiteError):
            return None

    async def read_logs(self, budget_bytes: int) -> tuple[Lines, int]:
        """Return new lines and their size in bytes, at most the budget."""
        own, own_bytes = await asyncio.to_thread(self._own_log.read, budget_bytes // 8)
        if self._ended:
            return own, own_bytes
        try:
            call = ReadLogs(id=next(self._ids), budget_bytes=budget_bytes - own_bytes)
            lines, read_bytes = await self._call(call)
        except (_LostError, SiteError):
            return own, own_bytes
        return [*own, *lines], own_bytes + read_bytes

    async def read_log_ends(self, first: Sequence[str]) -> Lines:
        """Return the last lines of every source, as of the node's closing."""
        own = await asyncio.to_thread(self._own_log.read_ends, first)
        return [*own, *self._log_ends]

    async def end(self, grace_s: float) -> bool:
        """End ranks, then gateways, then the node's other processes."""
        self._ended = True
        try:
            async with asyncio.timeout(grace_s + 2 * KILL_S):
                return await self._call(End(id=next(self._ids), grace_s=grace_s))
        except (_LostError, SiteError):
            return True  # its processes ended with it
        except TimeoutError:
            return False

    async def close(self) -> None:
        """Fetch the ends of the node's logs, then end the supervisor."""
        self._ended = True
        with contextlib.suppress(_LostError, SiteError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                call = ReadLogEnds(id=next(self._ids), first=())
                self._log_ends = await self._call(call)
        if self.process.stdin is not None:
            self.process.stdin.close()
        if not await wait_ended([self.process], time.monotonic() + _CLOSE_S):
            send(self.process, SIGKILL)
            await self.process.wait()
