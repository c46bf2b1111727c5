"""The executor of a gateway: brings local ranks' parts and peers' frames together, chunk by chunk.

Each chunk's machine (`chunk_reduction.py`) gets its events one after another; different chunks run
side by side, so encoding, sending, summing and decoding overlap. A rank's own part is worked on by
whichever pool thread is free. A peer's frame is worked on by the thread that received it, if it is
small, and else by the pool.

Peers' frames are accepted at once, in any order, and kept until they can be summed. Own parts are
admitted to encoding in (round, bucket, chunk) order, as fast as links take them and peers have room
(`credit.py`). So encoded bytes do not pile up here, nor frames at peers.

A round has one plan (`epochs.py`). While members or trees change, ranks wait at the next round. If
a site is lost, chunks stop, and are then handed over or repeated; a repeated chunk is admitted
anew.

One lock guards all of this; machines work outside of it.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from isthmus.protos.errors import (
    DeadlineExceededError,
    IsthmusError,
    LayoutMismatchError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    failure_of,
)
from isthmus.protos.failure import Failure
from isthmus.protos.frame import (
    HEADER_BYTES,
    ChunkKey,
    Frame,
    Kind,
    Packed,
    checksum_of,
    pack,
    unpack,
)
from isthmus.sites.codecs.codec import Floats
from isthmus.sites.codecs.registry import EXACT
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.links.peer_links import Link
from isthmus.sites.gateway.reduction.bucket import (
    Arrival,
    Chunk,
    Expected,
    OpenBucket,
    RoundHistory,
    check_finite,
)
from isthmus.sites.gateway.reduction.chunk_reduction import (
    Bucket,
    BucketReduction,
    ChunkReduction,
    Event,
    Finish,
    HandedOver,
    Own,
    Received,
    Send,
)
from isthmus.sites.gateway.reduction.credit import (
    FRAME_OVERHEAD_BYTES,
    Credit,
    Held,
    credit_of_peers,
)
from isthmus.sites.gateway.reduction.epochs import (
    BucketKey,
    ChunkOrder,
    Epochs,
    Gift,
    PlanInForce,
    Verdict,
    in_force,
)
from isthmus.sites.gateway.reduction.following import Following
from isthmus.sites.gateway.reduction.pool import Pool, Priority
from isthmus.sites.gateway.reduction.residuals import KeptResiduals, Residuals
from isthmus.sites.local.chunk_grid import Grid, Sharing, grid
from isthmus.sites.local.rank_messages import Form, Missing, Reduce, Reduced
from isthmus.sites.silence import Standstills
from isthmus.topology.spec.epoch import Finished
from isthmus.topology.spec.reduction_plan import ReductionPlan

_log = logging.getLogger(__name__)

_HERE_BYTES = 2 << 20
"""Largest payload that the receiving thread sums itself. That takes about 0.2 ms, in which all
links wait; waking a pool thread would cost more."""
_OUTCOME_CHECK_S = 1.0
_FOLLOW_SHARE = 0.25
"""Share of a machine's memory for results that wait for ranks that are catching up."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A gateway's progress, as reported during a change."""

    round: int
    """Latest round that a local rank has posted; -1 before the first."""
    finished: tuple[Finished, ...]
    """Finished chunks of rounds not known to be stable. Final if chunks are stopped."""
    chains: Mapping[int, int]
    """Checksums of complete rounds: `Epochs.chains`."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An epoch that begins with a round that a rank posts."""

    epoch: int
    """The epoch in which a site rejoins, or in which this site is catching up and could rejoin."""
    behind: int = 0
    """Rounds that this site, while catching up, may be behind when it rejoins; 0 for a member."""


class SiteLeftError(IsthmusError):
    """The site has left: it has no part in this round."""

    code = "CANCELLED"


