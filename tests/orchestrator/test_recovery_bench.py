"""The recovery benchmark's figures, from records; and that its fault scripts are ones."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.documents import Pair, load_pair
from isthmus.orchestrator.evidence.bench.experiment import RUNS, Ended
from isthmus.orchestrator.evidence.bench.recovery import (
    KINDS,
    Question,
    Recovery,
    RecoveryBench,
    RecoveryRuns,
    fault_script,
    recovery_of,
    return_of,
)
from isthmus.orchestrator.evidence.record.bench_record import Failed, Source
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.orchestrator.run_folder.run_files import METRICS, strict_json
from isthmus.topology.faults.loading import load_faults
from tests.fakes.measured_runs import Told

JOB = Path(__file__).parents[2] / "scripts" / "bench_recovery" / "job.yaml"


def step(site: str, number: int, wall_s: float, step_s: float) -> dict[str, Any]:
    values = {"step_s": step_s}
    return {"kind": "step", "site": site, "step": number, "wall_s": wall_s, "values": values}


def records(site: str, step_s: Sequence[float]) -> list[dict[str, Any]]:
    ends_s = [sum(step_s[: index + 1]) for index in range(len(step_s))]
    return [
        step(site, index + 1, end_s, each)
        for index, (end_s, each) in enumerate(zip(ends_s, step_s, strict=True))
    ]


FAULT = {"kind": "fault", "wall_s": 5.5, "values": {}, "labels": {"what": "kill"}}


def test_the_longest_step_after_the_fault_is_the_stall_and_no_step_is_lost() -> None:
    a = records("a", [1.0] * 5 + [4.0] + [1.0] * 4)
    b = records("b", [1.0] * 5 + [3.0] + [1.0] * 5)
    dead = records("c", [1.0] * 5)
    assert recovery_of([*a, FAULT, *b, *dead], ["a", "b"], 0.0) == (1.0, 3.0, 0)
    assert recovery_of([*a, FAULT, *b], ["a", "b"], 2.0) == (1.0, 1.0, 0)


def test_a_return_counts_from_the_fault_to_the_first_step_of_the_site() -> None:
    a = records("a", [1.0] * 5 + [1.5, 1.0, 1.1, 1.1, 3.0, 1.0])
    entry = {
        "kind": "entry",
        "site": "c",
        "wall_s": 9.8,
        "values": {"state_bytes": 1e8, "fetch_s": 1.2},
    }
    entered = {"kind": "entered", "site": "c", "step": 9, "wall_s": 12.0, "values": {}}
    back = [step("c", 9, 11.9, 0.1), step("c", 10, 12.8, 3.0), step("c", 11, 13.8, 1.0)]
    made = Recovery(kind="return", site="c", step_s=1.0)
    found = return_of(made, [*a, FAULT, entry, entered, *back], ["a"])
    assert found.away_s == pytest.approx(7.3)
    assert (found.beside_s, found.longest_s, found.stalled_s) == pytest.approx((1.1, 1.1, 2.0))
    assert (found.state_bytes, found.fetch_s) == (1e8, 1.2)
    with pytest.raises(MeasurementError, match="site c has not come back"):
        return_of(made, [*a, FAULT, *back], ["a"])


def test_steps_left_out_or_done_twice_are_lost() -> None:
    a = records("a", [1.0] * 12)
    twice = [*a, FAULT, step("a", 7, 7.5, 0.5)]
    assert recovery_of(twice, ["a"], 0.0)[2] == 1
    left_out = [each for each in (*a, FAULT) if each.get("step") != 8]
    assert recovery_of(left_out, ["a"], 0.0)[2] == 1


def test_a_run_without_fault_or_with_too_few_steps_measures_nothing() -> None:
    with pytest.raises(MeasurementError, match="was not played"):
        recovery_of(records("a", [1.0] * 12), ["a"], 0.0)
    with pytest.raises(MeasurementError, match="site a made 4 steps before the fault and 1 after"):
        recovery_of([*records("a", [1.0] * 6), FAULT], ["a"], 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_fault_script(kind: str) -> None:
    pair = load_pair(JOB, ())
    script = load_faults(
        fault_script(kind, "c", ["a", "b"], 8.0, 20.0), "faults.yaml", pair.topology
    )
    assert len(script.faults) == 1


def test_each_kind_has_a_run_and_one_that_fails_stops_no_other(tmp_path: Path) -> None:
    def launch(pair: Pair, home: Path, run_id: str, *, faults: Sequence[str] = ()) -> Ended:
        folder = home / RUNS / run_id
        folder.mkdir(parents=True)
        made = [*records("a", [1.0] * 12), *records("b", [1.0] * 12), FAULT]
        (folder / METRICS).write_text("".join(strict_json(each) + "\n" for each in made))
        failed = Failed(code="RANK_KILLED", message="gone") if "rank" in faults[1] else None
        return Ended("relay", failed)

    told, ids = Told(), iter(("run0", "run1"))
    source = Source(name="", path="")
    question = Question(site="c", at_s=1.0, outage_s=2.0, detect_within_s=15.0)
    runs = RecoveryRuns(
        folder=tmp_path,
        bench=RecoveryBench(name="x", job=source, topology=source, question=question, settings=()),
        pair=load_pair(JOB, ()),
        kinds=("rank", "agent"),
        launch=launch,
        watch=told,
        new_run_id=lambda: next(ids),
    )
    runs.run()
    rank, agent = runs.bench.settings
    assert told.ends == [rank.failed, "stalled for 0s"]
    assert list(runs.failed) == ["run0"]
    assert rank.failed is not None
    assert rank.failed.code == "RANK_KILLED"
    made = Recovery(kind="agent", site="c", run_id="run1", emulator="relay")
    assert agent == dataclasses.replace(made, step_s=1.0, stalled_s=0.0, lost_steps=0)
