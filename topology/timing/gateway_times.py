"""How long a step's bytes keep a site's gateways and its network cards busy. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from topology.codec_costs import COSTS, GATEWAY_BYTES_PER_S
from topology.job import Job
from topology.traffic.tree_load import Hop
from topology.traffic.wire_load import tree_ratios
from topology.trees.link_codecs import plan_codecs
from topology.trees.trees import ReductionPlan
from topology.world import Topology


def gateways_s_per_byte(
    job: Job, topology: Topology, plan: ReductionPlan, ratio: float
) -> list[float]:
    """Return how long each site's gateway works for a byte of float32, if its site has only one.

    In a gather it decodes everybody's part, its own included. In a tree, its children's sums and
    the result; and it sends up and down, which is as much as it receives.
    """
    codecs = plan_codecs(job, topology, plan)
    ratios = tree_ratios(job, topology, plan, ratio)
    if plan.is_gather:
        parts = [
            (1.0, [plan.num_sites - 1] * plan.num_sites, [plan.num_sites - 1] * plan.num_sites)
        ]
    else:
        total = sum(tree.weight for tree in plan.trees)
        parts = []
        for tree in plan.trees:
            children = Counter(tree.parent.values())
            below = [children[site] for site in range(plan.num_sites)]
            sent = [each + (tree.root != site) for site, each in enumerate(below)]
            parts.append((tree.weight / total, below, sent))
    found = [0.0] * plan.num_sites
    for codec, each_ratio, (share, below, sent) in zip(codecs, ratios, parts, strict=True):
        cost = COSTS[codec]
        for site in range(plan.num_sites):
            coding_s = 1 / cost.encode_bytes_per_s + (below[site] + 1) / cost.decode_bytes_per_s
            found[site] += share * (coding_s + sent[site] * each_ratio / GATEWAY_BYTES_PER_S)
    return found


def cards_s(topology: Topology, link_bytes: Mapping[Hop, float]) -> list[float]:
    """Return how long a step's bytes keep each site's network cards busy, each way."""
    busy_s = []
    for site in topology.sites:
        if site.nic_bytes_per_s is not None:
            for end in (0, 1):
                crossing = math.fsum(
                    each for hop, each in link_bytes.items() if hop[end] == site.index
                )
                busy_s.append(crossing / (site.nodes * site.nic_bytes_per_s))
    return busy_s
