"""What people write, and what runs leave: YAML documents, overrides, metrics, benchmarks."""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3

from isthmus.orchestrator.client.recorded_run import RecordedRun
from isthmus.orchestrator.coordinator.journal import FILE, JournalError
from isthmus.orchestrator.evidence.record.bench_record import BENCH, read_bench
from isthmus.orchestrator.evidence.record.run_record import read_record
from isthmus.orchestrator.evidence.report.markdown import markdown
from isthmus.orchestrator.evidence.report.page import page
from isthmus.orchestrator.evidence.report.run_facts import run_facts
from isthmus.orchestrator.evidence.trace_events import trace
from isthmus.orchestrator.run_folder.home import RunFolder
from isthmus.orchestrator.run_folder.run_files import METRICS, strict_json
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.documents.editing import with_measured
from isthmus.topology.documents.load import document_kind, load_job, load_topology, split_overrides
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import expand
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.text.yaml_document import read_document, read_with_overrides
from isthmus.topology.trees.tree_choice import plan_reduction
from tests.fakes.recorded_benches import record_bench
from tests.fakes.recorded_runs import metric, record_run
from tests.fuzz.line_targets import file_with, json_bytes, line
from tests.fuzz.target import MIB, Target
from tests.topology import fault_documents
from tests.topology.documents import JOB, TOPOLOGY

_CHAIN = load_topology(fault_documents.TOPOLOGY, "chain.yaml")
_WORLD = load_topology(TOPOLOGY, "topology.yaml")
_TREES = """\
version: 1
name: trees
topology: topology.yaml
reduction:
  trees:
    - {root: virginia, parents: {oregon: virginia, ohio: virginia}, weight: 2}
    - {root: oregon, parents: {virginia: oregon, ohio: virginia}}
"""
_GROUPS = """\
version: 1
name: groups
topology: topology.yaml
reduction: {tree: hierarchy, groups: [[oregon], [virginia, ohio]]}
"""


def yaml_bytes(data: bytes) -> int:
    """Return what a document may take.

    100,000 nodes at most, of 2 KiB with their marks and places.
    """
    return MIB + min(200 * MIB, 2000 * len(data))


def _text(data: bytes) -> str:
    """Return the text as a file's reader gives it; what is no UTF-8 is refused before."""
    return data.decode("utf-8", errors="replace")


def _load_faults(data: bytes) -> None:
    expand(load_faults(_text(data), "faults.yaml", _CHAIN))


def _plan(data: bytes) -> None:
    plan = plan_reduction(load_job(_text(data), "job.yaml"), _WORLD)
    assert all(plan.neighbours(site) for site in range(plan.num_sites))


def _write_measured(data: bytes) -> None:
    """Write figures into a topology that is valid; nothing else of it may change."""
    before = load_topology(_text(data), "t.yaml")
    text = with_measured(_text(data), "t.yaml", {0: {"bandwidth": "87Mbit/s", "rtt": "31ms"}})
    assert load_topology(text, "t.yaml").sites == before.sites


def _override(data: bytes) -> None:
    for_topology, for_job = split_overrides([_text(data)])
    load_topology(TOPOLOGY, "t.yaml", for_topology)
    load_job(JOB, "j.yaml", for_job)


def _yaml_target(name: str, decode: object, samples: list[str], mutations: int) -> Target:
    assert callable(decode)
    return Target(
        name=name,
        decode=decode,
        refusals=(ConfigError,),
        samples=lambda: [each.encode() for each in samples],
        most_bytes=yaml_bytes,
        mutations=mutations,
    )


# ---------------------------------------------------------------- what runs leave

_SITES = ("oregon", "virginia")


def _metrics_samples() -> list[bytes]:
    step = {"step_s": 0.4, "compute_s": 0.3, "loss": 2.5, "tokens": 99.0, "exposed_inter_s": 0.1}
    crossed = {"submitted_s": 1.1, "posted_s": 1.2, "reduced_s": 1.5, "finished_s": 1.6}
    records = [
        metric("oregon", "step", 1, 10.0, step),
        metric("virginia", "evaluation", 1, 10.5, {"held_out_loss": 2.0}),
        metric("oregon", "link", -1, 10.6, {"sent_bytes": 5.0}, source="oregon", target="virginia"),
        metric("oregon", "timeline", 1, 11.0, {"begin_s": 1.0, "computed_s": 1.4, "end_s": 2.0}),
        metric("oregon", "bucket", 1, 11.0, {"bucket": 0.0, "raw_bytes": 4.0, **crossed}),
        metric("", "fault", 0, 12.0, {"at_s": 1.0, "loss": 0.1}, what="shape", source="oregon"),
        metric("", "emulated_link", 0, 12.0, {"queued_bytes": 3.0}, source="a", target="b"),
    ]
    return [b"".join(map(line, records)), *map(line, records)]


