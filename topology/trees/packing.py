"""Finds the packing of spanning trees with the highest total rate: a linear program (HiGHS).

Maximise the sum of x_T over spanning trees T, so that the trees over each edge carry no more than
its rate: sum of x_T over T with e in T <= c_e. A chunk crosses each edge of its tree once up and
once down, so c_e is the rate of the slower direction, and the root does not matter. The sum is the
rate at which sums of all sites can be formed; x_T divided by it is the share of the chunks that T
takes. Where links have codecs of their own, a chunk of T has l_T bytes on each of its edges, those
of the smallest of its edges' codecs: sum of l_T x_T <= c_e. Otherwise all l_T are 1, and
Nash-Williams and Tutte say what binds. Part the sites into k groups, and divide the rate between
the groups by k - 1: the sum of x_T is the least of this over all ways to do so.

There are n^(n-2) trees, so columns are generated as needed. The next tree is the cheapest at the
current prices of the edges. A tree costs l_T times the sum of these, so it is a minimum spanning
tree, or the cheapest one with an edge of a smaller codec. The search ends when no tree costs less
than 1: the prices then prove that no packing is better (`generated`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from isthmus.topology.spec.reduction_plan import TREES_MAX, WEIGHT_MAX, Tree
from isthmus.topology.trees.pairs import Edge, Pairs, edge
from isthmus.topology.trees.shapes import rooted

EDGES_MAX = 120
"""Largest number of edges in the program: all between 16 sites. An optimum has at most as many
trees."""
ENOUGH = 0.995
"""Share of the optimum that is good enough. The last half percent takes as long as all before it,
and rounding to whole weights loses as much."""
PERIOD_MAX = 256
"""Largest sum of weights: small, so that even a few chunks are distributed well."""
NEAR_ENOUGH = 1.01
"""Factor by which rounding to integer weights may lengthen the busiest link's time."""
_LEAST_SHARE = 1e-6
"""Share of the optimum below which a tree counts as carrying nothing."""

LinkT = TypeVar("LinkT", bound=Edge)
TreeT = TypeVar("TreeT")

EdgeSet = tuple[Edge, ...]
"""The edges of a spanning tree, in ascending order."""
_Prices = Mapping[Edge, float]
_Loads = Mapping[Edge, int]


@dataclass(frozen=True, slots=True)
class Packing:
    """Spanning trees with their optimal rates."""

    bytes_per_s: float
    """Total bytes per second of all trees, the optimum; with `Pairs.loads`, chunks of their unit
    per second."""
    trees: tuple[tuple[EdgeSet, float], ...]
    """Trees with their rates, all above 0, in ascending order."""


def pack_trees(pairs: Pairs) -> Packing:
    """Return the best packing of spanning trees of any form, preferring stars.

    Above EDGES_MAX edges only the widest are used.
    """
    packing = _pack(pairs)
    assert packing is not None, "the sites are connected"
    return packing


def pack_stars(pairs: Pairs, most: int | None = None) -> Packing | None:
    """Return the best packing of stars; None: no site has edges to all others.

    There is one star for each site, so one program has them all. `most` is how many of the best may
    be in it; None: all.
    """
    sites = range(pairs.num_sites)
    stars = [
        tuple(sorted(edge(hub, site) for site in sites if site != hub))
        for hub in sites
        if not pairs.missing(hub)
    ]
    if not stars:
        return None
    packing = _packed_stars(pairs, stars)
    if most is not None and len(packing.trees) > most:
        best = sorted(packing.trees, key=lambda each: -each[1])[:most]
        packing = _packed_stars(pairs, [star for star, _ in best])
    return packing


def _packed_stars(pairs: Pairs, stars: Sequence[EdgeSet]) -> Packing:
    waiting = iter([stars])
    found = generated(
        {each: pairs.bytes_per_s[each] for each in sorted({*itertools.chain(*stars)})},
        lambda _: next(waiting, []),
        lambda star: dict.fromkeys(star, pairs.load(star)),
    )
    assert found is not None, "there is a star"
    bytes_per_s, carried = found
    return Packing(bytes_per_s, tuple(sorted(carried)))


def weighted(
    pairs: Pairs, packing: Packing, near_enough: Sequence[float] = (NEAR_ENOUGH,)
) -> list[tuple[Tree, ...]]:
    """Return a packing's trees, with the best roots and small whole weights, for each ratio."""
    rooted_trees = [rooted(pairs, edges, 1) for edges, _ in packing.trees]
    return [
        with_weights(rooted_trees, weights)
        for weights in small_weights(packing, pairs, near_enough)
    ]


