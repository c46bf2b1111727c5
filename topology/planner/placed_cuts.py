"""The times of each site's step where a job says which sites take part, with which cuts. Pure."""

from __future__ import annotations

from topology.cost.model_shape import Workload, degrees_of, misfit, workload_described
from topology.errors import ConfigError
from topology.job import Job, Placed
from topology.planner.cuts import Timing, given_cut, layers_together
from topology.planner.shares import Split
from topology.planner.site_cuts import SiteCuts
from topology.world import Site, Topology


def placed_timings(job: Job, topology: Topology) -> list[Timing]:
    """Return the times of each site's cut; where nobody knows how it cuts, of its fastest.

    Args:
        job: describes its model.
        topology: of the sites that take part.

    Raises:
        ConfigError: the model fits a site in no way.
    """
    assert job.workload is not None, "the job describes its model"
    workload = workload_described(job.workload)
    placed = {each.site: each for each in job.placement}
    return [
        _timing(job, workload, site, placed.get(site.name), sequences)
        for site, sequences in zip(topology.sites, _sequences(job, topology), strict=True)
    ]


def _timing(
    job: Job, workload: Workload, site: Site, placed: Placed | None, sequences: int
) -> Timing:
    assert job.workload is not None, "the job describes its model"
    serial = job.exchange.schedule == "serial"
    together = layers_together(workload, job.exchange.bucket_bytes)
    if placed is not None and placed.parallel is not None:
        degrees = degrees_of(placed.parallel, job.workload)
        if misfit(workload, degrees) is None:
            return given_cut(workload, degrees, site, serial=serial).timing(sequences, together)
    cuts = SiteCuts(job.workload, workload, site, serial=serial)
    able = cuts.timings(sequences, together)
    if not able:
        raise ConfigError(f"site {site.name}: {cuts.closest()}")
    return able[0]


def _sequences(job: Job, topology: Topology) -> Split:
    """Return the sequences of each site: as placed, or an even share."""
    if job.placement:
        count = {each.site: each.sequences for each in job.placement}
        return tuple(count[site.name] for site in topology.sites)
    num_ranks = topology.num_ranks
    return tuple(-(-job.global_batch * site.num_ranks // num_ranks) for site in topology.sites)
