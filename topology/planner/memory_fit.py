"""Checks the memory of the shipped trainer, and finds its largest micro-batch. Pure.

A plan may choose the micro-batch: the largest that fits. Only the last micro-batch's backward pass
hides the exchange, because earlier gradients are summed first. The trainer has one micro-batch size
for all sites, so the site with the least memory decides.
"""

from __future__ import annotations

from isthmus.topology.cost.memory import exchange_bytes, memory
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import Degrees, workload_of
from isthmus.topology.spec.units import format_size
from isthmus.topology.spec.world import Site, Topology
from isthmus.topology.trees.codec_costs import RELATIVE_ERRORS


def too_large(job: Job, topology: Topology) -> list[str]:
    """Return a warning for each site whose accelerators have less memory than a rank needs.

    Args:
        job: The job with its placement.
        topology: Topology with all sites.
    """
    if job.entrypoint is not None:
        return []
    warnings = []
    for each in job.placement:
        site = topology.site(each.site)
        most = min(job.trainer.micro_batch, -(-each.sequences // site.num_ranks))
        needed_bytes, has = rank_bytes(job, site, most), site.accelerator.memory_bytes
        if needed_bytes > has:
            warnings.append(
                f"{each.site}: a rank needs {format_size(needed_bytes)} of memory for {most} sequences at "
                f"once, and its accelerator has {format_size(has)}: lower trainer.micro_batch or the model"
            )
    return warnings


def rank_bytes(job: Job, site: Site, micro_batch: int) -> float:
    """Return the bytes that a rank of the shipped trainer needs with a micro-batch.

    Every rank holds the whole model: parameters, gradients and Adam's moments in float32, the
    activations of a micro-batch, and buffers for other sites. The runtime's memory is left out,
    because it varies. A lossy codec that may be chosen counts as chosen.
    """
    workload = workload_of(job.trainer.model)
    cut = Degrees(data=site.num_ranks, micro_batch=micro_batch, fused_attention=True)
    known = {job.exchange.codec, *(each.codec for each in job.exchange.codecs)}
    known.update(() if job.plan is None else job.plan.codecs)
    has_residual = job.exchange.error_feedback and any(RELATIVE_ERRORS[each] > 0 for each in known)
    crossing = exchange_bytes(
        workload.parameters, site.num_ranks, is_sharded=False, has_residual=has_residual
    )
    needed = memory(workload, cut, micro_batch * site.num_ranks, exchange=crossing)
    return needed.total - needed.runtime


def largest_micro_batch(job: Job, topology: Topology) -> tuple[int, Site]:
    """Return the largest micro-batch that fits all sites, at least 1, and the limiting site.

    Args:
        job: The model; the micro-batch is at most its batch.
        topology: Of the sites that take part.
    """
    return min(((_largest(job, site), site) for site in topology.sites), key=lambda each: each[0])


def _largest(job: Job, site: Site) -> int:
    """Return the largest micro-batch that fits a site (bisection)."""
    fits, above = 1, job.trainer.global_batch + 1
    while above - fits > 1:
        middle = (fits + above) // 2
        if rank_bytes(job, site, middle) <= site.accelerator.memory_bytes:
            fits = middle
        else:
            above = middle
    return fits
