"""What trees put on links and gateways, and at which site a link's lower end is. Pure, by arrays.

Legend of shapes, which end names in lower case: N mixes, U sets of trees, J trees of one, K trees
of all, R directed links, S sites.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.codec_costs import usual_ratio
from topology.job import Job
from topology.model.buckets import gradient_bytes
from topology.model.tree_times import seconds_per_byte
from topology.model.wire_load import Hop, Load, gateways_s_per_byte, tree_ratios
from topology.planner.tree_mixes import Mixes
from topology.trees.trees import ReductionPlan, Tree
from topology.world import Link, Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]


def busy_s(job: Job, topology: Topology, trees: Sequence[Tree]) -> tuple[Floats, Floats]:
    """Return how long links and gateways are busy if one tree carries a step; (K, R), (K, S)."""
    ratio = usual_ratio(job.exchange.codec)
    nodes = np.array([site.nodes for site in topology.sites])
    links, gateways = [], []
    for plan in alone(topology, trees):
        busy = seconds_per_byte(plan, topology, tree_ratios(job, topology, plan, ratio))
        links.append([busy.get(hop, 0.0) for hop in links_of(topology)])
        gateways.append(gateways_s_per_byte(job, topology, plan, ratio) / nodes)
    raw_bytes = gradient_bytes(job)
    return raw_bytes * np.array(links), raw_bytes * np.array(gateways)


def links_of(topology: Topology) -> dict[Hop, Link]:
    """Return the directed links, by the indices of their sites: what R stands for."""
    index = {site.name: site.index for site in topology.sites}
    return {(index[link.source], index[link.target]): link for link in topology.links}


def alone(topology: Topology, trees: Sequence[Tree]) -> list[ReductionPlan]:
    """Return each of the trees by itself."""
    return [ReductionPlan(len(topology.sites), (tree,), "") for tree in trees]


def shared_nr(mixes: Mixes, each_kr: Floats) -> Floats:
    """Return what mixes come to of what each tree would if it carried all; shape (N, R)."""
    found = np.zeros((len(mixes.set_n), each_kr.shape[1]))
    for place in range(mixes.sets_uj.shape[1]):
        found += mixes.weights_nj[:, place, None] * each_kr[mixes.trees_nj[:, place]]
    return found / mixes.total


class TreeLinks:
    """The links of trees, with one load."""

    def __init__(self, topology: Topology, trees: Sequence[Tree], load: Load) -> None:
        """Take the load, which has the chunks of each of the trees."""
        links = links_of(topology)
        self.abreast_r = np.array([load.abreast_on(hop) for hop in links])
        """Chunks that are side by side."""
        self.chunk_kr = np.zeros((len(trees), len(links)))
        """Seconds of one of its chunks on each link that a tree uses."""
        self._lower_kr = np.full((len(trees), len(links)), -1)
        for row, (hop, link) in enumerate(links.items()):
            for index, tree in enumerate(trees):
                for lower, upper in (hop, hop[::-1]):
                    if tree.parent.get(lower) == upper:
                        self._lower_kr[index, row] = lower
                        self.chunk_kr[index, row] = load.chunk_bytes[index] / link.bytes_per_s
        self.there_and_back_s = np.full(len(links), math.inf)
        """Of a round trip, and of a chunk or less on the way back: what comes to all that a link
        carries."""
        for row, (source, target) in enumerate(links):
            if (target, source) in links:
                link, back = links[source, target], links[target, source]
                part = min(load.abreast_on((target, source)), 1)
                chunk_s = part * min(load.chunk_bytes) / back.bytes_per_s
                self.there_and_back_s[row] = (link.rtt_s + back.rtt_s) / 2 + chunk_s

    def lowers(self, sets_uj: Counts) -> Counts:
        """Return the site at each link's lower end if its set's trees agree; else -1; (U, R)."""
        lower_ujr = self._lower_kr[sets_uj]
        most_ur = lower_ujr.max(axis=1)
        least_ur = np.where(lower_ujr < 0, most_ur[:, None], lower_ujr).min(axis=1)
        found: Counts = np.where(least_ur == most_ur, most_ur, -1)
        return found
