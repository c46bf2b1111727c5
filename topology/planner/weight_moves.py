"""Weighted trees made better by moving chunks from one tree to another, for as long as that helps.

Where there are too many sites for all mixes of trees to be looked at, a linear program says how
links are shared best; but round trips, waits and whole numbers of chunks are not in it. So its
trees are a beginning: parts of what one carries go to another, of all trees that came into
question, large parts first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from topology.planner.choice import Rank
from topology.trees.trees import TREES_MAX, WEIGHT_MAX, ReductionPlan, Tree, shape_of

_TOTAL = 96
"""Of weights, at most, unless there are more from the beginning."""
_PARTS = (4, 8, 16, 48)
"""Of the total, that are moved at once: one fourth, ..."""
_TRIES = 500
"""Plans that are looked at, at most."""


class WeightMoves:
    """Looks for better weights of some trees."""

    def __init__(self, pool: Sequence[Tree], rank: Callable[[ReductionPlan], Rank]) -> None:
        """Look at nothing yet.

        Args:
            pool: Trees that may carry something, whatever their weights; over the same sites.
            rank: Returns what orders plans: the lower the better.
        """
        self._trees = {shape_of(tree): tree for tree in pool}
        self._rank = rank

    def best(self, plan: ReductionPlan) -> ReductionPlan:
        """Return what moves from a plan's trees lead to; the plan itself if nothing is better.

        Args:
            plan: With trees; no gather.
        """
        weights = self._begun(plan)
        best, best_rank = plan, self._rank(plan)
        num_tries, parts = 0, [*reversed(_PARTS)]
        while parts:
            part, is_better = parts[-1], False
            for moved in _moves(weights, max(1, sum(weights) // part)):
                if num_tries == _TRIES:
                    return best
                num_tries += 1
                other = self._plan(moved)
                other_rank = self._rank(other)
                if other_rank < best_rank:
                    best, best_rank, is_better = other, other_rank, True
                    weights[:] = moved
            if not is_better:
                parts.pop()
        return best

    def _begun(self, plan: ReductionPlan) -> list[int]:
        """Return a plan's weights, of all trees, with a total of which parts can be moved."""
        for tree in plan.trees:
            self._trees.setdefault(shape_of(tree), tree)
        carried = dict.fromkeys(self._trees, 0)
        for tree in plan.trees:
            carried[shape_of(tree)] += tree.weight
        factor = max(1, _TOTAL // sum(carried.values()))
        return [factor * each for each in carried.values()]

    def _plan(self, weights: Sequence[int]) -> ReductionPlan:
        shared = math.gcd(*weights)
        trees = tuple(
            dataclasses.replace(tree, weight=weight // shared)
            for tree, weight in zip(self._trees.values(), weights, strict=True)
            if weight
        )
        num_sites = len(trees[0].parent) + 1
        return ReductionPlan(num_sites, trees, f"{len(trees)} weighted trees")


def _moves(weights: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield the weights when one tree has given another so much, or all that it has.

    Of what the weights are by then: whoever takes the moves may change them.
    """
    for giver, taker in itertools.permutations(range(len(weights)), 2):
        given = min(size, weights[giver])
        num_trees = sum(1 for each in weights if each) + (weights[taker] == 0)
        if given and weights[taker] + given <= WEIGHT_MAX and num_trees <= TREES_MAX:
            moved = list(weights)
            moved[giver] -= given
            moved[taker] += given
            yield moved
