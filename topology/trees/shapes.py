"""Trees of a given form: the best star, the widest tree, the paths of a ring; where a root is.

What all sites derive alike: in integers, and where two do as well the first in site order is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from topology.trees.pairs import Edge, Pairs
from topology.trees.trees import Tree, star


def best_hub(pairs: Pairs) -> int | None:
    """Return the centre of the star whose slowest link is fastest; None where no star reaches all.

    Of equal ones that with the least sum of round trips.
    """
    hubs = [site for site in range(pairs.num_sites) if not pairs.missing(site)]
    return max(hubs, key=lambda hub: _star_score(pairs, hub), default=None)


def _star_score(pairs: Pairs, hub: int) -> tuple[Fraction, int, int]:
    others = [site for site in range(pairs.num_sites) if site != hub]
    speed = pairs.speed([(hub, other) for other in others]) if others else Fraction(0)
    return speed, -sum(pairs.delay_ns(hub, other) for other in others), -hub


def widest_tree(pairs: Pairs) -> Tree | None:
    """Return the tree whose slowest link is fastest; None if the sites are not connected.

    The best star if a star can be that; otherwise grown from each site in turn along the widest
    edge (Prim), and of equal ones the lowest. Where links have codecs of their own, a tree is small
    on all of its links because of one of them: so it is also grown from the widest edge of each
    size.
    """
    hub = best_hub(pairs)
    begun = [(root, root) for root in range(pairs.num_sites)]
    for load in sorted({pairs.load([each]) for each in pairs.bytes_per_s}) if pairs.loads else ():
        alike = [each for each in pairs.bytes_per_s if pairs.load([each]) == load]
        one, other = max(alike, key=lambda each: (pairs.bytes_per_s[each], -each[0], -each[1]))
        begun += [(one, other), (other, one)]
    grown = [_grown(pairs, *each) for each in begun]
    trees = [tree for tree in grown if tree is not None]
    if not trees:
        return None
    tree = max(trees, key=lambda each: (_speed(pairs, each), -_depth(each), -each.root))
    if hub is not None:
        centred = star(pairs.num_sites, hub)
        if _speed(pairs, centred) >= _speed(pairs, tree):
            return centred
    return tree


def _grown(pairs: Pairs, root: int, first: int) -> Tree | None:
    """Return the tree grown from `root`, or, where it is another site, from the edge to `first`."""
    depth, parent = {root: 0}, {}
    if first != root:
        depth[first], parent[first] = 1, root
    while len(depth) < pairs.num_sites:
        rate, _, inside, outside = max(
            (pairs.rate(inside, outside), -depth[inside], -inside, -outside)
            for inside in depth
            for outside in range(pairs.num_sites)
            if outside not in depth
        )
        if rate == 0:
            return None
        parent[-outside] = -inside
        depth[-outside] = depth[-inside] + 1
    return Tree(root, parent)


def width(pairs: Pairs, tree: Tree) -> int:
    """Return the bytes per second of a tree's slowest edge."""
    return min(pairs.rate(child, parent) for child, parent in tree.parent.items())


def _speed(pairs: Pairs, tree: Tree) -> Fraction:
    return pairs.speed(tree.parent.items())


def _depth(tree: Tree) -> int:
    return max(len(way_up(tree, site)) for site in tree.parent)


def way_up(tree: Tree, site: int) -> list[tuple[int, int]]:
    """Return the hops (from, to) by which a site's contribution gets to the root."""
    hops = []
    while site != tree.root:
        hops.append((site, tree.parent[site]))
        site = tree.parent[site]
    return hops


def ring_paths(order: Sequence[int]) -> tuple[Tree, ...]:
    """Return a path around the ring for each site, whose root is that site, in its middle.

    Each leaves out the one link of the ring that is farthest from its root, so together they use
    every link alike: all but one of them, in both directions.
    """
    size = len(order)
    trees = []
    for middle, root in enumerate(order):
        parent = {}
        for step in range(1, size):
            # Half of the others lie behind the root and half before it; one more, if they are odd.
            side = 1 if step <= size // 2 else -1
            distance = step if side == 1 else step - size // 2
            site = order[(middle + side * distance) % size]
            parent[site] = order[(middle + side * (distance - 1)) % size]
        trees.append(Tree(root, parent))
    return tuple(trees)


def spans(edges: Sequence[Edge], num_sites: int) -> bool:
    """Return whether so many edges as a tree has, one less than sites, are one."""
    group = list(range(num_sites))
    for one, other in edges:
        first, second = group[one], group[other]
        if first == second:
            return False
        group = [first if each == second else each for each in group]
    return len(edges) == num_sites - 1


def rooted(pairs: Pairs, edges: Iterable[Edge], weight: int) -> Tree:
    """Return the tree of these edges with the root from which the farthest site is nearest.

    A chunk goes up and comes down again, so its delay is twice that.
    """
    trees = every_root(pairs, edges, weight)
    return min(trees, key=lambda tree: (*delays_ns(pairs, tree), tree.root))


def every_root(pairs: Pairs, edges: Iterable[Edge], weight: int) -> list[Tree]:
    """Return the tree of these edges with each of the sites as its root."""
    around: dict[int, list[int]] = {site: [] for site in range(pairs.num_sites)}
    for one, other in edges:
        around[one].append(other)
        around[other].append(one)
    return [_hung(around, root, weight) for root in range(pairs.num_sites)]


def _hung(around: dict[int, list[int]], root: int, weight: int) -> Tree:
    parent: dict[int, int] = {}
    reached = [root]
    for site in reached:
        for other in around[site]:
            if other != root and other not in parent:
                parent[other] = site
                reached.append(other)
    return Tree(root, parent, weight)


def delays_ns(pairs: Pairs, tree: Tree) -> tuple[int, int]:
    """Return the round trip from the root to its farthest site, and the sum to all of them."""
    trips = [
        sum(pairs.delay_ns(*hop) for hop in way_up(tree, site)) for site in range(pairs.num_sites)
    ]
    return max(trips), sum(trips)
