"""Which buckets a gateway has had, and which may still come. Pure.

A round ends at all sites together, for each needs something of every other; so a peer is at most
one round ahead of a site. A gateway can be a round behind its site: where all of a round's buckets
are so small that nothing of them belongs to its node, nobody waits for its ranks until the
collectives of the next. What comes of an older round is a repetition, or a bucket that never was
here.

How much of a bucket's time went by because another site was later, and not because of the link.

Pure. A peer's first frame of a bucket is expected half a round trip after this site was ready (a
whole one for a result, which answers what this site sent), plus its transmission; and not before
the link has carried what that peer sent earlier. What goes beyond is the peer's lateness.

A link's channels carry a frame each, side by side, so that the first arrives hardly before the last
of them: its transmission counts for all. Where fewer were under way, up to so much lateness is
taken for the link's time. Of a slower start than the configured rate, the reverse holds.

All chunks of one bucket at one site: their machines, and which frames may come for them.

Pure.

What the executor keeps of a bucket while it is under way.

Finds numbers that are not finite in what a rank hands over.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from protos.errors import (
    CorruptDataError,
    LayoutMismatchError,
    LocalProtocolError,
    NonFiniteError,
    RemoteProtocolError,
    StaleGenerationError,
)
from protos.frame import Frame, Kind
from sites.codecs.codec import BodyCodec, Codec, Encoded
from sites.codecs.kernels import floats
from sites.codecs.parts import Floats
from sites.gateway.links.peer_server import Sender
from sites.gateway.reduction.chunk_reduction import (
    WEIGHT_MAX,
    Bucket,
    ChunkReduction,
    Event,
    Own,
    Role,
)
from sites.gateway.reduction.residuals import BucketResiduals
from sites.local.rank_messages import Form
from topology.trees.trees import ReductionPlan

BucketKey = tuple[int, int]
"""Round and bucket."""

_AHEAD_MAX = 2
"""Rounds that a peer can be ahead: one of this site, which is at most one ahead of this gateway."""


class Rounds:
    """Remembers the latest two rounds."""

    def __init__(self) -> None:
        self.current = -1
        """The latest round that a local rank has posted; -1 before the first."""
        self._posted: dict[int, set[int]] = {}
        self._done: set[BucketKey] = set()

    def begin(self, round_: int) -> None:
        """A local rank has gone on to `round_`: everything of the rounds before was posted."""
        self.current = round_
        self._posted = {r: buckets for r, buckets in self._posted.items() if r >= round_ - 1}
        self._done = {key for key in self._done if key[0] >= round_ - 1}

    def note_posted(self, key: BucketKey) -> None:
        """A local rank has posted a bucket."""
        self._posted.setdefault(key[0], set()).add(key[1])

    def note_done(self, key: BucketKey) -> None:
        """A bucket is finished for all ranks of the node."""
        self._done.add(key)

    def is_done(self, key: BucketKey) -> bool:
        """Whether a bucket is finished here; of older rounds, nothing is remembered."""
        return key in self._done

    def is_ahead(self, key: BucketKey) -> bool:
        """Whether a bucket that is not under way here is still to come.

        Raises:
            LayoutMismatchError: it never will.
            RemoteProtocolError: no site can be that far ahead.
        """
        round_, bucket = key
        if round_ > self.current + _AHEAD_MAX:
            raise RemoteProtocolError(
                f"a frame of round {round_}, when this site is in round {self.current}"
            )
        if round_ >= self.current:
            return not self.is_done(key)
        if round_ in self._posted and bucket not in self._posted[round_]:
            raise LayoutMismatchError(
                f"a frame of round {round_} bucket {bucket}, which this site has never had"
            )
        return False


@dataclass(frozen=True, slots=True)
class Arrival:
    """The first frame of a bucket from one peer. Times are monotonic."""

    at_s: float
    previous_s: float
    """When the frame before it came from the same peer; 0 if it was the first ever."""
    frame_bytes: int
    num_channels: int
    """Frames that may be on the link side by side."""
    is_result: bool
    rtt_s: float
    bytes_per_s: float


def lateness_s(ready_s: float, arrival: Arrival) -> float:
    """Return by how much a peer was later than this site, at least 0.

    Args:
        ready_s: when this site's own contribution was ready.
        arrival: the peer's first frame.
    """
    transmission_s = arrival.num_channels * arrival.frame_bytes / arrival.bytes_per_s
    trips = 2 if arrival.is_result else 1
    answer_s = ready_s + trips * (arrival.rtt_s / 2 + transmission_s)
    expected_s = max(answer_s, arrival.previous_s + transmission_s)
    return max(0.0, arrival.at_s - expected_s)


class BucketReduction:
    """All chunks of one bucket at one site."""

    def __init__(
        self,
        bucket: Bucket,
        plan: ReductionPlan,
        own_roles: tuple[Role, ...],
        residuals: BucketResiduals | None,
    ) -> None:
        """Begin with no chunk.

        Args:
            bucket: which one, and how it is cut.
            plan: of its round.
            own_roles: this site's, from `roles`.
            residuals: of the rounds before, for trees whose codec loses something; None: that is
                lost.
        """
        self.bucket = bucket
        self._residuals = residuals
        self._plan = plan
        self._roles = own_roles
        self._chunks: dict[int, ChunkReduction] = {}

    def chunk(self, index: int) -> ChunkReduction:
        """Return the machine of one chunk."""
        machine = self._chunks.get(index)
        if machine is None:
            role = self._role(index)
            residual = None
            if self._residuals is not None and not self.bucket.codecs[role.tree].lossless:
                residual = self._residuals.chunk(index, self.bucket.grid.span(index)[1])
            machine = self._chunks[index] = ChunkReduction(self.bucket, role, index, residual)
        return machine

    @property
    def is_gather(self) -> bool:
        """Whether every site sends its part to every other."""
        return self._plan.is_gather

    def readers(self, chunk: int) -> tuple[int, ...]:
        """Return the sites that get this site's part of a chunk, or the sum that is formed here."""
        role = self._role(chunk)
        return role.audience if role.parent is None else (role.parent,)

    def codec(self, chunk: int) -> Codec:
        """Return the codec of a chunk's tree."""
        return self.bucket.codecs[self._role(chunk).tree]

    def _role(self, chunk: int) -> Role:
        turn = self.bucket.grid.turn(self.bucket.index, chunk)
        return self._roles[self._plan.tree_index(turn)]

    def check(self, sender: int, frame: Frame) -> None:
        """Compare a frame of this bucket with this site's own plan, before anything is decoded.

        Raises:
            StaleGenerationError: it belongs to another generation.
            LayoutMismatchError: its bucket is not what the same bucket is here.
            RemoteProtocolError: `sender` may not send this.
        """
        key, bucket = frame.key, self.bucket
        name = f"round {key.round} bucket {key.bucket}"
        if frame.generation != bucket.generation:
            raise StaleGenerationError(
                f"{name} of generation {frame.generation}; this is {bucket.generation}"
            )
        if frame.numel != bucket.grid.numel:
            raise LayoutMismatchError(
                f"{name} has {frame.numel} elements there and {bucket.grid.numel} here"
            )
        if frame.layout != bucket.layout:
            raise LayoutMismatchError(f"{name} holds other parameters there than here")
        if key.chunk >= bucket.grid.num_chunks:
            raise RemoteProtocolError(
                f"{name} has {bucket.grid.num_chunks} chunks; number {key.chunk} came"
            )
        self._check_part(sender, frame)

    def _check_part(self, sender: int, frame: Frame) -> None:
        key = frame.key
        name = f"round {key.round} bucket {key.bucket} chunk {key.chunk}"
        role = self._role(key.chunk)
        codec = self.bucket.codecs[role.tree]
        if frame.codec != codec.number:
            raise LayoutMismatchError(
                f"{name} came with codec number {frame.codec}; here it is {codec.name}"
            )
        if key.kind is Kind.CONTRIBUTION:
            allowed = sender != role.site and sender in role.members and key.site == sender
        else:
            allowed = role.parent is not None and sender == role.parent and key.site == role.root
        if not allowed or frame.tree != role.tree:
            raise RemoteProtocolError(f"{name}: this {key.kind.name.lower()} is not its to send")
        if not (math.isfinite(frame.weight) and 0 <= frame.weight <= WEIGHT_MAX):
            raise RemoteProtocolError(f"{name}: a weight of {frame.weight}")
        most_bytes = codec.max_bytes(self.bucket.grid.span(key.chunk)[1])
        if len(frame.payload) > most_bytes:
            raise RemoteProtocolError(f"{name}: {len(frame.payload)} bytes, at most {most_bytes}")


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


