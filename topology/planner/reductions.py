"""Which reductions come into question for some sites, and how weighted trees get better.

The menu is small: gather, a star at each site, rings, two levels, the widest tree, single trees of
few sites, and the weighted trees of a linear program (topology/trees/packing.py). The program
knows how links are shared best, but neither round trips nor waits nor whole numbers of chunks. So
its trees are a beginning: parts of what one tree carries go to another for as long as that helps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from topology.errors import ConfigError
from topology.job import Job, NamedTree, Reduction
from topology.model.reduction_plans import packings, plan_reduction
from topology.model.tree_times import seconds_per_byte
from topology.trees.packing import NEAR_ENOUGH, apportioned, weighted
from topology.trees.pairs import Pairs, edge, pairs_of
from topology.trees.shapes import (
    best_hub,
    every_root,
    groups_by_delay,
    hierarchy,
    ring_paths,
    rooted,
    spans,
    widest_tree,
    width,
)
from topology.trees.trees import TREES_MAX, WEIGHT_MAX, ReductionPlan, Tree, shape_of, star
from topology.world import Topology

EVERY_TREE_SITES = 4
"""Up to so many sites every spanning tree is on the menu: 16 of them."""
EVERY_RING_SITES = 5
"""Up to so many sites all orders of a ring are: 12 of them. Of more, the widest that is found."""
ROUNDINGS = (NEAR_ENOUGH, 1.05, 1.2, 1.5)
"""How near whole weights are to a linear program: fewer turns share out few chunks better."""
_TOTAL = 96
"""Of weights that are moved, at most, unless there are more from the beginning."""
_POOL = 12
"""Trees that single moves may give weight to, beside a plan's own."""
_PARTS = (4, 8, 16, 48)
"""Of the total, that are moved at once: one fourth, ..."""


Score = Callable[[ReductionPlan, float], float]
"""Of a plan, what is to become less, seconds or dollars: exactly, where it is below the number."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One reduction, as the executor knows it and as a job writes it."""

    form: str
    """For people: `star at oregon`."""
    plan: ReductionPlan
    reduction: Reduction


def menu(job: Job, topology: Topology, *, packed: bool = True) -> list[Way]:
    """Return the reductions for a topology's sites, the simplest first; none where none can be.

    A job that names its reduction is asked for no other.

    Args:
        job: Gives what is asked for.
        topology: Of the sites that take part.
        packed: Also weighted trees of a linear program.
    """
    if len(topology.sites) == 1:
        return [Way("alone", ReductionPlan(1, (), "one site: nothing crosses"), Reduction())]
    pairs = pairs_of(topology, job.exchange)
    if job.reduction != Reduction():
        try:
            plan = plan_reduction(job, topology)
        except ConfigError:
            return []
        form = f"{len(plan.trees)} trees" if job.reduction.trees else plan.why.partition(":")[0]
        return [way_of(f"{form}, as the job says", pairs.names, plan.trees)]
    found: dict[object, Way] = {}
    for form, trees in _forms(pairs, packed=packed):
        shapes = tuple(sorted((*shape_of(tree), tree.weight) for tree in trees))
        found.setdefault(shapes, way_of(form, pairs.names, trees))
    return list(found.values())


def way_of(form: str, names: Sequence[str], trees: tuple[Tree, ...]) -> Way:
    """Return the reduction over some trees; none: gather."""
    plan = ReductionPlan(len(names), trees, form)
    return Way(form, plan, named(plan, names))


def named(plan: ReductionPlan, names: Sequence[str]) -> Reduction:
    """Return a plan as a job writes it: gather, or exactly these trees."""
    if plan.num_sites == 1:
        return Reduction()
    if plan.is_gather:
        return Reduction(tree="gather")
    return Reduction(
        trees=tuple(
            NamedTree(
                root=names[tree.root],
                parents={names[child]: names[parent] for child, parent in tree.parent.items()},
                weight=tree.weight,
            )
            for tree in plan.trees
        )
    )


