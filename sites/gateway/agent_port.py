"""The protocol of a gateway and its agent, as JSON lines, and the gateway's end of the pipes.

Commands come on stdin, answers go to stdout; docs/protocols.md has the conversation.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import IOBase
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

from isthmus.protos.errors import LocalProtocolError, RemoteProtocolError
from isthmus.protos.failure import text_of
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.local.rank_messages import Digest, Failed, Metric
from isthmus.topology.spec.epoch import Epoch, Finished, Handover
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.run_spec import CodedPlan

if TYPE_CHECKING:
    from isthmus.protos.control.v1.control_pb2 import GatewayEndpoint

_log = logging.getLogger(__name__)

_LINES_MAX: Final = 4096
"""Lines that may wait for a slow agent. Beyond that metrics are dropped, and all else waits."""
_WRITE_DEADLINE_S: Final = 10.0
_LINE_BYTES_MAX: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a gateway listens, for those of other sites."""

    site: str
    gateway: Annotated[int, (1 << 31) - 1]
    host: str
    port: Annotated[int, (1 << 16) - 1]

    @classmethod
    def of(cls, endpoint: GatewayEndpoint) -> Address:
        """Return the address in a message of the control plane."""
        return cls(
            site=endpoint.site, gateway=endpoint.gateway, host=endpoint.host, port=endpoint.port
        )


# ---------------------------------------------------------------- agent to gateway


class Connect(Message):
    """The agent's command to dial the peers, with their addresses."""

    peers: tuple[Address, ...]
    sites: tuple[str, ...] | None = None
    """Sites whose gateways `peers` lists. None: all sites of the run."""


class Settle(Message):
    """The membership or plan will change: begin no new round, and report progress."""

    epoch: int
    stops: bool
    """Also stop all chunks, because a site or a link that they need is lost."""
    reduction: CodedPlan | None = None
    """The plan of the new epoch, to open its links early. None: not known yet."""


class Resume(Message):
    """The command to begin a new epoch."""

    epoch: Epoch
    handovers: tuple[Handover, ...] = ()
    enters: tuple[str, ...] = ()
    """Members that rejoin. The others begin the epoch with the round that their ranks mark."""


class Cancel(Message):
    """The announced change is called off: go on in the old epoch."""

    epoch: int


class Revoke(Message):
    """The command to refuse the certificates in a list, and to break connections that show them."""

    list: str
    """X.509 CRL in PEM."""


Command = Connect | Settle | Resume | Cancel | Revoke
_CONFIGURATIONS: Final[Kinds[GatewayConfig]] = Kinds(
    "agent to gateway", GatewayConfig, LocalProtocolError
)
_COMMANDS: Final[Kinds[Command]] = Kinds("agent to gateway", Command, LocalProtocolError)


# ---------------------------------------------------------------- gateway to agent


class Listening(Message):
    """Where other sites' gateways reach this one."""

    host: str
    port: Annotated[int, (1 << 16) - 1]


class Connected(Message):
    """Every gateway that this one needs has answered Hello."""


class Joined(Message):
    """All ranks of the gateway have connected."""

    ranks: tuple[int, ...]


class Probed(Message):
    """The links are measured, and no peer needs this gateway any more."""


class Settled(Message):
    """The gateway begins no new round; what it has finished."""

    epoch: int
    round: int
    finished: tuple[Finished, ...]
    chains: Mapping[int, int]
    """By round: the checksum of all results up to it."""
    why: str = ""
    """What is in the way of the plan; empty: nothing."""
    codecs_fixed: bool = False
    """Whether `why` is that the codecs may not change."""


class Resumed(Message):
    """The gateway is in an epoch."""

    epoch: int
    round: int
    behind: int = 0
    """Rounds until a site that is catching up has caught up."""


class RankLeft(Message):
    """A rank is done with the job; `round` is the gateway's latest."""

    rank: int
    round: int


class Left(Message):
    """The site has left the run, and its ranks have all results."""


class Suspect(Message):
    """A site is not reached."""

    site: str
    is_gone: bool
    why: str


class Reached(Message):
    """A site that was suspected is reached again."""

    site: str


@dataclass(frozen=True, slots=True)
class Still:
    """A rank that has not moved for so long, since that round."""

    rank: int
    for_s: float
    round: int


class Stalled(Message):
    """Ranks that have not moved for too long; replaces the gateway's previous report."""

    absent: tuple[Still, ...]
    """They have submitted nothing."""
    waiting: tuple[Still, ...]
    """They wait for results."""
    behind: bool
    """Whether other sites wait for this one."""


Report = Metric | Digest | Settled | Resumed | RankLeft | Left | Suspect | Reached | Stalled
"""What is for the agent; a node has metrics of its own."""
Said = Listening | Connected | Joined | Probed | Failed | Report
SAID: Final[Kinds[Said]] = Kinds("gateway to agent", Said, RemoteProtocolError)


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

    def write(self, message: Said) -> None:
        """Queue one line. It is lost if the agent has ended."""
        if self._broken:
            return
        line = line_of(message)
        try:
            if isinstance(message, Metric):
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
    line = stream.readline(_LINE_BYTES_MAX)
    return _CONFIGURATIONS.read(line) if line else None


def read_commands(stream: IOBase) -> Iterator[Command]:
    """Yield the commands after the configuration until the agent closes stdin.

    Raises:
        LocalProtocolError: a line is not a valid command.
    """
    while line := stream.readline(_LINE_BYTES_MAX):
        yield _COMMANDS.read(line)
