"""How long an exchange's parts take between sites, with chunks of several sizes side by side. Pure.

A planner compares sizes, and they differ by little: all are worked out at once, and what one gains
over another, at most, tells for which spreads of the batch it need not be looked at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.codec_costs import usual_ratio
from topology.job import Job
from topology.model.buckets import gradient_bytes
from topology.model.tree_times import crossings_s
from topology.model.wire_load import Load, Wire, gateways_s_per_byte
from topology.trees.trees import ReductionPlan
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class JointCrossings:
    """Exchanges of jobs whose chunks alone differ. Keeps what it has worked out."""

    def __init__(self, jobs: Sequence[Job], topology: Topology, plan: ReductionPlan) -> None:
        """Work out nothing yet.

        Args:
            jobs: One of each size.
            topology: Of the sites that take part.
            plan: Over them.
        """
        self._topology, self._plan = topology, plan
        ratio = usual_ratio(jobs[0].exchange.codec)
        self._wires = [Wire(job, topology, plan, ratio) for job in jobs]
        self._raw_bytes = gradient_bytes(jobs[0])
        self.gateway_s = gateways_s(jobs[0], topology, plan)
        """How long one gateway of each site would take for all bytes of a step."""
        self._nodes = min(site.nodes for site in topology.sites)
        self._times_s: dict[tuple[float, bool], Floats] = {}
        """By share, and whether connections are warm; shape (sizes, S, T)."""
        self._gains_s = np.zeros((len(jobs), len(jobs)))

    def load(self, size: int) -> Load:
        """Return what a step puts on the wire with one of the sizes."""
        return self._wires[size].load(self._raw_bytes)

    def times_s(self, size: int, share: float, *, is_warm: bool) -> Floats:
        """Return the exchange of a share of all bytes, in one of the sizes; -inf: nobody waits.

        Connections have rested when the first gradients leave; those after them find them warm.

        Returns:
            Seconds, shape (S, T): from a site's having its part to another's having what needs it.
        """
        key = (share, is_warm)
        if key not in self._times_s:
            self._times_s[key] = self._worked_out(share, is_warm=is_warm)
        times_s: Floats = self._times_s[key][size]
        return times_s

    def gain_s(self, size: int, over: int) -> float:
        """Return how much quicker one size is than another, at most, by what is known so far."""
        return float(self._gains_s[size, over])

    def _worked_out(self, share: float, *, is_warm: bool) -> Floats:
        raw_bytes = math.ceil(self._raw_bytes * share)
        loads = [wire.load(raw_bytes).of_gateways(self._nodes) for wire in self._wires]
        if is_warm:
            loads = [dataclasses.replace(each, first_window_bytes=None) for each in loads]
        times_s = crossings_s(self._plan, self._topology, loads)
        is_waiting = np.isfinite(times_s)
        known_s = np.where(is_waiting, times_s, 0.0)
        quicker_s = known_s[None] - known_s[:, None]
        # Of few chunks some trees have none, and then nobody waits for what only they carry.
        quicker_s[is_waiting[None] & ~is_waiting[:, None]] = math.inf
        self._gains_s = np.maximum(self._gains_s, quicker_s.max(axis=(2, 3)))
        return times_s


def gateways_s(job: Job, topology: Topology, plan: ReductionPlan) -> list[float]:
    """Return how long one gateway of each site takes for all bytes of a step; 0: no cost."""
    if plan.num_sites == 1 or (job.plan is not None and job.plan.gateways == "unlimited"):
        return [0.0] * plan.num_sites
    ratio = usual_ratio(job.exchange.codec)
    raw_bytes = gradient_bytes(job)
    return [raw_bytes * each for each in gateways_s_per_byte(job, topology, plan, ratio)]
