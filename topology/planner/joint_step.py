"""Steps of sites that each cut a model in their own way, and what crosses between them. Pure.

As in topology/model/step_model.py: site j ends step k once all that it needs is there, and the mean
step is the largest cycle mean of

    w_ij = max over releases r of leave_i(r) + x_ij(L(r)) + tail_j,    w_ii = head_i + tail_i,

where leave_i(r) counts from the beginning of i's step, L(r) are the bytes that have not left before
r, and x_ij is the exchange of so many. x_ij grows with its bytes about as a line and r leave
evenly, so the first and the last release decide; others lie between. The last micro-batch goes back
through all stages one after another, and gradients leave all that time. Each rank's shard crosses
its own node's gateway and card, so the fullest node's share of the bytes, which leaves in its own
stage's part of that time, sets their pace, and no exchange and no step is shorter than they take.
All nodes of a site send side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.job import Job
from topology.model.step_model import largest_cycle_means
from topology.model.tree_times import bytes_of_hops, rate_of
from topology.model.wire_load import Hop
from topology.planner.cuts import Timing
from topology.planner.joint_crossings import JointCrossings
from topology.trees.trees import ReductionPlan
from topology.world import Site, Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


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
        return float(self._crossings.times_s(self._size, 1.0, is_warm=False).max())

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
        """Return a step's mean seconds; `timings` are of each site, in the topology's order."""
        if self._plan.num_sites == 1:
            return timings[0].alone_s
        pace_s = self._pace_s(timings)
        [mean_s] = largest_cycle_means(self._weights(timings, pace_s)[None])
        return max(float(mean_s), self.links_s, pace_s)

    def _weights(self, timings: Sequence[Timing], pace_s: float) -> Floats:
        """Return the seconds from each site's beginning of a step to each one's end; -inf: no wait.

        Shape (S, T): sites from and to which they are.
        """
        all_st = self._crossings.times_s(self._size, 1.0, is_warm=False)
        last_st = np.array(
            [
                self._crossings.times_s(self._size, each.last_share, is_warm=each.last_share < 1)[
                    source
                ]
                for source, each in enumerate(timings)
            ]
        )
        times = [(each.first_s, each.head_s, each.cut.tail_s, each.alone_s) for each in timings]
        first_s, head_s, tail_t, alone_s = np.array(times).T
        # The fullest nodes begin later than the first ones; they are done no sooner than they can.
        paced_s = np.array(
            [
                max(each.node_first_s + pace_s, each.head_s + each.node_last_share * pace_s)
                for each in timings
            ]
        )
        there_st = np.maximum(first_s[:, None] + all_st, head_s[:, None] + last_st)
        paced_st = np.where(np.isinf(there_st), -math.inf, paced_s[:, None])
        weights_st: Floats = np.maximum(there_st, paced_st) + tail_t
        np.fill_diagonal(weights_st, np.maximum(weights_st.diagonal(), alone_s))
        return weights_st

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