def with_weights(trees: Iterable[Tree], weights: Iterable[int]) -> tuple[Tree, ...]:
    """Return trees with other weights, without those of weight 0."""
    return tuple(
        dataclasses.replace(tree, weight=weight)
        for tree, weight in zip(trees, weights, strict=True)
        if weight > 0
    )


def small_weights(
    packing: Packing, pairs: Pairs, near_enough: Sequence[float] = (NEAR_ENOUGH,)
) -> list[list[int]]:
    """Return integer weights of the trees, 0 to WEIGHT_MAX, with the smallest adequate total.

    Adequate: the busiest link takes at most `near_enough` times as long as in the packing. If no
    total up to PERIOD_MAX is, take the one whose busiest link is least busy. The result has weights
    for each ratio of `near_enough`.
    """
    uses = [dict.fromkeys(edges, pairs.load(edges)) for edges, _ in packing.trees]
    carried = [part for _, part in packing.trees]
    return least_weights(carried, packing.bytes_per_s, uses, pairs.bytes_per_s, near_enough)


def least_weights(
    carried: Sequence[float],
    bytes_per_s: float,
    uses: Sequence[Mapping[LinkT, int]],
    rates: Mapping[LinkT, int],
    near_enough: Sequence[float],
) -> list[list[int]]:
    """Return small integer weights, like `small_weights`, for trees over any kind of links.

    Args:
        carried: Rate of each tree.
        bytes_per_s: Total rate.
        uses: Load of a chunk of each tree, by link.
        rates: Bytes per second of each link.
        near_enough: Allowed factors on the busiest link's time.
    """
    import numpy as np  # most processes do not need it, and it takes a fifth of a second to import

    links = list(dict.fromkeys(link for of_tree in uses for link in of_tree))
    loads = np.array([[of_tree.get(link, 0) for of_tree in uses] for link in links])
    rate = np.array([rates[link] for link in links], dtype=np.float64)
    best_busy_s, best = float("inf"), [1] * len(carried)
    found: dict[float, list[int]] = {}
    for period in range(1, PERIOD_MAX + 1):
        weights = apportioned(carried, period)
        if max(weights) > WEIGHT_MAX and len(carried) > 1:
            continue
        busy_s = float((loads @ weights / rate).max()) / period
        if busy_s < best_busy_s:
            best_busy_s, best = busy_s, weights
        for ratio in near_enough:
            if busy_s * bytes_per_s <= ratio:
                found.setdefault(ratio, best)
        if len(found) == len(near_enough):
            break
    return [found.get(ratio, best) for ratio in near_enough]


def _pack(pairs: Pairs) -> Packing | None:
    edges = _widest_edges(pairs)
    loads = {each: pairs.load([each]) for each in edges if pairs.load([each]) != 1}

    def cheapest(prices: _Prices) -> list[EdgeSet]:
        found = _star_or_tree(pairs.num_sites, prices, loads)
        return [] if found is None else [found]

    found = generated(
        {each: pairs.bytes_per_s[each] for each in edges},
        cheapest,
        lambda tree: dict.fromkeys(tree, _load(tree, loads)),
    )
    if found is None:
        return None
    bytes_per_s, carried = found
    return Packing(bytes_per_s, tuple(sorted(carried)))


