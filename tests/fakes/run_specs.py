"""Runs that were decided from documents, as a coordinator decides them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from orchestrator.coordinator.submission import Submission, decided
from protos.control.v1 import control_pb2
from topology.documents.load import load_job, load_topology
from topology.documents.placement import placed
from topology.hashing import topology_hash
from topology.job import Job
from topology.plan_wishes import Replan
from topology.run_decisions import decide_reduction, decide_run
from topology.run_spec import RunSpec
from topology.world import Topology

FOLDER = PurePath("/jobs")


def spec_of(
    job: Job, world: Topology, replan: Replan | None = None, folder: PurePath = FOLDER
) -> RunSpec:
    """Return what a job on a topology comes to; its files lie in `folder`."""
    here = placed(job, world)
    return decide_run(job, here, decide_reduction(job, here), folder=folder, replan=replan)


def spec_of_texts(job: str, topology: str, overrides: Sequence[str] = ()) -> RunSpec:
    """Return what two YAML texts come to; `overrides` are the job's."""
    return spec_of(load_job(job, "job.yaml", overrides), load_topology(topology, "topology.yaml"))


def submission_of(request: control_pb2.SubmitRequest) -> Submission:
    """Return what a coordinator of the request's own topology decides."""
    text = request.topology
    own = load_topology(text.text, text.source, text.overrides)
    return decided(request, topology_hash(own))