def _forms(pairs: Pairs, *, packed: bool) -> Iterator[tuple[str, tuple[Tree, ...]]]:
    hubs = [site for site in range(pairs.num_sites) if not pairs.missing(site)]
    if len(hubs) == pairs.num_sites:
        yield "gather", ()
    first = best_hub(pairs)
    for hub in sorted(hubs, key=lambda site: site != first):
        yield f"star at {pairs.names[hub]}", (star(pairs.num_sites, hub),)
    widest = widest_tree(pairs)
    if widest is None:
        return
    for tree in (widest, *_every_tree(pairs)):
        yield f"tree at {pairs.names[tree.root]}", (tree,)
    for order in _rings(pairs):
        yield f"ring {' - '.join(pairs.names[site] for site in order)}", ring_paths(order)
    groups = groups_by_delay(pairs)
    levels = hierarchy(pairs, groups) if 1 < len(groups) < pairs.num_sites else None
    if levels is not None:
        yield f"two levels with their root at {pairs.names[levels.root]}", (levels,)
    if packed and pairs.num_sites > 2:
        found = packings(pairs, width(pairs, widest))
        for packing, near_enough in itertools.product(found, ROUNDINGS):
            trees = weighted(pairs, packing, near_enough)
            form = f"{len(trees)} weighted trees"
            yield form if len(trees) > 1 else f"tree at {pairs.names[trees[0].root]}", trees


def _every_tree(pairs: Pairs) -> list[Tree]:
    """Return all spanning trees of few sites, each with the best root."""
    if not 2 < pairs.num_sites <= EVERY_TREE_SITES:
        return []
    every = itertools.combinations(pairs.bytes_per_s, pairs.num_sites - 1)
    return [rooted(pairs, edges, 1) for edges in every if spans(edges, pairs.num_sites)]


def _rings(pairs: Pairs) -> Iterable[tuple[int, ...]]:
    """Return orders in which the sites make a ring: all, or the widest that exchanges lead to."""
    if pairs.num_sites < 3:
        return []
    if pairs.num_sites <= EVERY_RING_SITES:
        orders = [
            (0, *order)
            for order in itertools.permutations(range(1, pairs.num_sites))
            if order[0] < order[-1]  # each only one way round
        ]
    else:
        orders = [_widest_ring(pairs)]
    return [order for order in orders if _narrowest(pairs, order)[0] > 0]


def _widest_ring(pairs: Pairs) -> tuple[int, ...]:
    """Return an order whose narrowest links no reversal of a part of it makes wider (2-opt)."""
    best = tuple(range(pairs.num_sites))
    better = True
    while better:
        better = False
        for first, last in itertools.combinations(range(1, pairs.num_sites), 2):
            other = (*best[:first], *reversed(best[first : last + 1]), *best[last + 1 :])
            if _narrowest(pairs, other) > _narrowest(pairs, best):
                best, better = other, True
    return best


def _narrowest(pairs: Pairs, order: Sequence[int]) -> list[int]:
    """Return a ring's rates, the narrowest first."""
    return sorted(
        pairs.rate(one, other) for one, other in zip(order, (*order[1:], order[0]), strict=True)
    )


