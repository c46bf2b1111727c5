"""Brings contributions of local ranks and frames of peers together, chunk by chunk.

Each chunk's machine gets its events one after another: the own part on whichever pool thread is free,
what peers send mostly on the thread that received it. Different
chunks run side by side, so encoding, sending, summing and decoding overlap. Own contributions are
admitted in (round, bucket, chunk) order as the links take them, so that encoded bytes do not
pile up, and as far as peers have room for them (`credit.py`); what peers send is taken over at once, and
kept until the local ranks' own is there.
"""

from __future__ import annotations

import heapq
import math
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
    RemoteProtocolError,
    StaleGenerationError,
)
from protos.frame import HEADER_BYTES, Frame, Kind
from sites.codecs.registry import EXACT
from sites.gateway.bucket_run import (
    BucketRun,
    Chunk,
    Post,
    Reduced,
    Shard,
    compare_posts,
)
from sites.gateway.config import GatewayConfig
from sites.gateway.credit import Credit, credit_of_peers
from sites.gateway.failure import Failure
from sites.gateway.finite import check_finite
from sites.gateway.forms import Form
from sites.gateway.grid import grid
from sites.gateway.held import FRAME_BYTES, Held
from sites.gateway.lateness import Arrival, lateness_s
from sites.gateway.link import Link
from sites.gateway.plan_schedule import Begun, PlanSchedule
from sites.gateway.pool import Pool, Priority
from sites.gateway.proposal import Proposal
from sites.gateway.rank_encoding import own_encoded
from sites.gateway.reduction import (
    Bucket,
    BucketReduction,
    Event,
    Own,
    Received,
    Send,
)
from sites.gateway.residuals import Residuals
from sites.gateway.rounds import BucketKey, Rounds
from sites.gateway.server import Sender

_CHECK_S = 1.0
_OUTCOME_LEASES = 3
"""Times `peer_lost_s`, for the outcome of a proposed plan: the coordinator decides within one, and whoever
has lost it by then is ended within another."""


