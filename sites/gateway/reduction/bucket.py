"""One bucket at one gateway, from the first frame or post until all ranks have their result.

Until a rank of this gateway posts the bucket, it only keeps what peers send of it. With the first
post its grid, plan and codecs are known, and its reduction begins. Callers hold the executor's
lock.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from isthmus.protos.errors import (
    CorruptDataError,
    LayoutMismatchError,
    LocalProtocolError,
    NonFiniteError,
    RemoteProtocolError,
)
from isthmus.protos.frame import Frame, Kind, unpack
from isthmus.sites.codecs.codec import BodyCodec, Codec, Encoded, Floats
from isthmus.sites.codecs.kernels import loops
from isthmus.sites.codecs.registry import codec_named
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.reduction.chunk_reduction import (
    BucketReduction,
    ChunkReduction,
    Event,
    Finish,
    HandedOver,
    Own,
    OwnEncoded,
    Received,
)
from isthmus.sites.gateway.reduction.credit import FRAME_OVERHEAD_BYTES
from isthmus.sites.gateway.reduction.epochs import BucketKey, ChunkOrder, Fate
from isthmus.sites.local.chunk_grid import Grid
from isthmus.sites.local.rank_messages import Form, Reduce, Reduced, ReductionTimes
from isthmus.sites.local.squares import total_of, units_of

_AHEAD_MAX = 2
"""Rounds that a peer can be ahead of this gateway: one between two sites, and one between this
gateway and its own site."""


def check_finite(request: Reduce, values: Floats) -> None:
    """Check that all numbers of a rank's part of a bucket are finite.

    Raises:
        NonFiniteError: a number is NaN or infinite; the message names the first.
    """
    first = loops.first_not_finite(values)
    if first >= 0:
        raise NonFiniteError(
            f"round {request.round} bucket {request.bucket}: element {first} of {len(values)} "
            f"of its part is {values[first]}"
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """The first frame of a bucket from one peer. Times are monotonic."""

    at_s: float
    previous_s: float
    """When the previous frame of this peer came; 0 if there was none."""
    frame_bytes: int
    num_channels: int
    """Connections of the link: the number of frames that may cross in parallel."""
    is_result: bool
    rtt_s: float
    bytes_per_s: float

    def lateness_s(self, ready_s: float) -> float:
        """Return the seconds by which the peer was later than this site, at least 0.

        The frame is expected half a round trip, plus its transmission, after this site was ready. A
        result answers this site's part, so it takes a whole round trip. No frame is expected before
        the link has carried the peer's earlier frames. Any further delay is the peer's lateness.

        Frames cross in parallel, one per connection, so the first arrives hardly before the last:
            the transmission of all of them counts. If fewer were in flight, lateness is
            underestimated by at most that time.

        Args:
            ready_s: when this site's own part was ready.
        """
        transmission_s = self.num_channels * self.frame_bytes / self.bytes_per_s
        trips = 2 if self.is_result else 1
        answer_s = ready_s + trips * (self.rtt_s / 2 + transmission_s)
        expected_s = max(answer_s, self.previous_s + transmission_s)
        return max(0.0, self.at_s - expected_s)


@dataclass(slots=True)
class Shard:
    """One rank's part of an open bucket, and what it has cost so far."""

    rank: int
    ready_s: float
    remaining: int
    """Number of chunks that are not finished."""
    squares: int | None = 0
    """Sum of squares of the finished chunks, in the units of sites/local/squares.py."""
    wire_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(slots=True)
class Chunk:
    """One chunk's state machine and its inbox of events."""

    bucket: GatewayBucket
    index: int
    machine: ChunkReduction
    raw_bytes: int
    peers: tuple[GatewayId, ...]
    """The gateways that get this gateway's part of the chunk, or the sum formed here."""
    most_bytes: int
    """Largest memory that a frame of the chunk takes at a peer."""
    own: Own | None = None
    """The own part, once its rank has posted it."""
    inbox: deque[Event] = field(default_factory=deque)
    is_admitted: bool = False
    """Whether the own part has been put into the inbox."""
    is_scheduled: bool = False
    is_summed: bool = False
    """Whether all contributions needed here have been summed."""
    is_finished: bool = False
    handed_over: dict[int, Frame] = field(default_factory=dict)
    """Received frames of a handover, by the site that made them."""

    @property
    def order(self) -> ChunkOrder:
        """Round, bucket and chunk."""
        return (*self.bucket.key, self.index)

    def stop(self) -> int:
        """Drop events that were not handled; return the float32 bytes of an own part among them."""
        own_bytes = self.raw_bytes if any(isinstance(each, Own) for each in self.inbox) else 0
        self.inbox.clear()
        return own_bytes

    def take_handed_over(self, frame: Frame, count: int) -> bool:
        """Take one of `count` frames of a handover; return as `deliver` does."""
        self.handed_over[frame.key.site] = frame
        if len(self.handed_over) < count:
            return False
        frames, self.handed_over = tuple(self.handed_over.values()), {}
        return self.deliver(HandedOver(frames))

    def deliver(self, event: Event) -> bool:
        """Put an event into the inbox; return whether the caller must schedule the chunk.

        Before the own part is there, nothing can be handled.
        """
        self.inbox.append(event)
        self.is_admitted = self.is_admitted or isinstance(event, Own)
        if not self.is_admitted or self.is_scheduled:
            return False
        self.is_scheduled = True
        return True

    def is_past(self, kind: Kind) -> bool:
        """Whether a frame of this kind comes too late to change anything."""
        return self.is_finished or (self.is_summed and kind is Kind.CONTRIBUTION)


