"""Steps of sites that each cut a model in their own way, and what crosses between them. Pure.

As in topology/timing/step_time.py: site j ends step k once all that it needs is there, and the mean step is the
largest cycle mean of

    w_ij = max over releases r of leave_i(r) + x_ij(L(r)) + tail_j,    w_ii = head_i + tail_i,

where leave_i(r) counts from the beginning of i's step, L(r) are the bytes that have not left before r,
and x_ij is the exchange of so many. x_ij grows with its bytes about as a line and r leave evenly, so the
first and the last release decide; others lie between. Each rank's shard crosses its own node's gateway
and card, so the fullest node's share of the bytes sets their pace, and no exchange and no step is
shorter than they take. All nodes of a site send side by side.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from topology.codec_costs import usual_ratio
from topology.job import Job
from topology.planner.cuts import Timing
from topology.timing.cycle_mean import largest_cycle_means
from topology.timing.gateway_times import gateways_s_per_byte
from topology.timing.releases import gradient_bytes
from topology.traffic.tree_load import Hop
from topology.traffic.tree_times import bytes_of_hops, plan_times_s, rate_of
from topology.traffic.wire_load import wire_load
from topology.trees.trees import ReductionPlan
from topology.world import Topology


class JointModel:
    """Steps of one job over one reduction, for any cuts and any spread of the batch."""

    def __init__(self, job: Job, topology: Topology, plan: ReductionPlan) -> None:
        """Work out what depends neither on cuts nor on the spread.

        Args:
            job: Gives the model, the exchange, and how fast gateways are taken to be.
            topology: Of the sites that take part.
            plan: Over them.
        """
        self._job, self._topology, self._plan = job, topology, plan
        self._ratio = usual_ratio(job.exchange.codec)
        self._raw_bytes = gradient_bytes(job)
        self._crossings: dict[tuple[float, bool], list[list[tuple[int, float]]]] = {}
        self.link_s: Mapping[Hop, float] = {}
        """How long a step's bytes keep each directed link busy."""
        self.link_bytes: Mapping[Hop, float] = {}
        """What a step sends over it."""
        self._node_s: list[tuple[float, float]] = [(0.0, 0.0) for _ in topology.sites]
        if plan.num_sites > 1:
            load = wire_load(job, topology, plan, self._raw_bytes, self._ratio)
            self.link_bytes = bytes_of_hops(plan, load)
            self.link_s = {
                hop: num_bytes / rate_of(topology, hop)
                for hop, num_bytes in self.link_bytes.items()
            }
            per_byte_s = gateways_s_per_byte(job, topology, plan, self._ratio)
            self._node_s = [self._one_node_s(index, per_byte_s[index]) for index in self._indices]

    @property
    def _indices(self) -> range:
        return range(len(self._topology.sites))

    @property
    def links_s(self) -> float:
        """Seconds that no step is shorter than, for its bytes take so long on some link."""
        return max(self.link_s.values(), default=0.0)

    def gateway_s(self, timings: Sequence[Timing]) -> list[float]:
        """Return how long the gateway of each site's fullest node works in a step."""
        return [
            each.cut.node_share * node_s[0]
            for each, node_s in zip(timings, self._node_s, strict=True)
        ]

    def card_s(self, timings: Sequence[Timing]) -> list[float]:
        """Return how long its network card is busy, in the busier direction."""
        return [
            each.cut.node_share * node_s[1]
            for each, node_s in zip(timings, self._node_s, strict=True)
        ]

    def exchange_s(self, timings: Sequence[Timing]) -> float:
        """Return the seconds of an exchange that nothing hides."""
        if self._plan.num_sites == 1:
            return 0.0
        crossings = itertools.chain.from_iterable(self._crossing(1.0, is_warm=False))
        return max(max(crossing_s for _, crossing_s in crossings), self._pace_s(timings))

    def step_s(self, timings: Sequence[Timing]) -> float:
        """Return the mean seconds of a step; `timings` are of each site, in the topology's order."""
        if self._plan.num_sites == 1:
            return timings[0].alone_s
        pace_s = self._pace_s(timings)
        weights = np.array([[self._row(source, timings, pace_s) for source in self._indices]])
        return max(float(largest_cycle_means(weights)[0]), self.links_s, pace_s)

    def _row(self, source: int, timings: Sequence[Timing], pace_s: float) -> list[float]:
        """Return the seconds from a site's beginning of a step to each site's end; -inf: no wait."""
        timing = timings[source]
        row = [-math.inf] * len(timings)
        row[source] = timing.alone_s
        parts = timing.cut.num_releases
        for leaves_s, share, is_warm in (
            (timing.first_s, 1.0, False),
            (timing.head_s, 1 / parts, parts > 1),
        ):
            least_s = share * pace_s
            for target, crossing_s in self._crossing(share, is_warm=is_warm)[source]:
                end_s = leaves_s + max(crossing_s, least_s) + timings[target].cut.tail_s
                if end_s > row[target]:
                    row[target] = end_s
        return row

    def _pace_s(self, timings: Sequence[Timing]) -> float:
        return max(*self.gateway_s(timings), *self.card_s(timings))

    def _crossing(self, share: float, *, is_warm: bool) -> list[list[tuple[int, float]]]:
        """Return, by source, the targets of an exchange of a share of all bytes, and its seconds.

        Connections have rested when the first gradients leave; those after them find them warm.
        """
        if (share, is_warm) not in self._crossings:
            raw_bytes = math.ceil(self._raw_bytes * share)
            load = wire_load(self._job, self._topology, self._plan, raw_bytes, self._ratio)
            nodes = min(site.nodes for site in self._topology.sites)
            load = load.of_gateways(nodes)
            if is_warm:
                load = dataclasses.replace(load, first_window_bytes=None)
            rows: list[list[tuple[int, float]]] = [[] for _ in self._indices]
            times_s = plan_times_s(self._plan, self._topology, load)
            for (source, target), crossing_s in times_s.items():
                rows[source].append((target, crossing_s))
            self._crossings[share, is_warm] = rows
        return self._crossings[share, is_warm]

    def _one_node_s(self, index: int, per_byte_s: float) -> tuple[float, float]:
        """Return how long one gateway and one card would take for all bytes of a site's step."""
        site = self._topology.sites[index]
        wishes = self._job.plan
        gateway_s = card_s = 0.0
        if wishes is None or wishes.gateways == "measured":
            gateway_s = self._raw_bytes * per_byte_s
        if site.nic_bytes_per_s is not None:
            crossing_bytes = max(
                math.fsum(each for hop, each in self.link_bytes.items() if hop[end] == index)
                for end in (0, 1)
            )
            card_s = crossing_bytes / site.nic_bytes_per_s
        return gateway_s, card_s
