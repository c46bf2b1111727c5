"""`python -m isthmus.orchestrator.exporters`: one run's exporters, from its start to its end.

A process of its own: libraries that take seconds to import, or that break, are nothing to the
coordinator. It follows what the coordinator writes (runs/follower.py) and ends with the run, or
when its stdin does: the coordinator is gone, or goes. stdout has a JSON object a line, `text` and
`is_warning`, for people.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_record import Measurement
from isthmus.orchestrator.exporters.figures import ExportedEvent, Point, RunFigures
from isthmus.orchestrator.exporters.outlet import Outlet, Say
from isthmus.orchestrator.exporters.position import Position
from isthmus.orchestrator.exporters.tool import Tool, Update
from isthmus.orchestrator.run_folder.run_files import RunFiles
from isthmus.orchestrator.run_folder.state_lock import StateLockedError, lock
from isthmus.orchestrator.runs.follower import RunFollower
from isthmus.protos.failure import reason_of
from isthmus.topology.spec.run_spec import RunSpec

POLL_S = 0.5
"""Between two looks at the run's files."""
KEEP_S = 5.0
"""Between two writings of how far it has got."""
FINISH_S = 20.0
"""Time for tools to take what is left."""
LOCK = "exporters.lock"
LOCK_S = FINISH_S + 5.0
"""Time for the exporters of an earlier coordinator, which finish, to end."""
_MOST_CHARS = 500
"""Limit on a script's arguments: older MLflow servers refuse longer parameters."""
_NICE = 10
"""It may share its machine with ranks."""

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Export one run; return 0."""
    parser = argparse.ArgumentParser(prog="isthmus exporters", description="Export one run.")
    parser.add_argument("--run", required=True, metavar="ID")
    parser.add_argument("--folder", required=True, type=Path, metavar="DIR", help="the run's")
    parser.add_argument("--state", required=True, type=Path, metavar="DIR", help="the journal's")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s exporters: %(message)s")
    os.nice(_NICE)
    say = _saying()
    descriptor = _lock(options.folder / LOCK)
    if descriptor is None:
        say(
            "exporters: those of an earlier coordinator do not end; the run continues without", True
        )
        return 0
    spec = RunSpec.from_bytes(RunFiles(options.folder).read_spec())
    outlets = [
        Outlet(name, tool, say) for name, tool in _tools(spec, options.run, options.folder).items()
    ]
    for outlet in outlets:
        outlet.start()
    follower = RunFollower(options.run, options.folder, options.state)
    _export(RunFigures(options.run, spec), follower, outlets, options.folder)
    deadline_s = time.monotonic() + FINISH_S
    for outlet in outlets:
        outlet.end()
    for outlet in outlets:
        outlet.wait(deadline_s)
    sys.stderr.flush()
    os._exit(0)  # a library's thread that does not end must not keep it


def _tools(spec: RunSpec, run_id: str, folder: Path) -> dict[str, Tool]:
    """Return the tools that the job asks for, by name."""
    asked, job, tools = spec.job.exporters, spec.job.name, dict[str, Tool]()
    if asked.prometheus is not None:
        from isthmus.orchestrator.exporters.prometheus import PrometheusPage

        tools["prometheus"] = PrometheusPage(asked.prometheus, run_id)
    if asked.otlp is not None:
        from isthmus.orchestrator.exporters.otlp import OtlpPush

        tools["otlp"] = OtlpPush(asked.otlp, run_id, job)
    if asked.otlp is not None and asked.otlp.traces:
        from isthmus.orchestrator.exporters.otlp_traces import OtlpTraces

        tools["otlp traces"] = OtlpTraces(asked.otlp, run_id, job)
    if asked.tensorboard is not None:
        from isthmus.orchestrator.exporters.tensorboard import EventFiles

        tools["tensorboard"] = EventFiles(asked.tensorboard, run_id, folder)
    if asked.mlflow is not None:
        from isthmus.orchestrator.exporters.mlflow import MlflowRun

        tools["mlflow"] = MlflowRun(asked.mlflow, run_id, job, folder, _facts(spec))
    if asked.wandb is not None:
        from isthmus.orchestrator.exporters.wandb import WandbRun

        tools["wandb"] = WandbRun(asked.wandb, run_id, job, folder, _facts(spec))
    if asked.webhook is not None:
        from isthmus.orchestrator.exporters.webhook import WebhookPost

        tools["webhook"] = WebhookPost(asked.webhook, run_id, job, os.environ)
    return tools


def _facts(spec: RunSpec) -> dict[str, Any]:
    """Return what a run is, for tools that keep it: nothing of the job's environment.

    A script's batch is known where its job describes the workload; the trainer's is not its.
    """
    job = spec.job
    is_batch_known = job.entrypoint is None or job.workload is not None
    return {
        "job": job.name,
        "entrypoint": job.entrypoint or "the shipped trainer",
        "sites": ",".join(spec.site_names),
        "ranks": sum(site.num_ranks for site in spec.topology.sites),
        "codec": job.exchange.codec,
        "regime": job.regime.kind,
        **({"global_batch": job.global_batch} if is_batch_known else {}),
        **({"arguments": shlex.join(job.arguments)[:_MOST_CHARS]} if job.arguments else {}),
        "links": len(spec.topology.links),
    }


def _export(
    figures: RunFigures, follower: RunFollower, outlets: Sequence[Outlet], folder: Path
) -> None:
    """Hand over what is new, until the run has ended or nobody wants more."""
    begun, kept, kept_s = Position.read(folder), Position(), time.monotonic()
    is_over = False
    while True:
        is_asked_to_end = _is_closed(sys.stdin, 0.0 if is_over else POLL_S)
        was_over, points, events, num_read = is_over, [], [], 0
        while entries := follower.read():
            num_read += len(entries)
            for entry in entries:
                new_points, new_events = _add(figures, entry, begun)
                points += new_points
                events += new_events
        is_over = figures.has_ended or is_asked_to_end
        is_last = is_over and was_over  # once more: metrics are written before the end
        if num_read or is_last:
            update = Update(
                samples=tuple(figures.samples()),
                points=tuple(points),
                events=tuple(events),
                state=figures.state,
                submitted_s=figures.submitted_s,
                is_last=is_last,
            )
            for outlet in outlets:
                outlet.put(update)
        position = Position(line=follower.num_lines, sequence=follower.sequence)
        now_s = time.monotonic()
        if position != kept and (is_last or now_s - kept_s >= KEEP_S):
            kept, kept_s = position, now_s
            with contextlib.suppress(OSError):  # then later exporters begin a little earlier
                position.write(folder)
        if is_last:
            break
    if follower.num_odd:
        log.warning("%d lines of the metrics make no sense and were not exported", follower.num_odd)


def _add(
    figures: RunFigures, entry: RecordedEvent | Measurement, begun: Position
) -> tuple[list[Point], list[ExportedEvent]]:
    """Take what was written of the run; return what was not exported before."""
    points: list[Point] = []
    events: list[ExportedEvent] = []
    try:
        if isinstance(entry, Measurement):
            points = figures.add_metric(entry)
            is_new = entry.number >= begun.line
        else:
            points, events = figures.add_event(entry)
            is_new = entry.sequence > begun.sequence
    except (LookupError, TypeError, ValueError) as error:
        log.warning("a record was not exported: %s", reason_of(error))
        return [], []
    return (points, events) if is_new else ([], [])


def _is_closed(stream: TextIO, within_s: float) -> bool:
    """Wait for the end of a stream, which nobody writes to."""
    ready, _, _ = select.select([stream], [], [], within_s)
    return bool(ready)


def _saying() -> Say:
    """Return what tells people a line; whatever a library prints goes to stderr from now on."""
    own, printing = os.fdopen(os.dup(1), "w", encoding="utf-8"), threading.Lock()
    os.dup2(2, 1)

    def say(text: str, is_warning: bool) -> None:
        with printing, contextlib.suppress(OSError):
            own.write(json.dumps({"text": text, "is_warning": is_warning}) + "\n")
            own.flush()

    return say


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock; None: others hold it for too long."""
    deadline_s = time.monotonic() + LOCK_S
    while time.monotonic() < deadline_s:
        try:
            return lock(path)
        except StateLockedError:
            time.sleep(POLL_S)
    return None


if __name__ == "__main__":
    sys.exit(main())
