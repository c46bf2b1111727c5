"""The messages between a rank and its gateway: one class each, one encoder, one decoder.

They cross a Unix SOCK_SEQPACKET socket as JSON objects, one a message; docs/protocols.md has the
conversation. A field's annotation says what it may hold, and the decoder refuses everything else by
the field's name. A field with a default may be absent, and one that this build does not know is
left out, so that either end may be a version older.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args

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
from isthmus.sites.local.chunk_grid import Sharing, sharing_of
from isthmus.sites.local.squares import Units
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import read_json

WEIGHT_MAX = float(1 << 53)
"""Tokens behind one bucket: up to here every whole number is a float64."""

Count = Annotated[int, (1 << 63) - 1]
UInt32 = Annotated[int, (1 << 32) - 1]
UInt64 = Annotated[int, (1 << 64) - 1]
Weight = Annotated[float, WEIGHT_MAX]
"""Integers, and numbers, from 0 to the annotation."""


class Form(StrEnum):
    """In what form a rank hands its shard of a bucket over."""

    VALUES = "values"
    """float32. The gateway encodes what it sends, and keeps what that loses."""
    ENCODED = "encoded"
    """Each chunk's body (`BodyCodec`), where its first element would be. The rank
    keeps what was lost. Chunks of trees whose codec has no bodies are as in VALUES."""
    UNFIT = "unfit"
    """float32 of which some have no code, a NaN say. Where chunks have bodies otherwise, the
    rank's residual is added already: the gateway encodes as usual, and keeps no residual."""


