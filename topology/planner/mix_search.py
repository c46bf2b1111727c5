"""The best weighted trees of three to five sites: the few of a menu bounds leave, one by one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.job import Job, Reduction
from topology.model.buckets import releases
from topology.model.wire_load import starts_slowly
from topology.plan_wishes import PlanWishes
from topology.planner.choice import DIGITS, Choice, Sizing, better, money
from topology.planner.codings import Coding
from topology.planner.mix_bounds import MixBounds
from topology.planner.mix_few import promising
from topology.planner.mix_group import MixGroup
from topology.planner.mix_links import busy_s, shared_nr
from topology.planner.sizings import Sizes
from topology.planner.tree_mixes import (
    Mixes,
    menu,
    mix_plan,
    plan_of_mix,
    small_mixes,
    spanning_trees,
)
from topology.planner.ways import Way
from topology.trees.pairs import Pairs
from topology.trees.trees import ReductionPlan, Tree
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

_BLOCK = 256
"""Mixes whose bounds for all spreads are worked out together."""
_DEEPER = (0.7, 0.8, 0.9, 1.0)
"""Parts of the best step known: first those mixes are looked for that may be so much shorter, for
what is found makes the rest fewer."""
_AT_ONCE = (1.0,)
_SAME = 10.0 ** (1 - DIGITS) / 2
"""How much what comes to the same after rounding may differ by."""

Try = Callable[[Choice | None, float, ReductionPlan, int, Sizing], Choice | None]
"""(best, least seconds, reduction, which coding, sizes) -> the better of that and the best."""


class MixSearch:
    """Looks for weighted trees for sites, a few, that have links with each other."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        pairs: Pairs,
        codings: Sequence[Coding],
        spreads: Sequence[Sequence[int]],
        *,
        are_all: bool,
        trees: tuple[Tree, ...] = (),
    ) -> None:
        """Look at these sites only.

        Args:
            job: Without a placement.
            topology: Of the sites.
            pairs: Of them.
            codings: Codecs for all links.
            spreads: Of the busiest rank of each site: all that there are, or one to judge by.
            are_all: Which of the two.
            trees: That may be mixed; empty: all.
        """
        self._job, self._topology, self._codings = job, topology, codings
        self._spreads, self._trees = spreads, trees or spanning_trees(pairs)
        self._jobs = [dataclasses.replace(job, exchange=each.of(job.exchange)) for each in codings]
        alone = [ReductionPlan(pairs.num_sites, (tree,), "") for tree in self._trees]
        self._is_exact = are_all and not starts_slowly(topology)
        ways = [Way("", plan, Reduction()) for plan in alone]
        self._costs = [[money(each, topology, way) for way in ways] for each in self._jobs]
        self._busy = [busy_s(each, topology, self._trees) for each in self._jobs]

    def single_trees(self) -> Iterator[tuple[float, ReductionPlan, int]]:
        """Yield each tree with each codec: the seconds its bytes take, reduction, which coding."""
        for coding_index, (link_kr, gateway_ks) in enumerate(self._busy):
            busy_k = np.maximum(link_kr.max(axis=1), gateway_ks.max(axis=1))
            for tree, least_s in zip(self._trees, busy_k.tolist(), strict=True):
                yield least_s, mix_plan((tree,), (1,)), coding_index

    def guesses(self) -> Iterator[tuple[float, ReductionPlan, int]]:
        """Yield each codec's small mix whose bytes take least: seconds, reduction, which coding."""
        mixes = small_mixes(len(self._trees))
        for coding_index, busy in enumerate(self._busy if len(mixes.set_n) else ()):
            busy_n = shared_nr(mixes, np.concatenate(busy, axis=1)).max(axis=1)
            row = int(busy_n.argmin())
            yield float(busy_n[row]), plan_of_mix(self._trees, mixes, row), coding_index

    def best(self, best: Choice, sizes: Sizes, try_one: Try) -> Choice:
        """Return the best of all mixes, or `best`.

        Of links that start slowly, and where not all spreads are tried, only the most promising are
        looked at.
        """
        for place, group in enumerate(self._groups(sizes)):
            if self._is_exact:
                best = self._best_of(best, group, _DEEPER if place == 0 else _AT_ONCE, try_one)
            else:
                best = self._best_of_few(best, group, try_one)
        return best

    def _groups(self, sizes: Sizes) -> Iterator[MixGroup]:
        own = sizes.all[0].bucket_bytes
        # All sizes of chunks, with the job's own buckets: more of these gained nothing.
        chosen = [each for each in sizes.all if each.bucket_bytes == own]
        for index, (coding, job) in enumerate(zip(self._codings, self._jobs, strict=True)):
            egress_k1 = np.array([[egress] for _, egress in self._costs[index]])
            for sizing in sizes.different(coding, chosen):
                sized = dataclasses.replace(job, exchange=sizing.of(job.exchange))
                only = self._spreads[0] if len(self._spreads) == 1 else None
                bounds = MixBounds(sized, self._topology, self._trees, self._busy[index], only)
                parts = menu(len(self._topology.sites), bounds.num_chunks, len(releases(sized)))
                yield MixGroup(index, sizing, self._trees, bounds, parts, egress_k1)

    def _best_of(
        self, best: Choice, group: MixGroup, parts: Sequence[float], try_one: Try
    ) -> Choice:
        """Return the best mix of a group, or `best`; first those that are such parts of it."""
        begun_s = self._limit_s(best)
        for factor in parts:
            for part in group.menu:
                limit_s = min(factor * begun_s, self._limit_s(best))
                for mixes, least_n in group.looked(part, limit_s, _BLOCK):
                    best = self._best_of_sets(best, group, (mixes, least_n), try_one)
            if self._limit_s(best) <= factor * begun_s:
                break  # whatever is as short has been looked at
        return best

    def _best_of_few(self, best: Choice, group: MixGroup, try_one: Try) -> Choice:
        """Return the best of the most promising mixes of a group, or `best`."""
        for mixes in promising(group, self._spreads):
            # What one spread says is no bound: another may be better.
            plan = plan_of_mix(self._trees, mixes, 0)
            found = try_one(best, 0.0, plan, group.coding_index, group.sizing)
            best = better(best, found) or best
        return best

    def _best_of_sets(
        self, best: Choice, group: MixGroup, bounded: tuple[Mixes, Floats], try_one: Try
    ) -> Choice:
        """Return the best of these mixes of some sets, or `best`."""
        mixes, least_n = bounded
        is_left = self._may_win(best, group, mixes, least_n)
        if not is_left.any():
            return best
        mixes, least_n = mixes.of(is_left), least_n[is_left]
        is_left = group.bounds.may_fit(mixes, self._limit_s(best))
        mixes, least_n = mixes.of(is_left), least_n[is_left]
        changes = np.flatnonzero(np.diff(mixes.set_n)) + 1
        for rows in np.split(np.arange(len(least_n)), changes):
            if len(rows):
                best = self._best_of_set(best, group, (mixes.of(rows), least_n[rows]), try_one)
        return best

    def _best_of_set(
        self, best: Choice, group: MixGroup, bounded: tuple[Mixes, Floats], try_one: Try
    ) -> Choice:
        """Return the best of these mixes of one set, or `best`."""
        mixes, least_n = bounded
        for begin in range(0, len(least_n), _BLOCK):
            rows = slice(begin, begin + _BLOCK)
            block, block_n = mixes.of(rows), least_n[rows]
            is_left = self._may_win(best, group, block, block_n)
            if not is_left.any():
                continue
            block = block.of(is_left)
            crossed = group.bounds.crossed(block)
            is_left = group.bounds.fits(crossed, self._limit_s(best))
            if not is_left.any():
                continue
            block, crossed = block.of(is_left), crossed.of(is_left)
            block_n = group.bounds.of_spreads_s(crossed, self._spreads, of_all=False)
            is_left = self._may_win(best, group, block, block_n)
            if not is_left.any():
                continue
            block, crossed = block.of(is_left), crossed.of(is_left)
            block_n = group.bounds.of_spreads_s(crossed, self._spreads)
            best = self._best_of_block(best, group, (block, block_n), try_one)
        return best

    def _best_of_block(
        self, best: Choice, group: MixGroup, bounded: tuple[Mixes, Floats], try_one: Try
    ) -> Choice:
        """Return the best of these mixes, one by one, or `best`."""
        mixes, least_n = bounded
        is_left = np.ones(len(least_n), dtype=np.bool_)
        while True:
            wins = self._may_win(best, group, mixes, least_n) & is_left
            if not wins.any():
                return best
            row = int(np.where(wins, least_n, math.inf).argmin())
            plan = plan_of_mix(self._trees, mixes, row)
            found = try_one(best, float(least_n[row]), plan, group.coding_index, group.sizing)
            best = better(best, found) or best
            is_left[row] = False

    def _limit_s(self, best: Choice) -> float:
        """Return the longest step with which a mix may be better."""
        if (self._job.plan or PlanWishes()).objective != "cost":
            return best.step_s * (1 + _SAME)
        per_s, _ = self._costs[0][0]
        least_usd = min(egress for costs in self._costs for _, egress in costs)
        # Where time costs nothing, no mix costs less than its cheapest tree by itself.
        longest_s = (best.usd_per_step - least_usd) / per_s if per_s else best.step_s
        return longest_s * (1 + _SAME)

    def _may_win(
        self, best: Choice, group: MixGroup, mixes: Mixes, least_n: Floats
    ) -> NDArray[np.bool_]:
        """Return which mixes may beat the best, by these seconds; its rank's entries, by arrays."""
        coding_index = group.coding_index
        mine = (len(self._topology.sites), self._codings[coding_index].loss, coding_index)
        objectives = best.rank[: -len(_REST)]
        wins = np.full(len(least_n), mine < best.rank[len(objectives) :][: len(mine)])
        per_s, _ = self._costs[coding_index][0]
        keys = [least_n]
        if len(objectives) > 1:
            egress_n = shared_nr(mixes, group.egress_k1)[:, 0]
            keys = [per_s * least_n + egress_n, least_n]
        for key_n, value in reversed([*zip(keys, objectives, strict=True)]):
            is_same = np.abs(key_n - value) <= _SAME * value
            wins = np.where(is_same, wins, key_n < value)
        return wins


_REST = ("sites", "loss", "coding", "reduction", "sizes")
"""What orders choices that are equal by their objective."""
