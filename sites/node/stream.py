"""The protocol of a site's agent and a node's supervisor: lines of JSON.

docs/protocols.md lists the messages.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args

from isthmus.protos.control.v1.control_pb2 import GatewayEndpoint
from isthmus.protos.failure import Failure
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.rank_stacks import RankStack
from isthmus.topology.spec.json_lines import Kinds

T_co = TypeVar("T_co", covariant=True)

GREETING = "isthmus-node "
"""Prefix of the supervisor's first line; its build follows. A login shell may print before."""
LINE_BYTES = 16 << 20
"""Longest line. The longest are the run's spec and the ends of logs."""
ORDER_S = 60.0
"""Time from the greeting to the order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """The order of one node for a run: the agent's first line."""

    op: ClassVar[str] = "order"
    site: str
    node: int
    prepare: str
    """The coordinator's Prepare, serialised, in base64."""
    state: str
    """Path of the agent's state folder, also used on the node, shared or not."""
    bind_host: str | None
    dialled_host: str | None
    inside_host: str | None
    """Host by which the site's other nodes reach this one; None: all are on one machine."""
    cwd: str
    """The agent's working directory; ranks start there if the node has it."""
    files: Mapping[str, str]
    """Secret files by name, in base64; empty if the node reads the agent's files."""
    env: Mapping[str, str]
    """Environment variables added for ranks and gateways."""
    build: str
    lease_s: float
    """Silence after which either end gives the other up."""
    heartbeat_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Either end's heartbeat."""

    op: ClassVar[str] = "alive"


# ---------------------------------------------------------------- agent to node

SourceLines = tuple[tuple[str, tuple[str, ...]], ...]
"""Log lines by their source (`Lines`, sites/node/log_files.py)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of one of the node's gateways, for other sites."""

    gateway: Annotated[int, (1 << 31) - 1]
    host: str
    port: Annotated[int, (1 << 16) - 1]

    def at(self, site: str) -> GatewayEndpoint:
        """Return the address as other sites get it."""
        return GatewayEndpoint(site=site, gateway=self.gateway, host=self.host, port=self.port)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T_co]):
    """A call of the node: a method of `Node` (sites/node/node.py), or a part of the run's files."""

    op: ClassVar[str]
    answer: ClassVar[Any] = None
    """Type of the result; None: there is none."""
    id: int
    """Number of the call, which its answer repeats."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MissingBlobs(Call[tuple[str, ...]]):
    """Which blobs of the run's carried folder the node lacks, by digest."""

    op: ClassVar[str] = "missing_blobs"
    answer: ClassVar[Any] = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TakeBlob(Call[None]):
    """Gives the node a part of a blob."""

    op: ClassVar[str] = "take_blob"
    part: str
    """BlobPart, serialised, in base64."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartGateways(Call[tuple[Endpoint, ...]]):
    """`Node.start_gateways`."""

    op: ClassVar[str] = "start_gateways"
    answer: ClassVar[Any] = tuple[Endpoint, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WaitConnected(Call[None]):
    """`Node.wait_connected`."""

    op: ClassVar[str] = "wait_connected"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WaitProbed(Call[None]):
    """`Node.wait_probed`."""

    op: ClassVar[str] = "wait_probed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WaitJoined(Call[None]):
    """`Node.wait_joined`."""

    op: ClassVar[str] = "wait_joined"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRanks(Call[None]):
    """`Node.run_ranks`."""

    op: ClassVar[str] = "run_ranks"
    endpoint: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Call[None]):
    """`Node.leave`."""

    op: ClassVar[str] = "leave"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look(Call[RankStack | None]):
    """`Node.look`."""

    op: ClassVar[str] = "look"
    answer: ClassVar[Any] = RankStack | None
    rank: int
    only_stopped: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadLogs(Call[tuple[SourceLines, int]]):
    """`Node.read_logs`."""

    op: ClassVar[str] = "read_logs"
    answer: ClassVar[Any] = tuple[SourceLines, int]
    budget_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadLogEnds(Call[SourceLines]):
    """`Node.read_log_ends`."""

    op: ClassVar[str] = "read_log_ends"
    answer: ClassVar[Any] = SourceLines
    first: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End(Call[bool]):
    """`Node.end`."""

    op: ClassVar[str] = "end"
    answer: ClassVar[Any] = bool
    grace_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForGateways:
    """A command for each of the node's gateways."""

    op: ClassVar[str] = "for_gateways"
    command: Mapping[str, Any]


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
AGENT_LINES: Kinds[AgentLine] = Kinds(*get_args(AgentLine))
"""The kinds of lines that an agent sends after its order."""
ORDERS: Kinds[NodeOrder] = Kinds(NodeOrder)
"""An agent's first line."""


# ---------------------------------------------------------------- node to agent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A call's result."""

    op: ClassVar[str] = "answered"
    id: int
    result: Any
    """Read by the call's `answer`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A call's error."""

    op: ClassVar[str] = "refused"
    id: int
    code: str
    message: str
    node: int
    gateway: int
    log_path: str

    @classmethod
    def of(cls, call: int, error: SiteError) -> Refused:
        """Return the message for an error of that call."""
        return cls(
            id=call,
            code=error.code,
            message=str(error),
            node=error.node,
            gateway=error.gateway,
            log_path=error.log_path,
        )

    def error(self, node: int) -> SiteError:
        """Return the call's error; its place defaults to the node."""
        return SiteError(
            self.code,
            self.message,
            node=max(self.node, node),
            gateway=self.gateway,
            log_path=self.log_path,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FromGateway:
    """A gateway's message to the agent; from gateway -1: the node's own."""

    op: ClassVar[str] = "from_gateway"
    gateway: int
    message: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A failure on the node, with its age, because two machines' clocks differ."""

    op: ClassVar[str] = "failed"
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
NODE_LINES: Kinds[NodeLine] = Kinds(*get_args(NodeLine))
"""The kinds of lines that a node sends after its greeting."""
