"""Files that grow for weeks: bounded, and read in order, also while somebody writes."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest

from isthmus.orchestrator.evidence.record.run_record import read_record
from isthmus.orchestrator.run_folder import log_files, run_files
from isthmus.orchestrator.run_folder.log_files import LogReader, LogWriter
from isthmus.orchestrator.run_folder.rotated_lines import Limits, PartWriter, parts_of
from isthmus.orchestrator.run_folder.run_files import METRICS, MetricsError, RunFiles, read_metrics
from isthmus.orchestrator.runs import follower
from isthmus.protos.control.v1 import control_pb2
from tests.fakes.recorded_runs import metric

SMALL = Limits(part_bytes=200, num_parts=3)


def whole(path: Path) -> list[str]:
    return "".join(part.path.read_text() for part in parts_of(path)).splitlines()


@pytest.mark.parametrize("seed", range(10))
def test_the_newest_lines_are_kept_whole_and_in_order(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    writer = PartWriter(tmp_path / "a.log", SMALL)
    written: list[str] = []
    longest = 0
    while len(written) < 500:
        batch = [f"line {len(written) + place}" for place in range(chance.randint(1, 8))]
        writer.append([f"{line}\n" for line in batch])
        written += batch
        longest = max(longest, sum(len(line) + 1 for line in batch))
        sizes = [part.path.stat().st_size for part in parts_of(tmp_path / "a.log")]
        assert sum(sizes) <= SMALL.part_bytes * SMALL.num_parts + len(sizes) * longest, f"{seed=}"
    parts = parts_of(tmp_path / "a.log")
    assert len(parts) == SMALL.num_parts, f"{seed=}"
    assert whole(tmp_path / "a.log") == written[parts[0].first :], f"{seed=}"
    assert {each.name for each in tmp_path.iterdir()} == {each.path.name for each in parts}


def test_a_short_file_is_one_file(tmp_path: Path) -> None:
    PartWriter(tmp_path / "a.log", SMALL).append(["one\n", "two\n"])
    (tmp_path / "a.log.bak").write_text("somebody's\n")
    (part,) = parts_of(tmp_path / "a.log")
    assert (part.first, part.path.read_text()) == (0, "one\ntwo\n")
    assert [part.path for part in parts_of(tmp_path / "none")] == [tmp_path / "none"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few lines."""
    monkeypatch.setattr(log_files, "LIMITS", SMALL)
    monkeypatch.setattr(run_files, "METRICS_LIMITS", SMALL)


def shipped(source: str, first: int, count: int) -> list[control_pb2.LogLine]:
    return [
        control_pb2.LogLine(
            site="a", source=source, sequence=first + place, text=f"{first + place}"
        )
        for place in range(count)
    ]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(10))
def test_logs_are_followed_across_parts(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    writer = LogWriter(tmp_path)
    reader = LogReader(tmp_path, site="", rank=-1)
    seen: dict[str, list[int]] = {"rank0": [], "rank1": []}
    written = dict.fromkeys(seen, 0)
    for _ in range(200):
        source, count = chance.choice(list(seen)), chance.randint(1, 20)
        writer.append("a", shipped(source, written[source], count))
        written[source] += count
        if chance.random() < 0.7:
            for line in reader.read():
                assert line.text == str(line.sequence), f"{seed=}"
                seen[line.source].append(line.sequence)
    for line in reader.read():
        seen[line.source].append(line.sequence)
    for source, sequences in seen.items():
        assert sequences == sorted(set(sequences)), f"{seed=}"
        assert sequences[-1] == written[source] - 1, f"{seed=}"


def test_what_a_full_disk_has_refused_is_written_once_when_it_comes_again(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    lines = [*shipped("rank0", 0, 3), *shipped("rank1", 0, 2000)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                writer.append("a", lines)
            assert not (tmp_path / "logs" / "a" / "rank1.log").read_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.append("a", lines)
    for source, count in (("rank0", 3), ("rank1", 2000)):
        told = [str(number) for number in range(count)]
        assert whole(tmp_path / "logs" / "a" / f"{source}.log") == told


@pytest.mark.usefixtures("small")
def test_the_tail_may_begin_in_an_earlier_part(tmp_path: Path) -> None:
    LogWriter(tmp_path).append("a", shipped("rank0", 0, 1))
    writer = LogWriter(tmp_path / "run")
    for first in range(0, 600, 5):
        writer.append("a", shipped("rank0", first, 5))
    parts = parts_of(tmp_path / "run" / "logs" / "a" / "rank0.log")
    assert len(parts) == SMALL.num_parts
    num_lines = 600 - parts[-1].first + 3
    for wanted, got in ((num_lines, num_lines), (10_000, 600 - parts[0].first)):
        reader = LogReader(tmp_path / "run", site="a", rank=0)
        reader.skip_to_tail(wanted)
        assert [line.sequence for line in reader.read()] == list(range(600 - got, 600))
    assert not list(LogReader(tmp_path / "run", site="b", rank=-1).read())
    assert not list(LogReader(tmp_path / "run", site="", rank=7).read())


@pytest.mark.usefixtures("small")
def test_metrics_are_read_from_all_parts(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in range(60):
        files.append_metrics([metric("a", "evaluation", step, 1.0 + step, {"held_out_loss": 2.0})])
    parts = parts_of(tmp_path / METRICS)
    assert parts[0].first > 0, "the first part has gone, and with it the file's own name"
    read = [record["step"] for record in read_metrics(tmp_path / METRICS)]
    assert read == list(range(parts[0].first, 60))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"kind": "step"}\n{"kind": ', r"metrics\.jsonl:2: "),
        ("7\n", r"metrics\.jsonl:1: want a JSON object"),
        ("[" * 100_000, r"metrics\.jsonl:"),
        ("\udcff", r"metrics\.jsonl:"),
        (None, r"metrics\.jsonl:0: .*No such file"),
    ],
)
def test_metrics_that_make_no_sense_are_refused(
    tmp_path: Path, text: str | None, told: str
) -> None:
    if text is not None:
        (tmp_path / METRICS).write_text(text, errors="surrogateescape")
    with pytest.raises(MetricsError, match=told):
        list(read_metrics(tmp_path / METRICS))


@pytest.mark.usefixtures("small")
def test_a_report_reads_all_parts_and_says_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunFiles(tmp_path)
    for step in range(60):
        files.append_metrics([metric("a", "evaluation", step, 1.0 + step, {"held_out_loss": 2.0})])
    parts = parts_of(tmp_path / METRICS)
    assert len(parts) == SMALL.num_parts
    run = control_pb2.Run(run_id="r1", folder=str(tmp_path))
    run.sites.add(site="a")
    record = read_record(run, [])
    assert [step for step, _ in record.evaluations] == list(range(parts[0].first, 60))
    assert any(f"its first {parts[0].first} lines" in gap for gap in record.gaps), record.gaps
    # The oldest part goes just when it was to be read.
    parts[0].path.unlink()
    monkeypatch.setattr(follower, "parts_of", lambda _: parts)
    record = read_record(run, [])
    assert [step for step, _ in record.evaluations] == list(range(parts[1].first, 60))
    assert any(f"its first {parts[1].first} lines" in gap for gap in record.gaps), record.gaps
