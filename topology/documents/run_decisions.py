"""The one place where a run is decided: a job and its topology become a `RunSpec`.

Only the coordinator, and tests, call this. Sites get the result.
"""

from __future__ import annotations

import dataclasses
from pathlib import PurePath

from isthmus.topology.spec.job import Job
from isthmus.topology.spec.job_paths import anchored
from isthmus.topology.spec.plan_wishes import Replan
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
) -> RunSpec:
    """Return what a job, with a plan's decisions in it, on the sites that take part comes to.

    `reduction` is what `decide_reduction` made of the two. The job's relative paths begin at
    `folder`.
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
    )
    if spec.first_sites == spec.site_names:
        return spec
    return dataclasses.replace(spec, first=plan_for(spec, spec.first_sites))


def decide_reduction(job: Job, topology: Topology) -> CodedPlan:
    """Return the trees that a job's reduction means on a topology, and each tree's codec.

    And how small buckets are that go without trees.

    Raises:
        ConfigError: What the job asks for needs a link, or a site, that the topology does not
            have. Problems have paths in the job.
    """
    plan = plan_reduction(job, topology)
    codecs = plan_codecs(job, topology, plan)
    gathered = gathered_bytes(topology, plan, codecs)
    return CodedPlan(dataclasses.replace(plan, gathered_bytes=gathered), codecs)
