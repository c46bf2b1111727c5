"""Weighted trees of three to five sites: a menu, the same whatever links carry. Pure, by arrays.

A linear program would give weights that fit the rates, but these have to be rounded, and what it
gives for a wider link may then be worse than what it gave before. What was best of a menu that is
always the same is still there. Three sites have 3 spanning trees, four have 16 and five 125; each
has the root that round trips give it. The menu is all mixes of a few of them, with all weights of a
total: too many to look at, but those whose bytes fit into some time are soon found, for what one
tree takes of a link the others lack.

Legend of shapes: N mixes, U sets of trees, J trees of one set, K trees of all, R rows of what is
scarce (links, gateways).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from topology.trees.pairs import Pairs
from topology.trees.shapes import rooted, spans
from topology.trees.trees import ReductionPlan, Tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]
    Floats = NDArray[np.float64]

_FEW_CHUNKS = 12
"""Up to so many, trees are given every number of chunks."""
_TOTALS = {3: {2: 96, 3: 96}, 4: {2: 96, 3: 48, 4: 16}, 5: {1: 1, 2: 48, 3: 16}}
"""Of weights, by the numbers of sites and of trees: as fine as can be looked at in time. With
these, the busiest link of 150 random topologies of four sites took 3.1 % longer than in a linear
program without rounding."""
_TOTALS_OF_BUCKETS = {3: _TOTALS[3], 4: {2: 96, 3: 24, 4: 8}, 5: {1: 1, 2: 48, 3: 12}}
"""The same where gradients leave bucket by bucket: each has few chunks, and is looked at."""
MIXED_SITES = tuple(_TOTALS)
_FEW_TREES = 16
"""Of which three together are soon looked through."""
_MORE = 1 + 1e-9
"""What sums in another order may differ by."""


@dataclass(frozen=True, slots=True)
class Part:
    """Of the menu: all mixes of some trees whose weights add up to a total."""

    total: int
    num_trees: int


def menu(num_sites: int, num_chunks: int, num_releases: int) -> list[Part]:
    """Return the menu for so many chunks, by numbers of trees; single ones if not tried anyhow.

    Args:
        num_sites: Three or more.
        num_chunks: Of a step.
        num_releases: That leave one after another.
    """
    of_sites = _TOTALS if num_releases == 1 else _TOTALS_OF_BUCKETS
    finest = of_sites[min(num_sites, max(MIXED_SITES))]
    few = num_chunks if num_chunks <= _FEW_CHUNKS else 0
    totals = {
        trees: min(total, num_chunks) if trees == 1 else few or min(total, num_chunks)
        for trees, total in finest.items()
    }
    return [Part(total, trees) for trees, total in totals.items() if trees <= total]


def spanning_trees(pairs: Pairs) -> tuple[Tree, ...]:
    """Return all trees over sites, each with the root from which the farthest site is nearest."""
    every = itertools.combinations(pairs.bytes_per_s, pairs.num_sites - 1)
    return tuple(rooted(pairs, edges, 1) for edges in every if spans(edges, pairs.num_sites))


@functools.cache
def sets_of(num_all: int, num_trees: int) -> Counts:
    """Return every choice of so many of all trees; shape (U, J)."""
    found = np.array([*itertools.combinations(range(num_all), num_trees)], dtype=np.int64)
    return found.reshape(-1, num_trees)


@dataclass(frozen=True, slots=True)
class Mixes:
    """Some mixes of equally many trees."""

    total: int
    sets_uj: Counts
    """The sets of trees that are used."""
    set_n: Counts
    """Which of them each mix has."""
    weights_nj: Counts
    """Of its trees; none is 0."""

    @property
    def trees_nj(self) -> Counts:
        """The trees of each mix."""
        return self.sets_uj[self.set_n]

    def of(self, rows: Counts | NDArray[np.bool_] | slice) -> Mixes:
        """Return some of them."""
        return dataclasses.replace(self, set_n=self.set_n[rows], weights_nj=self.weights_nj[rows])


@functools.cache
def small_mixes(num_all: int) -> Mixes:
    """Return all mixes of a few trees with a small total: to guess with."""
    part = Part(6, 3) if num_all <= _FEW_TREES else Part(4, 2)
    nothing = np.zeros((num_all, 1))
    sets_uj = sets_of(num_all, part.num_trees)
    most_k = np.full(num_all, part.total)
    return mixes_within(part, sets_uj, nothing, np.ones((len(sets_uj), 1)), most_k)


def mix_plan(trees: tuple[Tree, ...], weights: tuple[int, ...]) -> ReductionPlan:
    """Return the reduction of these trees with these weights, in the lowest terms."""
    shared = math.gcd(*weights)
    weighted = tuple(
        dataclasses.replace(tree, weight=weight // shared)
        for tree, weight in zip(trees, weights, strict=True)
    )
    num_sites = len(trees[0].parent) + 1
    return ReductionPlan(num_sites, weighted, f"{len(trees)} weighted trees")


def plan_of_mix(trees: Sequence[Tree], mixes: Mixes, row: int) -> ReductionPlan:
    """Return the reduction of one of some mixes; `trees` are all that there are."""
    chosen = tuple(trees[each] for each in mixes.trees_nj[row].tolist())
    return mix_plan(chosen, tuple(mixes.weights_nj[row].tolist()))


def mixes_within(
    part: Part, sets_uj: Counts, time_kr: Floats, most_ur: Floats, most_k: Counts
) -> Mixes:
    """Return the mixes of a part that leave nothing busier than it may be.

    Weights are chosen tree by tree, the scarcest first. Those of the trees that are left have to
    make up the total, and be at least 1; what cannot is left out at once.

    Args:
        part: Of the menu.
        sets_uj: Which sets of trees; each in any order.
        time_kr: How long each tree keeps each row busy if it carries all.
        most_ur: How long each row may be busy, by sets.
        most_k: The largest weight that each tree may have.
    """
    rests = _Rests(part, sets_uj, time_kr, most_ur, most_k)
    for place in range(part.num_trees):
        rests = rests.chosen(place)
    # Which of equal trees has its turn first follows from their order: rates must not decide that.
    order_uj = rests.sets_uj.argsort(axis=1)
    weights_nj = np.take_along_axis(rests.weights_nj, order_uj[rests.set_n], axis=1)
    sets_uj = np.take_along_axis(rests.sets_uj, order_uj, axis=1)
    return Mixes(part.total, sets_uj, rests.set_n, weights_nj)


class _Rests:
    """Mixes of which the first trees have their weights."""

    def __init__(
        self, part: Part, sets_uj: Counts, time_kr: Floats, most_ur: Floats, most_k: Counts
    ) -> None:
        """Take sets of which no tree has a weight yet; arguments are those of `mixes_within`."""
        order_uj = most_k[sets_uj].argsort(axis=1, kind="stable")
        self.sets_uj = np.take_along_axis(sets_uj, order_uj, axis=1)
        self._time_kr, self._most_k = time_kr, most_k
        self.set_n = np.arange(len(sets_uj))
        self.weights_nj = np.zeros((len(sets_uj), 0), dtype=np.int64)
        self._left_n = np.full(len(sets_uj), part.total)
        # In units of a weight's share.
        self._rest_nr = most_ur * part.total * _MORE

    def chosen(self, place: int) -> _Rests:
        """Return these with every weight that the next tree may have."""
        left_nj = self.sets_uj[self.set_n, place:]
        time_njr = self._time_kr[left_nj]
        fit_njr = np.floor(self._rest_nr[:, None] / np.where(time_njr > 0, time_njr, np.nan))
        fit_njr = np.where(time_njr > 0, fit_njr, np.inf)
        most_nj = np.minimum(fit_njr.min(axis=2), self._most_k[left_nj]).astype(np.int64)
        # What a row has left, and what trees carry that do without it, have to be enough.
        around_nr = np.where(time_njr > 0, 0, most_nj[..., None]).sum(axis=1)
        can_nr = around_nr + np.where(time_njr > 0, fit_njr, 0.0).max(axis=1)
        is_possible = (most_nj > 0).all(axis=1) & (most_nj.sum(axis=1) >= self._left_n)
        is_possible &= (can_nr >= self._left_n[:, None]).all(axis=1)
        kept = np.flatnonzero(is_possible)
        left_n, most_nj = self._left_n[kept], most_nj[kept]
        num_later = most_nj.shape[1] - 1
        most_n = np.minimum(most_nj[:, 0], left_n - num_later)
        least_n = np.maximum(1, left_n - most_nj[:, 1:].sum(axis=1))
        which, weights = _ranges(least_n, most_n)
        return self._with(kept[which], weights, place)

    def _with(self, rows: Counts, weights: Counts, place: int) -> _Rests:
        """Return some of these, with the weights of one more tree."""
        found = copy.copy(self)
        found.set_n = self.set_n[rows]
        found.weights_nj = np.concatenate([self.weights_nj[rows], weights[:, None]], axis=1)
        found._left_n = self._left_n[rows] - weights
        time_nr = self._time_kr[self.sets_uj[found.set_n, place]]
        found._rest_nr = self._rest_nr[rows] - weights[:, None] * time_nr
        return found


def _ranges(first: Counts, last: Counts) -> tuple[Counts, Counts]:
    """Return all whole numbers from each first to each last, and of which pair each is."""
    sizes = np.maximum(last - first + 1, 0)
    which = np.repeat(np.arange(len(sizes)), sizes)
    begins = np.cumsum(sizes) - sizes
    return which, first[which] + np.arange(len(which)) - begins[which]


def chunks_pnj(weights_nj: Counts, num_chunks: Sequence[int]) -> Counts:
    """Return how many of the first chunks each tree of each mix carries; shape (P, N, J).

    By the rule of topology.trees.trees, for P numbers of chunks and all mixes side by side.
    """
    weights_nj = weights_nj // np.gcd.reduce(weights_nj, axis=1)[:, None]
    total_n1 = weights_nj.sum(axis=1, keepdims=True)
    periods_pn, rest_pn = np.divmod(np.array(num_chunks)[:, None], total_n1[:, 0])
    found = periods_pn[..., None] * weights_nj
    taken_nj, rows = np.zeros_like(weights_nj), np.arange(len(weights_nj))
    trees = np.arange(weights_nj.shape[1])
    for turn in range(1, int(rest_pn.max(initial=0)) + 1):
        may_from = taken_nj * total_n1 // weights_nj
        must_before = -(-(taken_nj + 1) * total_n1 // weights_nj)
        order = (must_before * (total_n1 + 1) + may_from) * len(trees) + trees
        order[may_from >= turn] = np.iinfo(np.int64).max
        taken_nj[rows, order.argmin(axis=1)] += 1
        place, row = np.nonzero(rest_pn == turn)
        found[place, row] += taken_nj[row]
    return found
