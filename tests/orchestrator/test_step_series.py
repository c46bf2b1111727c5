"""Points over steps: a bounded number, and nothing of minimum, maximum and mean is lost."""

from __future__ import annotations

import math
import random

import pytest

from isthmus.orchestrator.evidence.record.step_series import StepSeries


@pytest.mark.parametrize("num_steps", [1, 7, 600, 601, 5000])
def test_points_are_few_and_their_figures_those_of_all_steps(num_steps: int) -> None:
    chance = random.Random(num_steps)
    values = [chance.uniform(-3, 9) for _ in range(num_steps)]
    series = StepSeries(100)
    for step, value in enumerate(values, 1):
        series.add(step, 10.0 * step, {"loss": value})
    found = series.to_json(("loss",))
    assert len(found["step"]) <= 100
    assert found["step"] == sorted(found["step"])
    assert (found["step"][-1], found["wall_s"][-1]) == (num_steps, 10.0 * num_steps)
    assert sum(found["steps"]) == sum(found["records"]) == num_steps
    assert min(found["loss"]["min"]) == min(values)
    assert max(found["loss"]["max"]) == max(values)
    total = sum(
        mean * num for mean, num in zip(found["loss"]["mean"], found["records"], strict=True)
    )
    assert total == pytest.approx(sum(values))


def test_the_newest_steps_stay_apart() -> None:
    series = StepSeries(100, num_newest=10)
    for step in range(1, 1001):
        series.add(step, 0.0, {"loss": float(step)})
    found = series.to_json(("loss",), newest_only=True)
    assert found["step"] == list(range(991, 1001))
    assert found["loss"]["mean"] == [float(step) for step in range(991, 1001)]


def test_what_is_not_finite_or_not_there_is_left_out() -> None:
    series = StepSeries()
    series.add(1, 0.0, {"loss": math.nan, "step_s": 2.0})
    series.add(2, 0.0, {"loss": 4.0})
    found = series.to_json(("loss", "step_s", "wait_s"))
    assert found["loss"]["mean"] == [None, 4.0]
    assert found["step_s"]["max"] == [2.0, None]
    assert "wait_s" not in found


def test_a_part_is_shown_in_more_detail_than_the_whole() -> None:
    series = StepSeries(10_000, names=("loss",))
    for step in range(1, 8001):
        series.add(step, 0.0, {"loss": float(step), "other": 1.0})
    whole = series.to_json(("loss", "other"))
    assert (whole["width"], len(whole["step"])) == (16, 501)
    assert whole["loss"]["max"][-1] == 8000.0
    assert "other" not in whole
    part = series.to_json(("loss",), 2001, 2300)
    assert part["step"] == list(range(2001, 2301))
    assert part["loss"]["mean"][0] == 2001.0
    assert series.to_json(("loss",), 9000)["step"] == []
    assert series.to_json(("loss",), 30, 20)["step"] == []


@pytest.mark.parametrize("seed", range(3))
def test_the_order_in_which_records_come_changes_nothing(seed: int) -> None:
    steps = [step for step in range(1, 3001) for _ in range(2)]
    ordered, shuffled = StepSeries(100), StepSeries(100)
    for step in steps:
        ordered.add(step, float(step), {"loss": step % 7})
    random.Random(seed).shuffle(steps)
    for step in steps:
        shuffled.add(step, float(step), {"loss": step % 7})
    assert ordered.to_json(("loss",)) == shuffled.to_json(("loss",)), f"{seed=}"
