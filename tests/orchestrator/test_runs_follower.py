"""Who reads a run gets all that a coordinator has written, in its order, and nothing twice."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_record import Measurement
from isthmus.orchestrator.exporters.position import POSITION, Position
from isthmus.orchestrator.run_folder import run_files
from isthmus.orchestrator.run_folder.rotated_lines import Limits
from isthmus.orchestrator.run_folder.run_files import METRICS, RunFiles
from isthmus.orchestrator.runs import follower as run_follower
from isthmus.orchestrator.runs.follower import MetricsFollower, RunFollower
from tests.fakes.exported_runs import exported_run, records_of
from tests.fakes.recorded_runs import metric


def read_all(follower: RunFollower) -> list[RecordedEvent | Measurement]:
    found = []
    while entries := follower.read():
        found += entries
    return found


def lines(entries: list[RecordedEvent | Measurement]) -> list[Measurement]:
    return [each for each in entries if isinstance(each, Measurement)]


@pytest.mark.parametrize("read_bytes", [1 << 22, 700])
def test_all_comes_once_and_events_before_what_follows_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(run_follower, "READ_BYTES", read_bytes)
    folder = exported_run(tmp_path)
    follower = RunFollower("r1", folder.path, folder.path)
    found = read_all(follower)
    records = records_of(folder)
    assert lines(found) == [Measurement.of(each, at) for at, each in enumerate(records)]
    assert [each.number for each in lines(found)] == list(range(len(records)))
    kinds = [each.kind if isinstance(each, RecordedEvent) else "line" for each in found]
    assert kinds.index("run.active") < kinds.index("line")
    assert kinds[-1] == "run.ended"
    assert follower.read() == []
    events = [each for each in found if isinstance(each, RecordedEvent)]
    assert (follower.num_lines, follower.sequence) == (len(records), events[-1].sequence)


def test_it_goes_on_with_what_is_appended_and_waits_for_whole_lines(tmp_path: Path) -> None:
    folder = exported_run(tmp_path, steps=2)
    follower = RunFollower("r1", folder.path, folder.path)
    num = len(lines(read_all(follower)))
    with (folder.path / METRICS).open("a") as file:
        text = json.dumps(
            {**metric("oregon", "step", 3, 1.0, {}), "values": {"loss": None, "odd": None}}
        )
        file.write(text[:30])
        file.flush()
        assert follower.read() == []
        file.write(text[30:] + '\n{"wall_s"\n')
    (line,) = lines(follower.read())
    assert (line.number, line.step) == (num, 3)
    assert math.isnan(line.values["loss"])
    assert "odd" not in line.values
    assert follower.num_lines == num + 2, "the damaged line is counted"
    with Journal(folder.path) as journal:
        journal.append("x.happened", wall_s=1.0, generation=1, run_id="r1", detail={})
        journal.append("x.happened", wall_s=1.0, generation=1, run_id="other", detail={})
    (event,) = follower.read()
    assert isinstance(event, RecordedEvent)
    assert event.kind == "x.happened"


def test_it_follows_a_file_into_its_next_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "METRICS_LIMITS", Limits(part_bytes=200, num_parts=1000))
    folder = exported_run(tmp_path, steps=0)
    follower, files = RunFollower("r1", folder.path, folder.path), RunFiles(folder.path)
    read_all(follower)
    found: list[Measurement] = []
    for number in range(30):
        files.append_metrics([metric("a", "step", number, float(number), {})])
        if number % 7 == 0:
            found += lines(follower.read())
    found += lines(read_all(follower))
    assert len(list(folder.path.glob(f"{METRICS}*"))) > 5
    assert [each.step for each in found] == list(range(30))
    numbers = [each.number for each in found]
    assert numbers == list(range(numbers[0], numbers[0] + 30))


def test_a_position_is_kept_and_a_broken_one_is_the_beginning(tmp_path: Path) -> None:
    assert Position.read(tmp_path) == Position()
    Position(line=7, sequence=3).write(tmp_path)
    assert Position.read(tmp_path) == Position(line=7, sequence=3)
    (tmp_path / POSITION).write_text('{"line": "7"')
    assert Position.read(tmp_path) == Position()


def test_a_line_that_is_longer_than_any_of_ours_ends_nothing(tmp_path: Path) -> None:
    good = json.dumps(metric("a", "step", 1, 1.0, {}))
    (tmp_path / METRICS).write_text(f"{good}\n{'x' * 5000}\n{good}\n")
    follower, found, is_read = MetricsFollower(tmp_path, 1000), list[Measurement](), False
    while not is_read:
        more, is_read = follower.read()
        found += more
    assert [each.step for each in found] == [1, 1]
    assert follower.num_odd > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"site": ["a"]}, {"kind": 3}, {"step": "x"}, {"wall_s": float("inf")}, {"wall_s": None},
        {"values": 3}, {"values": {"loss": "high"}}, {"labels": []},
    ],
)  # fmt: skip
def test_lines_that_make_no_sense_are_counted(tmp_path: Path, wrong: dict[str, object]) -> None:
    records = [{**metric("a", "step", 1, 1.0, {}), **wrong}, metric("a", "step", 2, 2.0, {})]
    (tmp_path / METRICS).write_text("".join(f"{json.dumps(each)}\n" for each in records))
    follower = MetricsFollower(tmp_path)
    (found,), _ = follower.read()
    assert (found.step, found.number, follower.num_odd) == (2, 1, 1)
