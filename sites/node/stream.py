"""The protocol of a site's agent and a node's supervisor: lines of JSON.

docs/protocols.md lists the messages.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.failure import Failure
from isthmus.sites.gateway.agent_port import Address, Command, Report
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.rank_stacks import RankStack
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.json_lines import Kinds

T_co = TypeVar("T_co", covariant=True)

GREETING = "isthmus-node "
"""Prefix of the supervisor's first line; its build follows. A login shell may print before."""
LINE_BYTES = 16 << 20
"""Longest line. The longest are the run's spec and the ends of logs."""
ORDER_S = 60.0
"""Time from the greeting to the order."""


class NodeOrder(Message):
    """The order of one node for a run: the agent's first line."""

    site: str
    node: int
    prepare: bytes
    """The coordinator's Prepare, serialised."""
    state: str
    """Path of the agent's state folder, also used on the node, shared or not."""
    bind_host: str | None
    dialled_host: str | None
    inside_host: str | None
    """Host by which the site's other nodes reach this one; None: all are on one machine."""
    cwd: str
    """The agent's working directory; ranks start there if the node has it."""
    files: Mapping[str, bytes]
    """Secret files by name; empty if the node reads the agent's files."""
    env: Mapping[str, str]
    """Environment variables added for ranks and gateways."""
    build: str
    lease_s: float
    """Silence after which either end gives the other up."""
    heartbeat_s: float


class Alive(Message):
    """Either end's heartbeat."""


# ---------------------------------------------------------------- agent to node

SourceLines = tuple[tuple[str, tuple[str, ...]], ...]
"""Log lines by their source (`Lines`, sites/node/log_files.py)."""


class Call(Message, Generic[T_co]):
    """A call of the node: a method of `Node` (sites/node/node.py), or a part of the run's files."""

    answer: ClassVar[Any] = None
    """Type of the result; None: there is none."""
    id: int
    """Number of the call, which its answer repeats."""


class MissingBlobs(Call[tuple[str, ...]]):
    """Which blobs of the run's carried folder the node lacks, by digest."""

    answer: ClassVar[Any] = tuple[str, ...]


class TakeBlob(Call[None]):
    """Gives the node a part of a blob."""

    part: bytes
    """BlobPart, serialised."""


class StartGateways(Call[tuple[Address, ...]]):
    """`Node.start_gateways`."""

    answer: ClassVar[Any] = tuple[Address, ...]


class WaitConnected(Call[None]):
    """`Node.wait_connected`."""


class WaitProbed(Call[None]):
    """`Node.wait_probed`."""


class WaitJoined(Call[None]):
    """`Node.wait_joined`."""


class RunRanks(Call[None]):
    """`Node.run_ranks`."""

    endpoint: str


class Leave(Call[None]):
    """`Node.leave`."""


class Look(Call[RankStack | None]):
    """`Node.look`."""

    answer: ClassVar[Any] = RankStack | None
    rank: int
    only_stopped: bool


class ReadLogs(Call[tuple[SourceLines, int]]):
    """`Node.read_logs`."""

    answer: ClassVar[Any] = tuple[SourceLines, int]
    budget_bytes: int


class ReadLogEnds(Call[SourceLines]):
    """`Node.read_log_ends`."""

    answer: ClassVar[Any] = SourceLines
    first: tuple[str, ...]


class End(Call[bool]):
    """`Node.end`."""

    answer: ClassVar[Any] = bool
    grace_s: float


class ForGateways(Message):
    """A command for each of the node's gateways."""

    command: Command


AgentLine = (
    Alive
    | MissingBlobs
    | TakeBlob
    | StartGateways
    | WaitConnected
    | WaitProbed
    | WaitJoined
    | RunRanks
    | Leave
    | Look
    | ReadLogs
    | ReadLogEnds
    | End
    | ForGateways
)
AGENT_LINES: Kinds[AgentLine] = Kinds("agent to node", AgentLine, RemoteProtocolError)
"""The kinds of lines that an agent sends after its order."""
ORDERS: Kinds[NodeOrder] = Kinds("agent to node", NodeOrder, RemoteProtocolError)
"""An agent's first line."""


# ---------------------------------------------------------------- node to agent


class Answered(Message):
    """A call's result."""

    id: int
    result: Any
    """Read by the call's `answer`."""


class Refused(Message):
    """A call's error."""

    id: int
    failure: Failure

    def error(self, node: int) -> SiteError:
        """Return the call's error; its place defaults to the node."""
        what = self.failure
        return SiteError(
            what.code,
            what.message,
            node=max(what.node, node),
            gateway=what.gateway,
            log_path=what.log_path,
        )


class FromGateway(Message):
    """A gateway's message to the agent; from gateway -1: the node's own."""

    gateway: int
    message: Report


class Failed(Message):
    """A failure on the node, with its age, because two machines' clocks differ."""

    failure: Failure
    age_s: float

    @classmethod
    def of(cls, failure: Failure) -> Failed:
        """Return the message for a failure, as old as it is now."""
        return cls(failure=failure, age_s=time.monotonic() - failure.at_s)

    def here(self) -> Failure:
        """Return the failure, dated by this machine's clock."""
        return dataclasses.replace(self.failure, at_s=time.monotonic() - max(0.0, self.age_s))


NodeLine = Alive | Answered | Refused | FromGateway | Failed
NODE_LINES: Kinds[NodeLine] = Kinds("node to agent", NodeLine, RemoteProtocolError)
"""The kinds of lines that a node sends after its greeting."""
