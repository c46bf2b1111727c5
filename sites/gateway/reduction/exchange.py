"""The exchange of one epoch at a gateway: the buckets of its rounds, and the frames for them.

It begins when the epoch's plan is known here. The others may know it sooner: until then, what they
send is kept. It ends when its buckets are reduced and later rounds have another plan; or when a
site is lost: then its successor takes over the buckets that are not finished. Callers hold the
executor's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from isthmus.protos.errors import (
    IsthmusError,
    LayoutMismatchError,
    LocalProtocolError,
    RemoteProtocolError,
    failure_of,
)
from isthmus.protos.failure import Failure
from isthmus.protos.frame import HEADER_BYTES, ChunkKey, Frame, Kind
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.links.peer_links import Link
from isthmus.sites.gateway.reduction.bucket import Arrival, Chunk, GatewayBucket, RoundHistory
from isthmus.sites.gateway.reduction.chunk_reduction import BucketReduction
from isthmus.sites.gateway.reduction.credit import FRAME_OVERHEAD_BYTES, Held
from isthmus.sites.gateway.reduction.epochs import BucketKey, Epochs, Verdict
from isthmus.sites.gateway.reduction.reductions import Reductions
from isthmus.sites.local.rank_messages import Reduce

_FOLLOW_SHARE = 0.25
"""Share of a machine's memory for results that wait for ranks that are catching up."""


class Exchange:
    """The exchange of one epoch."""

    def __init__(self, config: GatewayConfig, history: RoundHistory, held: Held) -> None:
        """`held` counts the peers' frames that are kept here until they can be summed."""
        self.buckets: dict[BucketKey, GatewayBucket] = {}
        """The buckets that are not finished."""
        self.held = held
        self.results_bytes = 0
        """Memory of the results that came before the exchange began."""
        self.has_begun = False
        self._ahead: dict[tuple[GatewayId, ChunkKey], Frame] = {}
        """Frames that came before the exchange began."""
        self._config = config
        self._history = history

    def begin(self, held: Held) -> list[tuple[GatewayId, Frame]]:
        """Begin, for the plan is known; return the frames to `receive` again."""
        self.has_begun, self.held, self.results_bytes = True, held, 0
        ahead = [(sender, frame) for (sender, _), frame in self._ahead.items()]
        self._ahead = {}
        return ahead

    def bucket(self, key: BucketKey) -> GatewayBucket:
        """Return a bucket, which begins with its first frame or post."""
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = self.buckets[key] = GatewayBucket(self._config, key)
        return bucket

    def receive(
        self, sender: GatewayId, frame: Frame, note: Callable[[GatewayBucket], None]
    ) -> Chunk | None:
        """Take a peer's frame; return its chunk if that is to be worked on now.

        A repeated frame, or one of a finished bucket, changes nothing. Else `note` is called with
        the frame's bucket first.

        Raises:
            IsthmusError: the peer may not send this frame.
        """
        if not self.has_begun:
            self._keep(sender, frame)
            return None
        key = frame.key
        if self._is_past(sender, frame):
            return None
        bucket = self.bucket((key.round, key.bucket))
        note(bucket)
        chunk = bucket.receive(sender, frame)
        self.held.keep(sender, (key.round, key.bucket, key.chunk), size_of(frame))
        return chunk

    def receive_handover(self, donor: int | None, sender: int, given: Frame) -> Chunk | None:
        """Take a frame of a chunk that `donor` hands over (None: nobody); return as `receive`.

        Raises:
            IsthmusError: the peer may not send this frame.
        """
        if donor is None:
            return None  # a repeated frame
        key = given.key
        bucket = self.buckets.get((key.round, key.bucket))
        if donor != sender or bucket is None or key.chunk not in bucket.chunks:
            order = key.round, key.bucket, key.chunk
            raise RemoteProtocolError(f"chunk {order} was handed over, and nobody asked for it")
        return bucket.receive_handover(given)

    def check_posted(self, round_: int) -> None:
        """Check that ranks have posted all buckets of earlier rounds than `round_`.

        Raises:
            LayoutMismatchError: another site has a bucket there that this site lacks.
        """
        for (before, index), bucket in self.buckets.items():
            if before < round_ and not bucket.is_open:
                site = self._config.sites[bucket.early[0][0][0]]
                raise LayoutMismatchError(
                    f"site {site} has a bucket {index} in round {before}; site "
                    f"{self._config.site} has not"
                )

    def drop_expected(self) -> None:
        """Drop the buckets that no rank has posted yet."""
        self.buckets = {key: each for key, each in self.buckets.items() if each.is_open}

    def stop(self) -> int:
        """Drop all but the own parts; return the float32 bytes of those that were not handled."""
        self.drop_expected()
        chunks = (chunk for bucket in self.buckets.values() for chunk in bucket.chunks.values())
        return sum(chunk.stop() for chunk in chunks)

    def leave(self, from_round: int) -> Iterator[GatewayBucket]:
        """Yield the buckets of rounds from one on, which a later exchange takes over."""
        for key in [key for key in self.buckets if key[0] >= from_round]:
            yield self.buckets.pop(key)

    def _keep(self, sender: GatewayId, frame: Frame) -> None:
        """Keep a frame until the exchange begins.

        A handover takes no credit: its result is kept here anyway until its round is stable. Nor do
        results: this site's own requests bound them, except while it catches up.

        Raises:
            RemoteProtocolError: the frame exceeds the peer's credit.
        """
        key = frame.key
        if (sender, key) in self._ahead:
            return
        if key.kind is Kind.CONTRIBUTION:
            self.held.keep(sender, (key.round, key.bucket, key.chunk), size_of(frame))
        else:
            self.results_bytes += size_of(frame)
        self._ahead[sender, key] = frame

    def _is_past(self, sender: GatewayId, frame: Frame) -> bool:
        """Whether a frame was taken before, or comes too late to change anything.

        A frame comes twice if its connection broke before the acknowledgement.

        Raises:
            LayoutMismatchError: this site never has the frame's bucket.
            RemoteProtocolError: the round is further ahead than any site can be.
        """
        key = frame.key
        bucket = self.buckets.get((key.round, key.bucket))
        if bucket is None or not bucket.is_open:
            if not self._history.is_ahead((key.round, key.bucket)):
                return True
        elif bucket.has_had(frame):
            return True
        return self.held.has(sender, (key.round, key.bucket, key.chunk))


