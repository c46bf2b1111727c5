"""Candidate reductions for a set of sites, and local changes of weighted trees.

The menu is small: gather, a star at each site, the widest ring, two levels, the widest tree with
each site as its root, and the weighted trees of a linear program (topology/trees/packing.py). The
program finds how links are shared best, but ignores round trips, waits and integer numbers of
chunks. So its trees are a start, which small changes improve: other roots, sites below other sites,
and weight moved between trees.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job, NamedTree, Reduction
from isthmus.topology.spec.reduction_plan import (
    TREES_MAX,
    WEIGHT_MAX,
    ReductionPlan,
    Tree,
    shape_of,
    star,
)
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.packing import NEAR_ENOUGH, pack_stars, weighted
from isthmus.topology.trees.pairs import Pairs, edge, pairs_of
from isthmus.topology.trees.shapes import (
    best_hub,
    every_root,
    groups_by_delay,
    hierarchy,
    ring_paths,
    widest_tree,
)
from isthmus.topology.trees.tree_choice import plan_reduction, weighted_sets
from isthmus.topology.trees.two_way_packing import widest_two_way_tree

HUBS = 8
"""Largest number of hubs of stars that are found quickly."""
QUICK_ROUNDING = 1.05
"""Allowed ratio between their integer weights and the linear program."""
ROUNDINGS = (NEAR_ENOUGH, 1.05, 1.2, 1.5)
"""Allowed ratios between integer weights and a linear program: short periods distribute few chunks
better."""
_TOTAL = 96
"""Largest total weight while weights are moved, unless the start has more."""
_PARTS = (4, 8, 16, 48)
"""Fractions of the total weight that are moved at once: 1/4, 1/8, and so on."""
TreeChanges = Callable[[ReductionPlan], Iterator[tuple[Tree, ...]]]
"""A function that yields a plan's trees after each change of one kind."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A candidate reduction, as a plan for the executor and in a job's format."""

    form: str
    """The form's name for people: `star at oregon`."""
    plan: ReductionPlan
    reduction: Reduction


def menu(
    job: Job, topology: Topology, *, packed: bool = True, pairs: Pairs | None = None
) -> list[Candidate]:
    """Return the candidate reductions for a topology, the simplest first; may be empty.

    If the job names its reduction, that is the only candidate.

    Args:
        job: The job, whose reduction may be fixed.
        topology: Of the sites that take part.
        packed: Whether to include weighted trees of a linear program.
        pairs: Of the topology with the job's codecs, where they are known.
    """
    if len(topology.sites) == 1:
        return [Candidate("alone", ReductionPlan(1, (), "one site: nothing crosses"), Reduction())]
    pairs = pairs or pairs_of(topology, job.exchange)
    if job.reduction != Reduction():
        try:
            plan = plan_reduction(job, topology)
        except ConfigError:
            return []
        form = f"{len(plan.trees)} trees" if job.reduction.trees else plan.why.partition(":")[0]
        return [candidate_of(pairs.names, plan.trees, f"{form}, as the job says")]
    candidates: dict[object, Candidate] = {}
    for form, trees in _forms(pairs, packed=packed):
        shapes = tuple(sorted((*shape_of(tree), tree.weight) for tree in trees))
        candidates.setdefault(shapes, candidate_of(pairs.names, trees, form))
    return list(candidates.values())


def candidate_of(names: Sequence[str], trees: tuple[Tree, ...], form: str = "") -> Candidate:
    """Return the candidate for these trees (none: gather); `form` is derived if empty."""
    if not form:
        form = f"{len(trees)} weighted trees"
        if len(trees) == 1:
            form = f"tree at {names[trees[0].root]}"
    plan = ReductionPlan(len(names), trees, form)
    return Candidate(form, plan, named(plan, names))