class WeightMoves:
    """Makes weighted trees better by moving chunks from one tree to another."""

    def __init__(
        self,
        pool: Iterable[Tree],
        topology: Topology,
        score: Score,
        least: Callable[[float], float],
        most_tries: int,
    ) -> None:
        """Look at nothing yet.

        Args:
            pool: Trees that may carry something, whatever their weights; over the same sites.
            topology: Of these sites.
            score: What is to become less.
            least: Returns what a plan's score is at least, whose busiest link takes so many seconds
                for a byte.
            most_tries: Scores that are asked for at most.
        """
        self._trees = {shape_of(tree): tree for tree in pool}
        self._topology, self._score, self._least = topology, score, least
        self._most_tries = most_tries

    def best(self, plan: ReductionPlan) -> ReductionPlan:
        """Return what moves from a plan's trees lead to; the plan itself if nothing is better.

        Args:
            plan: With trees; no gather.
        """
        weights = self._begun(plan)
        best, best_score = plan, self._score(plan, math.inf)
        num_tries, parts = 0, [*reversed(_PARTS)]
        tried: set[tuple[int, ...]] = set()
        while parts:
            part, is_better = parts[-1], False
            for moved in _moves(weights, max(1, sum(weights) // part)):
                shared = math.gcd(*moved)
                key = tuple(each // shared for each in moved)
                if key in tried:
                    continue
                tried.add(key)
                other = self._plan(key)
                busy_s = max(seconds_per_byte(other, self._topology).values())
                if self._least(busy_s) >= best_score:
                    continue
                if num_tries == self._most_tries:
                    return best
                num_tries += 1
                other_score = self._score(other, best_score)
                if other_score < best_score * (1 - 1e-6):
                    best, best_score, is_better = other, other_score, True
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
        trees = tuple(
            dataclasses.replace(tree, weight=weight)
            for tree, weight in zip(self._trees.values(), weights, strict=True)
            if weight
        )
        form = f"{len(trees)} weighted trees" if len(trees) > 1 else "a tree"
        return ReductionPlan(len(trees[0].parent) + 1, trees, form)


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


def other_roots(plan: ReductionPlan, pairs: Pairs, place: int) -> Iterator[tuple[Tree, ...]]:
    """Yield a plan's trees, one of them with another root."""
    tree = plan.trees[place]
    for other in every_root(pairs, [edge(*hop) for hop in tree.parent.items()], tree.weight):
        if other.root != tree.root:
            yield (*plan.trees[:place], other, *plan.trees[place + 1 :])


def rehung(plan: ReductionPlan, pairs: Pairs) -> Iterator[tuple[Tree, ...]]:
    """Yield a plan's only tree with one site, and all below it, under another site."""
    [tree] = plan.trees
    for site, parent in tree.parent.items():
        for other in range(pairs.num_sites):
            above = other
            while above not in (tree.root, site):
                above = tree.parent[above]
            if other not in (site, parent) and above != site and pairs.rate(site, other):
                yield (dataclasses.replace(tree, parent={**tree.parent, site: other}),)


def other_trees(
    plan: ReductionPlan, pairs: Pairs, pool: Sequence[Tree]
) -> Iterator[tuple[Tree, ...]]:
    """Yield a plan's trees with another root, and with a part of one's weight at another tree.

    Args:
        plan: With trees.
        pairs: Of its sites.
        pool: Other trees that may carry something.
    """
    for place in range(len(plan.trees)):
        yield from other_roots(plan, pairs, place)
    known = {shape_of(tree): tree for tree in (*plan.trees, *pool[:_POOL])}
    carried = dict.fromkeys(known, 0)
    for tree in plan.trees:
        carried[shape_of(tree)] += tree.weight
    factor = max(1, _TOTAL // sum(carried.values()))
    weights = [factor * each for each in carried.values()]
    for part in _PARTS[::2]:
        for moved in _moves(weights, max(1, sum(weights) // part)):
            shared = math.gcd(*moved)
            yield tuple(
                dataclasses.replace(tree, weight=weight // shared)
                for tree, weight in zip(known.values(), moved, strict=True)
                if weight
            )


def rounded_weights(plan: ReductionPlan, total: int) -> tuple[Tree, ...]:
    """Return a plan's trees with weights that add up to so much, or less; the least carry none."""
    weights = apportioned([tree.weight for tree in plan.trees], total)
    shared = math.gcd(*weights)
    return tuple(
        dataclasses.replace(tree, weight=weight // shared)
        for tree, weight in zip(plan.trees, weights, strict=True)
        if weight
    )