class GatewayBucket:
    """A bucket of which a frame has come, or that a rank of this gateway has posted."""

    def __init__(self, config: GatewayConfig, key: BucketKey) -> None:
        self.key = key
        self.arrivals: dict[GatewayId, Arrival] = {}
        """The first frame of each peer."""
        self.early: list[tuple[GatewayId, Frame]] = []
        """Frames that came before a rank has posted the bucket."""
        self.is_open = False
        """Whether a rank has posted the bucket."""
        self.reduction: BucketReduction
        self.request: Reduce
        """The post that opened the bucket; the other ranks' posts must agree with it."""
        self.chunks: dict[int, Chunk] = {}
        """The chunks for which a frame or an own part has come."""
        self.shards: dict[int, Shard] = {}
        """The shards of the ranks that have posted, by rank."""
        self._after = 0
        self._config = config
        self._grid: Grid
        self._ranks: list[int] = []
        """The ranks of this gateway that share the bucket."""
        self._weight: float | None = None
        """Total tokens of the round over all sites. None until the bucket's first chunk is
        finished."""
        self._finished: list[Shard] = []
        """Finished shards whose ranks do not have the result yet."""
        self._num_reduced = 0

    def open(self, first: Reduce, reduction: BucketReduction) -> list[tuple[GatewayId, Frame]]:
        """Begin the reduction with the first rank's post; return the frames to `receive` again."""
        config, self._grid = self._config, reduction.bucket.grid
        self.request, self.reduction, self.is_open = first, reduction, True
        num_ranks = config.ranks_per_gateway[config.site_index]
        served = range(config.gateway * num_ranks, (config.gateway + 1) * num_ranks)
        self._ranks = [rank for rank in self._grid.ranks(config.site_index) if rank in served]
        early, self.early = self.early, []
        return early

    def receive(self, sender: GatewayId, frame: Frame) -> Chunk | None:
        """Take a peer's frame; return its chunk if that is to be worked on now.

        Raises:
            IsthmusError: the plan has no such frame.
        """
        if not self.is_open:
            self.early.append((sender, frame))
            return None
        chunk = self._accept(sender[0], frame)
        return chunk if chunk.deliver(Received(sender[0], frame)) else None

    def receive_handover(self, given: Frame) -> Chunk | None:
        """Take a frame that another site hands over; return as `receive`.

        Raises:
            IsthmusError: the frame is no part of a finished chunk.
        """
        frame = unpack(bytes(given.payload))
        self.reduction.check_handover(given, frame)
        chunk = self.chunks[given.key.chunk]
        return chunk if chunk.take_handed_over(frame, given.tree) else None

    def renew(self, reduction: BucketReduction, fates: Mapping[int, Fate]) -> list[Chunk]:
        """Switch to a new epoch's plan; return the chunks that have to be admitted again.

        `fates` has an entry for every chunk of the bucket.

        Raises:
            LocalProtocolError: a chunk is to be handed over that this site has never begun.
        """
        self.reduction = reduction
        again = []
        for index, chunk in self.chunks.items():
            what = fates[index]
            chunk.handed_over = {}
            if what is Fate.COMES and not chunk.is_admitted:
                raise LocalProtocolError(
                    f"round {self.key[0]} bucket {self.key[1]} chunk {index} is handed over, and "
                    "has not begun here"
                )
            if what is not Fate.AGAIN:
                continue
            chunk.machine.put_back()
            before = chunk.machine
            chunk.machine = reduction.chunk(index)
            chunk.machine.encode_s, chunk.machine.decode_s = before.encode_s, before.decode_s
            chunk.peers, chunk.most_bytes = self._peers(index)
            if chunk.is_admitted:
                again.append(chunk)
            chunk.is_admitted = chunk.is_summed = False
        return again

    @property
    def after(self) -> BucketKey | None:
        """The bucket that all ranks must post before this one; None: none."""
        return (self.key[0], self._after - 1) if self._after else None

    @property
    def is_posted(self) -> bool:
        """Whether all ranks of the gateway have posted the bucket."""
        return self.is_open and len(self.shards) == len(self._ranks)

    @property
    def is_reduced(self) -> bool:
        """Whether all ranks of the gateway have their result."""
        return self._num_reduced == len(self._ranks)

    def gateway(self, index: int, site: int) -> GatewayId:
        """Return the gateway whose ranks' shards hold a chunk at a site."""
        return site, self._grid.owner(site, index) // self._config.ranks_per_gateway[site]

    def chunk(self, index: int) -> Chunk:
        """Return a chunk, created on first use."""
        chunk = self.chunks.get(index)
        if chunk is None:
            raw_bytes = 4 * self._grid.span(index)[1]
            machine = self.reduction.chunk(index)
            peers = self._peers(index)
            chunk = self.chunks[index] = Chunk(self, index, machine, raw_bytes, *peers)
        return chunk

    def _peers(self, index: int) -> tuple[tuple[GatewayId, ...], int]:
        """Return the gateways at which a chunk takes credit, and the bytes per gateway."""
        numel = self._grid.span(index)[1]
        peers = tuple(self.gateway(index, site) for site in self.reduction.peers(index))
        return peers, FRAME_OVERHEAD_BYTES + self.reduction.codec(index).max_bytes(numel)

    def add_part(self, rank: int, request: Reduce, values: Floats, now_s: float) -> list[Chunk]:
        """Take a rank's part; return its chunks, which are to be admitted.

        `values`, float32 (n,), is the rank's shard without padding. It is borrowed until reduced.

        Raises:
            LocalProtocolError: the rank has posted the bucket before.
            LayoutMismatchError: another rank posted a different bucket under this index.
        """
        name = f"rank {rank}: round {request.round} bucket {request.bucket}"
        if rank in self.shards:
            raise LocalProtocolError(f"{name} was posted twice")
        for what in ("numel", "layout", "weight", "exact", "participants"):
            there, here = getattr(self.request, what), getattr(request, what)
            if there != here:
                raise LayoutMismatchError(f"{name}: {what} is {here}; another rank's is {there}")
        self._after = max(self._after, request.after)
        site = self._config.site_index
        chunks = self._grid.chunks(site, rank)
        shard = self.shards[rank] = Shard(rank, now_s, len(chunks))
        if not chunks:
            self._finished.append(shard)
        base = self._grid.shard(site, rank)[0]
        parts = []
        for index in chunks:
            start, count = self._grid.span(index)
            part = values[start - base : start - base + count]
            where = f"rank {rank}: bucket {request.bucket} chunk {index}"
            encoded = _own_encoded(where, self._offered(index), request.form, part)
            chunk = self.chunk(index)
            chunk.own = Own(part, request.weight, encoded)
            parts.append(chunk)
        return parts

    def has_had(self, frame: Frame) -> bool:
        """Whether a frame comes too late to change anything."""
        chunk = self.chunks.get(frame.key.chunk)
        return chunk is not None and chunk.is_past(frame.key.kind)

    def _offered(self, index: int) -> Codec:
        """Return the codec that ranks use for a chunk, whatever the plan of its round."""
        config = self._config
        turn = self._grid.turn(self.key[1], index)
        return codec_named(config.codecs[config.plan.tree_index(turn)])

    def _accept(self, sender: int, frame: Frame) -> Chunk:
        """Check a peer's frame against this site's plan; return its chunk.

        Raises:
            IsthmusError: the plan has no such frame.
        """
        self.reduction.check(sender, frame)
        config, index = self._config, frame.key.chunk
        if self.gateway(index, config.site_index)[1] != config.gateway:
            rank = self._grid.owner(config.site_index, index)
            raise RemoteProtocolError(f"chunk {index} belongs to rank {rank}, not to this gateway")
        return self.chunk(index)

    def account(self, chunk: Chunk, wire_bytes: int, finish: Finish | None) -> None:
        """Add bytes sent for a chunk since the previous call, and at its end its CPU cost.

        `finish` is the chunk's last action; None while it is not finished.
        """
        shard = self.shards[self._grid.owner(self._config.site_index, chunk.index)]
        shard.wire_bytes += wire_bytes
        if finish is None:
            return
        self._weight = finish.weight
        shard.squares = total_of((shard.squares, units_of(finish.squares)))
        # Finish is a machine's last action, so its times are final.
        shard.encode_s += chunk.machine.encode_s
        shard.decode_s += chunk.machine.decode_s
        shard.remaining -= 1
        if not shard.remaining:
            self._finished.append(shard)

    def take_reduced(self, now_s: float) -> list[tuple[int, Reduced]]:
        """Return (rank, result message) for ranks whose parts are now reduced.

        A rank without a chunk gets its message once the weight is known. If no chunk belongs to
        this gateway, it gets the message at once.
        """
        if self._weight is None and self._grid.chunks(self._config.site_index, self._ranks[0]):
            return []
        finished, self._finished = self._finished, []
        self._num_reduced += len(finished)
        return [(shard.rank, self._reduced(shard, now_s)) for shard in finished]

    def _reduced(self, shard: Shard, now_s: float) -> Reduced:
        inter_s = now_s - shard.ready_s
        late_s = max((each.lateness_s(shard.ready_s) for each in self.arrivals.values()), default=0)
        return Reduced(
            round=self.key[0],
            bucket=self.key[1],
            weight=math.nan if self._weight is None else self._weight,
            times=ReductionTimes(
                inter_s=inter_s,
                wait_s=min(late_s, inter_s),
                encode_s=shard.encode_s,
                decode_s=shard.decode_s,
            ),
            wire_bytes=shard.wire_bytes,
            squares=shard.squares,
        )