class Exchange:
    """The executor of one gateway. All methods may be called from any thread."""

    def __init__(
        self,
        config: GatewayConfig,
        pool: Pool,
        *,
        on_reduced: Callable[[int, Reduced], None],
        on_failure: Callable[[Failure], None],
    ) -> None:
        """Start nothing.

        Args:
            config: this gateway's.
            pool: does the encoding, summing and decoding; owned by the caller.
            on_reduced: called from a pool thread with a rank and its result.
            on_failure: called once per failure; must not block.
        """
        self._config = config
        self._site = config.site_index
        self._plans = PlanSchedule(config.plan, config.codecs, self._site)
        self._pool = pool
        self._on_reduced = on_reduced
        self._on_failure = on_failure
        self._links: Mapping[Sender, Link] = {}
        self._condition = threading.Condition()
        self._runs: dict[BucketKey, BucketRun] = {}
        self._rounds = Rounds()
        self._residuals = Residuals()
        credit = credit_of_peers(config)
        self._credit = Credit(credit)
        self._held = Held({peer: 2 * num_bytes for peer, num_bytes in credit.items()})
        self._waiting: list[tuple[Priority, BucketRun, Chunk, Own]] = []
        """A heap: own chunks that are not admitted yet. Priorities are unique."""
        self._admitted_bytes = 0
        self._last_arrival_s: dict[Sender, float] = {}
        self._closed = False
        self.begun: Begun | None = None
        """The latest switch of plans that a local rank has got to."""

    def connect(self, links: Mapping[Sender, Link]) -> None:
        """Take all links that there are now, in a mapping that stays as it is. Before the first call nothing may be posted."""
        self._links = links

    def propose(self, proposal: Proposal) -> tuple[bool, int]:
        """Keep a plan for the rounds from a later one on, and begin none of them before `decide`.

        Returns:
            Whether it is kept, and the latest round that a local rank has posted.
        """
        with self._condition:
            return self._plans.propose(proposal, self._rounds.current), self._rounds.current

    def decide(self, epoch: int, *, commit: bool) -> None:
        """Take the outcome of a proposal: ranks that wait for it go on."""
        with self._condition:
            self._plans.decide(epoch, commit=commit)
            self._condition.notify_all()

    def needs(self, site: int) -> bool:
        """Whether a plan of rounds under way, or of later ones, has a use for the link to a site."""
        with self._condition:
            return self._plans.needs(site)

    def close(self) -> None:
        """Let everybody who waits go."""
        with self._condition:
            self._closed = True
            self._waiting.clear()
            self._condition.notify_all()

    @property
    def round(self) -> int:
        """The latest round that a local rank has posted; -1 before the first."""
        return self._rounds.current

    # ---------------------------------------------------------------- local ranks

    def post(self, rank: int, post: Post) -> None:
        """Start a rank's part of a bucket.

        Raises:
            LocalProtocolError: the rank broke the order of posts.
            LayoutMismatchError: another rank or site has another bucket in this place.
            NonFiniteError: it holds a NaN or an infinity, and the run is to stop for that.
        """
        if self._config.non_finite == "stop" and post.form is not Form.ENCODED:
            check_finite(post)
        key = post.round, post.bucket
        replies: list[tuple[int, Reduced]] = []
        with self._condition:
            self._wait_for_plan(post.round)
            run = self._open(key, rank, post)
            assert run.reduction is not None
            chunks = run.reduction.bucket.grid.chunks(self._site, rank)
            now_s = time.monotonic()
            shard = run.shards[rank] = Shard(rank, now_s, len(chunks))
            base = run.reduction.bucket.grid.shard(self._site, rank)[0]
            for index in chunks:
                start, count = run.reduction.bucket.grid.span(index)
                values = post.values[start - base : start - base + count]
                name = f"rank {rank}: bucket {post.bucket} chunk {index}"
                encoded = own_encoded(name, run.reduction.codec(index), post.form, values)
                own = Own(values, post.weight, encoded)
                entry = ((*key, index), run, self._chunk(run, index), own)
                heapq.heappush(self._waiting, entry)
            if not chunks:
                run.empty.append(shard)
                replies = self._answer_empty(run, now_s)
        self.pump()
        self._reply(replies)

    def _wait_for_plan(self, round_: int) -> None:
        """Wait until it is known which plan carries a round; the lock is held.

        Raises:
            DeadlineExceededError: nobody has said so for too long.
            PeerLostError: this gateway ends.
        """
        patience_s = _OUTCOME_LEASES * self._config.peer_lost_s
        deadline_s = time.monotonic() + patience_s
        while not self._plans.is_settled(round_):
            if self._closed:
                raise PeerLostError("this gateway is stopping", self._config.site)
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceededError(
                    f"round {round_} has waited {patience_s:g} s to hear whether it has a new plan"
                )
            self._condition.wait(min(remaining_s, _CHECK_S))

    def pump(self) -> None:
        """Admit own chunks to encoding, as far as the links keep up."""
        if not self._waiting:  # without the lock: who adds to it calls this afterwards
            return
        with self._condition:
            while self._waiting and not self._closed and self._may_admit():
                order, run, chunk, own = heapq.heappop(self._waiting)
                self._credit.take(order, chunk.peers, chunk.most_bytes)
                self._admitted_bytes += chunk.raw_bytes
                if self._deliver(chunk, own):
                    self._pool.submit((*run.key, chunk.index), partial(self._work, run, chunk))

    def _may_admit(self) -> bool:
        """Return whether the earliest own chunk that waits may be sent.

        Only of a bucket that all ranks of the node have posted: those of a late rank come before those
        of the others' later buckets, here as at all sites.
        """
        _, run, chunk, _ = self._waiting[0]
        return (
            len(run.shards) == self._config.ranks_per_node[self._site]
            and self._credit.has_room(chunk.peers, chunk.most_bytes)
            and all(
                link.unsent_bytes + self._admitted_bytes < link.ahead_bytes
                for link in self._links.values()
            )
        )

    def _open(self, key: BucketKey, rank: int, post: Post) -> BucketRun:
        """Return the bucket's run, made by the first rank that posts it."""
        name = f"rank {rank}: round {post.round} bucket {post.bucket}"
        if post.round > self._rounds.current:
            self._begin_round(post.round)
        run = self._runs.get(key)
        if self._rounds.is_done(key) or (run is not None and rank in run.shards):
            raise LocalProtocolError(f"{name} was posted twice")
        if run is not None and run.first is not None:
            compare_posts(name, run.first, post)
            return run
        if post.round < self._rounds.current:
            raise LocalProtocolError(f"{name} came after round {self._rounds.current} had begun")
        if run is None:
            run = self._runs[key] = BucketRun(key)
        config = self._config
        cut = grid(post.numel, config.chunk_numel, config.ranks_per_site)
        ruling = self._plans.of(post.round)
        codecs = (EXACT,) * len(ruling.codecs) if post.exact else ruling.codecs
        bucket = Bucket(config.generation, *key, post.layout, codecs, cut, time.thread_time)
        residuals = None
        if config.error_feedback and not all(codec.lossless for codec in codecs):
            residuals = self._residuals.bucket(post.bucket, post.layout, post.numel)
        run.reduction = BucketReduction(bucket, ruling.plan, ruling.roles, residuals)
        run.first = post
        self._rounds.note_posted(key)
        early, run.early = run.early, []
        for sender, frame in early:
            try:
                self._accept(run, sender, frame)
            except IsthmusError as error:  # the peer's, not of the rank that posts
                self._on_failure(Failure.of(error, self._config.sites[sender[0]]))
        return run

    def _begin_round(self, round_: int) -> None:
        """A local rank has gone on: every bucket of the round before has been posted."""
        for key, run in self._runs.items():
            if run.reduction is None and key[0] < round_:
                site = self._config.sites[run.early[0][0][0]]
                raise LayoutMismatchError(
                    f"site {site} has a bucket {key[1]} in round {key[0]}; site "
                    f"{self._config.site} has not"
                )
        self._rounds.begin(round_)
        begun = self._plans.begin(round_)
        if begun is not None:
            # What was lost in one role is not owed in another: sums, parts and results have their units.
            self._residuals.forget()
            self.begun = Begun(begun.epoch, round_)

    # ---------------------------------------------------------------- peers

    def receive(self, sender: Sender, frame: Frame) -> None:
        """Take a peer's frame over, and sum its chunk if nothing else is missing; waits for nobody.

        A repeated frame, or one of a bucket that is finished, changes nothing. What is missing nothing is
        summed by the thread that brought its last part: to wake one of the pool costs more.

        Raises:
            IsthmusError: the peer may not send this.
        """
        now_s = time.monotonic()
        key = frame.key.round, frame.key.bucket
        if frame.generation != self._config.generation:
            raise StaleGenerationError(
                f"a frame of generation {frame.generation}; this is {self._config.generation}"
            )
        with self._condition:
            if self._closed:
                raise PeerLostError("this gateway is stopping", self._config.site)
            run = self._runs.get(key)
            if self._is_repetition(run, sender, frame):
                return
            ready = self._take_over(sender, frame, now_s)
        if ready is not None:
            self._work(*ready)

    def _is_repetition(self, run: BucketRun | None, sender: Sender, frame: Frame) -> bool:
        """Return whether a frame changes nothing any more: its connection broke before it was told so."""
        key = frame.key
        if run is None or run.reduction is None:
            if not self._rounds.is_ahead((key.round, key.bucket)):
                return True
        else:
            chunk = run.chunks.get(key.chunk)
            if chunk is not None and (
                chunk.is_finished or (chunk.is_summed and key.kind is Kind.CONTRIBUTION)
            ):
                return True
        return self._held.has(sender, (key.round, key.bucket, key.chunk))

    def _take_over(
        self, sender: Sender, frame: Frame, now_s: float
    ) -> tuple[BucketRun, Chunk] | None:
        """Deliver a frame, or keep it until a local rank has posted its bucket; return what to work on."""
        key = frame.key.round, frame.key.bucket
        run = self._runs.setdefault(key, BucketRun(key))
        self._note_arrival(run, sender, frame, now_s)
        ready = None
        if run.reduction is None:
            run.early.append((sender, frame))
        else:
            chunk = self._accept(run, sender, frame)
            ready = None if chunk is None else (run, chunk)
        order = (*key, frame.key.chunk)
        self._held.keep(sender, order, FRAME_BYTES + len(frame.payload))
        return ready

    def _accept(self, run: BucketRun, sender: Sender, frame: Frame) -> Chunk | None:
        """Check a frame against the bucket's plan and deliver it; return the chunk if that is to be worked on."""
        assert run.reduction is not None
        run.reduction.check(sender[0], frame)
        rank = run.reduction.bucket.grid.owner(self._site, frame.key.chunk)
        if rank // self._config.ranks_per_node[self._site] != self._config.node:
            raise RemoteProtocolError(
                f"chunk {frame.key.chunk} belongs to rank {rank}, not to this node"
            )
        chunk = self._chunk(run, frame.key.chunk)
        return chunk if self._deliver(chunk, Received(sender[0], frame)) else None

    def _note_arrival(self, run: BucketRun, sender: Sender, frame: Frame, now_s: float) -> None:
        previous_s = self._last_arrival_s.get(sender, 0.0)
        self._last_arrival_s[sender] = now_s
        link = self._links.get(sender)
        if sender not in run.arrivals and link is not None:
            run.arrivals[sender] = Arrival(
                now_s,
                previous_s,
                HEADER_BYTES + len(frame.payload),
                link.num_channels,
                frame.key.kind is Kind.RESULT,
                link.rtt_s,
                link.bytes_per_s,
            )

    # ---------------------------------------------------------------- chunks

    def _chunk(self, run: BucketRun, index: int) -> Chunk:
        chunk = run.chunks.get(index)
        if chunk is None:
            assert run.reduction is not None
            numel = run.reduction.bucket.grid.span(index)[1]
            peers = tuple(self._owner(run, index, site) for site in run.reduction.readers(index))
            most_bytes = FRAME_BYTES + run.reduction.codec(index).max_bytes(numel)
            machine = run.reduction.chunk(index)
            chunk = Chunk(index, machine, 4 * numel, peers, most_bytes)
            run.chunks[index] = chunk
        return chunk

    def _deliver(self, chunk: Chunk, event: Event) -> bool:
        """Put an event into a chunk's inbox; return whether the caller is to have it worked on.

        Without the own part nothing can be done yet. The lock is held.
        """
        chunk.inbox.append(event)
        chunk.is_admitted = chunk.is_admitted or isinstance(event, Own)
        if not chunk.is_admitted or chunk.is_scheduled:
            return False
        chunk.is_scheduled = True
        return True

    def _work(self, run: BucketRun, chunk: Chunk) -> None:
        """Let a chunk's machine handle its inbox; runs on one thread at a time."""
        while True:
            with self._condition:
                if not chunk.inbox or self._closed:
                    chunk.is_scheduled = False
                    return
                event = chunk.inbox.popleft()
            origin = self._config.sites[event.sender] if isinstance(event, Received) else ""
            try:
                self._handle(run, chunk, event)
            except IsthmusError as error:
                self._on_failure(Failure.of(error, origin))
            except Exception as error:  # noqa: BLE001 - the root of a task: reported, ends the run
                self._on_failure(Failure.of(error, origin))

    def _handle(self, run: BucketRun, chunk: Chunk, event: Event) -> None:
        wire_bytes, weight = 0, None
        try:
            for action in chunk.machine.handle(event):
                if isinstance(action, Send):
                    self._note_summed(run, chunk, is_finished=False)
                    wire_bytes += self._send(run, chunk, action)
                else:
                    self._note_summed(run, chunk, is_finished=True)
                    weight = action.weight
        finally:
            if isinstance(event, Own):
                with self._condition:
                    self._admitted_bytes -= chunk.raw_bytes
        if wire_bytes or weight is not None:
            self._account(run, chunk, wire_bytes, weight)
        if isinstance(event, Own) or weight is not None:
            self.pump()

    def _note_summed(self, run: BucketRun, chunk: Chunk, *, is_finished: bool) -> None:
        """Forget what was kept of a chunk once it is summed, before anybody can hear that it is.

        In a tree, whatever is sent is a whole sum; in a gather, it is the own part.
        """
        assert run.reduction is not None
        if not is_finished and run.reduction.is_gather:
            return
        with self._condition:
            order = (*run.key, chunk.index)
            chunk.is_summed, chunk.is_finished = True, is_finished
            self._held.release(order)
            if is_finished:
                self._credit.give_back(order)

    def _send(self, run: BucketRun, chunk: Chunk, action: Send) -> int:
        gateway = self._owner(run, chunk.index, action.site)
        return self._links[gateway].send(action.frame, chunk.raw_bytes)

    def _owner(self, run: BucketRun, index: int, site: int) -> Sender:
        """Return the gateway whose ranks' shards hold a chunk at a site."""
        assert run.reduction is not None
        rank = run.reduction.bucket.grid.owner(site, index)
        return site, rank // self._config.ranks_per_node[site]

    def _account(self, run: BucketRun, chunk: Chunk, wire_bytes: int, weight: float | None) -> None:
        """Add up what a chunk did for its rank; reply when it was the rank's last."""
        assert run.reduction is not None
        replies: list[tuple[int, Reduced]] = []
        with self._condition:
            rank = run.reduction.bucket.grid.owner(self._site, chunk.index)
            shard = run.shards[rank]
            shard.wire_bytes += wire_bytes
            if weight is not None:
                now_s = time.monotonic()
                run.weight = weight
                # A chunk is finished by the last that its machine does.
                shard.encode_s += chunk.machine.encode_s
                shard.decode_s += chunk.machine.decode_s
                shard.remaining -= 1
                if shard.remaining == 0:
                    replies = [self._reduced(run, shard, now_s)]
                replies += self._answer_empty(run, now_s)
        self._reply(replies)

    def _answer_empty(self, run: BucketRun, now_s: float) -> list[tuple[int, Reduced]]:
        """Finish the ranks without a chunk once the weight is known, or never will be here."""
        assert run.reduction is not None
        config = self._config
        first_rank = config.node * config.ranks_per_node[self._site]
        if run.weight is None and run.reduction.bucket.grid.chunks(self._site, first_rank):
            return []
        shards, run.empty = run.empty, []
        return [self._reduced(run, shard, now_s) for shard in shards]

    def _reply(self, replies: list[tuple[int, Reduced]]) -> None:
        for rank, reduced in replies:
            self._on_reduced(rank, reduced)

    def _reduced(self, run: BucketRun, shard: Shard, now_s: float) -> tuple[int, Reduced]:
        """Finish a rank's part, and the bucket with the last of this node's ranks."""
        run.num_reduced += 1
        if run.num_reduced == self._config.ranks_per_node[self._site]:
            del self._runs[run.key]
            self._rounds.note_done(run.key)
        inter_s = now_s - shard.ready_s
        late_s = max(
            (lateness_s(shard.ready_s, arrival) for arrival in run.arrivals.values()), default=0.0
        )
        return shard.rank, Reduced(
            round=run.key[0],
            bucket=run.key[1],
            weight=math.nan if run.weight is None else run.weight,
            inter_s=inter_s,
            wait_s=min(late_s, inter_s),
            encode_s=shard.encode_s,
            decode_s=shard.decode_s,
            wire_bytes=shard.wire_bytes,
        )
