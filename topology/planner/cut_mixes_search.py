"""The best weighted trees for sites that cut a model: every mix that may be the best is tried.

Where links start slowly, or not all spreads of the batch or combinations of cuts are tried, bounds
say less, and only the most promising mixes are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.codec_costs import usual_ratio
from topology.job import Job, Reduction
from topology.plan_wishes import PlanWishes
from topology.planner.choice import DIGITS, money
from topology.planner.codings import Coding
from topology.planner.cut_choice import CutChoice
from topology.planner.cut_mixes import Bounded, CutMixes
from topology.planner.cut_mixes_fronts import Front
from topology.planner.cut_trial import Sized
from topology.planner.mix_links import alone
from topology.planner.shares import Split
from topology.planner.site_cuts import SiteCuts
from topology.planner.tree_mixes import spanning_trees
from topology.planner.ways import Way
from topology.trees.pairs import Pairs
from topology.trees.trees import ReductionPlan
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_FEW = 9
"""Mixes of a codec that are tried where not all are that may be better."""
_SAME = 10.0 ** (1 - DIGITS) / 2
"""How much what comes to the same after rounding may differ by."""
_REST = ("sites", "loss", "coding", "reduction", "size")
"""What orders choices that are equal by their objective."""

Try = Callable[
    [CutChoice, ReductionPlan, tuple[int, Coding], Sequence[Sized], Sequence[Bounded]], CutChoice
]
"""(best, mix, codec and its place, sizes, splits) -> the better of that and the best."""


class CutMixSearch:
    """Looks for weighted trees for sites, a few, that cut a model."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        pairs: Pairs,
        cuts: Sequence[SiteCuts],
        sized: Sequence[tuple[Coding, Sequence[Sized]]],
        splits: Sequence[Split],
        *,
        is_complete: bool,
    ) -> None:
        """Look at these sites only.

        Args:
            job: Without a placement.
            topology: Of the sites.
            pairs: Of them.
            cuts: Of each of them.
            sized: Codecs for all links, and with each the sizes that come to something else.
            splits: Of the batch: all that sites can do, or some; the most even one first.
            is_complete: All mixes are looked at that may be the best; else the most promising.
        """
        self._job, self._topology, self._cuts = job, topology, cuts
        self._sized, self._splits = sized, splits
        self._trees = spanning_trees(pairs)
        self._alone = alone(topology, self._trees)
        self._is_complete = is_complete
        self._objective = (job.plan or PlanWishes()).objective

    def best(self, best: CutChoice, try_one: Try) -> CutChoice:
        """Return the best choice over a mix, or `best`."""
        # Small codecs first: what is found leaves less of others to look at.
        order = [usual_ratio(coding.codec) for coding, _ in self._sized]
        for coding_index in sorted(range(len(order)), key=order.__getitem__):
            _, sizes = self._sized[coding_index]
            if self._is_complete:
                for place, size in enumerate(sizes):
                    looked = (coding_index, size, [size])
                    best = self._best_of(best, looked, try_one, deeper=place == 0)
            else:
                like = [size for size in sizes if size.sizing == best.sizing] or sizes
                best = self._best_of(best, (coding_index, like[0], sizes), try_one, deeper=True)
        return best

    def _best_of(
        self,
        best: CutChoice,
        looked: tuple[int, Sized, Sequence[Sized]],
        try_one: Try,
        *,
        deeper: bool,
    ) -> CutChoice:
        """Return the best choice over a mix with one of the codecs, or `best`.

        Args:
            best: Of all others.
            looked: Which codec, the size by which mixes are judged, and those that are tried.
            try_one: Tries a mix.
            deeper: As of `promising_mixes`.
        """
        coding_index, judged, sizes = looked
        coding, _ = self._sized[coding_index]
        exchange = judged.sizing.of(coding.of(self._job.exchange))
        job = dataclasses.replace(self._job, exchange=exchange)
        ways = [Way("", plan, Reduction()) for plan in self._alone]
        costs = [money(job, self._topology, way) for way in ways]

        def longest(egress_n: Floats) -> Floats:
            return self._longest_s(best, coding_index, costs[0][0], egress_n)

        splits = self._splits if self._is_complete else self._judged_by(best)
        mixes = CutMixes(
            job,
            self._topology,
            self._trees,
            [self._front(site, splits, judged) for site in range(len(self._cuts))],
            splits,
            [egress for _, egress in costs],
        )
        if self._is_complete:
            for plan, bounded in mixes.promising(longest, deeper=deeper):
                best = try_one(best, plan, (coding_index, coding), sizes, bounded)
            return best
        every = [(0.0, split) for split in self._splits]
        for plan in mixes.few(longest, _FEW):
            best = try_one(best, plan, (coding_index, coding), sizes, every)
        return best

    def _judged_by(self, best: CutChoice) -> list[Split]:
        """Return the spreads by which mixes are judged: the first, and that of the best choice."""
        names = tuple(site.name for site in self._topology.sites)
        return [*self._splits[:1], *([best.sequences] if best.sites == names else [])]

    def _front(self, site: int, splits: Sequence[Split], size: Sized) -> Front:
        """Return the cuts of a site, by the sequences that it may have."""
        counts = sorted({split[site] for split in splits})
        return {count: self._cuts[site].timings(count, size.together) for count in counts}

    def _longest_s(
        self, best: CutChoice, coding_index: int, per_s: float, egress_n: Floats
    ) -> Floats:
        """Return the longest step with which mixes may be better, by their dollars of egress."""
        mine = (len(self._cuts), self._sized[coding_index][0].loss, coding_index)
        wins = mine < best.rank[-len(_REST) :][: len(mine)]
        factor = 1 + _SAME if wins else 1 - _SAME
        if self._objective != "cost":
            return np.full(len(egress_n), best.step_s * factor)
        if per_s:
            return (best.usd_per_step * factor - egress_n) / per_s
        # Where time costs nothing, no mix costs less than the cheapest tree by itself.
        is_same = egress_n <= best.usd_per_step * (1 + _SAME)
        return np.where(is_same, best.step_s * factor, -math.inf)