def _read_metrics(data: bytes) -> None:
    """Read a run's metrics, and show them in every way that there is."""
    with file_with(data, METRICS) as path:
        run = control_pb2.Run(run_id="r1", name="fuzz", folder=str(path.parent), created_wall_s=9.0)
        for site in _SITES:
            run.sites.add(site=site)
        run.links.add(source="oregon", target="virginia")
        record = read_record(run, [])
    json.loads(strict_json(trace(record)))
    facts = run_facts(record)
    markdown([facts], [])
    page([facts], [], "build")


def _journal_samples() -> list[bytes]:
    """Return what a journal holds as JSON, a line each.

    A run's last metrics, then its events' details.
    """
    with file_with(b"", "x") as path:
        folder = record_run(path.parent, steps=0, state="FAILED", reason="killed").path
        with contextlib.closing(sqlite3.connect(folder / FILE)) as journal:
            rows = journal.execute("SELECT progress FROM runs").fetchall()
            rows += journal.execute("SELECT detail FROM events ORDER BY sequence").fetchall()
    return ["\n".join(row[0] for row in rows).replace(str(folder), "/runs/r1").encode()]


@functools.cache
def _journal() -> bytes:
    """Return the file of a run's journal, that may be changed."""
    with file_with(b"", "x") as path:
        folder = record_run(path.parent, steps=0, state="FAILED", reason="killed").path
        with contextlib.closing(sqlite3.connect(folder / FILE)) as journal:
            journal.execute("DROP TRIGGER events_are_final")
            journal.execute("PRAGMA journal_mode = DELETE")
        return (folder / FILE).read_bytes()


def _read_journal(data: bytes) -> None:
    texts = data.decode(errors="replace").split("\n")
    with file_with(_journal(), FILE) as path:
        with contextlib.closing(sqlite3.connect(path)) as journal:
            journal.execute("PRAGMA synchronous = OFF")
            journal.execute("UPDATE runs SET progress = ?", (texts[0],))
            events = [(text, number) for number, text in enumerate(texts[1:], start=1)]
            journal.executemany("UPDATE events SET detail = ? WHERE sequence = ?", events)
            journal.execute("UPDATE events SET run_id = ?", (path.parent.name,))
            journal.execute("UPDATE runs SET run_id = ?", (path.parent.name,))
            journal.commit()
        recorded = RecordedRun(RunFolder(path.parent))
        record = read_record(recorded.run(), recorded.events(0))
    markdown([run_facts(record)], [])


def _bench_samples() -> list[bytes]:
    with file_with(b"", "x") as path:
        data = (record_bench(path.parent, swept=False) / BENCH).read_bytes()
    return [json.dumps(json.loads(data)).encode()]


def _read_bench(data: bytes) -> None:
    with file_with(data, BENCH) as path:
        bench = read_bench(path)
    markdown([], [bench])
    page([], [bench], "build")


DOCUMENT_TARGETS = (
    _yaml_target(
        "yaml",
        lambda data: read_document(_text(data), "t.yaml"),
        [
            "a: &x [1, 2ms, 'c']\nb: {c: *x, d: null}\n",
            "- |\n  text\n- >-\n  folded\n",
            "? k\n: v\n",
        ],
        200,
    ),
    _yaml_target("topology", lambda data: load_topology(_text(data), "t.yaml"), [TOPOLOGY], 60),
    _yaml_target("job", lambda data: load_job(_text(data), "j.yaml"), [JOB, _TREES, _GROUPS], 100),
    _yaml_target("faults", _load_faults, [fault_documents.SCRIPT], 60),
    _yaml_target("reduction-plan", _plan, [_TREES, _GROUPS], 100),
    _yaml_target(
        "document-kind",
        lambda data: document_kind(read_with_overrides(_text(data), "t.yaml", ())),
        [JOB, _TREES],
        60,
    ),
    _yaml_target(
        "override", _override, ["links.0.rtt=120ms", "exchange={codec: int8}", "name=x"], 40
    ),
    Target(
        name="metrics",
        decode=_read_metrics,
        refusals=(),
        samples=_metrics_samples,
        # The page is made whole: its style and script are 40 KB by themselves.
        most_bytes=lambda data: 2 * MIB + json_bytes(data),
        mutations=60,
    ),
    _yaml_target("measured-figures", _write_measured, [TOPOLOGY], 30),
    Target(
        name="journal",
        decode=_read_journal,
        refusals=(JournalError,),
        samples=_journal_samples,
        most_bytes=lambda data: MIB + json_bytes(data),
        mutations=60,
    ),
    Target(
        name="bench",
        decode=_read_bench,
        refusals=(ConfigError,),
        samples=_bench_samples,
        most_bytes=lambda data: 4 * MIB + json_bytes(data),
        mutations=100,
    ),
)
