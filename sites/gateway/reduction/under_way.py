"""The buckets that a gateway has under way, opened by the first of its ranks that posts them.

Whoever calls holds the executor's lock.
"""

from __future__ import annotations

import time

from protos.errors import LayoutMismatchError, LocalProtocolError
from sites.codecs.registry import EXACT
from sites.gateway.config import GatewayConfig
from sites.gateway.links.peer_server import Sender
from sites.gateway.reduction.bucket import (
    BucketKey,
    BucketReduction,
    BucketRun,
    Chunk,
    Post,
    Rounds,
    compare_posts,
)
from sites.gateway.reduction.chunk_reduction import Bucket
from sites.gateway.reduction.credit import FRAME_BYTES
from sites.gateway.reduction.plan_schedule import Begun, PlanSchedule
from sites.gateway.reduction.residuals import Residuals
from sites.local.chunk_grid import grid


class UnderWay:
    """Runs by round and bucket, and what all of them share."""

    def __init__(self, config: GatewayConfig) -> None:
        """Begin before the first round."""
        self.plans = PlanSchedule(config.plan, config.codecs, config.site_index)
        self.rounds = Rounds()
        self.residuals = Residuals()
        self.begun: Begun | None = None
        """The latest switch of plans that a local rank has got to."""
        self._config = config
        self._runs: dict[BucketKey, BucketRun] = {}

    def find(self, key: BucketKey) -> BucketRun | None:
        """Return a bucket's run: one that a rank or peer has begun, and not all ranks have had."""
        return self._runs.get(key)

    def expect(self, key: BucketKey) -> BucketRun:
        """Return the run of a bucket of which a peer has sent something."""
        return self._runs.setdefault(key, BucketRun(key))

    def finish(self, run: BucketRun) -> None:
        """All ranks of the node have a bucket's result."""
        del self._runs[run.key]
        self.rounds.note_done(run.key)

    def open(self, rank: int, post: Post) -> BucketRun:
        """Return the run of a bucket that a rank posts; the first of them has its reduction made.

        Raises:
            LocalProtocolError: the rank broke the order of posts.
            LayoutMismatchError: another rank or site has another bucket in this place.
        """
        name = f"rank {rank}: round {post.round} bucket {post.bucket}"
        key = post.round, post.bucket
        if post.round > self.rounds.current:
            self._begin_round(post.round)
        run = self._runs.get(key)
        if self.rounds.is_done(key) or (run is not None and rank in run.shards):
            raise LocalProtocolError(f"{name} was posted twice")
        if run is not None and run.first is not None:
            compare_posts(name, run.first, post)
            return run
        if post.round < self.rounds.current:
            raise LocalProtocolError(f"{name} came after round {self.rounds.current} had begun")
        run = self.expect(key)
        run.reduction = self._reduction(post)
        run.first = post
        self.rounds.note_posted(key)
        return run

    def chunk(self, run: BucketRun, index: int) -> Chunk:
        """Return a chunk of an opened bucket, made when it is first asked for."""
        chunk = run.chunks.get(index)
        if chunk is None:
            assert run.reduction is not None
            numel = run.reduction.bucket.grid.span(index)[1]
            peers = tuple(self.gateway(run, index, site) for site in run.reduction.readers(index))
            most_bytes = FRAME_BYTES + run.reduction.codec(index).max_bytes(numel)
            machine = run.reduction.chunk(index)
            chunk = run.chunks[index] = Chunk(index, machine, 4 * numel, peers, most_bytes)
        return chunk

    def gateway(self, run: BucketRun, index: int, site: int) -> Sender:
        """Return the gateway whose ranks' shards hold a chunk at a site."""
        assert run.reduction is not None
        rank = run.reduction.bucket.grid.owner(site, index)
        return site, rank // self._config.ranks_per_node[site]

    def _reduction(self, post: Post) -> BucketReduction:
        config = self._config
        ruling = self.plans.of(post.round)
        codecs = (EXACT,) * len(ruling.codecs) if post.exact else ruling.codecs
        cut = grid(post.numel, config.chunk_numel, config.ranks_per_site)
        key = post.round, post.bucket
        bucket = Bucket(config.generation, *key, post.layout, codecs, cut, time.thread_time)
        residuals = None
        if config.error_feedback and not all(codec.lossless for codec in codecs):
            residuals = self.residuals.bucket(post.bucket, post.layout, post.numel)
        return BucketReduction(bucket, ruling.plan, ruling.roles, residuals)

    def _begin_round(self, round_: int) -> None:
        """A local rank has gone on: every bucket of the round before has been posted."""
        for key, run in self._runs.items():
            if run.reduction is None and key[0] < round_:
                site = self._config.sites[run.early[0][0][0]]
                raise LayoutMismatchError(
                    f"site {site} has a bucket {key[1]} in round {key[0]}; site "
                    f"{self._config.site} has not"
                )
        self.rounds.begin(round_)
        begun = self.plans.begin(round_)
        if begun is not None:
            # What was lost in one role is not owed in another: sums, parts and results have their
            # units.
            self.residuals.forget()
            self.begun = Begun(begun.epoch, round_)
