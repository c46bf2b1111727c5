"""Trees of a given form: the best star, the widest tree, the paths of a ring, two levels.

All comparisons are of integers, and ties go to the first in site order, so the same topology always
gives the same trees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction

from isthmus.topology.spec.reduction_plan import Tree, star
from isthmus.topology.trees.pairs import Edge, Pairs


def best_hub(pairs: Pairs) -> int | None:
    """Return the centre of the star whose slowest link is fastest; None where no star reaches all.

    Ties: the one with the least sum of round trips.
    """
    hubs = [site for site in range(pairs.num_sites) if not pairs.missing(site)]
    return max(hubs, key=lambda hub: _star_score(pairs, hub), default=None)


def _star_score(pairs: Pairs, hub: int) -> tuple[Fraction, int, int]:
    others = [site for site in range(pairs.num_sites) if site != hub]
    speed = pairs.speed([(hub, other) for other in others]) if others else Fraction(0)
    return speed, -sum(pairs.delay_ns(hub, other) for other in others), -hub


def widest_tree(pairs: Pairs) -> Tree | None:
    """Return the tree whose slowest link is fastest; None if the sites are not connected.

    The best star if one is as fast; otherwise grown from each site in turn along the widest edge
    (Prim), and of equally wide ones the lowest. If links have different codecs, one edge makes
    chunks small on the whole tree, so trees are also grown from the widest edge of each size.
    """
    hub = best_hub(pairs)
    begun = [(root, root) for root in range(pairs.num_sites)]
    for load in sorted({pairs.load([each]) for each in pairs.bytes_per_s}) if pairs.loads else ():
        alike = [each for each in pairs.bytes_per_s if pairs.load([each]) == load]
        one, other = max(alike, key=lambda each: (pairs.bytes_per_s[each], -each[0], -each[1]))
        begun += [(one, other), (other, one)]
    sites = range(pairs.num_sites)
    order = {rate: place for place, rate in enumerate(sorted({0, *pairs.bytes_per_s.values()}))}
    places = [[order[pairs.rate(one, other)] for other in sites] for one in sites]
    grown = [_grown(places, *each) for each in begun]
    trees = [tree for tree in grown if tree is not None]
    if not trees:
        return None
    tree = max(trees, key=lambda each: (_speed(pairs, each), -_depth(each), -each.root))
    if hub is not None:
        centred = star(pairs.num_sites, hub)
        if _speed(pairs, centred) >= _speed(pairs, tree):
            return centred
    return tree


def _grown(places: Sequence[Sequence[int]], root: int, first: int) -> Tree | None:
    """Return the tree grown from `root`, or from its edge to `first` if that is another site.

    Of equally wide edges, that whose inner site is nearest to the root, then the first sites.

    Args:
        places: Of the rates between each two sites among all rates, in ascending order; 0: there is
            no edge.
        root: Site that the tree grows from.
        first: Site that joins it first.
    """
    size = len(places)
    # One number compares edges: by rate, then the inner site's depth, then its index.
    by_depth, by_place = size, size * size
    depth, parent = {root: 0}, {}
    nearest = (size - 1) * by_depth + size - 1 - root
    best = {site: by_place * places[root][site] + nearest for site in range(size) if site != root}
    joining = first if first != root else max(best, key=lambda site: (best[site], -site))
    while True:
        edge_place, rest = divmod(best.pop(joining), by_place)
        if edge_place == 0:
            return None
        parent[joining] = size - 1 - rest % by_depth
        depth[joining] = 1 + depth[parent[joining]]
        if not best:
            return Tree(root, parent)
        nearest = (size - 1 - depth[joining]) * by_depth + size - 1 - joining
        row = places[joining]
        widest, wanted = -1, -1
        for site, known in best.items():
            other = by_place * row[site] + nearest
            if other > known:
                best[site] = known = other
            if known > widest:
                widest, wanted = known, site
        joining = wanted


def width(pairs: Pairs, tree: Tree) -> int:
    """Return the bytes per second of a tree's slowest edge."""
    return min(pairs.rate(child, parent) for child, parent in tree.parent.items())


def _speed(pairs: Pairs, tree: Tree) -> Fraction:
    return pairs.speed(tree.parent.items())


def _depth(tree: Tree) -> int:
    return max(len(way_up(tree, site)) for site in tree.parent)


def way_up(tree: Tree, site: int) -> list[tuple[int, int]]:
    """Return the hops (from, to) of a site's contribution to the root."""
    hops = []
    while site != tree.root:
        hops.append((site, tree.parent[site]))
        site = tree.parent[site]
    return hops


def ring_paths(order: Sequence[int]) -> tuple[Tree, ...]:
    """Return a path around the ring for each site, whose root is that site, in its middle.

    Each path leaves out the ring's link farthest from its root, so together the paths use all links
    equally: each link in all paths but one, in both directions.
    """
    size = len(order)
    trees = []
    for middle, root in enumerate(order):
        parent = {}
        for step in range(1, size):
            # Half of the others are on either side of the root, plus one if their number is odd.
            side = 1 if step <= size // 2 else -1
            distance = step if side == 1 else step - size // 2
            site = order[(middle + side * distance) % size]
            parent[site] = order[(middle + side * (distance - 1)) % size]
        trees.append(Tree(root, parent))
    return tuple(trees)


