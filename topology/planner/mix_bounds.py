"""What no step over weighted trees is shorter than: of many mixes at once. Pure, by arrays.

As topology.model.step_model has it, of which these are parts: bytes on links and in gateways, and
releases of gradients over connections that are warm. Of links that do not start slowly, and a batch
whose spreads are all tried, the last of these bounds is the step itself but for network cards and
the fabric inside sites.

1. `may_be_busy_s`: a link's bytes have to get through it before a step ends. The last of them that
   had to wait go up to, or come down from, the site at the link's lower end, which cannot end its
   step before. So that bounds what mixes put on links, before there are any
   (`tree_mixes.mixes_within`).
2. `least_s`: the same for each mix, with what each tree takes by itself with as many chunks.
3. `of_spreads_s`: with all that trees do to each other, for the best of some spreads of the batch.

Legend of shapes, which end names in lower case: N mixes, U sets of trees, J trees of one, K trees
of all, C numbers of chunks, R directed links, S sites (sources), T sites (targets), B spreads of
the batch, P releases.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.codec_costs import usual_ratio
from topology.job import Job
from topology.model.buckets import between, knots, releases, within_s
from topology.model.step_model import largest_cycle_means
from topology.model.wire_load import wire_loads
from topology.planner.mix_crossings import Crossed, MixCrossings
from topology.planner.mix_links import TreeLinks, shared_nr
from topology.planner.mix_spreads import SpreadRoom
from topology.planner.tree_mixes import Mixes
from topology.trees.trees import ReductionPlan, Tree
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

_EXACT = 1 - 1e-12
"""What sums in another order may differ by."""
_RELEASES = 64
"""Up to so many are looked at one by one."""
_GRID = 129
"""Times of gateways that are looked at."""
_COUNTS = 16
"""Numbers of chunks for which each tree is looked at by itself, at most; others count as the next
smaller one."""


class MixBounds:
    """Bounds for one codec, and one size of chunks and of buckets."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        trees: Sequence[Tree],
        busy: tuple[Floats, Floats],
        only: Sequence[int] | None = None,
    ) -> None:
        """Work out what does not depend on the mixes.

        Args:
            job: With the exchange that is meant.
            topology: Of the sites that take part.
            trees: That are mixed.
            busy: As `busy_s` says.
            only: The one spread of the batch that counts; None: all.
        """
        self._topology, self._trees = topology, trees
        self._link_kr, self._gateway_ks = busy
        self._room = SpreadRoom(job, topology, only)
        self._sequence_s, self._micro_batch = self._room.sequence_s, job.trainer.micro_batch
        self._releases = releases(job)
        left_bytes = np.array([each.left_bytes for each in self._releases], dtype=np.float64)
        self._knots = knots(left_bytes)
        self._within_s = within_s(topology, self._releases)
        self._left_bytes = left_bytes
        every = ReductionPlan(len(topology.sites), tuple(trees), "")
        sizes = [self._releases[index].left_bytes for index in self._knots]
        loads = wire_loads(job, topology, every, sizes, usual_ratio(job.exchange.codec))
        warm = [dataclasses.replace(load, first_window_bytes=None) for load in loads]
        self._crossings = MixCrossings(topology, trees, warm)
        self.num_chunks = warm[0].num_chunks
        self._count_c = np.unique(np.geomspace(1, self.num_chunks, _COUNTS).astype(np.int64))
        share_after = np.array([each.share_after for each in self._releases])
        hidden_sr = share_after * self._micro_batch * self._sequence_s[:, None]
        self._added_sr = self._within_s - hidden_sr
        """Of each release: what its bytes leave later than computing ends, at least."""
        self._alone_kcst = self._alones_s()
        self._links = TreeLinks(topology, trees, warm[0])

    def _alones_s(self) -> Floats:
        """Return `_late_s` if a tree carries so many chunks of the first release; (K, C, S, T)."""
        found, loads = [], self._crossings.loads
        which = np.repeat(np.arange(len(loads)), len(self._count_c)).tolist()
        num_chunks = np.array([load.num_chunks for load in loads])
        counts_pc = self._count_c * num_chunks[:, None] // self.num_chunks
        for index in range(len(self._trees)):
            there = self._crossings.of_counts([index], which, counts_pc.reshape(-1, 1))
            there_pcst = there.reshape(len(loads), -1, *there.shape[1:])
            found.append(self._late_s(there_pcst.swapaxes(0, 1)))
        return np.array(found)

    def _late_s(self, there_npst: Floats) -> Floats:
        """Return how long after the end of each site's computing another has all of it; (N, S, T).

        Args:
            there_npst: Crossings from the first knot on; of the later ones that are left out
                nothing is said.
        """
        knots_p = self._knots[: there_npst.shape[1]]
        late_npst = there_npst + self._added_sr[:, knots_p].T[..., None]
        found: Floats = late_npst.max(axis=1) + self._within_s[:, -1]
        return found

    def largest_weights(self, total: int, at_most_s: float) -> Counts:
        """Return the largest weight with which each tree by itself takes no longer; shape (K,)."""
        weight_w = np.arange(1, total + 1)
        there = self._late_alone_s(slice(None), weight_w * self.num_chunks // total)
        fits = self._room.fits(there.reshape(-1, *there.shape[-2:]), at_most_s)
        found: Counts = (weight_w * fits.reshape(len(self._trees), -1)).max(axis=1)
        return found

    def _late_alone_s(self, trees: Counts | slice, counts: Counts) -> Floats:
        """Return `_late_s` at least, of trees with these numbers of chunks of the first release."""
        place = np.maximum(np.searchsorted(self._count_c, counts, side="right") - 1, 0)
        found: Floats = np.where(
            counts[..., None, None] > 0, self._alone_kcst[trees, place], -math.inf
        )
        return found

    def sets_that_fit(self, sets_uj: Counts, at_most_s: float) -> Counts:
        """Return the sets whose trees together may take no longer, with the fewest chunks."""
        late_ust = self._alone_kcst[sets_uj, 0].max(axis=1)
        return sets_uj[self._room.fits(late_ust, at_most_s)]

    def may_be_busy_s(self, sets_uj: Counts, at_most_s: float) -> Floats:
        """Return how long mixes of sets may keep each link and gateway busy; shape (U, R + S).

        Where all trees of a set have a link's lower end at the same site, that one waits for all
        that had to wait there.
        """
        most_ur = np.full((len(sets_uj), self._link_kr.shape[1]), at_most_s)
        lower_ur, chunk_ur = self._links.lowers(sets_uj), self._links.chunk_kr[sets_uj].max(axis=1)
        first = self._releases[0].share_after
        least_s = self._sequence_s * (1 - first) + self._within_s[:, 0] + self._within_s[:, -1]
        free_ur = at_most_s - least_s[lower_ur] - self._links.there_and_back_s
        uses_ur = (self._links.chunk_kr[sets_uj] > 0).sum(axis=1)
        # Single chunks, and those that are abreast, wait for nobody; and weights come to a chunk
        # more or less.
        loose_ur = uses_ur * (1 + self._links.abreast_r) * chunk_ur
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
        num_sites = len(self._topology.sites)
        late_gst = busy_g[:, None, None] + self._added_sr[:, :1] + self._within_s[:, -1]
        late_rgst = np.repeat(late_gst[None], num_sites, axis=0)
        for root in range(num_sites):
            late_rgst[root, :, root, root] = -math.inf
        fits = self._room.fits(late_rgst.reshape(-1, num_sites, num_sites), at_most_s)
        fits_g = fits.reshape(num_sites, -1).any(axis=0)
        # What lies between the last that fits and the next is not known.
        return float(busy_g[min(fits_g.sum(), _GRID - 1)])

    @property
    def busy_kr(self) -> Floats:
        """How long links and gateways are busy if one tree carries all; shape (K, R + S)."""
        return np.concatenate([self._link_kr, self._gateway_ks], axis=1)

    def least_s(self, mixes: Mixes, at_most_s: float) -> Floats:
        """Return what no step is shorter than, however the batch is spread; shape (N,).

        Infinite where it is longer than `at_most_s` in any case.
        """
        counts_nj = mixes.weights_nj * self.num_chunks // mixes.total
        num_mixes, num_sites = len(mixes.set_n), len(self._topology.sites)
        late_nst = np.full((num_mixes, num_sites, num_sites), -math.inf)
        late_nr = np.zeros((num_mixes, self._link_kr.shape[1]))
        for place in range(counts_nj.shape[1]):
            trees_n, count_n = mixes.trees_nj[:, place], counts_nj[:, place]
            np.maximum(late_nst, self._late_alone_s(trees_n, count_n), out=late_nst)
            waits_nr = count_n[:, None] > self._links.abreast_r
            late_nr += np.where(waits_nr, count_n[:, None] * self._links.chunk_kr[trees_n], 0.0)
        late_nr = np.where(late_nr > 0, late_nr + self._links.there_and_back_s, -math.inf)
        lower_nr = self._links.lowers(mixes.sets_uj)[mixes.set_n]
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
        least_n = np.maximum(busy_nr.max(axis=1), self._room.least_s(late_nst))
        return np.where(self._room.fits(late_nst, at_most_s), least_n, math.inf)

    def crossed(self, mixes: Mixes) -> Crossed:
        """Return how long exchanges of mixes of one set take."""
        return Crossed(self._crossings.of_set(mixes), self._gateway_s(mixes))

    def may_fit(self, mixes: Mixes, at_most_s: float) -> NDArray[np.bool_]:
        """Return which mixes may take no longer, by all bytes' crossing; as `fits`, but sooner.

        Args:
            mixes: Those of one set side by side.
            at_most_s: Of a step.
        """
        there = self._crossings.of_all_bytes(mixes)[:, None]
        return self.fits(Crossed(there, self._gateway_s(mixes)), at_most_s)

    def _gateway_s(self, mixes: Mixes) -> Floats:
        """Return what no mix's exchange is shorter than: so long a gateway is busy; shape (N,)."""
        found: Floats = shared_nr(mixes, self._gateway_ks).max(axis=1) * _EXACT
        return found

    def fits(self, crossed: Crossed, at_most_s: float) -> NDArray[np.bool_]:
        """Return which of these mixes may take no longer, however the batch is spread."""
        knots_p = self._knots[: crossed.there_npst.shape[1]]
        left_p = self._left_bytes[knots_p] / self._left_bytes[0]
        return self._room.fits(
            self._late_s(crossed.at_least(crossed.there_npst, left_p)), at_most_s
        )

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
