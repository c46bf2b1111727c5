"""Two levels: inside a group of near sites to its head, and between the heads.

Each contribution crosses the far links once a group and not once a site.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

from topology.trees.pairs import Pairs
from topology.trees.trees import Tree

NEAR_RATIO = 2
"""Far is at least so many times near: round trips closer together than that make no groups."""

Groups = tuple[tuple[int, ...], ...]
"""Each site in exactly one of them."""


def groups_by_delay(pairs: Pairs) -> Groups:
    """Return the sites in groups that are near each other.

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
    to its members and to the root is fastest. Equals are told apart by the sum of their round
    trips.
    """
    found = []
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
                found.append((*score, -root, Tree(root, parent)))
    return max(found, key=lambda each: each[:3])[-1] if found else None


def _head(pairs: Pairs, group: tuple[int, ...], root: int) -> int | None:
    def score(head: int) -> tuple[Fraction, int, int]:
        return (*_score(pairs, [(head, other) for other in (root, *group) if other != head]), -head)

    head = max(group, key=score)
    return head if score(head)[0] > 0 else None


def _score(pairs: Pairs, hops: list[tuple[int, int]]) -> tuple[Fraction, int]:
    """Return the speed, 0 if an edge is missing, and the sum of the round trips, negative."""
    slowest = pairs.speed(hops) if hops else Fraction(1)
    return slowest, -sum(pairs.delay_ns(*hop) for hop in hops) if slowest else 0
