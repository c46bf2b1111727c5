"""Finds the packing of trees with the highest total rate over asymmetric links.

With such links a chunk's result should return another way than the sum went. So a tree has a way
up, along which sums go to its root, and a way down for the result. The linear program is that of
topology/trees/packing.py, over directed links. T is a pair of a way up and a way down with the same
root. Maximise the sum of x_T over all such pairs, so that those over each directed link carry no
more than its rate. A link that a tree uses up and down counts twice.

The next trees are again the cheapest at the links' current prices, one for each root. The cheapest
way down is a minimum arborescence (Edmonds, Optimum branchings, 1967); the cheapest way up is one
with all links reversed. If links have different codecs, the packing may not be optimal, because
trees are priced without their codecs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.topology.spec.reduction_plan import Tree, shape_of
from isthmus.topology.trees.packing import NEAR_ENOUGH, generated, least_weights, with_weights
from isthmus.topology.trees.pairs import Hop, Pairs

SITES_MAX = 8
"""Largest number of sites for which the program is solved; eight take a quarter of a second."""
_AS_CHEAP = 1e-9
"""Relative extra cost at which a star is still preferred, for its low delay."""


@dataclass(frozen=True, slots=True)
class TwoWayPacking:
    """Trees with separate ways up and down, and their optimal rates."""

    bytes_per_s: float
    """Bytes per second of all trees together; in chunks of the unit of `Pairs.loads`, if any."""
    trees: tuple[tuple[Tree, float], ...]
    """Trees of weight 1 with their rates, all above 0."""


def pack_two_ways(pairs: Pairs, slowest_bytes_per_s: int = 0) -> TwoWayPacking | None:
    """Return the best packing over directed links of at least `slowest_bytes_per_s`.

    None if these do not reach every site, or there are more than SITES_MAX sites.
    """
    rates = {hop: rate for hop, rate in pairs.one_way.items() if rate >= slowest_bytes_per_s}
    if pairs.num_sites > SITES_MAX:
        return None
    packed = generated(
        rates,
        lambda prices: _cheapest(pairs.num_sites, prices),
        lambda tree: uses_of(tree, pairs),
    )
    if packed is None:
        return None
    bytes_per_s, carried = packed
    kept = sorted(carried, key=lambda each: shape_of(each[0]))
    return TwoWayPacking(bytes_per_s, tuple(kept))


def weighted_two_ways(
    pairs: Pairs, packing: TwoWayPacking, near_enough: Sequence[float] = (NEAR_ENOUGH,)
) -> list[tuple[Tree, ...]]:
    """Return a packing's trees with small whole weights, for each ratio."""
    trees = [tree for tree, _ in packing.trees]
    every = least_weights(
        [part for _, part in packing.trees],
        packing.bytes_per_s,
        [uses_of(tree, pairs) for tree in trees],
        pairs.one_way,
        near_enough,
    )
    return [with_weights(trees, weights) for weights in every]


def uses_of(tree: Tree, pairs: Pairs) -> dict[Hop, int]:
    """Return the size of a tree's chunk on each directed link, in the unit of `Pairs.loads`."""
    counts = Counter(tree.hops())
    load = pairs.load(counts)
    return {hop: count * load for hop, count in counts.items()}


def widest_two_way_tree(pairs: Pairs) -> Tree:
    """Return the tree whose slowest directed link is fastest; a link used twice has half its rate.

    From each root both ways are grown along the widest links (Prim).
    """

    def speed(tree: Tree) -> float:
        return min(pairs.one_way[hop] / count for hop, count in uses_of(tree, pairs).items())

    turned = {(target, source): rate for (source, target), rate in pairs.one_way.items()}
    sites = range(pairs.num_sites)
    trees = [
        Tree(root, _widest(root, sites, turned), down=_widest(root, sites, pairs.one_way))
        for root in sites
    ]
    return max(trees, key=lambda tree: (speed(tree), -tree.root))


def _widest(root: int, sites: range, rates: Mapping[Hop, int]) -> dict[int, int]:
    """Return each site's predecessor, when sites are reached along the widest links (Prim)."""
    giver: dict[int, int] = {}
    while len(giver) < len(sites) - 1:
        inside = {root, *giver}
        _, source, target = max(
            (rate, -source, -target)
            for (source, target), rate in rates.items()
            if source in inside and target not in inside
        )
        giver[-target] = -source
    return giver


def _cheapest(num_sites: int, prices: Mapping[Hop, float]) -> list[Tree]:
    """Return the cheapest tree of each root from which all sites are reached."""
    turned = {(target, source): price for (source, target), price in prices.items()}
    trees = []
    for root in range(num_sites):
        down, up = (_cheapest_way(num_sites, root, each) for each in (prices, turned))
        if down is not None and up is not None:
            trees.append(Tree(root, up, down=down))
    return trees


def _cheapest_way(num_sites: int, root: int, prices: Mapping[Hop, float]) -> dict[int, int] | None:
    """Return each site's predecessor on the cheapest way, preferring a star."""
    hops = _arborescence(root, [(*hop, price, hop) for hop, price in sorted(prices.items())])
    if len(hops) < num_sites - 1:
        return None
    spokes = [(root, site) for site in range(num_sites) if site != root]
    if all(hop in prices for hop in spokes):
        cost, of_star = (sum(prices[hop] for hop in each) for each in (hops, spokes))
        if of_star <= cost + _AS_CHEAP:
            hops = spokes
    return dict(sorted((site, giver) for giver, site in hops))


_Priced = tuple[int, int, float, Hop]
"""A link between two groups of sites: (from, to, price, the link itself)."""


def _arborescence(root: int, links: list[_Priced]) -> list[Hop]:
    """Return the links of the cheapest arborescence from `root`; too few if there is none.

    Each group takes its cheapest incoming link. A circle of these becomes one group, whose incoming
    links cost only the excess over the circle's own link there. Cost: O(groups · links).
    """
    into: dict[int, _Priced] = {}
    for link in links:
        _, target, price, _ = link
        if target != root and (target not in into or price < into[target][2]):
            into[target] = link
    circle = _circle(into)
    if not circle:
        return [link[3] for link in into.values()]
    within, name = set(circle), circle[0]
    merged = [
        (
            name if source in within else source,
            name if target in within else target,
            price - into[target][2] if target in within else price,
            hop,
        )
        for source, target, price, hop in links
        if source not in within or target not in within
    ]
    hops = _arborescence(root, merged)
    taken = set(hops)
    entered = {target for _, target, _, hop in links if hop in taken} & within
    if not entered:
        return []
    return [*hops, *(into[site][3] for site in circle if site not in entered)]


def _circle(into: Mapping[int, _Priced]) -> list[int]:
    """Return the groups of a circle, or nothing."""
    for start in into:
        way, at = [start], start
        while at in into:
            at = into[at][0]
            if at in way:
                return way[way.index(at) :]
            way.append(at)
    return []
