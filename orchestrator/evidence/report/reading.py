"""Reads what a run recorded, once.

Whatever is missing is left out and told in `gaps`: a run that was killed, one whose folder is on
another machine, and one of an older build all have something to show.
"""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.core.metrics import RunMetrics
from orchestrator.documents import read_text
from orchestrator.evidence.report.measurements import Measurements
from orchestrator.evidence.report.records import Event, RunRecord, SiteSums
from orchestrator.run_folder.home import JOB, TOPOLOGY
from orchestrator.run_folder.run_files import METRICS
from protos.control.v1 import control_pb2
from topology.documents.load import load_job, load_topology
from topology.documents.placement import placed
from topology.errors import ConfigError
from topology.job import Job
from topology.world import Topology


def read_record(run: control_pb2.Run, events: list[control_pb2.Event]) -> RunRecord:
    """Read what a run's folder holds, beside what its coordinator or its journal says of it."""
    folder = Path(run.folder) if run.folder and Path(run.folder).is_dir() else None
    gaps: list[str] = []
    told = tuple(map(_event, events))
    topology: Topology | None = None
    job: Job | None = None
    if folder is None:
        named = run.folder or "its folder"
        gaps.append(f"{named} is not on this machine: no documents, and nothing that was measured")
    else:
        topology, job = _documents(folder, told, gaps)
    sites = tuple(site.site for site in run.sites)
    record = RunRecord(
        run=run,
        events=told,
        folder=folder,
        topology=topology,
        job=job,
        measured=RunMetrics(sites),
        sums={site: SiteSums() for site in sites},
        gaps=gaps,
    )
    if folder is not None:
        Measurements(record).read(folder / METRICS)
    return record


def _documents(
    folder: Path, events: tuple[Event, ...], gaps: list[str]
) -> tuple[Topology | None, Job | None]:
    """Return both documents as they were submitted; a gap for each that cannot be read."""
    submitted = next((event.detail for event in events if event.kind == "run.submitted"), {})
    topology: Topology | None = None
    job: Job | None = None
    try:
        path = folder / TOPOLOGY
        overrides = submitted.get("topology_overrides", [])
        topology = load_topology(read_text(path), str(path), overrides)
    except ConfigError as error:
        gaps.append(f"no topology: {error.problems[0]}")
    try:
        path = folder / JOB
        job = load_job(read_text(path), str(path), submitted.get("job_overrides", []))
    except ConfigError as error:
        gaps.append(f"no job: {error.problems[0]}")
    if topology is not None and job is not None:
        topology = placed(job, topology)
    return topology, job


def _event(event: control_pb2.Event) -> Event:
    detail = json.loads(event.detail_json or "{}")
    return Event(event.wall_s, event.kind, event.site, detail if isinstance(detail, dict) else {})
