"""Decides a run: turns a job and its topology into a `RunSpec`.

Only the coordinator (and tests) calls this. Sites get the result.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import PurePath

from isthmus.topology.spec.carried_folder import Carried
from isthmus.topology.spec.compute import num_parameters
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.job_paths import anchored
from isthmus.topology.spec.loss_gaps import SMALL, loss_gap
from isthmus.topology.spec.model_shape import workload_described
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.regime import SYNC_EVERY, Regime, regime_of
from isthmus.topology.spec.run_spec import CodedPlan, RunSpec
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.link_codecs import plan_codecs
from isthmus.topology.trees.member_plans import plan_for
from isthmus.topology.trees.small_buckets import gathered_bytes
from isthmus.topology.trees.tree_choice import plan_reduction
from isthmus.topology.trees.wire_load import chunk_bytes_of, pipeline_bytes_of


def decide_run(
    job: Job,
    topology: Topology,
    reduction: CodedPlan,
    *,
    folder: PurePath,
    replan: Replan | None = None,
    carried: Carried | None = None,
) -> RunSpec:
    """Return the spec of a job, including a plan's decisions, on the sites that take part.

    `reduction` comes from `decide_reduction`. The job's relative paths begin at `folder`, and
    `carried` is what sites are given of it.
    """
    spec = RunSpec(
        job=anchored(job, folder),
        topology=topology,
        reduction=reduction,
        chunk_bytes=chunk_bytes_of(job, topology, reduction.plan),
        pipeline_bytes=pipeline_bytes_of(job, topology, reduction.plan),
        timeouts=Timeouts.derive(topology.failure),
        job_folder=str(folder),
        replan=replan,
        rungs=() if replan is None else rungs_of(job, len(topology.sites)),
        carried=carried,
    )
    if spec.first_sites == spec.site_names:
        return spec
    return dataclasses.replace(spec, first=plan_for(spec, spec.first_sites))


def decide_reduction(job: Job, topology: Topology) -> CodedPlan:
    """Return the trees of a job's reduction on a topology, with each tree's codec.

    The plan includes the size up to which buckets are gathered.

    Raises:
        ConfigError: The job needs a link or a site that the topology does not have. Problems have
            paths in the job.
    """
    plan = plan_reduction(job, topology)
    codecs = plan_codecs(job, topology, plan)
    gathered = gathered_bytes(topology, plan, codecs)
    return CodedPlan(dataclasses.replace(plan, gathered_bytes=gathered), codecs)


def rungs_of(job: Job, num_sites: int) -> tuple[Regime, ...]:
    """Return the regimes beside sync to which a run may change, most exact first.

    They are expected to end with as much more loss as the job permits, at most.
    """
    plan = job.plan
    if plan is None or plan.replan is None or plan.replan.regime != "follow":
        return ()
    parameters = float(num_parameters(job.trainer.model)) if job.entrypoint is None else SMALL
    if job.workload is not None:
        parameters = workload_described(job.workload).parameters
    period = min(SYNC_EVERY, plan.max_sync_period)
    rounds = [regime_of("diloco", sync_every=period)] if period > 1 else []
    most = math.inf if plan.max_loss_gap is None else plan.max_loss_gap
    return tuple(
        regime
        for regime in (regime_of("delayed"), *rounds)
        if loss_gap(regime, parameters, max(2, num_sites)) <= most
    )
