"""What no step of three sites with weighted stars is shorter than: of all mixes at once. Pure, by arrays.

As topology.timing.step_time has it, of which these are parts: bytes on links and in gateways, then the first and the
last release of gradients, over connections that are warm. Of links that do not start slowly, and a batch
whose spreads are all tried, little more decides a step, so that few mixes have to be looked at one by one.

Legend of shapes, which end names in lower case: N mixes (of `star_mixes`, or the rows of them that are asked
for), K stars, S sites (sources), T sites (targets), B spreads of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.codec_costs import usual_ratio
from topology.cost.compute import sequence_s
from topology.job import Job
from topology.planner.star_mixes import NUM_SITES, chunks_nk, weights_nk
from topology.timing.cycle_mean import largest_cycle_means
from topology.timing.gateway_times import gateways_s_per_byte
from topology.timing.releases import gradient_bytes, knots, releases, within_s
from topology.traffic.tree_begins import Crossing
from topology.traffic.tree_flow import flow_s
from topology.traffic.tree_times import seconds_per_byte
from topology.traffic.wire_load import tree_ratios, wire_loads
from topology.trees.trees import ReductionPlan, star
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

_ALL_STARS = ReductionPlan(NUM_SITES, tuple(star(NUM_SITES, hub) for hub in range(NUM_SITES)), "")
_EXACT, _MORE = 1 - 1e-12, 1 + 1e-12
"""What sums in another order may differ by."""


def single_stars() -> list[ReductionPlan]:
    """Return the three stars, each by itself."""
    return [ReductionPlan(NUM_SITES, (star(NUM_SITES, hub),), "") for hub in range(NUM_SITES)]


def shares_nk() -> Floats:
    """Return each star's share of the chunks, in the long run."""
    weights = weights_nk()
    found: Floats = weights / weights.sum(axis=1, keepdims=True)
    return found


def paces_s(job: Job, topology: Topology) -> tuple[Floats, Floats]:
    """Return how long a step's bytes take: on the busiest link of each mix, and in its gateways; shape (N,)."""
    ratio = usual_ratio(job.exchange.codec)
    nodes = np.array([site.nodes for site in topology.sites])
    links, gateways = [], []
    for plan in single_stars():
        busy = seconds_per_byte(plan, topology, tree_ratios(job, topology, plan, ratio))
        links.append([busy.get((i, j), 0.0) for i in range(3) for j in range(3)])
        gateways.append(gateways_s_per_byte(job, topology, plan, ratio) / nodes)
    raw_bytes = gradient_bytes(job)
    link_n = raw_bytes * (shares_nk() @ np.array(links)).max(axis=1) * _EXACT
    gateway_n = raw_bytes * (shares_nk() @ np.array(gateways)).max(axis=1) * _EXACT
    return link_n, gateway_n


class MixBounds:
    """Bounds for one codec, one size of chunks and of buckets, of some of the mixes."""

    def __init__(self, job: Job, topology: Topology, rows: Counts, gateways_s: Floats) -> None:
        """Work out how long exchanges take.

        Args:
            job: With the exchange that is meant.
            topology: Of three sites that all have links with each other.
            rows: Which of the mixes, shape (N,).
            gateways_s: Of their bytes, as `paces_s` says; shape (N,).
        """
        self._topology, self._gateways_s = topology, gateways_s
        self._sequence_s = np.array([sequence_s(job, site) for site in topology.sites])
        self._ranks = np.array([site.num_ranks for site in topology.sites])
        self._batch, self._micro_batch = job.trainer.global_batch, job.trainer.micro_batch
        self._releases = releases(job)
        left_bytes = np.array([each.left_bytes for each in self._releases], dtype=np.float64)
        self._knots = knots(left_bytes)
        self._within_s = within_s(topology, self._releases)
        ratio = usual_ratio(job.exchange.codec)
        sizes = [self._releases[index].left_bytes for index in self._knots]
        self._warm = [
            dataclasses.replace(load, first_window_bytes=None)
            for load in wire_loads(job, topology, _ALL_STARS, sizes, ratio)
        ]
        self._chunks = [chunks_nk(load.num_chunks)[rows] for load in self._warm]

    def least_s(self) -> Floats:
        """Return what no step is shorter than, however the batch is spread; shape (N,).

        With n sequences in its busiest rank a site takes n t + a, a being its wait for its own bytes; and of
        all sites r n, r being their ranks, add up to the batch. So the mean of all t n + a, weighted by r / t,
        is no more than a step. Where the whole n that fit are too few, the next one that fits decides.
        """
        rate = self._ranks / self._sequence_s
        found = np.zeros(len(self._gateways_s))
        for place in sorted({0, len(self._knots) - 1}):
            release = self._releases[self._knots[place]]
            own_ns = np.einsum("nss->ns", self._there_s(place, slice(None)))
            own_ns = own_ns + self._within_s[:, self._knots[place]] + self._within_s[:, -1]
            hidden_s = release.share_after * self._micro_batch * self._sequence_s
            waits_ns = np.maximum(own_ns - hidden_s, 0.0)
            least_n = (self._batch + waits_ns @ rate) / rate.sum()
            for _ in range(NUM_SITES):
                whole_ns = np.floor((least_n[:, None] - waits_ns) / self._sequence_s * _MORE)
                next_n = (waits_ns + (whole_ns + 1) * self._sequence_s).min(axis=1)
                least_n = np.where(whole_ns @ self._ranks < self._batch, next_n, least_n)
            found = np.maximum(found, least_n * _EXACT)
        return found

    def least_of_spreads_s(self, rows: Counts, spreads: Sequence[Sequence[int]]) -> Floats:
        """Return the same for the best of some spreads; shape (N,).

        Args:
            rows: Of these bounds' own.
            spreads: Of the busiest rank of each site.
        """
        counts_bs = np.array(spreads)
        compute_bs = counts_bs * self._sequence_s
        last_bs = ((counts_bs - 1) % self._micro_batch + 1) * self._sequence_s
        weights = np.full((len(rows), *compute_bs.shape, NUM_SITES), -np.inf)
        sites = range(NUM_SITES)
        weights[..., sites, sites] = compute_bs
        for place, index in enumerate(self._knots):
            left_bs = compute_bs - self._releases[index].share_after * last_bs
            left_bs = left_bs + self._within_s[:, index]
            there = left_bs[..., None] + self._there_s(place, rows)[:, None]
            np.maximum(weights, there + self._within_s[:, -1], out=weights)
        means = largest_cycle_means(weights.reshape(-1, NUM_SITES, NUM_SITES))
        found: Floats = means.reshape(len(rows), -1).min(axis=1) * _EXACT
        return found

    def _there_s(self, place: int, rows: Counts | slice) -> Floats:
        """Return how long all that has not left before a knot takes; shape (N, S, T), -inf where nobody waits."""
        chunks, load = self._chunks[place][rows], self._warm[place]
        counts, which = np.unique(chunks, axis=0, return_inverse=True)
        loads = [load] * len(counts)
        there_nst = flow_s(Crossing(_ALL_STARS, self._topology, loads, counts.tolist()))
        there_nst = there_nst[which.reshape(-1)]
        share = self._releases[self._knots[place]].left_bytes / self._releases[0].left_bytes
        least_n = share * self._gateways_s[rows]
        found: Floats = np.where(
            np.isinf(there_nst), there_nst, np.maximum(there_nst, least_n[:, None, None])
        )
        return found
