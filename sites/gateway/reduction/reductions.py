"""Parts of buckets' reductions: grids, the plan of their round, codecs, residuals.

Callers hold the executor's lock.
"""

from __future__ import annotations

import time

from isthmus.sites.codecs.registry import EXACT
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.reduction.chunk_reduction import Bucket, BucketReduction
from isthmus.sites.gateway.reduction.epochs import PlanInForce
from isthmus.sites.gateway.reduction.residuals import KeptResiduals, Residuals
from isthmus.sites.local.chunk_grid import Grid, grid
from isthmus.sites.local.rank_messages import Reduce
from isthmus.sites.local.sharing import Sharing


class Reductions:
    """Makes the reductions of a gateway's buckets, and keeps what outlives them."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._residuals = Residuals(config.error_feedback_decay)
        self._sharing: dict[int, Sharing] = {}
        """Ranks that share a bucket, by its layout, if not all ranks do."""

    def make(self, request: Reduce, plan: PlanInForce) -> BucketReduction:
        """Return the reduction of a bucket that a rank has posted, by its round's plan."""
        config = self._config
        ruling = plan.of_bucket(request.numel)
        codecs = (EXACT,) * len(ruling.codecs) if request.exact else ruling.codecs
        if request.participants:
            self._sharing[request.layout] = request.sharing(config.ranks_per_site)
        cut = self.cut(request.numel, request.layout)
        key = request.round, request.bucket
        bucket = Bucket(ruling.epoch, *key, request.layout, codecs, cut, time.thread_time)
        residuals = None
        if config.error_feedback and not all(codec.lossless for codec in codecs):
            residuals = self._residuals.bucket(request.bucket, request.layout, request.numel)
        return BucketReduction(bucket, ruling.plan, ruling.roles, residuals)

    def cut(self, numel: int, layout: int) -> Grid:
        """Return the grid of a bucket that a rank has posted."""
        sharing = self._sharing.get(layout, self._config.ranks_per_site)
        return grid(numel, self._config.chunk_numel, sharing)

    def residuals_of(self, rank: int) -> KeptResiduals:
        """Return the residuals of a rank's shards. They change in its next round."""
        site = self._config.site_index

        def chunks(numel: int, layout: int) -> range:
            cut = self.cut(numel, layout)
            return cut.chunks(site, rank) if rank in cut.ranks(site) else range(0)

        return self._residuals.kept(chunks)

    def restore(self, residuals: KeptResiduals) -> None:
        """Load residuals from a checkpoint, before the first round."""
        self._residuals.restore(residuals)
