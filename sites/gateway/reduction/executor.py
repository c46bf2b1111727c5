"""The executor of a gateway: brings local ranks' parts and peers' frames together, chunk by chunk.

Each chunk's machine (`chunk_reduction.py`) gets its events one after another; different chunks run
side by side, so encoding, sending, summing and decoding overlap. A rank's own part is worked on by
whichever pool thread is free. A peer's frame is worked on by the thread that received it, if it is
small, and else by the pool.

What a peer sends is taken over at once, in whatever order it comes, and kept until it can be
summed. Own parts are admitted to encoding one after another, in (round, bucket, chunk) order, as
fast as the links take them and as far as peers have room for them (`credit.py`). So encoded bytes
do not pile up here, and frames do not pile up at peers.

A round has one plan (`plan_schedule.py`). Where another one is proposed while a run goes on, ranks
wait at its first round until the outcome is known.

One lock guards all of this; machines work outside of it.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from protos.errors import (
    DeadlineExceededError,
    IsthmusError,
    LayoutMismatchError,
    LocalProtocolError,
    PeerLostError,
    StaleGenerationError,
    failure_of,
)
from protos.failure import Failure
from protos.frame import HEADER_BYTES, Frame, Kind
from sites.codecs.codec import Floats
from sites.codecs.registry import EXACT
from sites.gateway.config import GatewayConfig, GatewayId, Proposal
from sites.gateway.links.peer_links import Link
from sites.gateway.reduction.bucket import (
    Arrival,
    BucketKey,
    Chunk,
    Expected,
    OpenBucket,
    RoundHistory,
    check_finite,
)
from sites.gateway.reduction.chunk_reduction import (
    Bucket,
    BucketReduction,
    Event,
    Own,
    Received,
    Send,
)
from sites.gateway.reduction.credit import FRAME_BYTES, Credit, Held, credit_of_peers
from sites.gateway.reduction.plan_schedule import Begun, PlanSchedule
from sites.gateway.reduction.pool import Pool, Priority
from sites.gateway.reduction.residuals import Residuals
from sites.local.chunk_grid import grid
from sites.local.rank_messages import Form, Reduce, Reduced
from sites.silence import Standstills

_HERE_BYTES = 2 << 20
"""Payloads up to here are summed by the thread that received them. It takes 0.2 ms or so, in which
all links wait; to wake a thread of the pool would cost more."""
_OUTCOME_CHECK_S = 1.0


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
        """Guards everything below. It is notified when it becomes known which plan carries a
        round."""
        self._is_closed = False
        self._expected: dict[BucketKey, Expected] = {}
        self._open: dict[BucketKey, OpenBucket] = {}
        self._history = RoundHistory()
        self._residuals = Residuals()
        self._plans = PlanSchedule(config.plan, config.codecs, config.site_index)
        self.begun: Begun | None = None
        """The latest switch of plans that a local rank has got to."""
        credit = credit_of_peers(config)
        self._credit = Credit(credit)
        self._held = Held({peer: 2 * num_bytes for peer, num_bytes in credit.items()})
        self._waiting: list[tuple[Priority, OpenBucket, Chunk, Own]] = []
        """Own parts that are not admitted: a heap. Priorities are unique."""
        self._encoding_bytes = 0
        """float32 bytes of own parts that are admitted and not handed to links yet."""
        self._last_arrival_s: dict[GatewayId, float] = {}

    def connect(self, links: Mapping[GatewayId, Link]) -> None:
        """Take all links that there are now, in a mapping that stays as it is.

        Before the first call nothing may be posted.
        """
        self._links = links

    def close(self) -> None:
        """Let everybody who waits go."""
        with self._condition:
            self._is_closed = True
            self._waiting.clear()
            self._condition.notify_all()

    # ---------------------------------------------------------------- plans

    @property
    def round(self) -> int:
        """The latest round that a local rank has posted; -1 before the first."""
        return self._history.current

    def needs(self, site: int) -> bool:
        """Whether a plan of rounds under way, or of later ones, needs the link to a site."""
        with self._condition:
            return self._plans.needs(site)

    def propose(self, proposal: Proposal) -> tuple[bool, int]:
        """Keep a plan for the rounds from a later one on, and begin none of them before `decide`.

        Returns:
            Whether it is kept, and the latest round that a local rank has posted.
        """
        with self._condition:
            return self._plans.propose(proposal, self.round), self.round

    def decide(self, epoch: int, *, commit: bool) -> None:
        """Take the outcome of a proposal: ranks that wait for it go on.

        Raises:
            LocalProtocolError: all are to switch to a plan that is not kept here.
        """
        with self._condition:
            self._plans.decide(epoch, commit=commit)
            self._condition.notify_all()

    def _wait_for_plan(self, round_: int) -> None:
        """Wait until it is known which plan carries a round; the caller holds the lock.

        Raises:
            DeadlineExceededError: nobody has said so for too long.
            PeerLostError: this gateway ends.
        """
        if self._plans.is_settled(round_):
            return
        patience_s = self._config.rank_wait_s
        now_s = time.monotonic()
        deadline_s, standstills = now_s + patience_s, Standstills(now_s, self._config.peer_lost_s)
        while not self._plans.is_settled(round_):
            if self._is_closed:
                raise PeerLostError("this gateway is stopping", self._config.site)
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceededError(
                    f"round {round_} has waited {patience_s:g} s to hear whether it has a new plan"
                )
            wait_s = min(remaining_s, _OUTCOME_CHECK_S)
            self._condition.wait(wait_s)
            # While this process stood still, nobody could have told it.
            deadline_s += standstills.look(time.monotonic(), wait_s)

    # ---------------------------------------------------------------- local ranks

    def post(self, rank: int, request: Reduce, values: Floats) -> None:
        """Start a rank's part of a bucket, which is lent until it is reduced: `add_part`.

        Raises:
            LocalProtocolError: the rank broke the order of posts.
            LayoutMismatchError: another rank or site has another bucket in this place.
            NonFiniteError: it holds a NaN or an infinity, and the run is to stop for that.
        """
        if self._config.non_finite == "stop" and request.form is not Form.ENCODED:
            check_finite(request, values)
        with self._condition:
            self._wait_for_plan(request.round)
            bucket = self._opened(rank, request)
            now_s = time.monotonic()
            for chunk, own in bucket.add_part(rank, request, values, now_s):
                heapq.heappush(self._waiting, ((*bucket.key, chunk.index), bucket, chunk, own))
            reduced = self._take_reduced(bucket, now_s)
        self.pump()
        self._reply(reduced)

    def _opened(self, rank: int, request: Reduce) -> OpenBucket:
        """Return the bucket that a rank posts; the first rank opens it.

        Raises:
            LocalProtocolError: the rank broke the order of posts.
            LayoutMismatchError: another site has a bucket that this site has not.
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
            except IsthmusError as error:  # the peer's, and not of the rank that posts
                self._on_failure(failure_of(error, self._config.sites[sender[0]]))
        return bucket

    def _begin_round(self, round_: int) -> None:
        """A local rank has gone on: every bucket of the rounds before has been posted.

        Raises:
            LayoutMismatchError: another site has a bucket there that this site has not.
        """
        for (before, index), expected in self._expected.items():
            if before < round_:
                site = self._config.sites[expected.frames[0][0][0]]
                raise LayoutMismatchError(
                    f"site {site} has a bucket {index} in round {before}; site "
                    f"{self._config.site} has not"
                )
        self._history.begin(round_)
        begun = self._plans.begin(round_)
        if begun is not None:
            # What was lost in one role is not owed in another: sums, parts and results have
            # different units.
            self._residuals.forget()
            self.begun = Begun(begun.epoch, round_)

    def _reduction(self, request: Reduce) -> BucketReduction:
        """Return the machines of a bucket: its grid, and the plan and codecs of its round."""
        config = self._config
        ruling = self._plans.of(request.round)
        codecs = (EXACT,) * len(ruling.codecs) if request.exact else ruling.codecs
        cut = grid(request.numel, config.chunk_numel, config.ranks_per_site)
        key = request.round, request.bucket
        bucket = Bucket(config.generation, *key, request.layout, codecs, cut, time.thread_time)
        residuals = None
        if config.error_feedback and not all(codec.lossless for codec in codecs):
            residuals = self._residuals.bucket(request.bucket, request.layout, request.numel)
        return BucketReduction(bucket, ruling.plan, ruling.roles, residuals)

    # ---------------------------------------------------------------- admission

    def pump(self) -> None:
        """Admit own chunks to encoding, as far as links and peers have room."""
        if not self._waiting:  # asked without the lock: who adds to it calls this afterwards
            return
        with self._condition:
            while self._waiting and self._may_admit():
                order, bucket, chunk, own = heapq.heappop(self._waiting)
                self._credit.take(order, chunk.peers, chunk.most_bytes)
                self._encoding_bytes += chunk.raw_bytes
                if chunk.deliver(own):
                    self._pool.submit(order, partial(self._work, bucket, chunk))

    def _may_admit(self) -> bool:
        """Return whether the earliest chunk that waits may be encoded and sent.

        All ranks of the gateway must have posted its bucket: the chunks of a late rank come before
        those of the others' later buckets, here as at all sites.
        """
        _, bucket, chunk, _ = self._waiting[0]
        return (
            bucket.is_posted
            and self._credit.has_room(chunk.peers, chunk.most_bytes)
            and all(
                link.unsent_bytes + self._encoding_bytes < link.ahead_bytes
                for link in self._links.values()
            )
        )

    # ---------------------------------------------------------------- peers

    def receive(self, sender: GatewayId, frame: Frame) -> None:
        """Take a peer's frame over, and sum its chunk if nothing else is missing; waits for nobody.

        A repeated frame, or one of a bucket that is finished, changes nothing.

        Raises:
            IsthmusError: the peer may not send this.
        """
        now_s = time.monotonic()
        if frame.generation != self._config.generation:
            raise StaleGenerationError(
                f"a frame of generation {frame.generation}; this is {self._config.generation}"
            )
        with self._condition:
            if self._is_closed:
                raise PeerLostError("this gateway is stopping", self._config.site)
            if self._is_repetition(sender, frame):
                return
            ready = self._take_over(sender, frame, now_s)
            order = frame.key.round, frame.key.bucket, frame.key.chunk
            self._held.keep(sender, order, FRAME_BYTES + len(frame.payload))
        if ready is None:
            return
        if len(frame.payload) <= _HERE_BYTES:
            self._work(*ready)
        else:
            self._pool.submit(order, partial(self._work, *ready))

    def _is_repetition(self, sender: GatewayId, frame: Frame) -> bool:
        """Whether a frame changes nothing any more: its connection broke before it was told so.

        Raises:
            LayoutMismatchError: this site never has its bucket.
            RemoteProtocolError: no site can be that far ahead.
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
        """Deliver a frame, or keep it until a local rank posts its bucket; return what to work on.

        Raises:
            IsthmusError: the peer may not send this.
        """
        key = frame.key.round, frame.key.bucket
        bucket = self._open.get(key)
        if bucket is None:
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
        """Note when a bucket's first frame from a peer came: that tells how late the peer is."""
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
        while True:
            with self._condition:
                if not chunk.inbox or self._is_closed:
                    chunk.is_scheduled = False
                    return
                event = chunk.inbox.popleft()
            origin = self._config.sites[event.sender] if isinstance(event, Received) else ""
            try:
                self._handle(bucket, chunk, event)
            except IsthmusError as error:
                self._on_failure(failure_of(error, origin))
            except Exception as error:  # noqa: BLE001 - the root of a task: reported, ends the run
                self._on_failure(failure_of(error, origin))

    def _handle(self, bucket: OpenBucket, chunk: Chunk, event: Event) -> None:
        """Give a chunk's machine an event, and carry out its actions one by one."""
        wire_bytes, weight = 0, None
        try:
            for action in chunk.machine.handle(event):
                if isinstance(action, Send):
                    # In a tree, whatever is sent is a whole sum; in a gather, it is the own part.
                    if not bucket.reduction.is_gather:
                        self._note_summed(bucket, chunk, is_finished=False)
                    link = self._links[bucket.gateway(chunk.index, action.site)]
                    wire_bytes += link.send(action.frame, chunk.raw_bytes)
                else:
                    self._note_summed(bucket, chunk, is_finished=True)
                    weight = action.weight
        finally:
            if isinstance(event, Own):
                with self._condition:
                    self._encoding_bytes -= chunk.raw_bytes
        if wire_bytes or weight is not None:
            with self._condition:
                bucket.account(chunk, wire_bytes, weight)
                reduced = self._take_reduced(bucket, time.monotonic())
            self._reply(reduced)
        if isinstance(event, Own) or weight is not None:
            self.pump()

    def _note_summed(self, bucket: OpenBucket, chunk: Chunk, *, is_finished: bool) -> None:
        """Forget what was kept of a chunk once it is summed, before anybody can hear that it is."""
        with self._condition:
            order = (*bucket.key, chunk.index)
            chunk.is_summed, chunk.is_finished = True, is_finished
            self._held.release(order)
            if is_finished:
                self._credit.give_back(order)

    def _take_reduced(self, bucket: OpenBucket, now_s: float) -> list[tuple[int, Reduced]]:
        """Return the ranks that are to be told; with the gateway's last one the bucket is over."""
        reduced = bucket.take_reduced(now_s)
        if reduced and bucket.is_reduced:
            del self._open[bucket.key]
            self._history.note_done(bucket.key)
        return reduced

    def _reply(self, reduced: list[tuple[int, Reduced]]) -> None:
        for rank, result in reduced:
            self._on_reduced(rank, result)
