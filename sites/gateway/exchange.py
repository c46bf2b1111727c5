"""Brings contributions of local ranks and frames of peers together, chunk by chunk.

Each chunk's machine gets its events one after another: the own part on whichever pool thread is
free, what peers send on the thread that received it, where that takes no time worth mentioning.
Different chunks run side by side, so encoding, sending, summing and decoding overlap. Own
contributions are admitted in (round, bucket, chunk) order as the links take them, so that encoded
bytes do not pile up, and as far as peers have room for them (`admission.py`); what peers send is
taken over at once, and kept until the local ranks' own is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from protos.errors import IsthmusError, PeerLostError, StaleGenerationError, failure_of
from protos.failure import Failure
from protos.frame import Frame
from sites.gateway.config import GatewayConfig
from sites.gateway.links.peer_links import Link
from sites.gateway.links.peer_server import Sender
from sites.gateway.reduction.admission import Admission
from sites.gateway.reduction.bucket import (
    BucketRun,
    Chunk,
    Post,
    Reduced,
    Shard,
    check_finite,
    own_encoded,
)
from sites.gateway.reduction.chunk_reduction import Event, Own, Received, Send
from sites.gateway.reduction.credit import Credit, Held, credit_of_peers
from sites.gateway.reduction.intake import Intake
from sites.gateway.reduction.plan_gate import PlanGate
from sites.gateway.reduction.pool import Pool
from sites.gateway.reduction.under_way import UnderWay
from sites.local.rank_messages import Form

_HERE_BYTES = 2 << 20
"""Of a frame: what the thread that receives them sums itself, in 0.2 ms or so, in which all links
wait."""


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
        self._pool = pool
        self._on_reduced = on_reduced
        self._on_failure = on_failure
        self._links: Mapping[Sender, Link] = {}
        self._condition = threading.Condition()
        self._under_way = UnderWay(config)
        self.plans = PlanGate(config, self._under_way, self._condition)
        """Holds rounds back whose plan is not known yet."""
        credit = credit_of_peers(config)
        self._admission = Admission(Credit(credit), config.ranks_per_node[self._site])
        self._held = Held({peer: 2 * num_bytes for peer, num_bytes in credit.items()})
        self._intake = Intake(config, self._under_way, self._held)
        self._closed = False

    def connect(self, links: Mapping[Sender, Link]) -> None:
        """Take all links that there are now, in a mapping that stays as it is.

        Before the first call nothing may be posted.
        """
        self._links = links

    def close(self) -> None:
        """Let everybody who waits go."""
        with self._condition:
            self._closed = True
            self._admission.clear()
            self.plans.close()

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
        replies: list[tuple[int, Reduced]] = []
        with self._condition:
            self.plans.wait(post.round)
            run = self._open(rank, post)
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
                self._admission.add(run, self._under_way.chunk(run, index), own)
            if not chunks:
                run.empty.append(shard)
                replies = [self._reduced(run, each, now_s) for each in self._without_chunks(run)]
        self.pump()
        self._reply(replies)

    def pump(self) -> None:
        """Admit own chunks to encoding, as far as the links keep up."""
        if not self._admission:  # without the lock: who adds to it calls this afterwards
            return
        with self._condition:
            while not self._closed and (admitted := self._admission.next(self._links.values())):
                run, chunk, own = admitted
                if chunk.deliver(own):
                    self._pool.submit((*run.key, chunk.index), partial(self._work, run, chunk))

    def _open(self, rank: int, post: Post) -> BucketRun:
        """Return a bucket's run; the first rank that posts it has what came early taken up."""
        run = self._under_way.open(rank, post)
        early, run.early = run.early, []
        for sender, frame in early:
            try:
                self._intake.accept(run, sender, frame)
            except IsthmusError as error:  # the peer's, not of the rank that posts
                self._on_failure(failure_of(error, self._config.sites[sender[0]]))
        return run

    # ---------------------------------------------------------------- peers

    def receive(self, sender: Sender, frame: Frame) -> None:
        """Take a peer's frame over, and sum its chunk if nothing else is missing; waits for nobody.

        A repeated frame, or one of a bucket that is finished, changes nothing. A small chunk that
        is missing nothing is summed by the thread that brought its last part: to wake one of the
        pool costs more.

        Raises:
            IsthmusError: the peer may not send this.
        """
        now_s = time.monotonic()
        if frame.generation != self._config.generation:
            raise StaleGenerationError(
                f"a frame of generation {frame.generation}; this is {self._config.generation}"
            )
        with self._condition:
            if self._closed:
                raise PeerLostError("this gateway is stopping", self._config.site)
            if self._intake.is_repetition(sender, frame):
                return
            ready = self._intake.take_over(sender, frame, now_s, self._links.get(sender))
        if ready is None:
            return
        run, chunk = ready
        if len(frame.payload) <= _HERE_BYTES:
            self._work(run, chunk)
        else:
            self._pool.submit((*run.key, chunk.index), partial(self._work, run, chunk))

    # ---------------------------------------------------------------- chunks

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
                self._on_failure(failure_of(error, origin))
            except Exception as error:  # noqa: BLE001 - the root of a task: reported, ends the run
                self._on_failure(failure_of(error, origin))

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
                    self._admission.note_handled(chunk)
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
                self._admission.credit.give_back(order)

    def _send(self, run: BucketRun, chunk: Chunk, action: Send) -> int:
        gateway = self._under_way.gateway(run, chunk.index, action.site)
        return self._links[gateway].send(action.frame, chunk.raw_bytes)

    def _account(self, run: BucketRun, chunk: Chunk, wire_bytes: int, weight: float | None) -> None:
        """Add up what a chunk did for its rank; reply when it was the rank's last."""
        assert run.reduction is not None
        rank = run.reduction.bucket.grid.owner(self._site, chunk.index)
        with self._condition:
            now_s = time.monotonic()
            shards = run.account(chunk, rank, wire_bytes, weight) + self._without_chunks(run)
            replies = [self._reduced(run, shard, now_s) for shard in shards]
        self._reply(replies)

    def _without_chunks(self, run: BucketRun) -> list[Shard]:
        """Return the shards without a chunk once the weight is known, or never will be here."""
        assert run.reduction is not None
        if not run.empty:
            return []
        first_rank = self._config.node * self._config.ranks_per_node[self._site]
        if run.weight is None and run.reduction.bucket.grid.chunks(self._site, first_rank):
            return []
        shards, run.empty = run.empty, []
        return shards

    def _reply(self, replies: list[tuple[int, Reduced]]) -> None:
        for rank, reduced in replies:
            self._on_reduced(rank, reduced)

    def _reduced(self, run: BucketRun, shard: Shard, now_s: float) -> tuple[int, Reduced]:
        """Finish a rank's part, and the bucket with the last of this node's ranks."""
        reduced = run.reduced(shard, now_s)
        if run.num_reduced == self._config.ranks_per_node[self._site]:
            self._under_way.finish(run)
        return shard.rank, reduced
