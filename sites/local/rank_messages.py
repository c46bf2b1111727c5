"""The messages between a rank and its gateway.

They cross a Unix SOCK_SEQPACKET socket as one JSON object per message; docs/protocols.md has the
conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final

from isthmus.protos.errors import (
    IsthmusError,
    LocalProtocolError,
    PeerLostError,
    RankLostError,
    RemoteProtocolError,
    ScriptError,
)
from isthmus.protos.failure import Failure
from isthmus.protos.limits import LOCAL_MESSAGE_BYTES
from isthmus.sites.local.sharing import Sharing, sharing_of
from isthmus.sites.local.squares import Units
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.regime import AS_LAUNCHED, Rung
from isthmus.topology.spec.shares import AS_BEGUN, Shares

WEIGHT_MAX = float(1 << 53)
"""Largest token count of a bucket: up to here float64 holds every integer."""

Count = Annotated[int, (1 << 63) - 1]
UInt32 = Annotated[int, (1 << 32) - 1]
UInt64 = Annotated[int, (1 << 64) - 1]
Factor = Annotated[float, 1.0]
Weight = Annotated[float, WEIGHT_MAX]
"""Numbers from 0 to the annotated limit."""


class Form(StrEnum):
    """The form in which a rank submits its shard of a bucket."""

    VALUES = "values"
    """float32. The gateway encodes it, and keeps the residual."""
    ENCODED = "encoded"
    """Encoded: a chunk's body (`BodyCodec`) begins at the place of its first element. The rank
    keeps the residual. Chunks of trees whose codec has no bodies are as in VALUES."""
    UNFIT = "unfit"
    """float32 with values that the codec cannot encode, such as NaN. The rank has already added its
    residual; the gateway encodes as usual, and keeps no residual."""


# ---------------------------------------------------------------- rank to gateway


class Join(Message):
    """The first message of a rank."""

    rank: Count
    """Rank inside the site."""
    generation: Count
    """Generation of the run."""
    local_rank: Count = 0
    """Rank on the node."""
    pid: Count = 0
    encodes: bool = False
    """Whether the rank accepts the gateway's offer to encode, if there is one."""


class Region(Message):
    """Shared memory: float32[numel] in a memfd that comes with the message.

    A region with a known id replaces the earlier one. sites/local/regions.py makes the memory.
    """

    region: Count
    numel: Count


class Reduce(Message):
    """Request to reduce this rank's shard of a bucket, stored in a region, over all sites."""

    round: Count
    bucket: UInt32
    region: Count
    offset: Count = 0
    """Offset of the shard in its region, in elements."""
    numel: Count
    """float32 elements of the whole bucket, not of the shard."""
    layout: UInt32
    """crc32c of the bucket's layout: equal on all ranks of all sites."""
    weight: Weight
    """Tokens of the whole site for the bucket."""
    exact: bool
    """Send the bucket as fp32 whatever the link's codec."""
    form: Form = Form.VALUES
    """Form of the shard in the region."""
    encoded_bytes: Count = 0
    """Total size of the bodies, if the region holds bodies."""
    enters: Count = 0
    """Epoch that begins with this round (see `Members`). 0: none."""
    participants: tuple[tuple[Count, ...], ...] = ()
    """The ranks that share and submit the bucket, by site, ascending. Empty for a site: all its
    ranks; empty altogether: all ranks of all sites. Equal on all ranks of all sites."""
    after: Count = 0
    """One more than the preceding bucket of the round that other ranks of this gateway share, and
    this rank does not. 0: none."""

    def sharing(self, ranks_per_site: tuple[int, ...]) -> Sharing:
        """Return the ranks that share the bucket, in the form that `grid` takes.

        Raises:
            LocalProtocolError: a rank does not exist.
        """
        try:
            return sharing_of(self.participants, ranks_per_site)
        except ValueError as error:
            raise LocalProtocolError(f"reduce.participants: {error}") from error


class Handed(Message):
    """The script has submitted a bucket. Its `Reduce` follows once all ranks of the site have."""

    round: Count


class Moved(Message):
    """The rank does not hang, of which no bucket tells.

    Sent every second while it waits for a checkpoint, and after each step without a round.
    """


class StateProgress(Message):
    """A rank's progress in writing its part of the state for rejoining sites. Sent every second."""

    epoch: Count
    """Epoch with which the other sites begin to catch up."""
    done_bytes: Count
    """Bytes copied, written and hashed so far."""
    problem: str = ""
    """Why this site cannot provide the state; empty: it can."""


class KeepResiduals(Message):
    """Request to write the residuals of this rank's shards to a file, atomically.

    Sent between two rounds: all posted buckets have come back.
    """

    path: str


class RestoreResiduals(Message):
    """Request to load the residuals in such a file. Sent before the rank's first round."""

    path: str


class Metric(Message):
    """A metric for the coordinator: protos/metrics.py has the kinds."""

    kind: str
    values: Mapping[str, float] = field(default_factory=dict)
    step: int = -1
    labels: Mapping[str, str] = field(default_factory=dict)
    rank: int = -1
    """Rank inside the site, added by its gateway; -1: the metric is not a rank's."""


class Digest(Message):
    """Hashes of this rank's parameters, which the coordinator compares over all ranks."""

    step: int
    combined: UInt64
    tensors: tuple[UInt64, ...]
    names: tuple[str, ...]
    round: int | None = None
    """Last round in which gradients of the step crossed; None: none did."""
    rank: int = -1
    """Rank inside the site, added by its gateway."""