def check_finite(post: Post) -> None:
    """Look at each number of a rank's part.

    Raises:
        NonFiniteError: one is a NaN or an infinity; names the first.
    """
    first = floats.first_not_finite(post.values)
    if first >= 0:
        raise NonFiniteError(
            f"round {post.round} bucket {post.bucket}: element {first} of {len(post.values)} of "
            f"its part is {post.values[first]}"
        )


def own_encoded(
    name: str, codec: Codec, form: Form, values: Floats
) -> Callable[[], Encoded] | None:
    """Return what completes a chunk that its rank has encoded; None: these are its values.

    Args:
        name: of the chunk, for errors.
        codec: of the chunk.
        form: what lies in `values`; checked by `RankEncoding`.
        values: the chunk's part of the region: float32, shape (n,).
    """
    if form is Form.VALUES or not isinstance(codec, BodyCodec):
        return None
    if form is Form.UNFIT:
        return functools.partial(codec.encode_owed, values, None)
    return functools.partial(_seal, name, codec, values)


def _seal(name: str, codec: BodyCodec, values: Floats) -> Encoded:
    body = values.view(np.uint8)[: codec.body_bytes(len(values))]
    try:
        return codec.seal(body.data, len(values))
    except CorruptDataError as error:
        raise LocalProtocolError(f"{name}: {error}") from error
