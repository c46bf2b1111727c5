"""The time that the chunks of a plan take from site to site. Pure.

n chunks of c bytes, encoded and framed (c depends on the tree's codec), cross links of rate r and
round trip t:

- Gather: every site sends everything to every other, all links at once. The slowest link decides:
  max over links of (n c / r + t / 2).
- Trees: chunks go up to the root and come back down, as through a pipeline whose links several
  trees share: topology/trees/tree_flow.py.

After the pause of compute TCP starts slowly, as on a new connection (topology/trees/slow_start.py):
g connections send 10 packets each, and twice as many each round trip, until they fill the link. BBR
does not. The relay has neither packets nor slow start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.world import Link, Topology
from isthmus.topology.trees.wire_load import Hop, Load

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def plan_times_s(
    plan: ReductionPlan, topology: Topology, load: Load
) -> dict[tuple[int, int], float]:
    """Return the time from one site's start to another's end, as far as the first decides it.

    Returns:
        Seconds, by site indices, from the first site's part being ready to the second having the
        last of the sum that depends on it. Pairs that do not wait for each other are missing; in a
        tree, every site but the root waits for itself.
    """
    if plan.is_gather:
        return _gather_times_s(plan, topology, load)
    times_s = _trees_s(plan, topology, load).tolist()
    return {
        (source, target): each_s
        for source, row in enumerate(times_s)
        for target, each_s in enumerate(row)
        if each_s > -math.inf
    }


def seconds_per_byte(
    plan: ReductionPlan, topology: Topology, ratios: Sequence[float] = (1.0,)
) -> dict[Hop, float]:
    """Return the busy seconds of each directed link per byte of float32 that all sites sum up.

    The largest is a lower bound of the plan's time, however well it is pipelined.

    Args:
        plan: The plan over the topology's sites.
        topology: The links' rates.
        ratios: Encoded bytes per byte of float32, by tree; a single one is for all trees.
    """
    return {
        hop: num_bytes / rate_of(topology, hop) for hop, num_bytes in carried(plan, ratios).items()
    }


def carried(plan: ReductionPlan, sizes: Sequence[float] = (1.0,)) -> dict[Hop, float]:
    """Return the mean traffic of each directed link; by default its share of all chunks.

    Args:
        plan: The plan.
        sizes: Total size if a tree carried all chunks, by tree; a single one is for all trees.
    """
    weights = [tree.weight for tree in plan.trees] or [1]
    total = sum(weights)
    shares: dict[Hop, float] = {}
    for tree, weight in enumerate(weights):
        part = sizes[tree if len(sizes) > 1 else 0] * weight / total
        for hop in plan.hops(tree):
            shares[hop] = shares.get(hop, 0.0) + part
    return shares


def rate_of(topology: Topology, hop: Hop) -> float:
    """Return the bytes per second of a directed link."""
    return _link(topology, *hop).bytes_per_s


def _link(topology: Topology, source: int, target: int) -> Link:
    link = topology.link(topology.sites[source].name, topology.sites[target].name)
    assert link is not None, "the plan uses links that are there"
    return link


def _gather_times_s(
    plan: ReductionPlan, topology: Topology, load: Load
) -> dict[tuple[int, int], float]:
    times_s = {}
    for pair in itertools.permutations(range(plan.num_sites), 2):
        link, num_bytes = _link(topology, *pair), load.num_chunks * load.chunk_bytes[0]
        times_s[pair] = load.sending_s(link, num_bytes) + link.rtt_s / 2
    return times_s


def _trees_s(plan: ReductionPlan, topology: Topology, load: Load) -> Floats:
    """Return the times of a load over trees; shape (sites, sites), -inf where no site waits."""
    # numpy takes a fifth of a second to import, and most processes do not need it.
    from isthmus.topology.trees.link_arrays import LinkArrays, TreeArrays
    from isthmus.topology.trees.tree_flow import Crossing, flow_s

    [times_s] = flow_s(Crossing(TreeArrays(plan), LinkArrays(topology), [load]))
    found: Floats = times_s
    return found
