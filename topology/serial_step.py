"""How long a step takes in the long run when its exchange overlaps with nothing. Pure.

Sites are not in step with each other. In a gather, site j ends its step once every site's gradient is
there, whenever that site began to send it, so with c the seconds that sites compute and x those
from one site's start to another's end, the ends of step k are

    end_j(k) = max over i of (end_i(k - 1) + c_i + x_ij),  with x_jj = 0 in a gather,

a linear recurrence in the algebra of max and plus. Whatever sites begin with, its steps take in the
long run the largest mean weight of any cycle (Baccelli et al., "Synchronization and Linearity",
theorem 3.23). So two sites of a gather that compute for 1 s and 2 s, x apart, take 1.5 s + x, not 2 s
+ x: the slower one's gradient leaves late, but finds the other's already there.
"""

from __future__ import annotations

import math

from topology.compute import step_compute_s
from topology.job import Job
from topology.wire_time import crossing_times_s
from topology.world import Topology

Weights = list[list[float]]
"""By source, then target; -inf: no edge."""


def serial_step_s(
    job: Job, topology: Topology, raw_bytes: int, ratio: float | None = None
) -> float:
    """Return the mean seconds of a step with `exchange.schedule: serial` and modelled compute.

    Arguments and errors are those of `topology.wire_time.exchange_time_s`.
    """
    crossings_s = crossing_times_s(job, topology, raw_bytes, ratio)
    weights: Weights = []
    for site in topology.sites:
        compute_s = step_compute_s(job, topology, site)
        row = [
            compute_s + crossings_s.get((site.index, other.index), -math.inf)
            for other in topology.sites
        ]
        row[site.index] = max(row[site.index], compute_s)
        weights.append(row)
    return largest_cycle_mean(weights)


def largest_cycle_mean(weights: Weights) -> float:
    """Return the largest mean weight of the edges of any cycle; every node has one to itself.

    Karp, "A characterization of the minimum cycle mean in a digraph". O(nodes^3).
    """
    nodes = range(len(weights))
    heaviest = [[0.0 for _ in nodes]]
    """By number of edges: the weight of the heaviest walk of so many that ends at a node."""
    for _ in nodes:
        before = heaviest[-1]
        heaviest.append([max(before[u] + weights[u][v] for u in nodes) for v in nodes])
    last = len(weights)
    return max(
        min((heaviest[last][v] - heaviest[k][v]) / (last - k) for k in range(last)) for v in nodes
    )