def follow_bytes() -> int:
    """Return the memory limit for results that wait while ranks catch up."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_FOLLOW_SHARE * memory_bytes)


class Executor:
    """Reduces the buckets of one gateway. All methods may be called from any thread."""

    def __init__(
        self,
        config: GatewayConfig,
        pool: Pool,
        *,
        on_reduced: Callable[[int, Reduced], None],
        on_failure: Callable[[Failure], None],
    ) -> None:
        """Both callbacks come from any thread; `on_failure` must not block."""
        self._config = config
        self._site = config.site_index
        self._pool = pool
        self._on_reduced = on_reduced
        self._on_failure = on_failure
        self._links: Mapping[GatewayId, Link] = {}
        self._condition = threading.Condition()
        """Guards everything below. Notified when a round's plan becomes known."""
        self._is_closed = False
        self._expected: dict[BucketKey, Expected] = {}
        self._open: dict[BucketKey, OpenBucket] = {}
        self._history = RoundHistory()
        self._residuals = Residuals(config.error_feedback_decay)
        self._sharing: dict[int, Sharing] = {}
        """Ranks that share a bucket, by its layout, if not all ranks do."""
        self._epochs = Epochs(self._plan(config.plan, config.codecs, epoch=0, from_round=0))
        self._room_bytes = credit_of_peers(config)
        self._credit = Credit(self._room_bytes)
        self._held = self._nothing_held()
        self._ahead: dict[tuple[GatewayId, ChunkKey, int], Frame] = {}
        """Frames of epochs that have not begun here, by sender, key and epoch."""
        self._held_ahead = self._nothing_held()
        self._results_ahead_bytes = 0
        """Memory of the results among those frames."""
        self._due: deque[tuple[ChunkOrder, int, tuple[object, ...]]] = deque()
        """Handovers to send: (chunk, receiving site, frames)."""
        self._num_working = 0
        """Number of events that machines are handling."""
        self._waiting: list[tuple[Priority, OpenBucket, Chunk, Own]] = []
        """Heap of own parts that are not admitted. Priorities are unique."""
        self._encoding_bytes = 0
        """float32 bytes of own parts admitted and not yet queued on links."""
        self._last_arrival_s: dict[GatewayId, float] = {}
        self._following = Following(config.peer_lost_s, config.steps_per_round)
        self._newest = -1
        """Latest round of which a frame came before a rank had posted it; -1: none."""
        self._newest_s = math.inf
        """When that frame came."""
        self._longest_round_s = 0.0
        """Longest time between two such rounds of the others."""
        self._awaited_since_s = math.inf
        """Since when the others may be waiting for this site to rejoin (monotonic)."""
        self._ahead_bytes = follow_bytes()
        """Cap in bytes on the others' results that are kept while our ranks catch up."""

    def connect(self, links: Mapping[GatewayId, Link]) -> None:
        """Set the current links, as an immutable mapping.

        Must be called before the first post.
        """
        self._links = links

    def close(self) -> None:
        """End all waits."""
        with self._condition:
            self._is_closed = True
            self._waiting.clear()
            self._condition.notify_all()

    def wait_complete(self) -> None:
        """Wait until every posted bucket is reduced, or this gateway ends."""
        with self._condition:
            while self._open and not self._is_closed:
                self._condition.wait(_OUTCOME_CHECK_S)

    # ---------------------------------------------------------------- residuals

    def residuals_of(self, rank: int) -> KeptResiduals:
        """Return copies of the residuals of a rank's shards. Call between its rounds."""
        config = self._config

        def chunks(numel: int, layout: int) -> range:
            cut = self._cut(numel, layout)
            is_shared = rank in cut.ranks(config.site_index)
            return cut.chunks(config.site_index, rank) if is_shared else range(0)

        with self._condition:
            residual = self._residuals.kept(chunks)
        # Copied without the lock: with a large model it takes seconds, and frames keep coming.
        return {key: lost.copy() for key, lost in residual.items()}

    def restore(self, residual: KeptResiduals) -> None:
        """Load residuals from a checkpoint, before the first round."""
        with self._condition:
            self._residuals.restore(residual)

    # ---------------------------------------------------------------- plans

    @property
    def round(self) -> int:
        """The latest round that a local rank has posted; -1 before the first."""
        return self._history.current

    @property
    def results_wait_s(self) -> float:
        """How long ranks that catch up may leave results waiting; infinity: none wait.

        Twice as long as the others have taken for a round, an evaluation in it included.
        """
        with self._condition:
            is_behind = self._epochs.follows(self.round + 1) and self._newest > self.round
            return 2 * self._longest_round_s if is_behind else math.inf

    def needs(self, site: int) -> bool:
        """Whether the plan of a current or later round needs the link to a site."""
        with self._condition:
            return self._epochs.needs(site)

    def settle(self, epoch: int, *, stops: bool) -> Settled:
        """Begin no new round before `resume` or `cancel`; with `stops`, also stop all chunks.

        Returns the progress; with `stops`, no further chunk will finish.
        """
        with self._condition:
            was_stopped = self._epochs.is_stopped
            self._epochs.settle(epoch, stops=stops)
            if self._epochs.is_stopped and not was_stopped:
                self._stop()
            while self._epochs.is_stopped and self._num_working and not self._is_closed:
                self._condition.wait(_OUTCOME_CHECK_S)
            return Settled(self.round, self._epochs.finished(), dict(self._epochs.chains))

    def cancel(self, epoch: int) -> None:
        """Call off a change: go on as before."""
        with self._condition:
            self._epochs.cancel(epoch)
            self._condition.notify_all()

    def resume(
        self,
        epoch: int,
        from_round: int,
        plan: ReductionPlan,
        codecs: tuple[str, ...],
        gifts: Iterable[Gift] = (),
    ) -> None:
        """Use a plan from a round on; if chunks were stopped, continue or repeat them.

        Repeated calls change nothing.

        Raises:
            LocalProtocolError: the round has begun and chunks were not stopped.
        """
        with self._condition:
            was_stopped = self._epochs.is_stopped
            ruling = self._plan(plan, codecs, epoch=epoch, from_round=from_round)
            if not self._epochs.resume(ruling, gifts):
                return
            if self.round < 0 and not self._history.has_followed:
                self._history.first = from_round  # this site may have joined late
            if self._epochs.follows(from_round) and not self._history.has_followed:
                self._expected.clear()  # frames meant for this site's previous processes
                self._history.has_followed = True
                self._held = self._nothing_held()
            if was_stopped:
                self._do_again(from_round)
                self._due.clear()
            self._due.extend(self._epochs.due())
            if self._history.has_followed and not self._epochs.follows(from_round):
                self._awaited_since_s = time.monotonic()
            ahead = self._take_ahead()
            self._condition.notify_all()
        self._receive_again(ahead)
        self.pump()

    def await_entry(
        self, epoch: int, from_round: int, plan: ReductionPlan, codecs: tuple[str, ...]
    ) -> int | None:
        """Use a plan from the round on that ranks mark with its epoch, for a rejoining site.

        Rounds go on meanwhile. Repeated calls change nothing. Return the round with which the epoch
        has begun; None: it has not.
        """
        with self._condition:
            if self._epochs.await_entry(
                self._plan(plan, codecs, epoch=epoch, from_round=from_round)
            ):
                self._condition.notify_all()
            return self._epochs.from_round if self._epochs.number >= epoch else None

    def _take_ahead(self) -> dict[tuple[GatewayId, ChunkKey, int], Frame]:
        """Return frames that waited for an epoch that has begun; the lock is held."""
        ahead, self._ahead = self._ahead, {}
        self._held_ahead = self._nothing_held()
        self._results_ahead_bytes = 0
        return ahead

    def _receive_again(self, ahead: Mapping[tuple[GatewayId, ChunkKey, int], Frame]) -> None:
        for (sender, _, _), frame in ahead.items():
            try:
                self.receive(sender, frame)
            except IsthmusError as error:
                self._on_failure(failure_of(error, self._config.sites[sender[0]]))

    def _stop(self) -> None:
        """Drop the state of unfinished chunks except their own parts; the lock is held."""
        for bucket in self._open.values():
            for chunk in bucket.chunks.values():
                self._encoding_bytes -= chunk.stop()
        self._expected.clear()
        self._credit = Credit(self._room_bytes)
        self._held = self._nothing_held()

    def _do_again(self, from_round: int) -> None:
        """Restart all unfinished chunks that no site hands over; the lock is held."""
        for key, bucket in self._open.items():
            if key[0] < from_round:
                continue
            fates = {index: self._epochs.fate((*key, index)) for index in bucket.chunks}
            for chunk, own in bucket.renew(self._reduction(bucket.request), fates):
                heapq.heappush(self._waiting, ((*key, chunk.index), bucket, chunk, own))

    def _plan(
        self, plan: ReductionPlan, codecs: tuple[str, ...], *, epoch: int, from_round: int
    ) -> PlanInForce:
        return in_force(plan, codecs, self._site, epoch=epoch, from_round=from_round)

    def _nothing_held(self) -> Held:
        if self._history.has_followed:
            return Held({})
        return Held({peer: 2 * num_bytes for peer, num_bytes in self._room_bytes.items()})

    def _wait_for_plan(self, round_: int) -> None:
        """Wait until a round's plan is known; the caller holds the lock.

        Raises:
            SiteLeftError: this site has left before the round.
            DeadlineExceededError: the plan did not become known in time.
            PeerLostError: this gateway is stopping.
        """
        if round_ <= self.round or self._epochs.may_begin(round_):
            return
        config = self._config
        patience_s = config.rank_wait_s
        now_s = time.monotonic()
        deadline_s, standstills = now_s + patience_s, Standstills(now_s, config.peer_lost_s)
        while not self._epochs.may_begin(round_):
            if self._epochs.is_over(round_):
                raise SiteLeftError(
                    f"site {config.site} was dropped from the run, and has had its last round, "
                    f"{round_ - 1}: its processes end"
                )
            if self._is_closed:
                raise PeerLostError("this gateway is stopping", config.site)
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceededError(
                    f"round {round_} has waited {patience_s:g} s to hear which sites and trees "
                    "carry it"
                )
            wait_s = min(remaining_s, _OUTCOME_CHECK_S)
            self._condition.wait(wait_s)
            # Time in which this process was suspended does not count.
            deadline_s += standstills.look(time.monotonic(), wait_s)

    # ---------------------------------------------------------------- local ranks

    def post(self, rank: int, request: Reduce, values: Floats) -> Begun | None:
        """Start the reduction of a rank's part, which is borrowed until then; see `add_part`.

        Returns:
            The epoch to report to the coordinator; None: none begins.

        Raises:
            SiteLeftError: the site has no part in the round.
            PeerLostError: the site rejoins, and the others have waited for it for too long.
            LocalProtocolError: the rank broke the order of posts.
            LayoutMismatchError: another rank or site has a different bucket under this index.
            NonFiniteError: the part holds NaN or infinity, and the run is configured to stop.
        """
        if self._config.non_finite == "stop" and request.form is not Form.ENCODED:
            check_finite(request, values)
        with self._condition:
            self._wait_for_plan(request.round)
            has_entered = bool(request.enters) and self._epochs.enter(request.enters, request.round)
            now_s = time.monotonic()
            is_new = request.round > self.round
            behind = self._begin_to_follow(request.round, now_s) if is_new else None
            bucket = self._opened(rank, request)
            ahead = self._take_ahead() if has_entered else {}
            for chunk, own in bucket.add_part(rank, request, values, now_s):
                heapq.heappush(self._waiting, ((*bucket.key, chunk.index), bucket, chunk, own))
            reduced = self._take_reduced(bucket, now_s)
        self.pump()
        self._reply(reduced)
        self._receive_again(ahead)
        if behind is not None:
            return Begun(self._epochs.number, behind)
        return Begun(request.enters) if has_entered else None

    def _begin_to_follow(self, round_: int, now_s: float) -> int | None:
        """Return how many rounds this site may be behind at its rejoin: `Following.begins`.

        Raises:
            PeerLostError: the others have waited for this site for too long.
        """
        if not self._epochs.follows(round_):
            self._awaited_since_s = math.inf
            return None
        longest_s = 2 * self._following.wait_s
        if now_s - self._awaited_since_s > longest_s:
            why = f"this site takes part again, and the others have waited for {longest_s:g} s"
            raise PeerLostError(why, self._config.site)
        return self._following.begins(round_, self._newest, now_s)

    def _opened(self, rank: int, request: Reduce) -> OpenBucket:
        """Return the bucket that a rank posts; the first rank opens it.

        Raises:
            LocalProtocolError: the rank broke the order of posts.
            LayoutMismatchError: another site has a bucket that this site lacks.
        """
        key = request.round, request.bucket
        if request.round > self._history.current:
            self._begin_round(request.round)
        bucket = self._open.get(key)
        if bucket is not None:
            return bucket
        name = f"rank {rank}: round {request.round} bucket {request.bucket}"
        if self._history.is_done(key):
            raise LocalProtocolError(f"{name} was posted twice")
        if request.round < self._history.current:
            raise LocalProtocolError(f"{name} came after round {self._history.current} had begun")
        reduction = self._reduction(request)
        expected = self._expected.pop(key, None) or Expected(key)
        bucket = OpenBucket(self._config, request, reduction, expected.arrivals)
        self._open[key] = bucket
        self._history.note_posted(key)
        for sender, frame in expected.frames:
            try:
                bucket.accept(sender[0], frame).deliver(Received(sender[0], frame))
            except IsthmusError as error:  # the peer's error, not the posting rank's
                self._on_failure(failure_of(error, self._config.sites[sender[0]]))
        return bucket

    def _begin_round(self, round_: int) -> None:
        """A local rank begins a round: every bucket of earlier rounds has been posted.

        Raises:
            LayoutMismatchError: another site has a bucket in an earlier round that this site lacks.
        """
        for (before, index), expected in self._expected.items():
            if before < round_:
                site = self._config.sites[expected.frames[0][0][0]]
                raise LayoutMismatchError(
                    f"site {site} has a bucket {index} in round {before}; site "
                    f"{self._config.site} has not"
                )
        self._history.begin(round_)
        self._epochs.begin(round_)

    def _reduction(self, request: Reduce) -> BucketReduction:
        """Return the reduction of a bucket, from its grid and its round's plan and codecs."""
        config = self._config
        ruling = self._epochs.plan_of(request.round).of_bucket(request.numel)
        codecs = (EXACT,) * len(ruling.codecs) if request.exact else ruling.codecs
        if request.participants:
            self._sharing[request.layout] = request.sharing(config.ranks_per_site)
        cut = self._cut(request.numel, request.layout)
        key = request.round, request.bucket
        bucket = Bucket(ruling.epoch, *key, request.layout, codecs, cut, time.thread_time)
        residuals = None
        if config.error_feedback and not all(codec.lossless for codec in codecs):
            residuals = self._residuals.bucket(request.bucket, request.layout, request.numel)
        return BucketReduction(bucket, ruling.plan, ruling.roles, residuals)

    def _cut(self, numel: int, layout: int) -> Grid:
        """Return the grid of a bucket that a rank has posted."""
        sharing = self._sharing.get(layout, self._config.ranks_per_site)
        return grid(numel, self._config.chunk_numel, sharing)

    # ---------------------------------------------------------------- admission

    def pump(self) -> None:
        """Admit own chunks to encoding, as far as links and peers have room.

        Handovers that others wait for come first.
        """
        # Read without the lock: whoever adds an entry calls `pump` afterwards.
        if not self._waiting and not self._due:
            return
        with self._condition:
            while self._due and self._give(*self._due[0]):
                self._due.popleft()
            while self._waiting and self._may_admit():
                order, bucket, chunk, own = heapq.heappop(self._waiting)
                self._credit.take(order, chunk.peers, chunk.most_bytes)
                self._encoding_bytes += chunk.raw_bytes
                if chunk.deliver(own):
                    self._pool.submit(order, partial(self._work, bucket, chunk))

    def _may_admit(self) -> bool:
        """Return whether the earliest waiting chunk may be encoded and sent.

        All ranks of the gateway must have posted its bucket, and the one before: the chunks of a
        late rank come before those of the others' later buckets, here as at all sites.
        """
        _, bucket, chunk, _ = self._waiting[0]
        before = bucket.after
        return (
            bucket.is_posted
            and (before is None or before in self._open or self._history.is_done(before))
            and not self._epochs.is_stopped
            and self._credit.has_room(chunk.peers, chunk.most_bytes)
            and all(
                link.unsent_bytes + self._encoding_bytes < link.ahead_bytes
                for link in self._links.values()
            )
        )

    def _give(self, order: ChunkOrder, site: int, frames: tuple[object, ...]) -> bool:
        """Hand a chunk over, unless the link has no room now; return whether it was sent."""
        config = self._config
        for packed in frames:
            assert isinstance(packed, bytes | memoryview)
            frame = unpack(packed)
            cut = self._cut(frame.numel, frame.layout)
            gateway = cut.owner(site, order[2]) // config.ranks_per_gateway[site]
            link = self._links.get((site, gateway))
            if link is None:
                _log.warning("chunk %s is for site %d, and there is no link", order, site)
                return True
            if link.unsent_bytes >= link.ahead_bytes and frames[0] is packed:
                return False
            key = ChunkKey(*order, frame.key.site, Kind.HANDOVER)
            link.send(
                Frame(
                    key,
                    self._epochs.number,
                    frame.codec,
                    len(frames),
                    frame.layout,
                    frame.numel,
                    frame.weight,
                    packed,
                ),
                4 * cut.span(order[2])[1],
            )
        return True

    # ---------------------------------------------------------------- peers

    def receive(self, sender: GatewayId, frame: Frame) -> None:
        """Accept a peer's frame, and sum its chunk if it was the last one missing; never waits.

        A repeated frame, or one of a finished bucket, changes nothing.

        Raises:
            IsthmusError: the peer may not send this frame.
        """
        now_s = time.monotonic()
        key, is_handover = frame.key, frame.key.kind is Kind.HANDOVER
        order = key.round, key.bucket, key.chunk
        with self._condition:
            if self._is_closed:
                raise PeerLostError("this gateway is stopping", self._config.site)
            verdict = self._epochs.verdict(frame.epoch, key.round)
            if verdict is Verdict.DROP:
                return
            size_bytes = FRAME_OVERHEAD_BYTES + len(frame.payload)
            if verdict is Verdict.WAIT:
                self._keep_ahead(sender, frame, size_bytes)
                return
            if is_handover:
                ready = self._take_handover(sender, frame)
            elif self._is_repetition(sender, frame):
                return
            else:
                ready = self._take_over(sender, frame, now_s)
                self._held.keep(sender, order, size_bytes)
                self._check_level()
        if ready is None:
            return
        if len(frame.payload) <= _HERE_BYTES:
            self._work(*ready)
        else:
            self._pool.submit(order, partial(self._work, *ready))

    def _keep_ahead(self, sender: GatewayId, frame: Frame, size_bytes: int) -> None:
        """Keep a frame of an epoch that has not begun here.

        A handover takes no credit: its result is kept here anyway until its round is stable. Nor do
            results: this site's own requests bound them, except while it catches up.

        Raises:
            RemoteProtocolError: the frame exceeds the peer's credit.
        """
        key = frame.key
        if (sender, key, frame.epoch) in self._ahead:
            return
        if key.kind is Kind.CONTRIBUTION:
            self._held_ahead.keep(sender, (key.round, key.bucket, key.chunk), size_bytes)
        else:
            self._results_ahead_bytes += size_bytes
            self._check_level()
        self._ahead[sender, key, frame.epoch] = frame

    def _check_level(self) -> None:
        """Give up if results pile up because our ranks do not catch up."""
        held_bytes = self._held.num_bytes if self._history.has_followed else 0
        if held_bytes + self._results_ahead_bytes > self._ahead_bytes:
            has_begun = self._history.has_followed
            behind = "its ranks are" if has_begun else "the coordinator's word to it is"
            why = (
                f"this site came back, and {behind} further behind than the "
                f"{self._ahead_bytes} bytes of results that may lie here"
            )
            self._on_failure(failure_of(PeerLostError(why, self._config.site)))

    def _take_handover(self, sender: GatewayId, given: Frame) -> tuple[OpenBucket, Chunk] | None:
        """Accept a handed-over frame; return the chunk to work on, if any.

        Raises:
            IsthmusError: the peer may not send this frame.
        """
        order = given.key.round, given.key.bucket, given.key.chunk
        donor = self._epochs.donor(order)
        if donor is None:
            return None  # a repeated frame
        bucket = self._open.get(order[:2])
        if donor != sender[0] or bucket is None or order[2] not in bucket.chunks:
            raise RemoteProtocolError(f"chunk {order} was handed over, and nobody asked for it")
        frame = unpack(bytes(given.payload))
        bucket.reduction.check_handover(given, frame)
        chunk = bucket.chunks[order[2]]
        return (bucket, chunk) if chunk.take_handed_over(frame, given.tree) else None

    def _is_repetition(self, sender: GatewayId, frame: Frame) -> bool:
        """Whether a frame was already taken: its connection broke before the acknowledgement.

        Raises:
            LayoutMismatchError: this site never has the frame's bucket.
            RemoteProtocolError: the round is further ahead than any site can be.
        """
        key = frame.key
        bucket = self._open.get((key.round, key.bucket))
        if bucket is None:
            if not self._history.is_ahead((key.round, key.bucket)):
                return True
        elif key.chunk in bucket.chunks and bucket.chunks[key.chunk].is_past(key.kind):
            return True
        return self._held.has(sender, (key.round, key.bucket, key.chunk))

    def _take_over(
        self, sender: GatewayId, frame: Frame, now_s: float
    ) -> tuple[OpenBucket, Chunk] | None:
        """Deliver a frame, or keep it until a local rank posts its bucket; return work to do.

        Raises:
            IsthmusError: the peer may not send this frame.
        """
        key = frame.key.round, frame.key.bucket
        bucket = self._open.get(key)
        if bucket is None:
            if frame.key.round > self._newest:
                self._longest_round_s = max(self._longest_round_s, now_s - self._newest_s)
                self._newest, self._newest_s = frame.key.round, now_s
            expected = self._expected.setdefault(key, Expected(key))
            self._note_arrival(expected.arrivals, sender, frame, now_s)
            expected.frames.append((sender, frame))
            return None
        self._note_arrival(bucket.arrivals, sender, frame, now_s)
        chunk = bucket.accept(sender[0], frame)
        return (bucket, chunk) if chunk.deliver(Received(sender[0], frame)) else None

    def _note_arrival(
        self,
        arrivals: dict[GatewayId, Arrival],
        sender: GatewayId,
        frame: Frame,
        now_s: float,
    ) -> None:
        """Record when a peer's first frame of a bucket came, to measure the peer's lateness."""
        previous_s = self._last_arrival_s.get(sender, 0.0)
        self._last_arrival_s[sender] = now_s
        link = self._links.get(sender)
        if sender not in arrivals and link is not None:
            arrivals[sender] = Arrival(
                now_s,
                previous_s,
                HEADER_BYTES + len(frame.payload),
                link.num_channels,
                frame.key.kind is Kind.RESULT,
                link.rtt_s,
                link.bytes_per_s,
            )

    # ---------------------------------------------------------------- chunks

    def _work(self, bucket: OpenBucket, chunk: Chunk) -> None:
        """Let a chunk's machine handle its inbox; runs on one thread at a time."""
        is_working = False
        while True:
            with self._condition:
                self._num_working -= is_working
                if not chunk.inbox or self._is_closed:
                    chunk.is_scheduled = False
                    if not self._num_working:
                        self._condition.notify_all()  # `settle` may wait for the last event
                    return
                event, machine = chunk.inbox.popleft(), chunk.machine
                self._num_working += 1
                is_working = True
            origin = self._config.sites[event.sender] if isinstance(event, Received) else ""
            try:
                self._handle(bucket, chunk, machine, event)
            except IsthmusError as error:
                self._on_failure(failure_of(error, origin))
            except Exception as error:  # noqa: BLE001 - the root of a task: reported, ends the run
                self._on_failure(failure_of(error, origin))

    def _handle(
        self, bucket: OpenBucket, chunk: Chunk, machine: ChunkReduction, event: Event
    ) -> None:
        """Give a chunk's machine an event, and carry out its actions one by one."""
        wire_bytes = 0
        finish: Finish | None = None
        try:
            for action in machine.handle(event):
                if isinstance(action, Send):
                    # In a tree a sent frame is a complete sum; in a gather it is the own part.
                    if not bucket.reduction.is_gather:
                        self._note_summed(bucket, chunk, ())
                    wire_bytes += len(pack(action.frame))  # at once: its payload may change
                    link = self._links.get(bucket.gateway(chunk.index, action.site))
                    if link is not None:
                        link.send(action.frame, chunk.raw_bytes)
                else:
                    self._note_summed(bucket, chunk, tuple(map(pack, action.frames)), is_last=True)
                    finish = action
        finally:
            if isinstance(event, Own):
                with self._condition:
                    self._encoding_bytes -= chunk.raw_bytes
        if wire_bytes or finish is not None:
            with self._condition:
                bucket.account(chunk, wire_bytes, finish)
                reduced = self._take_reduced(bucket, time.monotonic())
                if isinstance(event, HandedOver):
                    self._due.extend(self._epochs.due())
            self._reply(reduced)
        if isinstance(event, Own) or finish is not None:
            self.pump()

    def _note_summed(
        self,
        bucket: OpenBucket,
        chunk: Chunk,
        frames: tuple[Packed, ...],
        *,
        is_last: bool = False,
    ) -> None:
        """Release a summed chunk's kept frames, before any peer can learn that it is summed.

        `is_last`: the chunk is finished, and `frames` are its result for other sites.
        """
        with self._condition:
            order = (*bucket.key, chunk.index)
            chunk.is_summed, chunk.is_finished = True, is_last
            self._held.release(order)
            if is_last:
                self._credit.give_back(order)
                self._epochs.finish(order, frames, sum(map(checksum_of, frames)))

    def _take_reduced(self, bucket: OpenBucket, now_s: float) -> list[tuple[int, Reduced]]:
        """Return finished ranks with their results; drop the bucket after the last rank."""
        reduced = bucket.take_reduced(now_s)
        if self._epochs.missing:
            told = self._epochs.missing.items()
            missing = tuple(Missing(site=site, from_round=at) for site, at in told)
            reduced = [(rank, replace(each, missing=missing)) for rank, each in reduced]
        if reduced and bucket.is_reduced:
            del self._open[bucket.key]
            self._history.note_done(bucket.key)
            self._condition.notify_all()  # `wait_complete` may wait for it
        return reduced

    def _reply(self, reduced: list[tuple[int, Reduced]]) -> None:
        for rank, result in reduced:
            self._on_reduced(rank, result)
