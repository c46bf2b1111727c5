"""One bucket at one gateway, from the first frame or post until all ranks have their result.

A bucket is `Expected` while peers have sent frames of it and no rank of this gateway has posted it.
It is `OpenBucket` from the first rank's `Post` on: then its grid, plan and codecs are known, and
its reduction is under way. Whoever calls holds the executor's lock.
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
from isthmus.protos.frame import Frame, Kind
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
)
from isthmus.sites.gateway.reduction.credit import FRAME_OVERHEAD_BYTES
from isthmus.sites.gateway.reduction.epochs import BucketKey, Fate
from isthmus.sites.local.rank_messages import Form, Reduce, Reduced, ReductionTimes
from isthmus.sites.local.squares import total_of, units_of

_AHEAD_MAX = 2
"""Rounds that a peer can be ahead of this gateway: a site is at most one round ahead of another,
and this gateway is at most one round behind its own site."""


def check_finite(request: Reduce, values: Floats) -> None:
    """Look at each number of a rank's part of a bucket.

    Raises:
        NonFiniteError: one is a NaN or an infinity; names the first.
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
    """When the frame before it came from the same peer; 0 if it was the first ever."""
    frame_bytes: int
    num_channels: int
    """Connections of the link: so many frames may cross side by side."""
    is_result: bool
    rtt_s: float
    bytes_per_s: float

    def lateness_s(self, ready_s: float) -> float:
        """Return by how much the peer was later than this site, at least 0.

        The frame is expected half a round trip after this site was ready, plus its transmission. A
        result answers what this site sent, so it takes a whole round trip. No frame is expected
        before the link has carried what the peer sent earlier. What goes beyond that is the peer's
        lateness, and not the link's time.

        Frames cross side by side, one a connection, so the first arrives hardly before the last:
        the transmission of all of them counts. Where fewer were under way, up to so much lateness
        is taken for the link's time.

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
    """Chunks that are not finished."""
    squares: int | None = 0
    """Sum over the finished chunks of their squares, in units (sites/local/squares.py)."""
    wire_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(slots=True)
class Chunk:
    """One chunk's machine and its inbox."""

    index: int
    machine: ChunkReduction
    raw_bytes: int
    peers: tuple[GatewayId, ...]
    """The gateways that get this one's part of it, or the sum formed here."""
    most_bytes: int
    """What a frame of it takes there at most."""
    own: Own | None = None
    """The own part, once its rank has posted it."""
    inbox: deque[Event] = field(default_factory=deque)
    is_admitted: bool = False
    """The own part is in the inbox, or was."""
    is_scheduled: bool = False
    is_summed: bool = False
    """No more contributions are needed here."""
    is_finished: bool = False
    handed_over: dict[int, Frame] = field(default_factory=dict)
    """The frames of a handover that have come, by who made them."""

    def stop(self) -> int:
        """Forget what has come and was not worked on.

        Return the float32 bytes of the own part, if that is such.
        """
        own_bytes = self.raw_bytes if any(isinstance(each, Own) for each in self.inbox) else 0
        self.inbox.clear()
        return own_bytes

    def take_handed_over(self, frame: Frame, count: int) -> bool:
        """Take one of `count` frames of a handover; return, as `deliver`, what to do about it."""
        self.handed_over[frame.key.site] = frame
        if len(self.handed_over) < count:
            return False
        frames, self.handed_over = tuple(self.handed_over.values()), {}
        return self.deliver(HandedOver(frames))

    def deliver(self, event: Event) -> bool:
        """Put an event into the inbox; return whether the caller has to see that it is worked on.

        Without the own part nothing can be done yet.
        """
        self.inbox.append(event)
        self.is_admitted = self.is_admitted or isinstance(event, Own)
        if not self.is_admitted or self.is_scheduled:
            return False
        self.is_scheduled = True
        return True

    def is_past(self, kind: Kind) -> bool:
        """Whether a frame of this kind changes nothing any more."""
        return self.is_finished or (self.is_summed and kind is Kind.CONTRIBUTION)


@dataclass(slots=True)
class Expected:
    """A bucket of which frames came, and which no rank of this gateway has posted yet."""

    key: BucketKey
    frames: list[tuple[GatewayId, Frame]] = field(default_factory=list)
    arrivals: dict[GatewayId, Arrival] = field(default_factory=dict)


