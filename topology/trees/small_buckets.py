"""How small a bucket has to be for every site to send its part to every other at once. Pure.

Trees take the fewest bytes: a sum crosses once on its way up, and once on its way down. A gather
takes one way instead of two. So a bucket is gathered where that saves more time than its further
bytes take, by far: the norm of a gradient, a loss, the small bucket that backward makes last.

It goes over the links that the plan's trees use anyway. Where they do without some pair of sites,
or have different codecs, nothing is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import usual_ratio

_WORTH = 8
"""What a gather saves has to be so many times what its bytes take on the slowest link: other
buckets may be waiting for it."""


def gathered_bytes(topology: Topology, plan: ReductionPlan, codecs: Sequence[str]) -> int:
    """Return the size up to which buckets are gathered, in float32 bytes; 0: none are.

    Args:
        topology: Of the sites that take part.
        plan: Over these.
        codecs: Of its trees.
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
    """Return how long the farthest part takes to the root, and the result to the farthest site."""

    def way_s(site: int, way: Mapping[int, int], *, is_up: bool) -> float:
        total_s = 0.0
        while site != tree.root:
            total_s += delays_s[(site, way[site]) if is_up else (way[site], site)]
            site = way[site]
        return total_s

    return max(way_s(site, tree.parent, is_up=True) for site in tree.parent) + max(
        way_s(site, tree.giver, is_up=False) for site in tree.giver
    )
