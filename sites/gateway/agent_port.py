"""The gateway's end of the pipe to its agent: JSON lines in on stdin, out on stdout."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import IOBase
from typing import Any, BinaryIO, ClassVar, Final, TypeVar, get_args

from isthmus.protos.errors import LocalProtocolError
from isthmus.protos.failure import text_of
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.transport import Peer
from isthmus.topology.spec.epoch import Handover
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_lines import Kinds, Message
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.regime import AS_LAUNCHED, Rung
from isthmus.topology.spec.run_spec import CodedPlan
from isthmus.topology.spec.shares import AS_BEGUN, Shares

M = TypeVar("M", bound=Message)
_log = logging.getLogger(__name__)

_LINES_MAX: Final = 4096
"""Lines that may wait for a slow agent. Beyond that metrics are dropped, and all else waits."""
_WRITE_DEADLINE_S: Final = 10.0
_LINE_BYTES_MAX: Final = 4 << 20
_DROPPABLE = frozenset({"metric"})


@dataclass(frozen=True, slots=True)
class Connect:
    """The agent's command to dial the peers, with their addresses."""

    op: ClassVar[str] = "connect"
    peers: tuple[Peer, ...]
    sites: tuple[str, ...] | None = None
    """Sites whose gateways `peers` lists. None: all sites of the run."""


@dataclass(frozen=True, slots=True)
class Settle:
    """The membership or plan will change: begin no new round, and report progress."""

    op: ClassVar[str] = "settle"
    epoch: int
    stops: bool
    """Also stop all chunks, because a site or a link that they need is lost."""
    reduction: CodedPlan | None = None
    """The plan of the new epoch, to open its links early. None: not known yet."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The command to begin a new epoch: the wire form of `Epoch` (topology/spec/epoch.py)."""

    op: ClassVar[str] = "resume"
    epoch: int
    from_round: int
    members: tuple[str, ...]
    plan: ReductionPlan
    codecs: tuple[str, ...]
    handovers: tuple[Handover, ...] = ()
    enters: tuple[str, ...] = ()
    """Members that rejoin. The others begin the epoch with the round that their ranks mark."""
    follows: tuple[str, ...] = ()
    """Members that are catching up: they get results and contribute nothing."""
    shares: Shares = AS_BEGUN
    """What sites get of the batch."""
    rung: Rung = AS_LAUNCHED
    """The regime."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The announced change is called off: go on in the old epoch."""

    op: ClassVar[str] = "cancel"
    epoch: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """The command to refuse the certificates in a list, and to break connections that show them."""

    op: ClassVar[str] = "revoke"
    list: str
    """X.509 CRL in PEM."""


Command = Connect | Settle | Resume | Cancel | Revoke
_CONFIGURATIONS: Final[Kinds[GatewayConfig]] = Kinds(GatewayConfig)
_COMMANDS: Final[Kinds[Command]] = Kinds(*get_args(Command))


class AgentWriter:
    """Writes lines from any thread without ever blocking on the pipe itself."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[bytes | None] = queue.Queue(_LINES_MAX)
        self._thread = threading.Thread(target=self._run, name="agent-writer", daemon=True)
        self._num_dropped = 0
        self._broken = False

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def write(self, message: Mapping[str, Any]) -> None:
        """Queue one line. It is lost if the agent has ended."""
        if self._broken:
            return
        line = json.dumps(message).encode() + b"\n"
        try:
            if message["op"] in _DROPPABLE:
                self._lines.put_nowait(line)
            else:
                self._lines.put(line, timeout=_WRITE_DEADLINE_S)
        except queue.Full:
            self._num_dropped += 1
            _log.warning("the agent reads too slowly: %d lines dropped", self._num_dropped)

    def close(self) -> None:
        """Write the queued lines, and stop the thread."""
        if self._broken:
            return
        try:
            self._lines.put(None, timeout=_WRITE_DEADLINE_S)
        except queue.Full:
            return
        self._thread.join(_WRITE_DEADLINE_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line)
                self._stream.flush()
            except OSError as error:
                _log.warning("the agent does not read any more: %s", text_of(error))
                self._broken = True
                return


def read_configuration(stream: IOBase) -> GatewayConfig | None:
    """Return the configuration in the first line; None if stdin ends before.

    Raises:
        LocalProtocolError: the line is not a valid configuration.
    """
    return next(_messages(stream, _CONFIGURATIONS), None)


def read_commands(stream: IOBase) -> Iterator[Command]:
    """Yield the commands after the configuration until the agent closes stdin.

    Raises:
        LocalProtocolError: a line is not a valid command.
    """
    return _messages(stream, _COMMANDS)


def _messages(stream: IOBase, kinds: Kinds[M]) -> Iterator[M]:
    while line := stream.readline(_LINE_BYTES_MAX):
        try:
            yield kinds.read(line)
        except ConfigError as error:
            raise LocalProtocolError(f"stdin: {error.problems[0].message}") from error
