"""Weighted trees of few sites that cut a model: what of the menu may be better than the best.

The menu is that of topology.planner.tree_mixes: nothing of it follows from rates, so what was best
is still there when links become wider. Bounds of all of it are worked out by arrays
(cut_mixes_bounds.py); what they leave is looked at one by one, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.job import Job
from topology.planner.cut_mixes_bounds import CutMixesBounds
from topology.planner.cut_mixes_fronts import Front
from topology.planner.mix_links import shared_nr
from topology.planner.shares import Split
from topology.planner.tree_mixes import Mixes, menu, plan_of_mix
from topology.trees.trees import ReductionPlan, Tree
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MIXED_SITES = (3, 4)
"""Of so many sites there is a menu that can be looked through."""
_DEEPER = (0.6, 0.7, 0.8, 0.9, 1.0)
"""Parts of the longest step that may be better: first those mixes are looked for that may be so
much shorter, for what is found makes the rest fewer."""
_AT_ONCE = (1.0,)

_FEW_OF_SET = 3
"""Of few mixes, those with the same trees: their bounds are hardly ever right for one and wrong
for another."""
_LESS = 1 - 1e-9
"""What has to be less, has to be so by more than rounding."""

Longest = Callable[["Floats"], "Floats"]
"""Of mixes, by their dollars of egress: the longest steps with which they may be the best."""
Bounded = tuple[float, Split]
"""What no step is shorter than, with a spread of the batch."""


class CutMixes:
    """The menu, with one codec and one size of chunks and of buckets."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        trees: tuple[Tree, ...],
        fronts: Sequence[Front],
        splits: Sequence[Split],
        egress_k: Sequence[float],
    ) -> None:
        """Take what steps depend on.

        Args:
            job: With the exchange that is meant.
            topology: Of the sites that take part, as many as MIXED_SITES has.
            trees: All that there are over them.
            fronts: What each site has to choose from, with each number of sequences that it may
                have.
            splits: Of the batch.
            egress_k: Dollars of each tree, if it carries all of a step.
        """
        self._trees, self._splits = trees, splits
        self._bounds = CutMixesBounds(job, topology, trees, fronts, splits)
        self._parts = menu(len(topology.sites), self._bounds.num_chunks, 1)
        self._egress_k1 = np.array(egress_k)[:, None]

    def promising(
        self, longest: Longest, *, deeper: bool
    ) -> Iterator[tuple[ReductionPlan, list[Bounded]]]:
        """Yield all mixes that may be better, by and by, for as long as they may be.

        Each with the splits of the batch with which it may be, the most promising first.

        Args:
            longest: Is asked again and again, for what was found meanwhile.
            deeper: First those are looked for that may be much better.
        """

        def limit() -> float:
            return self._longest_s(longest)

        for mixes, least_nb in self._looked(limit, _DEEPER if deeper else _AT_ONCE):
            egress_n = shared_nr(mixes, self._egress_k1)[:, 0]
            worse_n = least_nb.min(axis=1) - longest(egress_n)
            for row in worse_n.argsort(kind="stable").tolist():
                [most_s] = longest(egress_n[row : row + 1]).tolist()
                every = zip(least_nb[row].tolist(), self._splits, strict=True)
                bounded = [each for each in every if each[0] <= most_s]
                if not bounded:
                    break  # nor may those after it
                yield plan_of_mix(self._trees, mixes, row), sorted(bounded)

    def few(self, longest: Longest, count: int) -> list[ReductionPlan]:
        """Return the few mixes with the least bounds; not all of them of one set of trees."""
        found: list[tuple[float, ReductionPlan]] = []

        def limit() -> float:
            most_s = self._longest_s(longest)
            return most_s if len(found) < count else min(most_s, found[-1][0] * _LESS)

        for mixes, least_nb in self._looked(limit, _DEEPER):
            least_n = least_nb.min(axis=1)
            rows = least_n.argsort(kind="stable")[:_FEW_OF_SET].tolist()
            found += [(float(least_n[row]), plan_of_mix(self._trees, mixes, row)) for row in rows]
            found.sort(key=lambda each: each[0])
            del found[count:]
        return [plan for _, plan in found]

    def _looked(
        self, limit: Callable[[], float], factors: Sequence[float]
    ) -> Iterator[tuple[Mixes, Floats]]:
        """Yield mixes, set by set of trees, with what their steps are not shorter than.

        First those that may be no longer than the first part of the limit.
        """
        begun_s, before_s = limit(), 0.0
        for factor in factors:
            most_s = factor * begun_s
            for mixes, least_nb in self._bounds.looked(self._parts, most_s, limit):
                least_nb[least_nb <= before_s] = math.inf  # these have been looked at
                is_left = least_nb.min(axis=1) < math.inf
                if is_left.any():
                    yield mixes.of(is_left), least_nb[is_left]
            if limit() <= most_s:
                return
            before_s = most_s

    def _longest_s(self, longest: Longest) -> float:
        """Return the longest step with which any mix may be better."""
        # None costs less than its cheapest tree.
        return float(longest(self._egress_k1.min(axis=0))[0])
