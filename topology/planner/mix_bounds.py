"""What no step over weighted trees is shorter than: of many mixes at once. Pure, by arrays.

As topology.timing.step_time has it, of which these are parts: bytes on links and in gateways, and releases of gradients
over connections that are warm. Of links that do not start slowly, and a batch whose spreads are all tried, the last of
these bounds is the step itself but for network cards and the fabric inside sites.

1. `may_be_busy_s`: a link's bytes have to get through it before a step ends. The last of them that had to wait go up to, or
   come down from, the site at the link's lower end, which cannot end its step before. So that bounds what
   mixes put on links, before there are any (`tree_mixes.mixes_within`).
2. `least_s`: the same for each mix, with what each tree takes by itself with as many chunks.
3. `of_spreads_s`: with all that trees do to each other, for the best of some spreads of the batch.

Legend of shapes, which end names in lower case: N mixes, U sets of trees, J trees of one, K trees of all, C numbers of chunks,
R directed links, S sites (sources), T sites (targets), B spreads of the batch, P releases.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from topology.codec_costs import usual_ratio
from topology.cost.compute import sequence_s
from topology.job import Job
from topology.planner.tree_mixes import Mixes, chunks_pnj
from topology.timing.cycle_mean import largest_cycle_means
from topology.timing.gateway_times import gateways_s_per_byte
from topology.timing.releases import between, gradient_bytes, knots, releases, within_s
from topology.traffic.tree_begins import Crossing
from topology.traffic.tree_flow import flow_s
from topology.traffic.tree_load import Load
from topology.traffic.tree_times import seconds_per_byte
from topology.traffic.wire_load import tree_ratios, wire_loads
from topology.trees.trees import ReductionPlan, Tree
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

_EXACT, _MORE = 1 - 1e-12, 1 + 1e-12
"""What sums in another order may differ by."""
_RELEASES = 64
"""Up to so many are looked at one by one."""
_GRID = 129
"""Times of gateways that are looked at."""
_COUNTS = 16
"""Numbers of chunks for which each tree is looked at by itself, at most; others count as the next smaller one."""


def busy_s(job: Job, topology: Topology, trees: Sequence[Tree]) -> tuple[Floats, Floats]:
    """Return how long a step's bytes keep links and gateways busy if one tree carries all; (K, R), (K, S)."""
    ratio = usual_ratio(job.exchange.codec)
    nodes = np.array([site.nodes for site in topology.sites])
    links, gateways = [], []
    for plan in _alone(topology, trees):
        busy = seconds_per_byte(plan, topology, tree_ratios(job, topology, plan, ratio))
        links.append([busy.get(hop, 0.0) for hop in hops(topology)])
        gateways.append(gateways_s_per_byte(job, topology, plan, ratio) / nodes)
    raw_bytes = gradient_bytes(job)
    return raw_bytes * np.array(links), raw_bytes * np.array(gateways)


def hops(topology: Topology) -> list[tuple[int, int]]:
    """Return the directed links, by the indices of their sites: what R stands for."""
    index = {site.name: site.index for site in topology.sites}
    return [(index[link.source], index[link.target]) for link in topology.links]


def _alone(topology: Topology, trees: Sequence[Tree]) -> list[ReductionPlan]:
    return [ReductionPlan(len(topology.sites), (tree,), "") for tree in trees]


def shared_nr(mixes: Mixes, each_kr: Floats) -> Floats:
    """Return what mixes come to of what each tree would if it carried all; shape (N, R)."""
    found = np.zeros((len(mixes.set_n), each_kr.shape[1]))
    for place in range(mixes.sets_uj.shape[1]):
        found += mixes.weights_nj[:, place, None] * each_kr[mixes.trees_nj[:, place]]
    return found / mixes.total


@dataclass(frozen=True, slots=True)
class Crossed:
    """How long exchanges of mixes take."""

    there_npst: Floats
    """Of all that has not left before a knot, on trees; -inf where nobody waits."""
    gateway_n: Floats
    """That no exchange of all is shorter than."""

    def of(self, rows: NDArray[np.bool_]) -> Crossed:
        """Return those of some of the mixes."""
        return Crossed(self.there_npst[rows], self.gateway_n[rows])

    def at_least(self, there_npst: Floats, left_p: Floats) -> Floats:
        """Return crossings of such parts of the bytes that are no shorter than gateways take for them."""
        least_np11 = (self.gateway_n[:, None] * left_p)[..., None, None]
        return np.where(np.isinf(there_npst), -math.inf, np.maximum(there_npst, least_np11))