# ---------------------------------------------------------------- rank to gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The first message of a rank."""

    op: ClassVar[str] = "join"
    rank: Count
    """Inside the site."""
    generation: Count
    """The run's."""
    local_rank: Count = 0
    """On the node."""
    pid: Count = 0
    encodes: bool = False
    """The rank takes the gateway's offer to encode, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Shared memory: float32[numel] in a memfd that comes with the message.

    An id that was sent before is replaced. sites/local/regions.py has the memory itself.
    """

    op: ClassVar[str] = "region"
    region: Count
    numel: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """This rank's shard of a bucket lies in a region: reduce it over all sites."""

    op: ClassVar[str] = "reduce"
    round: Count
    bucket: UInt32
    region: Count
    offset: Count = 0
    """Elements of the region before the shard."""
    numel: Count
    """float32 elements of the whole bucket, not of the shard."""
    layout: UInt32
    """crc32c of what the bucket consists of: equal on all ranks of all sites."""
    weight: Weight
    """Tokens of the whole site behind the bucket."""
    exact: bool
    """Travel as fp32 whatever the link's codec."""
    form: Form = Form.VALUES
    """What lies in the region."""
    encoded_bytes: Count = 0
    """Size of all bodies together, where the region holds bodies."""
    enters: Count = 0
    """The epoch that this round begins: `Members`. 0: none."""
    participants: tuple[tuple[Count, ...], ...] = ()
    """The ranks that share the bucket, by site, ascending: nobody else hands it over. Empty for a
    site: all of it; empty altogether: all everywhere. Equal on all ranks of all sites."""
    after: Count = 0
    """One more than the bucket before it in the round that other ranks of this gateway share, and
    this one does not. 0: none."""

    def sharing(self, ranks_per_site: tuple[int, ...]) -> Sharing:
        """Return who shares the bucket, as a grid is made with.

        Raises:
            LocalProtocolError: there are no such ranks.
        """
        try:
            return sharing_of(self.participants, ranks_per_site)
        except ValueError as error:
            raise LocalProtocolError(f"reduce.participants: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """The script has handed a bucket over. Its `Reduce` follows when the site's ranks all have."""

    op: ClassVar[str] = "handed"
    round: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The rank waits for what is being saved: it does not hang. Told every second."""

    op: ClassVar[str] = "saving"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateProgress:
    """How far this rank is with its part of the state that others take over. Told every second."""

    op: ClassVar[str] = "state_progress"
    epoch: Count
    """They follow when this epoch begins."""
    done_bytes: Count
    """Copied, written and hashed so far."""
    problem: str = ""
    """Why it cannot be had from this site; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepResiduals:
    """Write the residuals of this rank's shards to a file, which has its name once it is whole.

    Between two rounds: what the rank posted before has come back.
    """

    op: ClassVar[str] = "keep_residuals"
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OweResiduals:
    """Go on with the residuals that such a file holds. Before the rank's first round."""

    op: ClassVar[str] = "owe_residuals"
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric for the coordinator: protos/metrics.py has the kinds."""

    op: ClassVar[str] = "metric"
    kind: str
    step: int
    values: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Hashes of this rank's parameters, which the coordinator compares over all ranks."""

    op: ClassVar[str] = "digest"
    step: int
    combined: UInt64
    tensors: tuple[UInt64, ...]
    names: tuple[str, ...]
    round: int = -1
    """The last in which the step's gradients crossed; -1: they have not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The rank ends because it is done. A connection that ends without this has lost its rank."""

    op: ClassVar[str] = "leave"
    has_averaged: bool = True
    """It has averaged something with other sites, or was not meant to."""


# ---------------------------------------------------------------- gateway to rank


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingOffer:
    """What a gateway takes encoded, beside float32."""

    codecs: tuple[str, ...]
    """Codec of each tree. One at least has bodies (`BodyCodec`); chunks of the
    others stay float32."""
    turns: tuple[Count, ...]
    """Index into `codecs` of the chunk with turn 0, 1, ...; then from the beginning: Grid.turn."""
    chunk_numel: Count
    """Elements of a chunk, at most: what the grid is made with."""
    error_feedback: bool
    """Whether the rank adds what encoding loses to the next shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to a join."""

    op: ClassVar[str] = "welcome"
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
    """How many ranks of the site each of its gateways serves, in their order. 0: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionTimes:
    """What a gateway measured of one rank's shard."""

    inter_s: float = 0.0
    """Seconds from the rank's message to the result."""
    wait_s: float = 0.0
    """How much later than ours the other sites' contributions were."""
    encode_s: float = 0.0
    """CPU time that the gateway spent on encoding."""
    decode_s: float = 0.0
    """CPU time that it spent on decoding and summing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A site that takes part no more."""

    site: Count
    """By index."""
    from_round: Count
    """The first round without it: the same at all gateways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The shard's region holds the sum over all sites, divided by `weight`."""

    op: ClassVar[str] = "reduced"
    round: Count
    bucket: UInt32
    weight: float
    """Tokens of all sites. NaN where no element of the bucket belongs to this gateway's ranks."""
    times: ReductionTimes
    wire_bytes: Count
    """What the gateway sent for this shard."""
    squares: Units | None = None
    """The sum of squares of what the region holds, exactly: sites/local/squares.py. None: one of
    its numbers is not finite."""
    missing: tuple[Missing, ...] = ()
    """Sites that the run goes on without, as far as the gateway knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Who takes part in the run. Where a site is lost, told once that is decided."""

    op: ClassVar[str] = "members"
    epoch: Count
    from_round: Count
    """The first round of these sites alone. Where one enters: by the end of the first step by which
    so many rounds have begun, all ranks agree when (sites/worker/exchange/member_history.py)."""
    sites: tuple[str, ...]
    """By name, in the run's order."""
    enters: tuple[str, ...] = ()
    """Who of them takes part, or follows, from then on. To those who begin to follow, `from_round`
    is the very round."""
    follows: tuple[str, ...] = ()
    """Who of them only gets the results."""
    state: str = ""
    """Where one follows, the folder in which its ranks find the state that they take over, and the
    others' ranks write it: sites/local/entry_folder.py."""


FromRank = (
    Join
    | Region
    | Reduce
    | Handed
    | Saving
    | StateProgress
    | KeepResiduals
    | OweResiduals
    | Metric
    | Digest
    | Leave
)
FromGateway = Welcome | Reduced | Members | Failure
"""A failure says that no collective will complete any more."""
_FROM_RANK: Mapping[str, type[FromRank]] = {kind.op: kind for kind in get_args(FromRank)}
_FROM_GATEWAY: Mapping[str, type[FromGateway]] = {
    "failed": Failure,
    "welcome": Welcome,
    "reduced": Reduced,
    "members": Members,
}


def error_of(failure: Failure) -> IsthmusError:
    """Return the exception that a rank raises for what its gateway says."""
    return error_for(failure.code, failure.message, failure.site)


def error_for(code: str, message: str, site: str = "") -> IsthmusError:
    """Return the exception of a code in protos/catalogue.py, as another process names an error."""
    for kind in (PeerLostError, RankLostError):
        if kind.code == code:
            return kind(message, site)
    for other in IsthmusError.__subclasses__():
        # It is neither this process's bug nor its script's mistake.
        if other.code == code and other not in (LocalProtocolError, ScriptError):
            return other(message)
    error = IsthmusError(message)
    error.code = code
    return error


# ---------------------------------------------------------------- JSON


def to_json(message: FromRank | FromGateway) -> dict[str, Any]:
    """Return a message as a JSON object."""
    if isinstance(message, Failure):
        return message.to_line()
    return {"op": message.op, **dataclasses.asdict(message)}


def encode(message: FromRank | FromGateway) -> bytes:
    """Return a message as it crosses the socket.

    Raises:
        LocalProtocolError: it is longer than a message may be.
    """
    fields = to_json(message)
    data = json.dumps(fields).encode()
    if len(data) > LOCAL_MESSAGE_BYTES:
        raise LocalProtocolError(
            f"a {fields['op']} message of {len(data)} bytes; {LOCAL_MESSAGE_BYTES} is the most"
        )
    return data


def decode_from_rank(data: bytes) -> FromRank:
    """Return the message of a rank.

    Raises:
        LocalProtocolError: it is none; names the field.
    """
    try:
        return _decode(data, _FROM_RANK)
    except ValueError as error:
        raise LocalProtocolError(str(error)) from error


def decode_from_gateway(data: bytes) -> FromGateway:
    """Return the message of a gateway.

    Raises:
        RemoteProtocolError: it is none; names the field.
    """
    try:
        return _decode(data, _FROM_GATEWAY)
    except ValueError as error:
        raise RemoteProtocolError(f"from the gateway: {error}") from error


MessageT = TypeVar("MessageT")


def _decode(data: bytes, kinds: Mapping[str, type[MessageT]]) -> MessageT:
    """Return the message of one of these kinds.

    Raises:
        ValueError: it is none, and why.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON message: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("a message must be a JSON object")  # noqa: TRY004
    op = fields.pop("op", None)
    kind = kinds.get(op) if isinstance(op, str) else None
    if kind is None:
        raise ValueError(f"unknown op {op!r:.100}")
    try:
        if kind is Failure:
            return cast("MessageT", Failure.from_json(fields))
        return read_json(kind, fields, str(op), on_unknown=lambda _: None)
    except ConfigError as error:
        raise ValueError(error.problems[0].message) from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{op}: {error}") from error
