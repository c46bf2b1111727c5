"""What no step of sites that cut a model is shorter than, over many mixes of trees at once. Pure.

As topology.planner.joint_step has it, where connections are warm. An edge of its graph, from site i
to site j, is what depends on i's cut and on the mix, and j's tail. A cycle's mean is the same if
each site's tail counts with the edges that leave it; then an edge depends on one site's cut alone.
With the least that each edge is with any cut of its site, the largest cycle mean is no more than
the step with any cuts. Where each site has a single cut to choose from, it is the step, but for
gateways and cards, which all sites wait for.

Legend of shapes, which end names in lower case: N mixes, U sets of trees, J trees of one, K trees
of all, R rows of what is scarce (directed links, then gateways, then cards), P parts of a step's
bytes, S sites (sources), T sites (targets), B spreads of the batch, W weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.codec_costs import usual_ratio
from topology.job import Job
from topology.model.buckets import gradient_bytes
from topology.model.step_model import largest_cycle_means
from topology.model.wire_load import Load, Wire
from topology.planner.cut_mixes_fronts import Front, SiteFront
from topology.planner.joint_step import JointModel
from topology.planner.mix_crossings import MixCrossings
from topology.planner.mix_links import TreeLinks, alone, links_of, shared_nr
from topology.planner.shares import Split
from topology.planner.tree_mixes import Mixes, Part, mixes_within, sets_of
from topology.trees.trees import ReductionPlan, Tree
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]
    Mask = NDArray[np.bool_]

_EXACT = 1 - 1e-12
"""What sums in another order may differ by."""
_FINEST, _WEIGHTS = 96, 16
"""Each tree is looked at by itself with so many weights at most, of the finest total."""
_BLOCK, _MANY = 512, 1 << 16
"""Mixes whose steps, and whose bytes, are worked out together."""


class CutMixesBounds:
    """Bounds for one codec, and one size of chunks and of buckets."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        trees: Sequence[Tree],
        fronts: Sequence[Front],
        splits: Sequence[Split],
    ) -> None:
        """Work out what does not depend on the mixes.

        Args:
            job: With the exchange that is meant.
            topology: Of the sites that take part.
            trees: That are mixed.
            fronts: What each site has to choose from, with each number of sequences that it may
                have.
            splits: Of the batch.
        """
        self._topology, self._trees = topology, trees
        timings = [each for front in fronts for cuts in front.values() for each in cuts]
        shares = sorted({each.last_share for each in timings})
        self._fronts = [SiteFront(site, front, shares) for site, front in enumerate(fronts)]
        self._place_bs = np.array([self._places(split) for split in splits])
        alone_bs = [
            [front.alone_c[place] for front, place in zip(self._fronts, places, strict=True)]
            for places in self._place_bs
        ]
        self._alone_b = np.array(alone_bs).max(axis=1)
        """What no step is shorter than with each split, whatever crosses."""
        loads = self._warm_loads(job, [1.0, *shares])
        self.num_chunks = loads[0].num_chunks
        self._crossings = MixCrossings(topology, trees, loads)
        self._links = TreeLinks(topology, trees, loads[0])
        self._busy_kr = np.array(
            [self._busy_s(job, plan) for plan in alone(self._topology, self._trees)]
        )
        self._weight_w = np.unique(np.geomspace(1, _FINEST, _WEIGHTS).astype(np.int64))
        self._alone_kwpst = self._crossed_alone()

    def _places(self, split: Split) -> list[int]:
        return [front.place[count] for front, count in zip(self._fronts, split, strict=True)]

    def _warm_loads(self, job: Job, shares: Sequence[float]) -> list[Load]:
        """Return what parts of a step's bytes put on connections that are warm."""
        every = ReductionPlan(len(self._topology.sites), tuple(self._trees), "")
        wire = Wire(job, self._topology, every, usual_ratio(job.exchange.codec))
        nodes, raw_bytes = min(site.nodes for site in self._topology.sites), gradient_bytes(job)
        loads = [wire.load(math.ceil(raw_bytes * each)).of_gateways(nodes) for each in shares]
        return [dataclasses.replace(each, first_window_bytes=None) for each in loads]

    def _busy_s(self, job: Job, plan: ReductionPlan) -> list[float]:
        """Return how long each row is busy at least if one tree carries all; shape (R,)."""
        model = JointModel(job, self._topology, plan)
        links_s = [model.link_s.get(hop, 0.0) for hop in links_of(self._topology)]
        lightest = [front.lightest for front in self._fronts]
        return [*links_s, *model.gateway_s(lightest), *model.card_s(lightest)]

    def looked(
        self, parts: Sequence[Part], at_most_s: float, limit: Callable[[], float]
    ) -> Iterator[tuple[Mixes, Floats]]:
        """Yield the mixes that may take no longer, with the steps of all splits at least.

        Mixes of one set of trees together, the sets first whose links are least busy. Steps have
        shape (N, B), and are infinite where they are longer.

        Args:
            parts: Of the menu.
            at_most_s: Of a step.
            limit: Returns the same, for what was found meanwhile.
        """
        too_large_k, busy_kr = self._least_too_large(min(at_most_s, limit())), self._busy_kr
        for part in parts:
            mixes = self._within(part, too_large_k, min(at_most_s, limit()))
            for begin in range(0, len(mixes.set_n), _BLOCK):
                most_s = min(at_most_s, limit())
                if most_s < self._alone_b.min():
                    return
                block = mixes.of(slice(begin, begin + _BLOCK))
                block = block.of(self._fit_alone(block, most_s))
                block = block.of(self._fit_with_all_bytes(block, min(most_s, limit())))
                for some in _by_sets(block):
                    busy_nr, there_npst = shared_nr(some, busy_kr), self._crossings.of_set(some)
                    least_nb = self._least_s(busy_nr, there_npst, min(most_s, limit()))
                    is_left = least_nb.min(axis=1) < math.inf
                    if is_left.any():
                        yield some.of(is_left), least_nb[is_left]

    def _within(self, part: Part, too_large_k: Counts, at_most_s: float) -> Mixes:
        """Return the mixes that leave nothing too busy: the sets first that leave it least so."""
        # Below the first weight that does not fit.
        most_k = np.minimum((too_large_k * part.total - 1) // _FINEST, part.total)
        sets_uj = sets_of(len(self._trees), part.num_trees)
        sets_uj = sets_uj[(most_k[sets_uj] > 0).all(axis=1)]
        most_ur = self._may_be_busy_s(sets_uj, at_most_s)
        mixes = mixes_within(part, sets_uj, self._busy_kr, most_ur, most_k)
        busiest_n = np.zeros(len(mixes.set_n))
        for begin in range(0, len(busiest_n), _MANY):
            rows = slice(begin, begin + _MANY)
            busiest_n[rows] = shared_nr(mixes.of(rows), self._busy_kr).max(axis=1)
        least_u = np.full(len(sets_uj), math.inf)
        np.minimum.at(least_u, mixes.set_n, busiest_n)
        return mixes.of(np.lexsort((mixes.set_n, least_u[mixes.set_n])))

    def _least_too_large(self, at_most_s: float) -> Counts:
        """Return the least weight of _FINEST with which each tree by itself takes longer."""
        num_rows = len(self._trees) * len(self._weight_w)
        busy_kwr = self._weight_w[:, None] / _FINEST * self._busy_kr[:, None]
        there_nxpst = self._alone_kwpst.reshape(num_rows, *self._alone_kwpst.shape[2:])
        least_nb = self._least_s(busy_kwr.reshape(num_rows, -1), there_nxpst, at_most_s)
        fits_kw = (least_nb.min(axis=1) < math.inf).reshape(len(self._trees), -1)
        found: Counts = np.append(self._weight_w, _FINEST + 1)[fits_kw.sum(axis=1)]
        return found

    def _fit_alone(self, mixes: Mixes, at_most_s: float) -> Mask:
        """Return of which mixes no tree takes longer by itself, with as many chunks."""
        # Other weights count as the next smaller one.
        known_w = self._weight_w * mixes.total
        place_nj = np.searchsorted(known_w, mixes.weights_nj * _FINEST, side="right") - 1
        there_npst = self._alone_kwpst[mixes.trees_nj, place_nj].max(axis=1)
        self._wait_for_links(mixes, there_npst)
        return self._fit(mixes, there_npst, at_most_s)

    def _wait_for_links(self, mixes: Mixes, there_npst: Floats) -> None:
        """Let sites wait at least for what their links are busy with.

        Where all trees of a mix have a link's lower end at the same site, that one waits for all
        that had to wait there, and for a round trip; single chunks, and those that are abreast,
        wait for nobody.
        """
        late_nr = np.zeros((len(mixes.set_n), len(self._topology.links)))
        for place in range(mixes.weights_nj.shape[1]):
            count_n1 = mixes.weights_nj[:, place, None] * self.num_chunks // mixes.total
            chunk_nr = self._links.chunk_kr[mixes.trees_nj[:, place]]
            late_nr += np.where(count_n1 > self._links.abreast_r, count_n1 * chunk_nr, 0.0)
        late_nr = np.where(late_nr > 0, late_nr + self._links.there_and_back_s, -math.inf)
        lower_nr = self._links.lowers(mixes.sets_uj)[mixes.set_n]
        for site in range(len(self._fronts)):
            of_site = np.where(lower_nr == site, late_nr, -math.inf).max(axis=1)
            np.maximum(there_npst[:, 0, site, site], of_site, out=there_npst[:, 0, site, site])

    def _fit_with_all_bytes(self, mixes: Mixes, at_most_s: float) -> Mask:
        """Return which mixes may take no longer, by the crossing of all bytes alone."""
        if not len(mixes.set_n):
            return np.empty(0, dtype=np.bool_)
        there = self._crossings.of_all_bytes(mixes)
        there_npst = np.full((len(there), *self._alone_kwpst.shape[2:]), -math.inf)
        there_npst[:, 0] = there
        return self._fit(mixes, there_npst, at_most_s)

    def _fit(self, mixes: Mixes, there_npst: Floats, at_most_s: float) -> Mask:
        """Return which mixes may take no longer with some split; arguments as of `_least_s`."""
        least_nb = self._least_s(shared_nr(mixes, self._busy_kr), there_npst, at_most_s)
        fits: Mask = least_nb.min(axis=1) < math.inf
        return fits

    def _crossed_alone(self) -> Floats:
        """Return how long parts take on each tree by itself; shape (K, W, P, S, T)."""
        num_chunks = np.array([load.num_chunks for load in self._crossings.loads])
        count_wp = self._weight_w[:, None] * num_chunks // _FINEST
        parts = np.indices(count_wp.shape)[1].ravel().tolist()
        counts, num_sites = count_wp.reshape(-1, 1), len(self._fronts)
        found = [
            self._crossings.of_counts([tree], parts, counts) for tree in range(len(self._trees))
        ]
        return np.array(found).reshape(-1, *count_wp.shape, num_sites, num_sites)

    def _may_be_busy_s(self, sets_uj: Counts, at_most_s: float) -> Floats:
        """Return how long mixes of sets may keep each row busy; shape (U, R).

        As MixBounds.may_be_busy_s: where all trees of a set have a link's lower end at the same
        site, that one waits for all that had to wait there.
        """
        most_ur = np.full((len(sets_uj), self._busy_kr.shape[1]), at_most_s)
        lower_ur, chunk_ur = self._links.lowers(sets_uj), self._links.chunk_kr[sets_uj].max(axis=1)
        least_s = np.array([front.least_s for front in self._fronts])
        free_ur = at_most_s - least_s[lower_ur] - self._links.there_and_back_s
        uses_ur = (self._links.chunk_kr[sets_uj] > 0).sum(axis=1)
        # Single chunks, and those that are abreast, wait for nobody; and weights come to a chunk
        # more or less.
        known_ur = np.maximum(free_ur, 0.0) + uses_ur * (1 + self._links.abreast_r) * chunk_ur
        links_ur = most_ur[:, : len(self._topology.links)]
        links_ur[:] = np.where(lower_ur >= 0, np.minimum(links_ur, known_ur), links_ur)
        return most_ur

    def _least_s(self, busy_nr: Floats, there_npst: Floats, at_most_s: float) -> Floats:
        """Return what no step is shorter than; shape (N, B), infinite where it is longer.

        Args:
            busy_nr: How long each row is busy.
            there_npst: How long parts take, at least.
            at_most_s: Of a step.
        """
        num_sites, num_links = len(self._fronts), len(self._topology.links)
        pace_n = busy_nr[:, num_links:].max(axis=1)
        edges = []
        for site, front in enumerate(self._fronts):
            parts_pnt = there_npst[:, 1:, site].swapaxes(0, 1)
            edges.append(front.soonest_s(there_npst[:, 0, site], parts_pnt, pace_n))
        chosen = np.flatnonzero(self._alone_b <= at_most_s)
        # By itself, no site may take longer.
        fits = np.ones((len(pace_n), len(chosen)), dtype=np.bool_)
        for site, edges_nct in enumerate(edges):
            fits &= (edges_nct[..., site] <= at_most_s)[:, self._place_bs[chosen, site]]
        rows, splits = np.nonzero(fits)
        splits = chosen[splits]
        weights = np.empty((len(rows), num_sites, num_sites))
        for site, edges_nct in enumerate(edges):
            weights[:, site] = edges_nct[rows, self._place_bs[splits, site]]
        least = np.maximum(largest_cycle_means(weights), busy_nr.max(axis=1)[rows]) * _EXACT
        found = np.full((len(pace_n), len(self._place_bs)), math.inf)
        found[rows, splits] = np.where(least <= at_most_s, least, math.inf)
        return found


def _by_sets(mixes: Mixes) -> Iterator[Mixes]:
    """Yield mixes, of each set of trees those that come one after another."""
    begins = np.flatnonzero(np.diff(mixes.set_n, prepend=-1))
    for begin, end in itertools.pairwise([*begins.tolist(), len(mixes.set_n)]):
        yield mixes.of(slice(begin, end))
