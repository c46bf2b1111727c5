"""How many sequences a rank of the shipped trainer takes at once, where a plan decides it. Pure.

The largest number that fits: what hides the exchange is the backward pass of the last micro-batch
alone, for the gradients of those before it are summed first. The trainer takes one number for all
sites, so the least memory decides. Where a rank's share is more than that, the spread of the batch
over the sites sees to it that the last micro-batch is no short rest (topology/planner/shares.py).
"""

from __future__ import annotations

from topology.job import Job
from topology.planner.room import rank_bytes
from topology.world import Site, Topology


def largest_micro_batch(job: Job, topology: Topology) -> tuple[int, Site]:
    """Return the largest micro-batch that fits these sites, 1 at least, and whose memory decides.

    Args:
        job: Gives the model; no micro-batch is larger than its batch.
        topology: Of the sites that take part.
    """
    return min(((_largest(job, site), site) for site in topology.sites), key=lambda each: each[0])


def _largest(job: Job, site: Site) -> int:
    """Return the largest micro-batch that fits a site; what it needs only grows with it."""
    fits, above = 1, job.trainer.global_batch + 1
    while above - fits > 1:
        middle = (fits + above) // 2
        if rank_bytes(job, site, middle) <= site.accelerator.memory_bytes:
            fits = middle
        else:
            above = middle
    return fits
