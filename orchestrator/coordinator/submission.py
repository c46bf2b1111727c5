"""A request for a run, checked and decided: what the run is from then on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from isthmus.orchestrator.exporters.libraries import exporter_problems
from isthmus.orchestrator.run_folder.run_files import RunFiles
from isthmus.protos.blobs import Blobs
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import ConfigMismatchError, RemoteProtocolError
from isthmus.protos.limits import PASSED_ENV_BYTES, RUN_SPEC_BYTES
from isthmus.topology.documents.load import load_topology
from isthmus.topology.documents.run_decisions import decide_reduction, decide_run
from isthmus.topology.documents.run_documents import DocumentText, RunDocuments, load_run
from isthmus.topology.spec.carried_folder import Carried, CarriedFolder, is_digest
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.hashing import topology_hash
from isthmus.topology.spec.job import Job, Reduction
from isthmus.topology.spec.lanes import AgentMachine, decide_lanes, with_lanes
from isthmus.topology.spec.plan_decisions import overrides_of
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.world import Topology

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One run, and the documents that it was decided from."""

    run_id: str
    spec: RunSpec
    written_spec: bytes
    """Serialised once: every site gets these bytes."""
    described: Topology
    """All sites, those that take no part included."""
    job_document: control_pb2.Document
    """As submitted, with a plan's decisions among its overrides."""
    topology_document: control_pb2.Document
    priority: int = 0
    """The run with the highest begins first, where several wait for the same sites."""
    code: control_pb2.Code = field(default_factory=control_pb2.Code)
    """Where the job's files were when it was launched, and what they were."""
    passed_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The values of the job's `pass_env`. Secrets: they are in nothing that is written of a run."""

    @property
    def occupies(self) -> frozenset[str]:
        """The sites that the run needs for itself: all, where it emulates the WAN between them."""
        sites = self.described.sites if self.spec.topology.emulate else self.spec.topology.sites
        return frozenset(site.name for site in sites)

    @property
    def _num_steps(self) -> int:
        """How many steps the job makes; 0: its own script decides."""
        job = self.spec.job
        return job.trainer.steps if job.entrypoint is None and job.probe is None else 0

    def write(self, files: RunFiles) -> None:
        """Write what `submitted_before` reads.

        Raises:
            OSError: the folder cannot be written.
        """
        files.write_documents(self.topology_document.text, self.job_document.text)
        files.write_spec(self.written_spec)

    def to_json(self, folder: Path) -> dict[str, Any]:
        """Return what the journal keeps: enough to show the run without its documents."""
        exchange = self.spec.job.exchange
        return {
            "name": self.spec.job.name,
            "priority": self.priority,
            "folder": str(folder),
            "sites": list(self.spec.site_names),
            "begin_with": list(self.spec.first_sites),
            "num_steps": self._num_steps,
            "codec": "" if exchange.codecs else exchange.codec,
            "links": [
                {
                    "source": link.source,
                    "target": link.target,
                    "bytes_per_s": link.bytes_per_s,
                    "rtt_s": link.rtt_s,
                    "egress_usd_per_byte": link.egress_usd_per_byte,
                }
                for link in self.spec.topology.links
            ],
            "code": _code_view(self.code),
            "job_source": self.job_document.source,
            "topology_source": self.topology_document.source,
            "job_overrides": list(self.job_document.overrides),
            "topology_overrides": list(self.topology_document.overrides),
        }


def _code_view(code: control_pb2.Code) -> dict[str, Any]:
    """Return what the journal keeps of a run's code; empty: nothing is known."""
    if not code.source:
        return {}
    return {
        "digest": code.digest,
        "source": code.source,
        "is_carried": code.is_carried,
        "commit": code.commit,
        "is_changed": code.is_changed,
        "num_files": code.num_files,
        "num_bytes": code.num_bytes,
        "since": code.since,
        "changes": list(code.changes),
    }


def submitted_before(
    run_id: str,
    detail: Mapping[str, Any],
    files: RunFiles,
    own_hash: str,
    passed_env: Mapping[str, str],
) -> Submission:
    """Return a run as an earlier coordinator decided it.

    Args:
        run_id: Its name.
        detail: What the journal keeps of it: `Submission.to_json`.
        files: Its folder.
        own_hash: The hash of this coordinator's own topology.
        passed_env: As it was kept of the run.

    Raises:
        ConfigError: What was kept cannot be read, or is of another topology.
        OSError: Its folder lacks a file.
    """
    texts = files.read_documents()
    job, topology = (
        DocumentText(text, detail[f"{kind}_source"], detail[f"{kind}_overrides"])
        for kind, text in zip(("job", "topology"), texts, strict=True)
    )
    written = files.read_spec()
    described = load_topology(topology.text, topology.source, list(topology.overrides))
    if topology_hash(described) != own_hash:
        raise ConfigError("this coordinator was started with another topology")
    return Submission(
        run_id=run_id,
        spec=RunSpec.from_bytes(written),
        written_spec=written,
        described=described,
        job_document=_document(job),
        topology_document=_document(topology),
        priority=detail.get("priority", 0),
        passed_env=passed_env,
    )


