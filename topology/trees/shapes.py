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
    """Return the tree grown from `root`, or from its edge to `first` if that is another site."""
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

    A chunk goes up and down, so its delay is twice that distance.
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
