"""Which reductions come into question for some sites: what a planner chooses from."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from topology.errors import ConfigError
from topology.job import Job, NamedTree, Reduction
from topology.model.reduction_plans import packings, plan_reduction, weighted
from topology.trees.hierarchy import groups_by_delay, hierarchy
from topology.trees.pairs import Pairs, pairs_of
from topology.trees.shapes import (
    best_hub,
    every_root,
    ring_paths,
    rooted,
    spans,
    widest_tree,
    width,
)
from topology.trees.trees import ReductionPlan, Tree, star
from topology.trees.weights import NEAR_ENOUGH
from topology.world import Topology

MIXES = {
    3: tuple(
        weights
        for count in (2, 3)
        for weights in itertools.product((1, 2, 3), repeat=count)
        if sum(weights) <= 4 and math.gcd(*weights) == 1
    ),
    4: ((1, 1), (2, 1), (1, 2)),
}
"""Weights of several stars, by the number of sites. Small weights share out few chunks best. And
these do not follow from rates, so that a wider link does not take away what was best without it."""
ROUNDINGS = {4: (NEAR_ENOUGH, Fraction(105, 100), Fraction(6, 5), Fraction(3, 2))}
"""How near a linear program's whole weights are to it, by the number of sites: fewer turns share
out few chunks better. Where the trainer that ships is planned, the weights of few sites are of
topology.planner.tree_mixes instead."""
EVERY_TREE_SITES = 4
"""Up to so many sites every tree is tried alone: 16 of them."""
EVERY_ROOT_SITES = 4
"""Up to so many sites each is tried as its root: where that is slow, others wait less for it."""
EVERY_RING_SITES = 5
"""Up to so many sites all orders of a ring are tried: 12 of them; of more, the widest found."""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One reduction, as the executor knows it and as a job writes it."""

    form: str
    """For people: `star at oregon`."""
    plan: ReductionPlan
    reduction: Reduction


def ways(
    job: Job, topology: Topology, *, with_packings: bool = True, by_rates: bool = True
) -> list[Way]:
    """Return the reductions for a topology's sites, the simplest first; none where none can be.

    A job that names its reduction is asked for no other.

    Args:
        job: Gives what is asked for.
        topology: Of the sites that take part.
        with_packings: Also weighted trees: of few sites some, of more those of linear programs.
        by_rates: Also trees that follow from rates: the widest, two levels, and those of linear
            programs, which take seconds for 12 sites.
    """
    if len(topology.sites) == 1:
        return [Way("alone", ReductionPlan(1, (), "one site: nothing crosses"), Reduction())]
    pairs = pairs_of(topology, job.exchange)
    if job.reduction != Reduction():
        try:
            plan = plan_reduction(job, topology)
        except ConfigError:
            return []
        named_trees = f"{len(plan.trees)} trees" if job.reduction.trees else ""
        form = named_trees or plan.why.partition(":")[0]
        return [_way(f"{form}, as the job says", pairs, plan.trees)]
    found: dict[object, Way] = {}
    for form, trees in _forms(pairs, with_packings, by_rates):
        key = _canonical(trees)
        found.setdefault(key, _way(form, pairs, trees))
    return list(found.values())


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


def _way(form: str, pairs: Pairs, trees: tuple[Tree, ...]) -> Way:
    plan = ReductionPlan(pairs.num_sites, trees, form)
    return Way(form, plan, named(plan, pairs.names))


def _canonical(trees: tuple[Tree, ...]) -> object:
    """Return what is equal for equal sets of trees."""
    return tuple(
        sorted((tree.root, tuple(sorted(tree.parent.items())), tree.weight) for tree in trees)
    )


def _forms(
    pairs: Pairs, with_packings: bool, by_rates: bool
) -> Iterator[tuple[str, tuple[Tree, ...]]]:
    sites = range(pairs.num_sites)
    hubs = [site for site in sites if not pairs.missing(site)]
    if len(hubs) == pairs.num_sites:
        yield "gather", ()
    first = best_hub(pairs)
    for hub in sorted(hubs, key=lambda site: site != first):
        yield f"star at {pairs.names[hub]}", (star(pairs.num_sites, hub),)
    widest = widest_tree(pairs)
    if widest is None:
        return
    for tree in _trees(pairs, widest, by_rates):
        yield f"tree at {pairs.names[tree.root]}", (tree,)
    for order in _rings(pairs):
        yield f"ring {' - '.join(pairs.names[site] for site in order)}", ring_paths(order)
    groups = groups_by_delay(pairs)
    levels = hierarchy(pairs, groups) if 1 < len(groups) < pairs.num_sites else None
    if levels is not None and by_rates:
        yield f"two levels with their root at {pairs.names[levels.root]}", (levels,)
    for mix in MIXES.get(pairs.num_sites, ()) if with_packings else ():
        for some in itertools.combinations(sorted(hubs), len(mix)):
            stars = (star(pairs.num_sites, hub) for hub in some)
            yield f"{len(mix)} weighted trees", tuple(map(_weighing, stars, mix))
    if with_packings and by_rates and pairs.num_sites > 2:
        roundings = ROUNDINGS.get(pairs.num_sites, (NEAR_ENOUGH,))
        found = packings(pairs, width(pairs, widest))
        for packing, near_enough in itertools.product(found, roundings):
            trees = weighted(pairs, packing, near_enough)
            form = f"{len(trees)} weighted trees"
            yield form if len(trees) > 1 else f"tree at {pairs.names[trees[0].root]}", trees


def _trees(pairs: Pairs, widest: Tree, by_rates: bool) -> Iterable[Tree]:
    """Return trees of any form: of few sites all, each with the best root; else the widest."""
    if pairs.num_sites > EVERY_TREE_SITES:
        return [widest] if by_rates else []
    every = itertools.combinations(pairs.bytes_per_s, pairs.num_sites - 1)
    forms = [edges for edges in every if spans(edges, pairs.num_sites)]
    found = [rooted(pairs, edges, 1) for edges in forms]
    if pairs.num_sites <= EVERY_ROOT_SITES:
        found += itertools.chain.from_iterable(every_root(pairs, edges, 1) for edges in forms)
    return found


def _weighing(tree: Tree, weight: int) -> Tree:
    return dataclasses.replace(tree, weight=weight)


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
