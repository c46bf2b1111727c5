"""Runs whose jobs ask for exporters, as coordinators leave them; and what receives what is sent."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.coordinator.journal import JournalReader
from isthmus.orchestrator.core.run_record import Measurement
from isthmus.orchestrator.exporters.figures import ExportedEvent, Point, RunFigures
from isthmus.orchestrator.exporters.libraries import NEEDS
from isthmus.orchestrator.exporters.tool import Update
from isthmus.orchestrator.run_folder.home import RunFolder
from isthmus.orchestrator.run_folder.run_files import METRICS, RunFiles, read_metrics
from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.presets.templates import job_yaml, topology_yaml
from isthmus.topology.spec.run_spec import RunSpec
from tests.fakes.recorded_runs import record_run
from tests.fakes.run_specs import spec_of

EGRESS = "links.0.egress=0.02USD/GB"


def needs_library(exporter: str) -> None:
    """Skip the test where the library of an exporter is not installed."""
    extra, module = NEEDS[exporter]
    pytest.importorskip(module, reason=f"wants pip install 'isthmus[{extra}]'")


def spec_with(exporters: str = "{}") -> RunSpec:
    """Return the run of `isthmus init`, with exporters and a price of its first link."""
    job = load_job(job_yaml(), "job.yaml", [f"exporters={exporters}"])
    return spec_of(job, load_topology(topology_yaml(), "topology.yaml", [EGRESS]))


def exported_run(home: Path, exporters: str = "{}", **options: Any) -> RunFolder:  # noqa: ANN401
    """Write a run that has ended, with its spec; `options` are those of `record_run`."""
    spec = spec_with(exporters)
    folder = record_run(home, sites=spec.site_names, **options)
    RunFiles(folder.path).write_spec(spec.to_bytes())
    return folder


def records_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Return all of a run's metrics."""
    return [dict(each) for each in read_metrics(folder.path / METRICS)]


def figures_of(
    folder: RunFolder, spec: RunSpec
) -> tuple[RunFigures, list[Point], list[ExportedEvent]]:
    """Return what is exported of a run, all at once."""
    figures, points, events = RunFigures(folder.run_id, spec), list[Point](), list[ExportedEvent]()
    with JournalReader(folder.path) as journal:
        *before, end = journal.events(folder.run_id)
    for event in before:
        events += figures.add_event(event)[1]
    for record in records_of(folder):
        points += figures.add_metric(Measurement.of(record))
    return figures, points, [*events, *figures.add_event(end)[1]]


def update_of(folder: RunFolder, spec: RunSpec, *, is_last: bool = False) -> Update:
    """Return a whole run as one update."""
    figures, points, events = figures_of(folder, spec)
    return Update(
        samples=tuple(figures.samples()),
        points=tuple(points),
        events=tuple(events),
        state=figures.state,
        submitted_s=figures.submitted_s,
        is_last=is_last,
    )


@dataclass
class Received:
    """What was posted to a server of this test's own."""

    url: str
    posts: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    """Path, headers and body of each."""
    statuses: list[int] = field(default_factory=list)
    """To answer with, the next first; 200 once there are none."""
    location: str = ""
    """Where answers redirect to; empty: they do not."""

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The bodies, where they are JSON."""
        return [json.loads(body) for _, _, body in self.posts]


@contextmanager
def receiving(answer: Callable[[], bytes] = bytes) -> Iterator[Received]:
    """Listen for posts; `answer` makes the bodies of answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.posts.append((self.path, dict(self.headers), body))
            self.send_response(received.statuses.pop(0) if received.statuses else 200)
            if received.location:
                self.send_header("Location", received.location)
            self.end_headers()
            self.wfile.write(answer())

        def do_GET(self) -> None:
            """Take what a redirect makes of a post."""
            received.posts.append((self.path, dict(self.headers), b""))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print no line for each request."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Received(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()


def series_of(points: Iterable[Point]) -> dict[str, list[tuple[int, float]]]:
    """Return each figure's steps and values."""
    found: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        for name, value in point.values.items():
            found.setdefault(name, []).append((point.step, value))
    return found


def is_near(one: Mapping[str, list[tuple[int, float]]], other: object) -> bool:
    """Whether two series are the same but for the rounding of a float32."""
    assert isinstance(other, dict)
    assert one.keys() == other.keys()
    return all(
        len(points) == len(other[name])
        and all(
            step == its_step and math.isclose(value, its_value, rel_tol=1e-6)
            for (step, value), (its_step, its_value) in zip(points, other[name], strict=True)
        )
        for name, points in one.items()
    )
