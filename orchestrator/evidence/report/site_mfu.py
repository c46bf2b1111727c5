"""The MFU of a run's sites: as measured, and as the step model plans it. Pure.

Both divide model FLOPs, of which what is computed twice is no part, by the peak that the topology
gives for a site's accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.cuts import placed_timings
from isthmus.topology.spec.compute import flops_per_sequence, peak_flops_per_s, site_shares
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import utilisation, workload_described
from isthmus.topology.spec.world import Site, Topology
from isthmus.topology.trees.tree_choice import plan_reduction


@dataclass(frozen=True, slots=True)
class Mfu:
    """The MFU of one site, 0 to 1; None where it is not known."""

    measured: float | None
    planned: float | None


def site_mfu(job: Job, topology: Topology, tokens_per_s: dict[str, float]) -> dict[str, Mfu]:
    """Return the MFU of each site; none where nobody knows what the job's script trains.

    Args:
        job: With its placement, if it has one.
        topology: Of the sites that take part.
        tokens_per_s: Of each site, as measured.
    """
    if job.entrypoint is not None and job.workload is None:
        return {}
    step_s = _planned_step_s(job, topology)
    flops, tokens = _sequence(job)
    found = {}
    for site in topology.sites:
        rate = tokens_per_s.get(site.name)
        planned = (
            None if step_s is None else _mfu(site, flops * _sequences(job, topology, site), step_s)
        )
        found[site.name] = Mfu(
            measured=None if rate is None else _mfu(site, flops * rate / tokens, 1.0),
            planned=planned,
        )
    return found


def _sequence(job: Job) -> tuple[float, int]:
    """Return the model FLOPs of a sequence, and its tokens."""
    if job.workload is None:
        model = job.trainer.model
        return flops_per_sequence(model), model.context
    return workload_described(job.workload).model_flops(1), job.workload.context


def _sequences(job: Job, topology: Topology, site: Site) -> int:
    return sum(site_shares(job, topology, site))


def _planned_step_s(job: Job, topology: Topology) -> float | None:
    """Return the step that the model predicts; None: it cannot."""
    if job.exchange.schedule == "off" or len(topology.sites) < 2:
        return None
    try:
        model = StepModel(job, topology, plan_reduction(job, topology))
        return model.step_s(placed_timings(job, topology))
    except (ConfigError, ValueError):  # a tree that does not fit; a codec of no known ratio
        return None


def _mfu(site: Site, flops: float, in_s: float) -> float:
    return utilisation(flops, in_s, site.num_ranks, peak_flops_per_s(site.accelerator))
