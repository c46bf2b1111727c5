"""The trees that carry most together where links are faster in one direction than in the other.

There a chunk's result had better come back another way than the sum went. So each tree has a way
up, along which sums go to its root, and a way down, along which the result goes from it. The linear
program is that of topology/trees/packing.py, over directed links. T is a pair of a way up and a way
down with the same root. Maximise the sum of x_T over all such pairs, so that those over each
directed link carry no more than its rate. A link that a tree uses up and down counts twice.

The next trees are again the cheapest at the links' current prices, one for each root. The cheapest
way down is a minimum arborescence (Edmonds, Optimum branchings, 1967); the cheapest way up is one
with all links turned around. Where links have codecs of their own, what is found is a packing, but
perhaps not the best: prices are looked at before codecs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.topology.spec.reduction_plan import Tree, shape_of
from isthmus.topology.trees.packing import NEAR_ENOUGH, generated, least_weights
from isthmus.topology.trees.pairs import Hop, Pairs

SITES_MAX = 8
"""The most sites that the program is solved for: of eight it takes a fourth of a second."""
_AS_CHEAP = 1e-9
"""How much more a star may cost than the cheapest way, for it has the least delay."""


@dataclass(frozen=True, slots=True)
class TwoWayPacking:
    """Trees with ways of their own up and down, and how much per second each carries."""

    bytes_per_s: float
    """Bytes per second of all trees together; in chunks of the unit of `Pairs.loads`, if any."""
    trees: tuple[tuple[Tree, float], ...]
    """The trees, of weight 1, and their rates; none carries nothing."""


def pack_two_ways(pairs: Pairs, slowest_bytes_per_s: int = 0) -> TwoWayPacking | None:
    """Return the best packing over the links that are as fast, in their direction.

    None where these do not reach every site, or where there are more than SITES_MAX sites.
    """
    rates = {hop: rate for hop, rate in pairs.one_way.items() if rate >= slowest_bytes_per_s}
    if pairs.num_sites > SITES_MAX:
        return None
    found = generated(
        rates,
        lambda prices: _cheapest(pairs.num_sites, prices),
        lambda tree: uses_of(tree, pairs),
    )
    if found is None:
        return None
    bytes_per_s, carried = found
    kept = sorted(carried, key=lambda each: shape_of(each[0]))
    return TwoWayPacking(bytes_per_s, tuple(kept))


def weighted_two_ways(
    pairs: Pairs, packing: TwoWayPacking, near_enough: float = NEAR_ENOUGH
) -> tuple[Tree, ...]:
    """Return a packing's trees with small whole weights."""
    weights = least_weights(
        [part for _, part in packing.trees],
        packing.bytes_per_s,
        [uses_of(tree, pairs) for tree, _ in packing.trees],
        pairs.one_way,
        near_enough,
    )
    return tuple(
        Tree(tree.root, tree.parent, weight, tree.down)
        for (tree, _), weight in zip(packing.trees, weights, strict=True)
        if weight > 0
    )


def uses_of(tree: Tree, pairs: Pairs) -> dict[Hop, int]:
    """Return the bytes, in the unit of `Pairs.loads`, that a chunk is on each directed link."""
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
    """Return from whom each site is reached, each over the widest link from those before."""
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
    """Return the cheapest tree of each root, where one reaches all sites."""
    turned = {(target, source): price for (source, target), price in prices.items()}
    found = []
    for root in range(num_sites):
        down, up = (_cheapest_way(num_sites, root, each) for each in (prices, turned))
        if down is not None and up is not None:
            found.append(Tree(root, up, down=down))
    return found


def _cheapest_way(num_sites: int, root: int, prices: Mapping[Hop, float]) -> dict[int, int] | None:
    """Return from whom each site is reached, at the least price; a star where one costs no more."""
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
"""A link between two groups of sites: from, to, price, and the link itself."""


def _arborescence(root: int, links: list[_Priced]) -> list[Hop]:
    """Return the links of the cheapest arborescence from `root`; too few where none reaches all.

    Each group takes its cheapest link in. A circle of these becomes one group, for whose links in
    only counts what they cost more than the circle's own at that place. Cost: O(groups · links).
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
