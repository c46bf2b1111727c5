"""A simulated run's folder: journal, documents, metrics and summary, as a coordinator leaves them.

`isthmus report`, `trace`, `status` and `events` read it like that of a run that was made. It says
itself that none was: in its notes, and as the host of each site.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.coordinator.journal import Journal
from orchestrator.core.metrics import RunMetrics
from orchestrator.core.summary import summarise
from orchestrator.documents import Pair
from orchestrator.evidence.simulate.records import records
from orchestrator.run_folder.home import claim_run_folder
from orchestrator.run_folder.run_files import RunFiles
from protos.errors import StateConflictError
from topology.simulator.run import SimulatedRun

NOTE = "simulated: no process ran, and no byte crossed"
HOST = "simulated"
EMULATOR = "a simulation"


def write_run(
    home: Path,
    run_id: str,
    pair: Pair,
    run: SimulatedRun,
    began_s: float,
    *,
    told: Sequence[str] = (),
) -> Path:
    """Write HOME/runs/RUN; return it.

    Args:
        home: the folder of the folder of runs.
        run_id: names the run, and its folder.
        pair: its documents.
        run: what was simulated.
        began_s: wall clock at which it is said to have begun.
        told: what else there is to say of how it was simulated.

    Raises:
        OSError: the disk refuses.
        StateConflictError: there is such a run.
    """
    folder, is_new = claim_run_folder(home, run_id, pair.job_text)
    if not is_new:
        raise StateConflictError(f"there is a run {run_id!r} already: {folder.path}")
    files = RunFiles(folder.path)
    files.write_documents(pair.topology_text, pair.job_text)
    sites = [site.name for site in pair.topology.sites]
    measured = RunMetrics(tuple(sites))
    made = list(records(run, run_id, began_s))
    for each in (one for one in made if one["site"]):
        measured.add(each["site"], each["kind"], each["step"], each["values"], each["labels"])
    files.append_metrics(made)
    journal = Journal(folder.path)
    try:
        note = "; ".join([NOTE, *told])
        _journal(journal, run_id, folder.path, pair, run, began_s, note)
        journal.save_progress(run_id, {**measured.progress(), "active_s": run.wall_s})
        view = journal.view(run_id)
        files.write_summary(summarise(view, measured, active_s=run.wall_s, verified_steps=0))
    finally:
        journal.close()
    return folder.path


def _journal(
    journal: Journal,
    run_id: str,
    folder: Path,
    pair: Pair,
    run: SimulatedRun,
    began_s: float,
    note: str,
) -> None:
    generation = journal.raise_generation()

    def append(kind: str, at_s: float, site: str = "", **detail: object) -> None:
        journal.append(
            kind,
            wall_s=began_s + at_s,
            generation=generation,
            run_id=run_id,
            site=site,
            detail=detail,
        )

    links = [
        {
            "source": link.source,
            "target": link.target,
            "bytes_per_s": link.bytes_per_s,
            "rtt_s": link.rtt_s,
        }
        for link in pair.topology.links
    ]
    sites = [site.name for site in pair.topology.sites]
    append(
        "run.submitted",
        0.0,
        name=pair.job.name,
        folder=str(folder),
        sites=sites,
        links=links,
        topology_overrides=pair.topology_overrides,
        job_overrides=pair.job_overrides,
    )
    append("run.simulated", 0.0, note=note)
    for site in sites:
        append("site.joined", 0.0, site, host=HOST)
    if links:
        append("wan.emulated", 0.0, emulator=EMULATOR)
    append("run.active", 0.0)
    for outage in run.outages:
        append("site.failed", outage.at_s, outage.site, lost_steps=outage.lost_steps)
        append("run.recovered", outage.until_s)
    for site in sites:
        append("site.ended", run.wall_s, site)
    append("run.ended", run.wall_s, state="SUCCEEDED", reason_code="", reason="", failure=None)