def _document(text: DocumentText) -> control_pb2.Document:
    return control_pb2.Document(source=text.source, text=text.text, overrides=text.overrides)


def decided(
    request: control_pb2.SubmitRequest,
    own_hash: str,
    machines: Mapping[str, AgentMachine],
    blobs: Blobs,
) -> Submission:
    """Parse both documents and decide the run; every mistake of both is told at once.

    Args:
        request: What an operator asks for.
        own_hash: The hash of the coordinator's own topology.
        machines: Of the sites whose agents are there.
        blobs: What this coordinator has been given to be carried.

    Raises:
        ConfigError: They have mistakes.
        ConfigMismatchError: The topology is another one.
        RemoteProtocolError: The plan's decisions are not JSON of any plan.
    """
    job_text, topology_text = request.job, request.topology
    decisions = _overrides(request.decisions)
    run = load_run(
        DocumentText(job_text.text, job_text.source, job_text.overrides),
        DocumentText(topology_text.text, topology_text.source, topology_text.overrides),
        decisions,
    )
    if topology_hash(run.described) != own_hash:
        raise ConfigMismatchError(
            f"{topology_text.source}: not the topology that this coordinator was started with"
        )
    if lacking := exporter_problems(run.job, run.written, os.environ):
        raise ConfigError(lacking)
    lanes = decide_lanes(run.topology, machines)
    for site, each in lanes.items():
        if each.is_of_interest:
            log.info("site %s: gateways a node: %d; %s", site, each.num_gateways, each.why)
    spec = decide_run(
        run.job,
        with_lanes(run.topology, lanes),
        decide_reduction(run.job, run.topology),
        folder=PurePath(job_text.source).parent,
        replan=_replan(run),
        carried=_carried(request.code, blobs),
    )
    written = spec.to_bytes()
    if len(written) > RUN_SPEC_BYTES:
        raise ConfigError(
            f"the run's spec has {len(written) >> 20} MiB, and {RUN_SPEC_BYTES >> 20} MiB can be "
            f"sent to sites: {topology_text.source} has too many links"
        )
    return Submission(
        run_id=request.run_id,
        spec=spec,
        written_spec=written,
        described=run.described,
        job_document=control_pb2.Document(
            source=job_text.source, text=job_text.text, overrides=run.written.overrides
        ),
        topology_document=topology_text,
        priority=request.priority,
        code=request.code,
        passed_env=_passed_env(run.job, request),
    )


def _carried(code: control_pb2.Code, blobs: Blobs) -> Carried | None:
    """Return the folder that comes with the job; None: its files lie at the sites.

    Raises:
        ConfigError: a part of it was not given, or a path leads out of it.
        CorruptDataError: its list has changed.
        NotFoundError: its list was not given.
    """
    if not code.is_carried:
        return None
    if not is_digest(code.digest):
        raise ConfigError("code: the folder that is carried has no digest")
    folder = CarriedFolder.from_bytes(blobs.read(code.digest))
    if missing := blobs.missing(file.digest for file in folder.files):
        raise ConfigError(f"code: {len(missing)} files of it are not here: launch the job again")
    return Carried(digest=code.digest, source=code.source)


def _passed_env(job: Job, request: control_pb2.SubmitRequest) -> dict[str, str]:
    """Return the values that came for the job's `pass_env`."""
    if missing := [name for name in job.pass_env if name not in request.passed_env]:
        raise ConfigError(
            f"pass_env: no value of {', '.join(missing)} came with the job: update isthmus where "
            "it is launched"
        )
    values = {name: request.passed_env[name] for name in job.pass_env}
    if sum(len(name) + len(value) for name, value in values.items()) > PASSED_ENV_BYTES:
        raise ConfigError(
            f"pass_env: more than {PASSED_ENV_BYTES >> 10} KiB: pass a file's path on"
        )
    return values


def _overrides(decisions: str) -> list[str]:
    """Return a plan's decisions as overrides of the job."""
    if not decisions:
        return []
    try:
        return overrides_of(json.loads(decisions))
    except (AttributeError, RecursionError, ValueError) as error:
        raise RemoteProtocolError("decisions: want JSON of a plan file's decisions") from error


def _replan(run: RunDocuments) -> Replan | None:
    """Return when the plan is made again; None: never, for a job that names its reduction keeps it.

    A plan's own reduction does not count.
    """
    job = run.job
    if job.plan is None or job.probe is not None or job.exchange.schedule == "off":
        return None
    return job.plan.replan if run.asked_reduction == Reduction() else None
