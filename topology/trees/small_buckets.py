"""Finds the size up to which buckets are gathered instead of reduced along trees. Pure.

Trees need the fewest bytes, but two trips: a sum goes up and comes down. A gather needs one. So a
bucket is gathered if that saves far more time than its additional bytes take: the norm of a
gradient, a loss, the small last bucket of backward.

A gather uses the links of the plan's trees. If these do not cover all pairs of sites, or trees have
different codecs, nothing is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import usual_ratio

_WORTH = 8
"""Required ratio of the time that a gather saves to the time of its bytes on the slowest link,
because other buckets may wait for the link."""


def gathered_bytes(topology: Topology, plan: ReductionPlan, codecs: Sequence[str]) -> int:
    """Return the size up to which buckets are gathered, in float32 bytes; 0: none are.

    Args:
        topology: Of the sites that take part.
        plan: The plan over these sites.
        codecs: The codecs of its trees.
    """
    if plan.is_gather or plan.num_sites < 3 or len(set(codecs)) > 1:
        return 0
    used = {frozenset(hop) for tree in range(len(plan.trees)) for hop in plan.hops(tree)}
    names = [site.name for site in topology.sites]
    delays_s, slowest_bytes_per_s = {}, []
    for hop in itertools.permutations(range(plan.num_sites), 2):
        link = topology.link(names[hop[0]], names[hop[1]])
        if link is None or frozenset(hop) not in used:
            return 0
        delays_s[hop] = link.rtt_s / 2
        slowest_bytes_per_s.append(link.bytes_per_s / usual_ratio(codecs[0]))
    saved_s = min(_there_and_back_s(tree, delays_s) for tree in plan.trees)
    saved_s -= max(delays_s.values())
    return max(0, int(saved_s / _WORTH * min(slowest_bytes_per_s)))


def _there_and_back_s(tree: Tree, delays_s: Mapping[tuple[int, int], float]) -> float:
    """Return the delay from the farthest site to the root and back to the farthest site."""

    def way_s(site: int, way: Mapping[int, int], *, is_up: bool) -> float:
        total_s = 0.0
        while site != tree.root:
            total_s += delays_s[(site, way[site]) if is_up else (way[site], site)]
            site = way[site]
        return total_s

    return max(way_s(site, tree.parent, is_up=True) for site in tree.parent) + max(
        way_s(site, tree.giver, is_up=False) for site in tree.giver
    )
