"""A request for a run, once it is checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.control.v1 import control_pb2
from protos.errors import ConfigMismatchError
from topology.documents.checks import check_pair
from topology.documents.run_documents import DocumentText, load_run
from topology.hashing import topology_hash
from topology.job import Job
from topology.world import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a run is."""

    run_id: str
    job: Job
    topology: Topology
    """Of the sites that take part."""
    job_document: control_pb2.Document
    topology_document: control_pb2.Document

    def to_json(self, folder: Path) -> dict[str, Any]:
        """Return what the journal keeps: enough to show the run without its documents."""
        topology = self.topology
        return {
            "name": self.job.name,
            "folder": str(folder),
            "sites": [site.name for site in topology.sites],
            "links": [
                {
                    "source": link.source,
                    "target": link.target,
                    "bytes_per_s": link.bytes_per_s,
                    "rtt_s": link.rtt_s,
                }
                for link in topology.links
            ],
            "job_overrides": list(self.job_document.overrides),
            "topology_overrides": list(self.topology_document.overrides),
        }


def checked(request: control_pb2.SubmitRequest, own_hash: str) -> Submission:
    """Parse both documents; every mistake of both is told at once.

    Args:
        request: Of an operator.
        own_hash: Of the coordinator's topology.

    Raises:
        ConfigError: they have mistakes.
        ConfigMismatchError: the topology is another one.
    """
    job_text, topology_text = request.job, request.topology
    run = load_run(
        DocumentText(job_text.text, job_text.source, job_text.overrides),
        DocumentText(topology_text.text, topology_text.source, topology_text.overrides),
    )
    check_pair(run.job, run.topology, job_text.text, job_text.source, job_text.overrides)
    if topology_hash(run.described) != own_hash:
        raise ConfigMismatchError(
            f"{topology_text.source}: not the topology that this coordinator was started with"
        )
    return Submission(
        run_id=request.run_id,
        job=run.job,
        topology=run.topology,
        job_document=job_text,
        topology_document=topology_text,
    )
