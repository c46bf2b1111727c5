"""isthmus probe, with a run that has been made already: what is shown, written, and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.cli import probe
from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.bench.experiment import Ended
from isthmus.orchestrator.evidence.record.bench_record import Failed
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.documents.load import load_topology
from tests.cli.conftest import Isthmus

RATE_BYTES_PER_S = 20e6


class FakeRun:
    """Stands for the run: leaves the records of every direction in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended = Ended("netns")
        self.before_end: Callable[[], object] = lambda: None
        self.pair: Pair | None = None

    def __call__(self, pair: Pair, _home: Path, run_id: str, **options: Any) -> Ended:  # noqa: ANN401
        self.pair = pair
        lines = [
            {
                "kind": "probe",
                "labels": {"source": link.source, "target": link.target},
                "values": {
                    "rtt_s_p50": link.rtt_s,
                    "rtt_s_p99": link.rtt_s + 0.001,
                    "jitter_s": 0.0005,
                    "bytes_per_s_1": RATE_BYTES_PER_S,
                    "segments": 30_000.0,
                    "lost_segments": 0.0,
                },
            }
            for link in pair.topology.links
        ]
        for first, name in enumerate(
            ("metrics.jsonl", "metrics.jsonl.1")
        ):  # in parts, as long runs do
            part = lines[first:][: 1 if first == 0 else None]
            (self.folder / name).write_text("".join(f"{json.dumps(each)}\n" for each in part))
        options["show"](control_pb2.Run(run_id=run_id, folder=str(self.folder)))
        self.before_end()
        return self.ended


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    folder = tmp_path / "run"
    folder.mkdir()
    run = FakeRun(folder)
    monkeypatch.setattr(probe, "run_to_end", run)
    return run


def test_configured_and_measured_stand_side_by_side(
    isthmus: Isthmus, files: Path, made: FakeRun
) -> None:
    done = isthmus("probe", files / "topology.yaml")
    assert done.code == 0
    lines = done.out.splitlines()
    heading = "link configured 1 connection configured RTT p50 p99 configured lost"
    assert " ".join(lines[0].split()) == heading
    assert lines[1].split()[:7] == [
        *("oregon", "->", "virginia", "200Mbit/s", "160Mbit/s", "62ms", "62ms")
    ]
    assert len(lines) == 7
    assert "oregon to montreal: bandwidth is 160Mbit/s, 100Mbit/s is configured (+60%)" in done.err
    assert "oregon to virginia: bandwidth" not in done.err  # a fifth is allowed


def test_options_become_the_jobs(isthmus: Isthmus, files: Path, made: FakeRun) -> None:
    done = isthmus(
        *("probe", files / "topology.yaml", "--json", "--no-emulate", "--emulator", "relay"),
        *("--connections", "2,8,2", "--window", "300ms", "--set", "links.0.rtt=70ms"),
    )
    assert done.code == 0
    assert made.pair is not None
    assert made.pair.job.probe is not None
    assert (made.pair.job.probe.connections, made.pair.job.probe.window_s) == ((2, 8), 0.3)
    world = made.pair.topology
    assert (world.emulate, world.emulator, world.links[0].rtt_s) == (False, "relay", 0.07)
    data = done.envelope["data"]
    assert (data["emulator"], data["written"], len(data["links"])) == ("netns", [], 6)
    assert data["links"][0]["loss"] == 0.0
    assert data["links"][0]["bandwidth_bytes_per_s"] == RATE_BYTES_PER_S


def test_write_puts_the_figures_into_the_file(isthmus: Isthmus, files: Path, made: FakeRun) -> None:
    path = files / "topology.yaml"
    before = path.read_text()
    done = isthmus("probe", path, "--write", "--json")
    assert done.code == 0
    assert done.envelope["data"]["written"] == [str(path)]
    after = path.read_text()
    at = done.envelope["data"]["at"]
    added = f", measured: {{bandwidth: 160Mbit/s, rtt: 62ms, jitter: 500us, loss: 0%, at: {at}}}"
    assert added in after
    assert re.sub(r", measured: \{.*?\}", "", after) == before
    link = load_topology(after, "t").link("virginia", "oregon")
    assert link is not None
    assert (link.bytes_per_s, link.measured_at) == (RATE_BYTES_PER_S, at)
    assert "oregon to montreal: bandwidth 160Mbit/s was measured" in isthmus("validate", path).err


def test_a_file_that_changes_meanwhile_is_left_alone(
    isthmus: Isthmus, files: Path, made: FakeRun
) -> None:
    path = files / "topology.yaml"
    changed = f"{path.read_text()}# somebody was here\n"
    made.before_end = lambda: path.write_text(changed)
    done = isthmus("probe", path, "--write", "--json")
    assert (done.code, done.envelope["error"]["code"]) == (8, "FILE_CHANGED")
    assert path.read_text() == changed


def test_a_run_that_fails_is_told_with_its_code(
    isthmus: Isthmus, files: Path, made: FakeRun
) -> None:
    made.ended = Ended("netns", Failed(code="PEER_LOST", message="virginia is not there"))
    done = isthmus("probe", files / "topology.yaml", "--write", "--json")
    assert (done.code, done.envelope["error"]["code"]) == (4, "PEER_LOST")
    assert done.envelope["error"]["where"]["folder"] == str(made.folder)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--connections", "0"],
        ["--connections", "1,x"],
        ["--connections", "33"],
        ["--window", "2"],
        ["--window", "90s"],
    ],
)
def test_wrong_options_are_refused(isthmus: Isthmus, files: Path, arguments: list[str]) -> None:
    done = isthmus("probe", files / "topology.yaml", "--json", *arguments)
    assert (done.code, done.envelope["error"]["code"]) == (2, "USAGE")


def test_a_topology_that_cannot_be_measured_is_refused(isthmus: Isthmus, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    site = "{name: a, nodes: 1, accelerators_per_node: 1, accelerator: cpu}"
    path.write_text(f"version: 1\nname: t\nsites: [{site}]\n")
    done = isthmus("probe", path, "--json")
    assert (done.code, done.envelope["error"]["code"]) == (2, "USAGE")
    assert isthmus("probe", tmp_path / "none.yaml").code in (2, 8)