def named(plan: ReductionPlan, names: Sequence[str]) -> Reduction:
    """Return a plan in a job's format: gather, or exactly these trees."""
    if plan.num_sites == 1:
        return Reduction()
    if plan.is_gather:
        return Reduction(tree="gather")
    return Reduction(
        trees=tuple(
            NamedTree(
                root=names[tree.root],
                parents=_by_name(tree.parent, names),
                weight=tree.weight,
                down=None if tree.down is None else _by_name(tree.down, names),
            )
            for tree in plan.trees
        )
    )


def _by_name(way: Mapping[int, int], names: Sequence[str]) -> dict[str, str]:
    return {names[child]: names[parent] for child, parent in way.items()}


def weighted_stars(pairs: Pairs) -> Candidate | None:
    """Return weighted stars of a few hubs: quickly found, and often nearly best; None: none are."""
    packing = pack_stars(pairs, HUBS) if pairs.num_sites > 2 else None
    if packing is None:
        return None
    [trees] = weighted(pairs, packing, (QUICK_ROUNDING,))
    return candidate_of(pairs.names, trees)


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
    for tree in (widest, *every_root(pairs, [edge(*hop) for hop in widest.parent.items()], 1)):
        yield "", (tree,)
    if pairs.one_way and pairs.num_sites > 2:
        yield "", (widest_two_way_tree(pairs),)
    order = _widest_ring(pairs)
    if pairs.num_sites > 2 and _narrowest_rate(pairs, order) > 0:
        yield f"ring {' - '.join(pairs.names[site] for site in order)}", ring_paths(order)
    groups = groups_by_delay(pairs)
    levels = hierarchy(pairs, groups) if 1 < len(groups) < pairs.num_sites else None
    if levels is not None:
        yield f"two levels with their root at {pairs.names[levels.root]}", (levels,)
    if packed and pairs.num_sites > 2:
        for trees in weighted_sets(pairs, widest, ROUNDINGS):
            yield "", trees


def _widest_ring(pairs: Pairs) -> tuple[int, ...]:
    """Return a ring of sites with wide narrowest links, by 2-opt.

    Of two rings that differ in two links, that one is wider whose two are, the narrower one first.
    """
    size = pairs.num_sites
    rates = [[pairs.rate(one, other) for other in range(size)] for one in range(size)]
    ring = list(range(size))
    better = True
    while better:
        better = False
        for first, last in itertools.combinations(range(1, size), 2):
            before, begin = ring[first - 1], ring[first]
            end, after = ring[last], ring[(last + 1) % size]
            turned = sorted((rates[before][end], rates[begin][after]))
            if turned > sorted((rates[before][begin], rates[end][after])):
                ring[first : last + 1] = reversed(ring[first : last + 1])
                better = True
    return tuple(ring)


def _narrowest_rate(pairs: Pairs, order: Sequence[int]) -> int:
    """Return the rate of a ring's narrowest link."""
    return min(
        pairs.rate(one, other) for one, other in zip(order, (*order[1:], order[0]), strict=True)
    )


def adapted(tree: Tree, names: Sequence[str], pairs: Pairs) -> Tree | None:
    """Return a tree over some sites as a tree over others: sites join it or leave it.

    Who leaves is replaced by its own parent, a root by the child with the widest links. Who joins
    does so over its widest link.

    Args:
        tree: Over the sites `names`.
        names: Names of its sites.
        pairs: Of the other sites.

    Returns:
        None: a link is missing.
    """
    index = {name: site for site, name in enumerate(pairs.names)}

    def rate(one: str, other: str) -> int:
        return pairs.rate(index[one], index[other])

    root, parents = names[tree.root], _by_name(tree.parent, names)
    if root not in index:
        children = [each for each, above in parents.items() if above == root and each in index]
        if not children:
            return None
        root = max(
            children,
            key=lambda one: min((rate(one, each) for each in children if each != one), default=0),
        )
    ways = []
    for way in (parents, _by_name(tree.giver, names)):
        kept: dict[str, str] = {}
        for name in names:
            if name in index and name != root:
                above = way.get(name, root)
                while above not in index:
                    above = way.get(above, root)
                kept[name] = root if above == name else above
        for name in index:
            if name not in names:
                kept[name] = max((root, *kept), key=lambda each: rate(name, each))
        if not _leads_to(root, kept) or not all(rate(*hop) for hop in kept.items()):
            return None
        ways.append({index[one]: index[other] for one, other in kept.items()})
    return Tree(index[root], ways[0], tree.weight, ways[1])


