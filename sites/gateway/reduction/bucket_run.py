"""What the executor keeps of a bucket while it is under way."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from protos.errors import LayoutMismatchError
from protos.frame import Frame
from sites.codecs.parts import Floats
from sites.gateway.links.server import Sender
from sites.gateway.reduction.bucket_reduction import BucketReduction
from sites.gateway.reduction.chunk_reduction import ChunkReduction
from sites.gateway.reduction.events import Event, Own
from sites.gateway.reduction.lateness import Arrival, lateness_s
from sites.gateway.reduction.rounds import BucketKey
from sites.local.rank_messages import Form


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

    def to_rank(self) -> dict[str, object]:
        """Return the message for a rank."""
        return {
            "op": "reduced",
            "round": self.round,
            "bucket": self.bucket,
            "weight": self.weight,
            "times": {
                "inter_s": self.inter_s,
                "wait_s": self.wait_s,
                "encode_s": self.encode_s,
                "decode_s": self.decode_s,
            },
            "wire_bytes": self.wire_bytes,
        }


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

    def deliver(self, event: Event) -> bool:
        """Put an event into the inbox; return whether the caller is to have it worked on.

        Without the own part nothing can be done yet. Whoever calls holds the executor's lock.
        """
        self.inbox.append(event)
        self.is_admitted = self.is_admitted or isinstance(event, Own)
        if not self.is_admitted or self.is_scheduled:
            return False
        self.is_scheduled = True
        return True


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
    """Ranks of this node that have their part."""

    def account(
        self, chunk: Chunk, rank: int, wire_bytes: int, weight: float | None
    ) -> list[Shard]:
        """Add up what a chunk did for its rank.

        Args:
            chunk: of this bucket.
            rank: which it belongs to.
            wire_bytes: sent of it since it was last asked.
            weight: tokens of all sites; None while the chunk is not finished.

        Returns:
            The rank's shard when that was the last of it.
        """
        shard = self.shards[rank]
        shard.wire_bytes += wire_bytes
        if weight is None:
            return []
        self.weight = weight
        # A chunk is finished by the last that its machine does.
        shard.encode_s += chunk.machine.encode_s
        shard.decode_s += chunk.machine.decode_s
        shard.remaining -= 1
        return [] if shard.remaining else [shard]

    def reduced(self, shard: Shard, now_s: float) -> Reduced:
        """Count a shard that is reduced, and return what its rank is told."""
        self.num_reduced += 1
        inter_s = now_s - shard.ready_s
        late_s = max(
            (lateness_s(shard.ready_s, arrival) for arrival in self.arrivals.values()), default=0.0
        )
        return Reduced(
            round=self.key[0],
            bucket=self.key[1],
            weight=math.nan if self.weight is None else self.weight,
            inter_s=inter_s,
            wait_s=min(late_s, inter_s),
            encode_s=shard.encode_s,
            decode_s=shard.decode_s,
            wire_bytes=shard.wire_bytes,
        )


def compare_posts(name: str, first: Post, post: Post) -> None:
    """Check that two ranks of a site speak of the same bucket."""
    for what in ("numel", "layout", "weight", "exact"):
        there, here = getattr(first, what), getattr(post, what)
        if there != here:
            raise LayoutMismatchError(f"{name}: {what} is {here}; another rank's is {there}")
