"""Steps of sites that each cut a model in their own way, and what crosses between them. Pure.

As in topology/timing/step_time.py: site j ends step k once all that it needs is there, and the mean step is the
largest cycle mean of

    w_ij = max over releases r of leave_i(r) + x_ij(L(r)) + tail_j,    w_ii = head_i + tail_i,

where leave_i(r) counts from the beginning of i's step, L(r) are the bytes that have not left before r,
and x_ij is the exchange of so many. x_ij grows with its bytes about as a line and r leave evenly, so the
first and the last release decide; others lie between. The last micro-batch goes back through all stages one
after another, and gradients leave all that time. Each rank's shard crosses its own node's gateway
and card, so the fullest node's share of the bytes, which leaves in its own stage's part of that time, sets
their pace, and no exchange and no step is shorter than they take. All nodes of a site send side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from topology.job import Job
from topology.planner.cuts import Timing
from topology.planner.joint_crossings import JointCrossings
from topology.timing.cycle_mean import largest_cycle_means
from topology.traffic.tree_load import Hop
from topology.traffic.tree_times import bytes_of_hops, rate_of
from topology.trees.trees import ReductionPlan
from topology.world import Site, Topology


class JointModel:
    """Steps of one job over one reduction, for any cuts and any spread of the batch."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        plan: ReductionPlan,
        crossings: JointCrossings | None = None,
        size: int = 0,
    ) -> None:
        """Work out what depends neither on cuts nor on the spread.

        Args:
            job: Gives the model, the exchange, and how fast gateways are taken to be.
            topology: Of the sites that take part.
            plan: Over them.
            crossings: Of this job and of others, whose chunks have other sizes; None: of its own.
            size: Which of them it is.
        """
        self._topology, self._plan = topology, plan
        self._crossings = crossings or JointCrossings([job], topology, plan)
        self._size = size
        self.link_s: Mapping[Hop, float] = {}
        """How long a step's bytes keep each directed link busy."""
        self.link_bytes: Mapping[Hop, float] = {}
        """What a step sends over it."""
        if plan.num_sites > 1:
            self.link_bytes = bytes_of_hops(plan, self._crossings.load(size))
            self.link_s = {
                hop: num_bytes / rate_of(topology, hop)
                for hop, num_bytes in self.link_bytes.items()
            }
        self._gateway_s = self._crossings.gateway_s
        self._card_s = [self._one_card_s(site) for site in topology.sites]

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
            each.cut.node_share * one_s
            for each, one_s in zip(timings, self._gateway_s, strict=True)
        ]

    def card_s(self, timings: Sequence[Timing]) -> list[float]:
        """Return how long its network card is busy, in the busier direction."""
        return [
            each.cut.node_share * one_s for each, one_s in zip(timings, self._card_s, strict=True)
        ]

    def exchange_s(self, timings: Sequence[Timing]) -> float:
        """Return the seconds of an exchange that nothing hides."""
        if self._plan.num_sites == 1:
            return 0.0
        return max(self.crossing_s, self._pace_s(timings))

    @property
    def crossing_s(self) -> float:
        """Seconds in which all bytes cross after a pause, if gateways take no time."""
        rows = itertools.chain.from_iterable(self._crossings.rows(self._size, 1.0, is_warm=False))
        return max(crossing_s for _, crossing_s in rows)

    def gain_s(self, over: JointModel) -> float:
        """Return by how much a step is shorter than with other chunks, at most, for the same cuts.

        Of cuts that have been looked at. A cycle's mean changes by no more than its edges do.

        Args:
            over: Of the same crossings.
        """
        gains_s = [
            self._crossings.gain_s(self._size, over._size),
            over.links_s - self.links_s,
            *(theirs - mine for theirs, mine in zip(over._card_s, self._card_s, strict=True)),
        ]
        return max(gains_s)

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
        last, is_warm = timing.last_share, timing.last_share < 1
        of_all = self._crossings.rows(self._size, 1.0, is_warm=False)[source]
        of_last = self._crossings.rows(self._size, last, is_warm=is_warm)[source]
        # The fullest nodes begin later than the first ones do, and are done no sooner than they can be.
        paced_s = max(timing.node_first_s + pace_s, timing.head_s + timing.node_last_share * pace_s)
        for leaves_s, crossings in ((timing.first_s, of_all), (timing.head_s, of_last)):
            for target, crossing_s in crossings:
                end_s = max(leaves_s + crossing_s, paced_s) + timings[target].cut.tail_s
                row[target] = max(row[target], end_s)
        return row

    def _pace_s(self, timings: Sequence[Timing]) -> float:
        return max(*self.gateway_s(timings), *self.card_s(timings))

    def _one_card_s(self, site: Site) -> float:
        """Return how long one network card would take for all bytes of a site's step."""
        if site.nic_bytes_per_s is None:
            return 0.0
        crossing_bytes = max(
            math.fsum(each for hop, each in self.link_bytes.items() if hop[end] == site.index)
            for end in (0, 1)
        )
        return crossing_bytes / site.nic_bytes_per_s