class MixBounds:
    """Bounds for one codec, and one size of chunks and of buckets."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        trees: Sequence[Tree],
        busy: tuple[Floats, Floats],
    ) -> None:
        """Work out what does not depend on the mixes.

        Args:
            job: With the exchange that is meant.
            topology: Of the sites that take part.
            trees: That are mixed.
            busy: As `busy_s` says.
        """
        self._topology, self._trees = topology, trees
        self._link_kr, self._gateway_ks = busy
        self._sequence_s = np.array([sequence_s(job, site) for site in topology.sites])
        self._ranks = np.array([site.num_ranks for site in topology.sites])
        self._batch, self._micro_batch = job.trainer.global_batch, job.trainer.micro_batch
        self._releases = releases(job)
        left_bytes = np.array([each.left_bytes for each in self._releases], dtype=np.float64)
        self._knots = knots(left_bytes)
        self._within_s = within_s(topology, self._releases)
        self._left_bytes = left_bytes
        every = ReductionPlan(len(topology.sites), tuple(trees), "")
        sizes = [self._releases[index].left_bytes for index in self._knots]
        loads = wire_loads(job, topology, every, sizes, usual_ratio(job.exchange.codec))
        self._warm = [dataclasses.replace(load, first_window_bytes=None) for load in loads]
        self.num_chunks = self._warm[0].num_chunks
        self._count_c = np.unique(np.geomspace(1, self.num_chunks, _COUNTS).astype(np.int64))
        share_after = np.array([each.share_after for each in self._releases])
        hidden_sr = share_after * self._micro_batch * self._sequence_s[:, None]
        self._added_sr = self._within_s - hidden_sr
        """Of each release: what its bytes leave later than computing ends, at least."""
        self._alone_kcst = self._alones_s()
        self._links()

    def _links(self) -> None:
        """Work out what trees do on links, of the first release."""
        rate = {
            hop: link.bytes_per_s
            for hop, link in zip(hops(self._topology), self._topology.links, strict=True)
        }
        rtt_s = {
            hop: link.rtt_s
            for hop, link in zip(hops(self._topology), self._topology.links, strict=True)
        }
        load = self._warm[0]
        most = min(load.chunk_bytes)
        self._abreast_r = np.array([load.abreast_on(hop) for hop in rate])
        back = [(target, source) for source, target in rate]
        self._there_and_back_s = np.array(
            [
                rtt_s[hop] / 2
                + rtt_s[other] / 2
                + min(load.abreast_on(other), 1) * most / rate[other]
                if other in rate
                else math.inf
                for hop, other in zip(rate, back, strict=True)
            ]
        )
        self._chunk_kr = np.zeros(self._link_kr.shape)
        self._lower_kr = np.full(self._link_kr.shape, -1)
        for row, (source, target) in enumerate(rate):
            for index, tree in enumerate(self._trees):
                for lower, upper in ((source, target), (target, source)):
                    if tree.parent.get(lower) == upper:
                        self._lower_kr[index, row] = lower
                        self._chunk_kr[index, row] = load.chunk_bytes[index] / rate[source, target]

    def _alones_s(self) -> Floats:
        """Return `_late_s` where one tree carries so many chunks of the first release; (K, C, S, T)."""
        found = []
        for index, plan in enumerate(_alone(self._topology, self._trees)):
            loads, counts = [], []
            for load in self._warm:
                count_c = self._count_c * load.num_chunks // self.num_chunks
                loads += [_of_trees(load, [index])] * len(count_c)
                counts += [[count] for count in count_c.tolist()]
            there = flow_s(Crossing(plan, self._topology, loads, counts))
            there_pcst = there.reshape(len(self._warm), -1, *there.shape[1:])
            found.append(self._late_s(there_pcst.swapaxes(0, 1)))
        return np.array(found)

    def _late_s(self, there_npst: Floats) -> Floats:
        """Return how much later than the end of each site's computing another has all of it; (N, S, T)."""
        late_npst = there_npst + self._added_sr[:, self._knots].T[..., None]
        found: Floats = late_npst.max(axis=1) + self._within_s[:, -1]
        return found

    def largest_weights(self, total: int, at_most_s: float) -> Counts:
        """Return the largest weight with which each tree by itself takes no longer; shape (K,)."""
        weight_w = np.arange(1, total + 1)
        there = self._late_alone_s(slice(None), weight_w * self.num_chunks // total)
        fits = self._fits(there.reshape(-1, *there.shape[-2:]), at_most_s)
        found: Counts = (weight_w * fits.reshape(len(self._trees), -1)).max(axis=1)
        return found

    def _late_alone_s(self, trees: Counts | slice, counts: Counts) -> Floats:
        """Return `_late_s` at least, of trees with these numbers of chunks of the first release."""
        place = np.maximum(np.searchsorted(self._count_c, counts, side="right") - 1, 0)
        found: Floats = np.where(
            counts[..., None, None] > 0, self._alone_kcst[trees, place], -math.inf
        )
        return found

    def _fits(self, late_nst: Floats, at_most_s: float) -> NDArray[np.bool_]:
        """Return whether the batch can be spread so that no cycle of one site or two takes longer.

        A site computes for no longer than a step less what its own bytes are late, and two sites together for no longer
        than two steps less what each other's are. So two sites take a limited part of the batch, and all sites
        are two pairs, in three ways; or a pair and one.
        """
        if math.isinf(at_most_s):
            return np.ones(len(late_nst), dtype=np.bool_)
        rate = self._ranks / self._sequence_s
        room_ns = np.minimum(at_most_s - np.einsum("nss->ns", late_nst), at_most_s)
        most_ns = np.floor(room_ns / self._sequence_s * _MORE) * self._sequence_s
        fits_n: NDArray[np.bool_] = (most_ns > 0).all(axis=1)
        taken = {}
        for one, other in itertools.combinations(range(len(rate)), 2):
            both_n = 2 * at_most_s - late_nst[:, one, other] - late_nst[:, other, one]
            first, second = (one, other) if rate[one] >= rate[other] else (other, one)
            first_n = np.minimum(most_ns[:, first], both_n)
            second_n = np.minimum(most_ns[:, second], both_n - first_n)
            taken[one, other] = rate[first] * first_n + rate[second] * second_n
        for pairs in _matchings(range(len(rate))):
            alone = [site for site in range(len(rate)) if not any(site in pair for pair in pairs)]
            taken_n = most_ns[:, alone] @ rate[alone] + sum(taken[pair] for pair in pairs)
            fits_n = fits_n & (taken_n * _MORE >= self._batch)
        return fits_n

    def sets_that_fit(self, sets_uj: Counts, at_most_s: float) -> Counts:
        """Return the sets whose trees together may take no longer, with the fewest chunks."""
        late_ust = self._alone_kcst[sets_uj, 0].max(axis=1)
        return sets_uj[self._fits(late_ust, at_most_s)]

    def may_be_busy_s(self, sets_uj: Counts, at_most_s: float) -> Floats:
        """Return how long mixes of sets may keep each link and gateway busy; shape (U, R + S).

        Where all trees of a set have a link's lower end at the same site, that one waits for all that had
        to wait there.
        """
        most_ur = np.full((len(sets_uj), self._link_kr.shape[1]), at_most_s)
        lower_ur, chunk_ur = self._lowers(sets_uj), self._chunk_kr[sets_uj].max(axis=1)
        first = self._releases[0].share_after
        least_s = self._sequence_s * (1 - first) + self._within_s[:, 0] + self._within_s[:, -1]
        free_ur = at_most_s - least_s[lower_ur] - self._there_and_back_s
        uses_ur = (self._chunk_kr[sets_uj] > 0).sum(axis=1)
        # Single chunks, and those that are abreast, wait for nobody; and weights come to a chunk more or less.
        loose_ur = uses_ur * (1 + self._abreast_r) * chunk_ur
        known_ur = np.maximum(free_ur, 0.0) + loose_ur
        most_ur = np.where(lower_ur >= 0, np.minimum(most_ur, known_ur), most_ur)
        gateway_s = self._gateways_may_be_busy_s(at_most_s)
        of_gateways = np.full((len(sets_uj), self._gateway_ks.shape[1]), gateway_s)
        return np.concatenate([most_ur, of_gateways], axis=1)

    def _gateways_may_be_busy_s(self, at_most_s: float) -> float:
        """Return how long gateways may be busy: no exchange is faster than they are.

        All sites wait for each other's bytes so long, and all but a common root for their own.
        """
        if math.isinf(at_most_s):
            return math.inf
        busy_g = np.linspace(0.0, at_most_s, _GRID)
        num_sites = len(self._ranks)
        late_gst = busy_g[:, None, None] + self._added_sr[:, :1] + self._within_s[:, -1]
        late_rgst = np.repeat(late_gst[None], num_sites, axis=0)
        for root in range(num_sites):
            late_rgst[root, :, root, root] = -math.inf
        fits = self._fits(late_rgst.reshape(-1, num_sites, num_sites), at_most_s)
        fits_g = fits.reshape(num_sites, -1).any(axis=0)
        # What lies between the last that fits and the next is not known.
        return float(busy_g[min(fits_g.sum(), _GRID - 1)])

    def _lowers(self, sets_uj: Counts) -> Counts:
        """Return the site at each link's lower end, of sets whose trees agree; else -1; shape (U, R)."""
        lower_ujr = self._lower_kr[sets_uj]
        most_ur = lower_ujr.max(axis=1)
        least_ur = np.where(lower_ujr < 0, most_ur[:, None], lower_ujr).min(axis=1)
        found: Counts = np.where(least_ur == most_ur, most_ur, -1)
        return found

    @property
    def busy_kr(self) -> Floats:
        """How long links and gateways are busy if one tree carries all; shape (K, R + S)."""
        return np.concatenate([self._link_kr, self._gateway_ks], axis=1)

    def least_s(self, mixes: Mixes, at_most_s: float) -> Floats:
        """Return what no step is shorter than, however the batch is spread; shape (N,).

        Infinite where it is longer than `at_most_s` in any case.
        """
        counts_nj = mixes.weights_nj * self.num_chunks // mixes.total
        num_mixes, num_sites = len(mixes.set_n), len(self._ranks)
        late_nst = np.full((num_mixes, num_sites, num_sites), -math.inf)
        late_nr = np.zeros((num_mixes, self._link_kr.shape[1]))
        for place in range(counts_nj.shape[1]):
            trees_n, count_n = mixes.trees_nj[:, place], counts_nj[:, place]
            np.maximum(late_nst, self._late_alone_s(trees_n, count_n), out=late_nst)
            waits_nr = count_n[:, None] > self._abreast_r
            late_nr += np.where(waits_nr, count_n[:, None] * self._chunk_kr[trees_n], 0.0)
        late_nr = np.where(late_nr > 0, late_nr + self._there_and_back_s, -math.inf)
        lower_nr = self._lowers(mixes.sets_uj)[mixes.set_n]
        busy_nr = shared_nr(mixes, self.busy_kr) * _EXACT
        gateway_n11 = busy_nr[:, -num_sites:].max(axis=1)[:, None, None]
        added_st = self._added_sr[:, :1] + self._within_s[:, -1]
        late_nst = np.where(
            np.isinf(late_nst), -math.inf, np.maximum(late_nst, gateway_n11 + added_st)
        )
        for site in range(num_sites):
            of_site = np.where(lower_nr == site, late_nr, -math.inf).max(axis=1)
            own_n = late_nst[:, site, site]
            late_nst[:, site, site] = np.maximum(own_n, of_site + added_st[site, site])
        waits_ns = np.maximum(np.einsum("nss->ns", late_nst), 0.0)
        least_n = np.maximum(busy_nr.max(axis=1), self._least_of_waits_s(waits_ns))
        return np.where(self._fits(late_nst, at_most_s), least_n, math.inf)

    def _least_of_waits_s(self, waits_ns: Floats) -> Floats:
        """Return what no step is shorter than, given how long each site waits for its own bytes; shape (N,).

        With n sequences in its busiest rank a site takes n t + a, a being its wait; and of
        all sites r n, r being their ranks, add up to the batch. So the mean of all t n + a, weighted by r / t,
        is no more than a step. Where the whole n that fit are too few, the next one that fits decides.
        """
        rate = self._ranks / self._sequence_s
        least_n = (self._batch + waits_ns @ rate) / rate.sum()
        for _ in range(len(self._ranks)):
            whole_ns = np.floor((least_n[:, None] - waits_ns) / self._sequence_s * _MORE)
            next_n = (waits_ns + (whole_ns + 1) * self._sequence_s).min(axis=1)
            least_n = np.where(whole_ns @ self._ranks < self._batch, next_n, least_n)
        found: Floats = least_n * _EXACT
        return found

    def crossed(self, mixes: Mixes) -> Crossed:
        """Return how long exchanges of mixes of one set take."""
        trees = mixes.sets_uj[mixes.set_n[0]].tolist()
        plan = ReductionPlan(len(self._ranks), tuple(self._trees[each] for each in trees), "")
        num_chunks = [load.num_chunks for load in self._warm]
        counts_pnj = chunks_pnj(mixes.weights_nj, num_chunks)
        place_pn1 = np.indices(counts_pnj.shape[:2])[0][..., None]
        # Of few chunks, many mixes give trees as many.
        cases = np.concatenate([place_pn1, counts_pnj], axis=2).reshape(-1, len(trees) + 1)
        cases, which = np.unique(cases, axis=0, return_inverse=True)
        loads = [_of_trees(self._warm[place], trees) for place in cases[:, 0].tolist()]
        there = flow_s(Crossing(plan, self._topology, loads, cases[:, 1:].tolist()))
        there_npst = there[which.reshape(counts_pnj.shape[:2]).T]
        gateway_n = shared_nr(mixes, self._gateway_ks).max(axis=1) * _EXACT
        return Crossed(there_npst, gateway_n)

    def fits(self, crossed: Crossed, at_most_s: float) -> NDArray[np.bool_]:
        """Return which of these mixes may take no longer, however the batch is spread."""
        left_p = self._left_bytes[self._knots] / self._left_bytes[0]
        return self._fits(self._late_s(crossed.at_least(crossed.there_npst, left_p)), at_most_s)

    def of_spreads_s(
        self, crossed: Crossed, spreads: Sequence[Sequence[int]], *, of_all: bool = True
    ) -> Floats:
        """Return what no step is shorter than, for the best of some spreads; shape (N,).

        Args:
            crossed: Of the mixes.
            spreads: Of the busiest rank of each site.
            of_all: Releases are looked at, as far as there are not too many; else knots alone.
        """
        there_npst, chosen = crossed.there_npst, self._knots
        num_mixes, _, num_sites, _ = there_npst.shape
        if of_all and len(self._releases) <= _RELEASES:
            there_npst, chosen = self._of_all_releases(there_npst), [*range(len(self._releases))]
        there_npst = crossed.at_least(there_npst, self._left_bytes[chosen] / self._left_bytes[0])
        counts_bs = np.array(spreads)
        compute_bs = counts_bs * self._sequence_s
        last_bs = ((counts_bs - 1) % self._micro_batch + 1) * self._sequence_s
        weights = np.full((num_mixes, *compute_bs.shape, num_sites), -np.inf)
        sites = range(num_sites)
        weights[..., sites, sites] = compute_bs
        for place, index in enumerate(chosen):
            left_bs = compute_bs - self._releases[index].share_after * last_bs
            left_bs = left_bs + self._within_s[:, index]
            there = left_bs[..., None] + there_npst[:, place, None]
            np.maximum(weights, there + self._within_s[:, -1], out=weights)
        means = largest_cycle_means(weights.reshape(-1, num_sites, num_sites))
        found: Floats = means.reshape(num_mixes, -1).min(axis=1) * _EXACT
        return found

    def _of_all_releases(self, there_npst: Floats) -> Floats:
        """Return crossings of all releases from those of the knots."""
        num_mixes, num_knots, num_sites, _ = there_npst.shape
        known = there_npst.swapaxes(0, 1).reshape(num_knots, -1, num_sites)
        found = between(known, self._left_bytes[self._knots], self._left_bytes)
        return found.reshape(-1, num_mixes, num_sites, num_sites).swapaxes(0, 1)


def _matchings(sites: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield every way to make pairs of sites, as many as there can be."""
    if len(sites) < 2:
        yield ()
        return
    if len(sites) % 2:
        for alone in sites:
            yield from _matchings([site for site in sites if site != alone])
        return
    first, *others = sites
    for other in others:
        for rest in _matchings([site for site in others if site != other]):
            yield ((first, other), *rest)


def _of_trees(load: Load, trees: Sequence[int]) -> Load:
    """Return the same with only some of the trees."""
    sizes = load.chunk_bytes
    chosen = tuple(sizes[each] for each in trees) if len(sizes) > 1 else sizes
    return dataclasses.replace(load, chunk_bytes=chosen)
