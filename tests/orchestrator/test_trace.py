"""Trace events follow the rules of the format: what Perfetto and chrome://tracing ask for."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.client.recorded_run import RecordedRun
from isthmus.orchestrator.evidence.record.run_record import LinkSample, read_record
from isthmus.orchestrator.evidence.trace_events import rates, trace
from isthmus.orchestrator.run_folder.home import RunFolder
from tests.fakes.recorded_runs import ACTIVE_S, BEGAN_S, STEP_S, record_run

FAULTS = (
    {"what": "cut", "source": "oregon", "target": "virginia"},
    {"what": "pause", "site": "montreal"},
)
FIELDS = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"},
    "C": {"ph", "pid", "tid", "name", "ts", "args"},
    "i": {"ph", "pid", "tid", "name", "cat", "ts", "s"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def trace_of(folder: RunFolder) -> dict[str, Any]:
    recorded = RecordedRun(folder)
    made = trace(read_record(recorded.run(), recorded.events(0)))
    read: dict[str, Any] = json.loads(json.dumps(made, allow_nan=False))
    return read


def check_rules(made: dict[str, Any]) -> None:
    """Hold what the format asks for."""
    events = made["traceEvents"]
    assert made["displayTimeUnit"] in {"ms", "ns"}
    for event in events:
        assert set(event) == FIELDS[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "M":
            assert event["name"] in METADATA
            continue
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert event.get("s", "p") in {"g", "p", "t"}
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in events} == processes
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= named
    check_nesting(events)


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Hold that complete events of a thread lie inside or beside each other, never across."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        open_ends: list[float] = []
        for begin, end in spans:
            while open_ends and open_ends[-1] <= begin + 0.05:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.15
            open_ends.append(end)


@pytest.mark.parametrize("buckets", [0, 1, 6, 25])
def test_the_rules_of_the_format(tmp_path: Path, buckets: int) -> None:
    check_rules(trace_of(record_run(tmp_path, faults=FAULTS, buckets=buckets)))


def test_a_run_without_timelines_or_sites_of_its_own(tmp_path: Path) -> None:
    made = trace_of(record_run(tmp_path, every=0))
    check_rules(made)
    assert not [event for event in made["traceEvents"] if event["ph"] == "X"]


def test_what_a_trace_shows(tmp_path: Path) -> None:
    made = trace_of(record_run(tmp_path, faults=FAULTS, every=10, buckets=6))
    events = made["traceEvents"]
    processes = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert list(processes.values()) == ["oregon", "virginia", "montreal", "links", "run"]
    steps = [event for event in events if event["name"] == "step 2"]
    assert [processes[event["pid"]] for event in steps] == ["oregon", "virginia", "montreal"]
    assert steps[0]["ts"] == pytest.approx((ACTIVE_S + STEP_S - BEGAN_S) * 1e6)
    for phase in ("reduce-scatter", "WAN", "all-gather"):
        spans = [event for event in events if event.get("cat") == phase]
        assert len(spans) == 3 * 7 * 6
        assert spans[0]["args"]["wire_bytes"] == 368000
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {"oregon → virginia", "oregon → virginia, queue of the emulator"} <= counters
    told = {(event["name"], processes[event["pid"]]) for event in events if event["ph"] == "i"}
    assert ("cut oregon → virginia", "run") in told
    assert ("pause montreal", "montreal") in told
    assert ("run.active", "run") in told
    assert ("site.joined", "oregon") in told


def test_rates_of_a_link() -> None:
    samples = [LinkSample(1.0, 0.0), LinkSample(1.5, 100.0), LinkSample(1.5, 110.0)]
    samples += [LinkSample(2.5, 110.0), LinkSample(3.5, 60.0)]
    assert list(rates(samples)) == [(1.0, 200.0), (1.5, 0.0), (2.5, 0.0), (3.5, 0.0)]
    assert list(rates([])) == []
    assert all(later >= earlier for (earlier, _), (later, _) in itertools.pairwise(rates(samples)))
