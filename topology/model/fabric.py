"""The time of a bucket's collectives inside a site, in closed form. Pure."""

from __future__ import annotations

import functools

from isthmus.topology.cost.collectives import Channel, levels_of
from isthmus.topology.cost.collectives import reduce_scatter_s as over_levels_s
from isthmus.topology.spec.world import Fabric, Site


def reduce_scatter_s(site: Site, num_bytes: float) -> float:
    """Return the seconds of one reduce-scatter, or all-gather, over all ranks of a site.

    First over a node's accelerators, then over nodes: topology/cost/collectives.py.

    Args:
        site: with one rank, or without a described fabric, the result is 0.
        num_bytes: size of the whole tensor, which a rank has before (after) the collective.
    """
    if site.fabric is None or site.num_ranks == 1:
        return 0.0
    return _over_fabric_s(site.fabric, site.num_ranks, site.accelerators_per_node, num_bytes)


@functools.lru_cache(maxsize=4096)
def _over_fabric_s(
    fabric: Fabric, num_ranks: int, accelerators_per_node: int, num_bytes: float
) -> float:
    """Return the same seconds, cached: planners ask for few different sites very often."""
    levels = levels_of(
        num_ranks,
        1,
        accelerators_per_node,
        Channel(fabric.node_bytes_per_s, fabric.latency_s),
        # A node's accelerators share its uplink.
        Channel(fabric.cluster_bytes_per_s / accelerators_per_node, fabric.latency_s),
    )
    return over_levels_s(levels, num_bytes)