def rooted(pairs: Pairs, edges: Iterable[Edge], weight: int) -> Tree:
    """Return the tree of these edges, rooted where the farthest site is nearest.

    A chunk goes up and down, so its delay is twice that distance. Ties: the least sum of distances.
    """
    around = _around(pairs.num_sites, edges)
    farthest_ns, sum_ns = _distances_ns(pairs, around)
    root = min(around, key=lambda site: (farthest_ns[site], sum_ns[site], site))
    return _hung(around, root, weight)


def every_root(pairs: Pairs, edges: Iterable[Edge], weight: int) -> list[Tree]:
    """Return the tree of these edges with each of the sites as its root."""
    around = _around(pairs.num_sites, edges)
    return [_hung(around, root, weight) for root in around]


def _around(num_sites: int, edges: Iterable[Edge]) -> dict[int, list[int]]:
    """Return the sites that edges join to each site."""
    around: dict[int, list[int]] = {site: [] for site in range(num_sites)}
    for one, other in edges:
        around[one].append(other)
        around[other].append(one)
    return around


def _hung(around: dict[int, list[int]], root: int, weight: int) -> Tree:
    parent: dict[int, int] = {}
    reached = [root]
    for site in reached:
        for other in around[site]:
            if other != root and other not in parent:
                parent[other] = site
                reached.append(other)
    return Tree(root, parent, weight)


def _distances_ns(
    pairs: Pairs, around: dict[int, list[int]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return each site's round trip to its farthest site, and the sum to all, along a tree.

    Two passes over the tree: what lies below each site, then what lies beyond its parent.
    """
    above, order = {0: 0}, [0]
    for site in order:
        for other in around[site]:
            if other not in above:
                above[other] = site
                order.append(other)
    counts = dict.fromkeys(order, 1)
    sum_ns = dict.fromkeys(order, 0)
    below_ns = {site: [0, 0] for site in order}
    """The two longest ways down, by different branches."""
    for site in reversed(order[1:]):
        delay_ns = pairs.delay_ns(site, above[site])
        counts[above[site]] += counts[site]
        sum_ns[above[site]] += sum_ns[site] + counts[site] * delay_ns
        longest = below_ns[above[site]]
        longest[:] = sorted((*longest, below_ns[site][0] + delay_ns))[:0:-1]
    farthest_ns, beyond_ns = {0: below_ns[0][0]}, {0: 0}
    for site in order[1:]:
        parent, delay_ns = above[site], pairs.delay_ns(site, above[site])
        sum_ns[site] = sum_ns[parent] + (len(order) - 2 * counts[site]) * delay_ns
        own_ns = below_ns[site][0] + delay_ns
        beside_ns = below_ns[parent][1 if own_ns == below_ns[parent][0] else 0]
        beyond_ns[site] = delay_ns + max(beyond_ns[parent], beside_ns)
        farthest_ns[site] = max(below_ns[site][0], beyond_ns[site])
    return farthest_ns, sum_ns


NEAR_RATIO = 2
"""Smallest ratio of round trips between and within groups."""

Groups = tuple[tuple[int, ...], ...]
"""The groups of sites by index; each site is in exactly one of them."""


def groups_by_delay(pairs: Pairs) -> Groups:
    """Return groups of sites that are near each other.

    Sites are joined in the order of their round trips, as a minimum spanning tree; it is cut where
    the next round trip is longest compared with the one before. With no such step that is at least
    NEAR_RATIO, all sites are one group.
    """
    edges = sorted(pairs.rtt_ns, key=lambda each: (pairs.rtt_ns[each], each))
    label = list(range(pairs.num_sites))
    joins: list[tuple[int, list[int]]] = []
    for one, other in edges:
        if label[one] != label[other]:
            joins.append((max(1, pairs.rtt_ns[one, other]), list(label)))
            label = [label[one] if each == label[other] else each for each in label]
    steps = [
        (Fraction(far_ns, near_ns), before)
        for (near_ns, _), (far_ns, before) in itertools.pairwise(joins)
    ]
    largest, parted = max(steps, key=lambda each: each[0], default=(Fraction(0), label))
    if largest < NEAR_RATIO:
        parted = label
    found: dict[int, list[int]] = {}
    for site, each in enumerate(parted):
        found.setdefault(each, []).append(site)
    return tuple(tuple(sites) for sites in found.values())


def hierarchy(pairs: Pairs, groups: Groups) -> Tree | None:
    """Return the two-level tree whose slowest link is fastest; None if none reaches all sites.

    The root is the head of its own group; each other group's head is the member whose slowest link
    to its members and to the root is fastest. Ties: the least sum of round trips.
    """
    scored = []
    for root in range(pairs.num_sites):
        parent: dict[int, int] = {}
        for group in groups:
            head = root if root in group else _head(pairs, group, root)
            if head is None:
                break
            parent |= {member: head for member in group if member != head}
            if head != root:
                parent[head] = root
        else:
            score = _score(pairs, list(parent.items()))
            if score[0] > 0:
                scored.append((*score, -root, Tree(root, parent)))
    return max(scored, key=lambda each: each[:3])[-1] if scored else None


def _head(pairs: Pairs, group: tuple[int, ...], root: int) -> int | None:
    def score(head: int) -> tuple[Fraction, int, int]:
        return (*_score(pairs, [(head, other) for other in (root, *group) if other != head]), -head)

    head = max(group, key=score)
    return head if score(head)[0] > 0 else None


def _score(pairs: Pairs, hops: list[tuple[int, int]]) -> tuple[Fraction, int]:
    """Return the speed, 0 if an edge is missing, and the sum of the round trips, negative."""
    slowest = pairs.speed(hops) if hops else Fraction(1)
    return slowest, -sum(pairs.delay_ns(*hop) for hop in hops) if slowest else 0
