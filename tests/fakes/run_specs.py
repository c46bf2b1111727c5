"""Runs that were decided from documents, as a coordinator decides them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath

from isthmus.orchestrator.coordinator.submission import Submission, decided
from isthmus.protos.blobs import Blobs
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.documents.placement import placed
from isthmus.topology.documents.run_decisions import decide_reduction, decide_run
from isthmus.topology.spec.hashing import topology_hash
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.world import Topology

FOLDER = PurePath("/jobs")


def spec_of(
    job: Job, world: Topology, replan: Replan | None = None, folder: PurePath = FOLDER
) -> RunSpec:
    """Return what a job on a topology comes to; its files lie in `folder`."""
    here = placed(job, world)
    return decide_run(job, here, decide_reduction(job, here), folder=folder, replan=replan)


def spec_of_texts(job: str, topology: str, overrides: Sequence[str] = ()) -> RunSpec:
    """Return what two YAML texts come to; `overrides` are the job's."""
    read = load_job(job, "job.yaml", overrides)
    replan = None if read.plan is None else read.plan.replan
    return spec_of(read, load_topology(topology, "topology.yaml"), replan)


def submission_of(request: control_pb2.SubmitRequest) -> Submission:
    """Return what a coordinator of the request's own topology decides, that was given no files."""
    own_request, text = (
        control_pb2.SubmitRequest.FromString(request.SerializeToString()),
        request.topology,
    )
    own_request.code.is_carried = False
    own = load_topology(text.text, text.source, text.overrides)
    return decided(own_request, topology_hash(own), {}, Blobs(Path("/nowhere")))