class OpenBucket:
    """A bucket that a rank of this gateway has posted: its reduction is under way."""

    def __init__(
        self,
        config: GatewayConfig,
        first: Reduce,
        reduction: BucketReduction,
        arrivals: dict[GatewayId, Arrival],
    ) -> None:
        """`first` opened the bucket: what the other ranks post has to agree with it."""
        self.key = first.round, first.bucket
        self.reduction = reduction
        self.arrivals = arrivals
        self.chunks: dict[int, Chunk] = {}
        """The chunks for which a frame or an own part has come."""
        self.shards: dict[int, Shard] = {}
        """The shards of the ranks that have posted, by rank."""
        self._after = 0
        self._config = config
        self._first = first
        self._grid = reduction.bucket.grid
        num_ranks = config.ranks_per_gateway[config.site_index]
        served = range(config.gateway * num_ranks, (config.gateway + 1) * num_ranks)
        self._ranks = [rank for rank in self._grid.ranks(config.site_index) if rank in served]
        """The ranks of this gateway that share the bucket."""
        self._weight: float | None = None
        """Tokens of all sites, from the first chunk that is finished."""
        self._finished: list[Shard] = []
        """Shards without an unfinished chunk whose ranks have not been told."""
        self._num_reduced = 0

    def renew(
        self, reduction: BucketReduction, fates: Mapping[int, Fate]
    ) -> list[tuple[Chunk, Own]]:
        """Go on by another epoch's plan; return the chunks that have to be admitted again.

        `fates` has every chunk that there is.

        Raises:
            LocalProtocolError: one is to be handed over that this site has never begun.
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
            if chunk.is_admitted and chunk.own is not None:
                again.append((chunk, chunk.own))
            chunk.is_admitted = chunk.is_summed = False
        return again

    @property
    def request(self) -> Reduce:
        """What opened the bucket."""
        return self._first

    @property
    def after(self) -> BucketKey | None:
        """The bucket that other ranks have to post before, as its ranks say; None: none."""
        return (self.key[0], self._after - 1) if self._after else None

    @property
    def is_posted(self) -> bool:
        """Whether all ranks of the gateway have posted the bucket."""
        return len(self.shards) == len(self._ranks)

    @property
    def is_reduced(self) -> bool:
        """Whether all ranks of the gateway have their result."""
        return self._num_reduced == len(self._ranks)

    def gateway(self, index: int, site: int) -> GatewayId:
        """Return the gateway whose ranks' shards hold a chunk at a site."""
        return site, self._grid.owner(site, index) // self._config.ranks_per_gateway[site]

    def chunk(self, index: int) -> Chunk:
        """Return a chunk, made when it is first asked for."""
        chunk = self.chunks.get(index)
        if chunk is None:
            raw_bytes = 4 * self._grid.span(index)[1]
            machine = self.reduction.chunk(index)
            chunk = self.chunks[index] = Chunk(index, machine, raw_bytes, *self._peers(index))
        return chunk

    def _peers(self, index: int) -> tuple[tuple[GatewayId, ...], int]:
        """Return the gateways at which a chunk takes credit, and the bytes that it takes."""
        numel = self._grid.span(index)[1]
        peers = tuple(self.gateway(index, site) for site in self.reduction.peers(index))
        return peers, FRAME_OVERHEAD_BYTES + self.reduction.codec(index).max_bytes(numel)

    def add_part(
        self, rank: int, request: Reduce, values: Floats, now_s: float
    ) -> list[tuple[Chunk, Own]]:
        """Take a rank's part; return its chunks and what their machines are to be given.

        `values`, float32 (n,), is the rank's shard without padding. It is lent until it is reduced.

        Raises:
            LocalProtocolError: the rank has posted the bucket before.
            LayoutMismatchError: another rank has another bucket in this place.
        """
        name = f"rank {rank}: round {request.round} bucket {request.bucket}"
        if rank in self.shards:
            raise LocalProtocolError(f"{name} was posted twice")
        for what in ("numel", "layout", "weight", "exact", "participants"):
            there, here = getattr(self._first, what), getattr(request, what)
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
            parts.append((chunk, chunk.own))
        return parts

    def _offered(self, index: int) -> Codec:
        """Return the codec that ranks were told for a chunk, whatever the plan of its round."""
        config = self._config
        turn = self._grid.turn(self.key[1], index)
        return codec_named(config.codecs[config.plan.tree_index(turn)])

    def accept(self, sender: int, frame: Frame) -> Chunk:
        """Check a peer's frame against this site's plan; return the chunk that it is for.

        Raises:
            IsthmusError: the bucket's plan has no such frame.
        """
        self.reduction.check(sender, frame)
        config, index = self._config, frame.key.chunk
        if self.gateway(index, config.site_index)[1] != config.gateway:
            rank = self._grid.owner(config.site_index, index)
            raise RemoteProtocolError(f"chunk {index} belongs to rank {rank}, not to this gateway")
        return self.chunk(index)

    def account(self, chunk: Chunk, wire_bytes: int, finish: Finish | None) -> None:
        """Add up what was sent of a chunk since the call before, and in the end what it cost.

        `finish` is its end; None while it is not finished.
        """
        shard = self.shards[self._grid.owner(self._config.site_index, chunk.index)]
        shard.wire_bytes += wire_bytes
        if finish is None:
            return
        self._weight = finish.weight
        shard.squares = total_of((shard.squares, units_of(finish.squares)))
        # A chunk is finished by the last that its machine does.
        shard.encode_s += chunk.machine.encode_s
        shard.decode_s += chunk.machine.decode_s
        shard.remaining -= 1
        if not shard.remaining:
            self._finished.append(shard)

    def take_reduced(self, now_s: float) -> list[tuple[int, Reduced]]:
        """Return the ranks whose parts are reduced now, each with what it is to be told.

        A rank without a chunk is told once the weight is known. Where no chunk belongs to this
        gateway, nothing will come, and it is told at once.
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
    """Which buckets a gateway has had, and which may still come. Pure; remembers two rounds.

    A round ends at all sites together, for each needs something of every other; so a peer is at
    most one round ahead of a site. A gateway can be a round behind its site. All buckets of a round
    may be so small that its ranks have no part in them. Then nobody waits for its ranks until the
    collectives of the next round. What comes of an older round is a repetition, or a bucket that
    never was here.
    """

    def __init__(self) -> None:
        self.current = -1
        """The latest round that a local rank has posted; -1 before the first."""
        self.first = 0
        """The round that a local rank may post first."""
        self.has_followed = False
        """This site came back to a run, and got results while its ranks were behind."""
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
        """A bucket is finished for all ranks of the gateway."""
        self._done.add(key)

    def is_done(self, key: BucketKey) -> bool:
        """Whether a bucket is finished here; of older rounds, nothing is remembered."""
        return key in self._done

    def is_ahead(self, key: BucketKey) -> bool:
        """Whether a bucket that is not open here is still to come.

        Raises:
            LayoutMismatchError: it never will.
            RemoteProtocolError: no site can be that far ahead.
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
    """Return what completes a chunk that its rank has encoded; None: these are its values.

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
