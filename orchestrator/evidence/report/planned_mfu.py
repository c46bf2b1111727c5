"""The MFU of a run's sites as the step model plans it. Pure."""

from __future__ import annotations

from isthmus.orchestrator.core.model_flops import ModelFlops
from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.cuts import placed_timings
from isthmus.topology.spec.compute import peak_flops_per_s, site_shares
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import utilisation
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.tree_choice import plan_reduction


def planned_mfu(job: Job, topology: Topology) -> dict[str, float]:
    """Return the MFU of each site, 0 to 1; none where a step or its FLOPs cannot be predicted.

    Args:
        job: With its placement, if it has one.
        topology: Of the sites that take part.
    """
    flops_per_token = ModelFlops(job, topology).flops_per_token
    is_known = job.entrypoint is None or job.workload is not None
    step_s = _planned_step_s(job, topology) if is_known else None
    if step_s is None or flops_per_token is None:
        return {}
    context = job.trainer.model.context if job.workload is None else job.workload.context
    return {
        site.name: utilisation(
            flops_per_token * context * sum(site_shares(job, topology, site)),
            step_s,
            site.num_ranks,
            peak_flops_per_s(site.accelerator),
        )
        for site in topology.sites
    }


def _planned_step_s(job: Job, topology: Topology) -> float | None:
    """Return the step that the model predicts; None: it cannot."""
    if job.exchange.schedule == "off" or len(topology.sites) < 2:
        return None
    try:
        model = StepModel(job, topology, plan_reduction(job, topology))
        return model.step_s(placed_timings(job, topology))
    except (ConfigError, ValueError):  # a tree that does not fit; a codec of no known ratio
        return None
