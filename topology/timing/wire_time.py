"""How long one exchange takes on the wire, if nothing hides it. Pure.

topology.traffic.tree_times has the formula, topology.traffic.wire_load what is put into it,
topology.reduction_plans the trees.

Left out: what sites do to encode and sum, loss, and a receiver's window that is too small.
"""

from __future__ import annotations

from topology.job import Job
from topology.reduction_plans import plan_reduction
from topology.traffic.tree_times import plan_times_s
from topology.traffic.wire_load import wire_load
from topology.world import Topology


def exchange_time_s(
    job: Job, topology: Topology, raw_bytes: int, ratio: float | None = None
) -> float:
    """Return the seconds from all sites' having `raw_bytes` to all sites' having the sum.

    Args:
        job: gives plan, codecs, chunk size.
        topology: gives the links; its `emulator`, whether there are packets and slow start (`auto`
            counts as netns, and so does a WAN that is not emulated).
        raw_bytes: float32 bytes of the whole gradient.
        ratio: encoded bytes for each of them by `exchange.codec`; needed where that compresses.

    Raises:
        ValueError: no ratio for a codec that compresses.
        ConfigError: the job's tree does not fit the topology.
    """
    return max(crossing_times_s(job, topology, raw_bytes, ratio).values(), default=0.0)


def crossing_times_s(
    job: Job, topology: Topology, raw_bytes: int, ratio: float | None = None
) -> dict[tuple[int, int], float]:
    """Return by which time after one site's start another is done, as far as the first decides.

    Arguments and errors are those of `exchange_time_s`.

    Returns:
        Seconds from the first site's having its gradient to the second's having the last of the sum
        that depends on it, by their indices. Pairs whose sites do not wait for each other are
        missing; in a tree, a site other than the root waits for its own.
    """
    plan = plan_reduction(job, topology)
    if raw_bytes == 0 or plan.num_sites == 1:
        return {}
    return plan_times_s(plan, topology, wire_load(job, topology, plan, raw_bytes, ratio))
