"""The step model's predictions for a run: its step, with other codecs too, and sites' MFU. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from isthmus.orchestrator.core.model_flops import ModelFlops
from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.cuts import placed_timings
from isthmus.topology.spec.compute import peak_flops_per_s, site_shares
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import utilisation
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import RELATIVE_ERRORS
from isthmus.topology.trees.tree_choice import plan_reduction

_FEW_SITES = 16


def planned_mfu(job: Job, topology: Topology) -> dict[str, float]:
    """Return the MFU of each site, 0 to 1; none where a step or its FLOPs cannot be predicted.

    Args:
        job: With its placement, if it has one.
        topology: Of the sites that take part.
    """
    flops_per_token = ModelFlops(job, topology).flops_per_token
    step = planned_step(job, topology)
    if step is None or flops_per_token is None:
        return {}
    context = job.trainer.model.context if job.workload is None else job.workload.context
    return {
        site.name: utilisation(
            flops_per_token * context * sum(site_shares(job, topology, site)),
            step.step_s,
            site.num_ranks,
            peak_flops_per_s(site.accelerator),
        )
        for site in topology.sites
    }


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step as the model predicts it."""

    step_s: float
    compute_s: float
    """Compute of the slowest site by itself, with collectives inside it."""


def planned_step(job: Job, topology: Topology) -> PlannedStep | None:
    """Return the step that the model predicts; None: it cannot.

    A script's step is not known, unless the job describes its model.
    """
    if job.entrypoint is not None and job.workload is None:
        return None
    if job.exchange.schedule == "off" or len(topology.sites) < 2:
        return None
    try:
        model = StepModel(job, topology, plan_reduction(job, topology))
        timings = placed_timings(job, topology)
        return PlannedStep(model.step_s(timings), max(each.alone_s for each in timings))
    except (ConfigError, ValueError):  # a tree that does not fit; a codec of no known ratio
        return None


def codec_steps_s(job: Job, topology: Topology) -> dict[str, float]:
    """Return the step that the model predicts with each codec on all links, all else as it is.

    Empty where it predicts none, or where links have codecs of their own. With many sites, too: the
    model then takes long.
    """
    if job.exchange.codecs or not job.regime.is_sync or len(topology.sites) > _FEW_SITES:
        return {}
    found = {}
    for codec in RELATIVE_ERRORS:
        exchange = dataclasses.replace(job.exchange, codec=codec)
        step = planned_step(dataclasses.replace(job, exchange=exchange), topology)
        if step is None:
            return {}
        found[codec] = step.step_s
    return found