def follow_bytes() -> int:
    """Return the memory limit for results that wait while ranks catch up."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_FOLLOW_SHARE * memory_bytes)


class Exchanges:
    """The exchanges of the epochs in force here, and of those that have begun elsewhere."""

    def __init__(
        self,
        config: GatewayConfig,
        epochs: Epochs,
        history: RoundHistory,
        reductions: Reductions,
        room_bytes: Mapping[GatewayId, int],
    ) -> None:
        """`room_bytes` is what each peer may have here: its credit."""
        self._config = config
        self._epochs = epochs
        self._history = history
        self._reductions = reductions
        self._room_bytes = room_bytes
        self._results_bytes_max = follow_bytes()
        """Limit on the others' results that are kept while our ranks catch up."""
        self._by_epoch: dict[int, Exchange] = {}
        self.begin()

    @property
    def held_bytes(self) -> int:
        """Bytes of peers' frames that are kept until they can be summed."""
        return sum(exchange.held.num_bytes for exchange in self._by_epoch.values())

    def lag_problem(self) -> str:
        """Return why this site, which has come back, can be waited for no longer; empty: it can."""
        has_begun = self._history.has_followed
        if not has_begun and len(self._by_epoch) == 1:
            return ""  # as mostly
        num_bytes = sum(
            exchange.results_bytes
            + (exchange.held.num_bytes if exchange.has_begun and has_begun else 0)
            for exchange in self._by_epoch.values()
        )
        if num_bytes <= self._results_bytes_max:
            return ""
        behind = "its ranks are" if has_begun else "the coordinator's word to it is"
        return (
            f"this site came back, and {behind} further behind than the "
            f"{self._results_bytes_max} bytes of results that may lie here"
        )

    def begin(self) -> list[tuple[GatewayId, Frame]]:
        """Begin the exchange of the newest epoch; return the frames to `receive` again."""
        ahead = self._of_epoch(self._epochs.number).begin(self._nothing_held())
        self._drop()
        return ahead

    def of(self, bucket: GatewayBucket) -> Exchange:
        """Return the exchange of an open bucket."""
        return self._by_epoch[bucket.reduction.bucket.epoch]

    def open_buckets(self) -> Iterator[GatewayBucket]:
        """Yield the buckets that a rank has posted, and that are not finished."""
        for exchange in self._by_epoch.values():
            yield from (bucket for bucket in exchange.buckets.values() if bucket.is_open)

    def receive(
        self, sender: GatewayId, frame: Frame, note: Callable[[GatewayBucket], None]
    ) -> Chunk | None:
        """Give a peer's frame to its epoch's exchange: `Exchange.receive`.

        Raises:
            IsthmusError: the peer may not send this frame.
        """
        key = frame.key
        if self._epochs.verdict(frame.epoch, key.round) is Verdict.DROP:
            return None
        exchange = self._of_epoch(frame.epoch)
        if key.kind is Kind.HANDOVER and exchange.has_begun:
            donor = self._epochs.donor((key.round, key.bucket, key.chunk))
            return exchange.receive_handover(donor, sender[0], frame)
        return exchange.receive(sender, frame, note)

    def opened(
        self, rank: int, request: Reduce, on_failure: Callable[[Failure], None]
    ) -> GatewayBucket:
        """Return the bucket that a rank posts; the first rank opens it.

        `on_failure` is called if a peer had no right to send what it has sent before.

        Raises:
            LocalProtocolError: the rank broke the order of posts.
            LayoutMismatchError: another site has a bucket that this site lacks.
        """
        key, history = (request.round, request.bucket), self._history
        if request.round > history.current:
            self._begin_round(request.round)
        for bucket in self.open_buckets():
            if bucket.key == key:
                return bucket
        name = f"rank {rank}: round {request.round} bucket {request.bucket}"
        if history.is_done(key):
            raise LocalProtocolError(f"{name} was posted twice")
        if request.round < history.current:
            raise LocalProtocolError(f"{name} came after round {history.current} had begun")
        bucket = self._of_epoch(self._epochs.plan_of(request.round).epoch).bucket(key)
        early = bucket.open(request, self._reduction(request))
        history.note_posted(key)
        for sender, frame in early:
            try:
                bucket.receive(sender, frame)
            except IsthmusError as error:  # the peer's error, not the posting rank's
                on_failure(failure_of(error, self._config.sites[sender[0]]))
        return bucket

    def end(self, bucket: GatewayBucket) -> None:
        """Drop a bucket whose result all ranks of the gateway have."""
        del self.of(bucket).buckets[bucket.key]
        bucket.chunks.clear()  # each knows its bucket: a circle, with all of their frames
        self._history.note_done(bucket.key)

    def drop_expected(self) -> None:
        """Drop the buckets that no rank has posted."""
        for exchange in self._by_epoch.values():
            exchange.drop_expected()

    def stop(self) -> int:
        """Drop the state of unfinished chunks except their own parts.

        Return the float32 bytes of admitted own parts that were not handled.
        """
        for exchange in self._by_epoch.values():
            if exchange.has_begun:
                exchange.held = self._nothing_held()
        return sum(exchange.stop() for exchange in self._by_epoch.values())

    def move(self, from_round: int) -> list[Chunk]:
        """Give unfinished buckets to the newest exchange; return the chunks to be admitted again.

        Raises:
            LocalProtocolError: a chunk is to be handed over that this site has never begun.
        """
        again: list[Chunk] = []
        newest = self._of_epoch(self._epochs.number)
        for exchange in self._by_epoch.values():
            for bucket in exchange.leave(from_round) if exchange is not newest else ():
                newest.buckets[bucket.key] = bucket
                fates = {index: self._epochs.fate((*bucket.key, index)) for index in bucket.chunks}
                again += bucket.renew(self._reduction(bucket.request), fates)
        self._drop()
        return again

    def _begin_round(self, round_: int) -> None:
        """A local rank begins a round: every bucket of earlier rounds has been posted.

        Raises:
            LayoutMismatchError: another site has a bucket in an earlier round that this site lacks.
        """
        for exchange in self._by_epoch.values():
            exchange.check_posted(round_)
        self._history.begin(round_)
        self._epochs.begin(round_)
        self._drop()

    def _of_epoch(self, epoch: int) -> Exchange:
        """Return the exchange of an epoch, which may not have begun here."""
        exchange = self._by_epoch.get(epoch)
        if exchange is None:
            exchange = Exchange(self._config, self._history, self._nothing_held())
            self._by_epoch[epoch] = exchange
        return exchange

    def _drop(self) -> None:
        """Drop the exchanges that no round needs any more."""
        self._by_epoch = {
            epoch: exchange
            for epoch, exchange in self._by_epoch.items()
            if epoch > self._epochs.number or exchange.buckets or self._epochs.is_in_force(epoch)
        }

    def _reduction(self, request: Reduce) -> BucketReduction:
        return self._reductions.make(request, self._epochs.plan_of(request.round))

    def _nothing_held(self) -> Held:
        if self._history.has_followed:
            return Held({})
        return Held({peer: 2 * num_bytes for peer, num_bytes in self._room_bytes.items()})


def size_of(frame: Frame) -> int:
    """Return the memory that a kept frame takes."""
    return FRAME_OVERHEAD_BYTES + len(frame.payload)


class Arrivals:
    """Notes when each peer's first frame of a bucket came, to measure the peers' lateness."""

    def __init__(self) -> None:
        self._latest_s: dict[GatewayId, float] = {}

    def note(
        self,
        bucket: GatewayBucket,
        sender: GatewayId,
        frame: Frame,
        link: Link | None,
        now_s: float,
    ) -> None:
        """Note a frame that has come; `link` leads to its sender."""
        previous_s = self._latest_s.get(sender, 0.0)
        self._latest_s[sender] = now_s
        if sender not in bucket.arrivals and link is not None:
            bucket.arrivals[sender] = Arrival(
                now_s,
                previous_s,
                HEADER_BYTES + len(frame.payload),
                link.num_channels,
                frame.key.kind is Kind.RESULT,
                link.rtt_s,
                link.bytes_per_s,
            )
