"""How long a collective takes inside a site. Pure.

Hockney's alpha and beta, in two levels as NCCL's rings are used (Cho et al., "BlueConnect", 2019): with n
accelerators a node, N nodes, bandwidths B a node's accelerator and C a node, and latency a a hop,

    reduce-scatter = all-gather = (n - 1) a + (n - 1)/n M/B  +  (N - 1) a + (N - 1)/N M/C.

Between nodes each of the n accelerators moves its n-th of M, over its n-th of C.
"""

from __future__ import annotations

from topology.world import Site


def reduce_scatter_s(site: Site, num_bytes: float) -> float:
    """Return the seconds of one reduce-scatter, or all-gather, of `num_bytes` a rank.

    Args:
        site: of one rank, or whose fabric is not described: nothing.
        num_bytes: of the whole tensor, that each rank has before (has after).
    """
    fabric = site.fabric
    if fabric is None:
        return 0.0
    inside, nodes = site.accelerators_per_node, site.nodes
    node_s = (inside - 1) * (fabric.latency_s + num_bytes / inside / fabric.node_bytes_per_s)
    cluster_s = (nodes - 1) * (fabric.latency_s + num_bytes / nodes / fabric.cluster_bytes_per_s)
    return node_s + cluster_s
