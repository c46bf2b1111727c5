"""What the executor keeps of a bucket while it is under way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from protos.errors import LayoutMismatchError
from protos.frame import Frame
from sites.codecs.parts import Floats
from sites.gateway.forms import Form
from sites.gateway.lateness import Arrival
from sites.gateway.reduction import BucketReduction, ChunkReduction, Event
from sites.gateway.rounds import BucketKey
from sites.gateway.server import Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """One rank's part of a bucket, handed over."""

    round: int
    bucket: int
    numel: int
    """float32 elements of the whole bucket."""
    layout: int
    weight: float
    exact: bool
    values: Floats
    """float32, shape (shard,): the rank's shard without padding; lent until it is reduced."""
    form: Form = Form.VALUES
    """What lies there until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """One rank's part of a bucket, reduced over all sites."""

    round: int
    bucket: int
    weight: float
    """Tokens of all sites; not a number where no chunk belongs to this node, for nothing came."""
    inter_s: float
    wait_s: float
    encode_s: float
    """CPU time of this gateway for the rank's chunks."""
    decode_s: float
    """Likewise, for decoding and summing."""
    wire_bytes: int


@dataclass(slots=True)
class Shard:
    """What is under way for one rank."""

    rank: int
    ready_s: float
    remaining: int
    """Chunks that are not finished."""
    wire_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(slots=True)
class Chunk:
    """One chunk's machine and its inbox."""

    index: int
    machine: ChunkReduction
    raw_bytes: int
    peers: tuple[Sender, ...]
    """The gateways that get this one's part of it, or the sum formed here."""
    most_bytes: int
    """What a frame of it takes there at most."""
    inbox: deque[Event] = field(default_factory=deque)
    is_admitted: bool = False
    """The own part is in the inbox, or was."""
    is_scheduled: bool = False
    is_summed: bool = False
    """No more contributions are needed here."""
    is_finished: bool = False


@dataclass(slots=True)
class BucketRun:
    """One bucket under way. `reduction` is None until a local rank has posted it."""

    key: BucketKey
    reduction: BucketReduction | None = None
    first: Post | None = None
    early: list[tuple[Sender, Frame]] = field(default_factory=list)
    shards: dict[int, Shard] = field(default_factory=dict)
    chunks: dict[int, Chunk] = field(default_factory=dict)
    arrivals: dict[Sender, Arrival] = field(default_factory=dict)
    weight: float | None = None
    """Tokens of all sites, from the first chunk that is finished."""
    empty: list[Shard] = field(default_factory=list)
    """Shards without a chunk, whose ranks still want to know the weight."""
    num_reduced: int = 0


def compare_posts(name: str, first: Post, post: Post) -> None:
    """Check that two ranks of a site speak of the same bucket."""
    for what in ("numel", "layout", "weight", "exact"):
        there, here = getattr(first, what), getattr(post, what)
        if there != here:
            raise LayoutMismatchError(f"{name}: {what} is {here}; another rank's is {there}")