class RoundHistory:
    """Tracks which buckets a gateway has had and which may come. Pure; remembers two rounds.

    Every site needs a contribution of every other in each round, so a peer is at most one round
    ahead. A gateway can be a round behind its site: if all buckets of a round are so small that its
    ranks have no part in them, nothing waits for its ranks until the next round. A frame of an
    older round is a repetition, or of a bucket that never existed here.
    """

    def __init__(self) -> None:
        self.current = -1
        """The latest round that a local rank has posted; -1 before the first."""
        self.first = 0
        """First round that local ranks may post."""
        self.has_followed = False
        """Whether this site rejoined, and got results while its ranks were catching up."""
        self._posted: dict[int, set[int]] = {}
        self._done: set[BucketKey] = set()

    def begin(self, round_: int) -> None:
        """A local rank begins `round_`: all buckets of earlier rounds have been posted."""
        self.current = round_
        self._posted = {r: buckets for r, buckets in self._posted.items() if r >= round_ - 1}
        self._done = {key for key in self._done if key[0] >= round_ - 1}

    def note_posted(self, key: BucketKey) -> None:
        """A local rank has posted a bucket."""
        self._posted.setdefault(key[0], set()).add(key[1])

    def is_posted(self, key: BucketKey) -> bool:
        """Whether a local rank has posted a bucket, which all ranks have to post."""
        return key[0] < self.current - 1 or key[1] in self._posted.get(key[0], ())

    def note_done(self, key: BucketKey) -> None:
        """A bucket is finished for all ranks of the gateway."""
        self._done.add(key)

    def is_done(self, key: BucketKey) -> bool:
        """Whether a bucket is finished here. Only for the rounds that are remembered."""
        return key in self._done

    def is_ahead(self, key: BucketKey) -> bool:
        """Whether a bucket that is not open here is still to come.

        Raises:
            LayoutMismatchError: this site never has the bucket.
            RemoteProtocolError: the round is further ahead than any site can be.
        """
        round_, bucket = key
        most = max(self.current, self.first - 1) + _AHEAD_MAX
        if round_ > most and not self.has_followed:
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


def _own_encoded(name: str, codec: Codec, form: Form, values: Floats) -> OwnEncoded | None:
    """Return the own part as its rank encoded it; None: `values` are plain float32.

    `values` is the chunk's part of the region, float32 (n,), whose form `RankEncoding` has checked.
    """
    if form is Form.VALUES or not isinstance(codec, BodyCodec):
        return None
    if form is Form.UNFIT:
        return OwnEncoded(codec, functools.partial(codec.encode_with_residual, values, None))
    return OwnEncoded(codec, functools.partial(_seal, name, codec, values))


def _seal(name: str, codec: BodyCodec, values: Floats) -> Encoded:
    body = values.view(np.uint8)[: codec.body_bytes(len(values))]
    try:
        return codec.seal(body.data, len(values))
    except CorruptDataError as error:
        raise LocalProtocolError(f"{name}: {error}") from error