def generated(
    rates: Mapping[LinkT, int],
    cheapest: Callable[[Mapping[LinkT, float]], Sequence[TreeT]],
    uses_of: Callable[[TreeT], Mapping[LinkT, int]],
) -> tuple[float, list[tuple[TreeT, float]]] | None:
    """Return the near-optimal total rate and the trees with their rates; None: no trees.

    Args:
        rates: Bytes per second of each link.
        cheapest: Returns the cheapest trees for given prices of links; none if there are no trees.
        uses_of: Returns the load of a tree's chunk by link.
    """
    # scipy takes a third of a second to import, and most processes do not need it.
    import numpy as np
    from scipy.optimize import linprog  # type: ignore[import-untyped]

    widest = max(rates.values(), default=1)
    limits = [rate / widest for rate in rates.values()]
    row_of = {link: index for index, link in enumerate(rates)}
    loads = np.empty((len(rates), 0))  # of a chunk of each tree, by link
    trees: list[TreeT] = []
    newest = list(cheapest({link: 1 / rate for link, rate in rates.items()}))
    if not newest:
        return None
    while True:
        trees += newest
        added = np.zeros((len(rates), len(newest)))
        for column, uses in enumerate(map(uses_of, newest)):
            added[[row_of[link] for link in uses], column] = list(uses.values())
        loads = np.hstack((loads, added))
        solved = linprog([-1.0] * len(trees), loads, limits)
        prices = dict(zip(rates, (-solved.ineqlin.marginals).tolist(), strict=True))
        newest = [
            tree
            for tree in cheapest(prices)
            if tree not in trees
            and sum(prices[link] * use for link, use in uses_of(tree).items()) < ENOUGH
        ]
        if not newest:
            break
    carried = zip(trees, (solved.x * widest).tolist(), strict=True)
    least = -solved.fun * widest * _LEAST_SHARE
    kept = [(tree, part) for tree, part in carried if part > least]
    kept.sort(key=lambda each: -each[1])
    return -solved.fun * widest, kept[:TREES_MAX]


def _widest_edges(pairs: Pairs) -> list[Edge]:
    """Return all edges, or those of the widest tree, then of the widest of the rest, and so on.

    This way every site keeps several edges, even if they are narrow.
    """
    kept: list[Edge] = []
    unused = {each: -float(pairs.speed([each])) for each in pairs.bytes_per_s}
    while unused:
        forest = _forest(pairs.num_sites, unused)
        if kept and len(kept) + len(forest) > EDGES_MAX:
            break
        kept += forest
        for each in forest:
            del unused[each]
    return sorted(kept)


def _star_or_tree(num_sites: int, prices: _Prices, loads: _Loads) -> EdgeSet | None:
    """Return the cheapest tree, preferring a star, which has the least delay."""
    tree = _cheapest_tree(num_sites, prices, loads)
    star = _cheapest_star(num_sites, prices, loads)
    if star is None or tree is None:
        return tree
    nearly = _cost(tree, prices, loads) + 1e-9
    return star if _cost(star, prices, loads) <= nearly else tree


def _load(tree: EdgeSet, loads: _Loads) -> int:
    """Return the load of a tree's chunk; edges missing in `loads` have 1."""
    return min(loads.get(each, 1) for each in tree)


def _cost(tree: EdgeSet, prices: _Prices, loads: _Loads) -> float:
    return _load(tree, loads) * sum(prices[each] for each in tree)


def _cheapest_star(num_sites: int, prices: _Prices, loads: _Loads) -> EdgeSet | None:
    stars = []
    for hub in range(num_sites):
        spokes = tuple(sorted(edge(hub, site) for site in range(num_sites) if site != hub))
        if all(each in prices for each in spokes):
            stars.append((_cost(spokes, prices, loads), spokes))
    return min(stars)[1] if stars else None


def _cheapest_tree(num_sites: int, prices: _Prices, loads: _Loads) -> EdgeSet | None:
    """Return the cheapest tree of any form.

    For each load, take the minimum spanning tree with an edge of that load. Other edges can only
    lower its load, and then it is found for the lower one.
    """
    forest = _forest(num_sites, prices)
    if len(forest) != num_sites - 1:
        return None
    if not loads:
        return forest
    least = _load(forest, loads)
    small = [each for each in prices if loads.get(each, 1) < least]
    trees = [forest, *(_forest(num_sites, prices, each) for each in small)]
    return min(trees, key=lambda tree: (_cost(tree, prices, loads), tree))


def _forest(num_sites: int, prices: _Prices, first: Edge | None = None) -> EdgeSet:
    """Return Kruskal's minimum spanning forest that includes the edge `first`."""
    group = list(range(num_sites))
    taken = []
    for each in sorted(prices, key=lambda pair: (pair != first, prices[pair], pair)):
        one, other = group[each[0]], group[each[1]]
        if one != other:
            taken.append(each)
            group = [one if label == other else label for label in group]
    return tuple(sorted(taken))


def apportioned(shares: Sequence[float], period: int) -> list[int]:
    """Return integers that sum to `period`, in proportion to `shares` (largest remainders)."""
    total = sum(shares)
    exact = [share / total * period for share in shares]
    weights = [int(each) for each in exact]
    by_rest = sorted(range(len(shares)), key=lambda index: (weights[index] - exact[index], index))
    for index in by_rest[: period - sum(weights)]:
        weights[index] += 1
    return weights