def _leads_to(root: str, way: Mapping[str, str]) -> bool:
    """Return whether a way has no circle."""
    reached = {root}
    for name in way:
        passed = []
        while name not in reached:
            if name in passed:
                return False
            passed.append(name)
            name = way[name]
        reached.update(passed)
    return True


def tree_changes(pairs: Pairs, pool: Sequence[Tree]) -> list[TreeChanges]:
    """Return the kinds of small changes: other roots, sites below others, and weights moved."""
    moved = (functools.partial(_reweighed, pool, part) for part in _PARTS)
    return [functools.partial(_rerooted, pairs), functools.partial(_rehung, pairs), *moved]


def _rerooted(pairs: Pairs, plan: ReductionPlan) -> Iterator[tuple[Tree, ...]]:
    """Yield a plan's trees, one of them with another root."""
    for place, tree in enumerate(plan.trees):
        for other, back in zip(
            *(
                every_root(pairs, [edge(*hop) for hop in way.items()], tree.weight)
                for way in (tree.parent, tree.giver)
            ),
            strict=True,
        ):
            if other.root != tree.root:
                turned = dataclasses.replace(other, down=back.parent)
                yield (*plan.trees[:place], turned, *plan.trees[place + 1 :])


def _rehung(pairs: Pairs, plan: ReductionPlan) -> Iterator[tuple[Tree, ...]]:
    """Yield a plan's trees, with one subtree of one tree moved under another site.

    If that tree has another way down, either way may change.
    """
    for place, tree in enumerate(plan.trees):
        before, after = plan.trees[:place], plan.trees[place + 1 :]
        for way in _rehung_ways(pairs, tree.root, tree.parent):
            yield (*before, dataclasses.replace(tree, parent=way), *after)
        for way in () if tree.down is None else _rehung_ways(pairs, tree.root, tree.down):
            yield (*before, dataclasses.replace(tree, down=way), *after)


def _rehung_ways(pairs: Pairs, root: int, way: Mapping[int, int]) -> Iterator[dict[int, int]]:
    for site, parent in way.items():
        for other in range(pairs.num_sites):
            above = other
            while above not in (root, site):
                above = way[above]
            if other not in (site, parent) and above != site and pairs.rate(site, other):
                yield {**way, site: other}


def _reweighed(pool: Sequence[Tree], part: int, plan: ReductionPlan) -> Iterator[tuple[Tree, ...]]:
    """Yield a plan's trees with 1/`part` of the total weight moved to another tree."""
    known = {shape_of(tree): tree for tree in (*plan.trees, *pool)}
    carried = dict.fromkeys(known, 0)
    for tree in plan.trees:
        carried[shape_of(tree)] += tree.weight
    factor = max(1, _TOTAL // sum(carried.values()))
    weights = [factor * each for each in carried.values()]
    for giver, taker in itertools.permutations(range(len(weights)), 2):
        given = min(max(1, sum(weights) // part), weights[giver])
        moved = list(weights)
        moved[giver] -= given
        moved[taker] += given
        num_trees = len(moved) - moved.count(0)
        if given and moved[taker] <= WEIGHT_MAX and num_trees <= TREES_MAX:
            yield _with_weights(known.values(), moved)


def _with_weights(trees: Iterable[Tree], weights: Sequence[int]) -> tuple[Tree, ...]:
    shared = math.gcd(*weights)
    return tuple(
        dataclasses.replace(tree, weight=weight // shared)
        for tree, weight in zip(trees, weights, strict=True)
        if weight
    )
