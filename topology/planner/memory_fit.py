"""Checks a job against the memory of its accelerators; finds the largest micro-batch. Pure.

Plans and simulations warn by the same check (`too_large`).

A plan may choose the micro-batch: the largest that fits. Only the last micro-batch's backward pass
hides the exchange, because earlier gradients are summed first. The trainer has one micro-batch size
for all sites, so the site with the least memory decides.
"""

from __future__ import annotations

from isthmus.topology.cost.memory import exchange_bytes, memory
from isthmus.topology.planner.cuts import why_not
from isthmus.topology.spec.compute import site_shares
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import Degrees, degrees_of, workload_described, workload_of
from isthmus.topology.spec.units import format_size
from isthmus.topology.spec.world import Site, Topology
from isthmus.topology.trees.codec_costs import RELATIVE_ERRORS

_NAMED = 3
"""Number of sites that a warning names."""


def too_large(job: Job, topology: Topology) -> list[str]:
    """Return warnings on sites whose accelerators have less memory than a rank needs.

    Sites that lack the same are in one warning. Of a script without a `workload` nothing is known,
    and nothing is warned of.

    Args:
        job: The job as it runs: with its placement and cuts, if it has any.
        topology: Of the sites that take part.
    """
    names: dict[str, list[str]] = {}
    for site in topology.sites:
        lacking = _lacking(job, topology, site)
        if lacking is not None:
            names.setdefault(lacking, []).append(site.name)
    return [f"{_listed(sites)}: {lacking}" for lacking, sites in names.items()]


def _lacking(job: Job, topology: Topology, site: Site) -> str | None:
    """Return what a site's accelerators lack; None: nothing, or nothing is known."""
    if job.workload is not None:
        [mine] = [each for each in job.placement if each.site == site.name]
        assert mine.parallel is not None, "each site has its cut of a described model"
        degrees = degrees_of(mine.parallel, job.workload)
        return why_not(workload_described(job.workload), degrees, site, mine.sequences)
    if job.entrypoint is not None:
        return None
    most = min(job.trainer.micro_batch, max(site_shares(job, topology, site)))
    needed_bytes, has = rank_bytes(job, site, most), site.accelerator.memory_bytes
    if needed_bytes <= has:
        return None
    return (
        f"a rank needs {format_size(needed_bytes)} of memory for {most} sequences at once, and its "
        f"accelerator has {format_size(has)}: lower trainer.micro_batch or the model"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


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