class Leave(Message):
    """The rank ends because it is done. A connection that ends without it means a lost rank."""

    has_averaged: bool = True
    """Whether the rank has averaged with other sites, or was not meant to."""


class RoundEnds(Message):
    """A round ends in which sites take steps of their own. Both ways: a gateway passes it on."""

    round: Count
    is_passed_over: bool = False
    """The sender's site takes no part in the round: for the ranks of this site, from its first one.
    Else another site has taken all of its steps."""


# ---------------------------------------------------------------- gateway to rank


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingOffer:
    """A gateway's offer to take encoded chunks instead of float32."""

    codecs: tuple[str, ...]
    """Codec of each tree. At least one has bodies (`BodyCodec`); chunks of the others stay
    float32."""
    turns: tuple[Count, ...]
    """Index into `codecs` by turn of the chunk (`Grid.turn`), repeated cyclically."""
    chunk_numel: Count
    """Largest number of elements of a chunk, from which the grid is made."""
    error_feedback: bool
    """Whether the rank keeps a residual and adds it to the next shard."""
    error_feedback_decay: Factor = 1.0
    """Factor on that residual in each round."""


class Welcome(Message):
    """The answer to a join."""

    site: str
    site_index: Count
    sites: tuple[str, ...]
    ranks_per_site: tuple[Count, ...]
    verify_every: Count
    """Steps between digests; 0: never."""
    config_hash: str
    encoding: EncodingOffer | None = None
    """None: the gateway takes float32 only."""
    ranks_per_gateway: Count = 0
    """Ranks per gateway of the site, in order. 0: one gateway serves all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionTimes:
    """A gateway's measurements for one rank's shard."""

    inter_s: float = 0.0
    """Seconds from the rank's message to the result."""
    wait_s: float = 0.0
    """Seconds by which the other sites' contributions were later than ours."""
    encode_s: float = 0.0
    """CPU time that the gateway spent on encoding."""
    decode_s: float = 0.0
    """CPU time that the gateway spent on decoding and summing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A site that has left."""

    site: Count
    """Index of the site."""
    from_round: Count
    """First round without the site, equal at all gateways."""


class Reduced(Message):
    """Result: the shard's region holds the sum over all sites, divided by `weight`."""

    round: Count
    bucket: UInt32
    weight: float
    """Tokens of all sites. NaN if no element of the bucket belongs to this gateway's ranks."""
    times: ReductionTimes
    wire_bytes: Count
    """Bytes that the gateway sent for this shard."""
    squares: Units | None = None
    """Exact sum of squares of the result, in units (sites/local/squares.py). None: a number is not
    finite."""
    missing: tuple[Missing, ...] = ()
    """Sites that have left, as far as the gateway knows."""


class Members(Message):
    """The members of the run. After the loss of a site, sent once that is decided."""

    epoch: Count
    from_round: Count
    """First round in which exactly these sites take part. When a site rejoins this is a bound, not
    the round itself: at the end of the first step that has begun at least this many rounds, all
    ranks agree on the step (sites/worker/exchange/member_history.py)."""
    sites: tuple[str, ...]
    """Names of the members, in the run's order."""
    enters: tuple[str, ...] = ()
    """Members that rejoin or begin to catch up then. For those that begin to catch up, `from_round`
    is exact."""
    follows: tuple[str, ...] = ()
    """Members that are catching up: they only get results."""
    state: str = ""
    """If a site begins to catch up: the folder where its ranks find the training state, and where
    the others' ranks write it (sites/local/entry_folder.py)."""
    shares: Shares = AS_BEGUN
    """What sites get of the batch; it is said again with each later epoch."""
    rung: Rung = AS_LAUNCHED
    """The regime, as `shares`."""


class Failed(Message):
    """The run has failed: a gateway ends, and no collective will complete any more.

    A gateway sends it to its ranks and to its agent, and a launcher to its parent.
    """

    failure: Failure
    """Its `at_s` holds for the reader, too: the clock is the machine's."""


FromRank = (
    Join
    | Region
    | Reduce
    | Handed
    | Moved
    | StateProgress
    | KeepResiduals
    | RestoreResiduals
    | Metric
    | Digest
    | RoundEnds
    | Leave
)
FromGateway = Welcome | Reduced | Members | RoundEnds | Failed
FROM_RANK: Final[Kinds[FromRank]] = Kinds("rank to gateway", FromRank, LocalProtocolError)
FROM_GATEWAY: Final[Kinds[FromGateway]] = Kinds("gateway to rank", FromGateway, RemoteProtocolError)


def error_of(failure: Failure) -> IsthmusError:
    """Return the exception that a rank raises for a gateway's failure."""
    return error_for(failure.code, failure.message, failure.site)


def error_for(code: str, message: str, site: str = "") -> IsthmusError:
    """Return the exception for another process's error code in protos/catalogue.py."""
    for kind in (PeerLostError, RankLostError):
        if kind.code == code:
            return kind(message, site)
    for other in IsthmusError.__subclasses__():
        # The error is neither this process's bug nor its script's mistake.
        has_code = vars(other).get("code") == code
        if has_code and other not in (LocalProtocolError, ScriptError):
            return other(message)
    error = IsthmusError(message)
    error.code = code
    return error


def encode(message: FromRank | FromGateway) -> bytes:
    """Return a message serialised for the socket.

    Raises:
        LocalProtocolError: the message is too long.
    """
    data = line_of(message)
    if len(data) > LOCAL_MESSAGE_BYTES:
        raise LocalProtocolError(
            f"a {message.op} message of {len(data)} bytes; {LOCAL_MESSAGE_BYTES} is the most"
        )
    return data
