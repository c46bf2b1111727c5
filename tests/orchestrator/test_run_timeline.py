"""A run over its time: no amount is lost, stalls are found with their causes, sites have phases."""

from __future__ import annotations

import math
import random

import pytest

from isthmus.orchestrator.core.epoch_record import detail_of
from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent
from isthmus.orchestrator.evidence.record.run_timeline import (
    Phase,
    SiteLanes,
    Stall,
    StepEnd,
    StepGaps,
    pace,
)
from isthmus.topology.spec.epoch import Epoch
from tests.fakes.run_worlds import GATHER


def ends(*times: float) -> list[StepEnd]:
    return [StepEnd(at_s, step, 10.0) for step, at_s in enumerate(times, 1)]


@pytest.mark.parametrize("seed", range(5))
def test_the_pace_holds_all_that_was_done(seed: int) -> None:
    chance = random.Random(seed)
    at_s, steps = 3.0, []
    for step in range(1, chance.randint(3, 2000)):
        at_s += chance.choice([0.0, 0.1, 0.1, 0.2, 7.0])
        steps.append(StepEnd(at_s, step, float(chance.randint(0, 50))))
    points = pace(steps)
    if len(points) < 2:
        return
    width_s = points[1][0] - points[0][0]
    done = math.fsum(each.amount for each in steps[1:])
    assert math.fsum(rate for _, rate in points) * width_s == pytest.approx(done), f"{seed=}"


def test_the_pace_is_low_where_a_run_stands_still() -> None:
    times = [*range(1, 41), *range(80, 120)]
    points = pace(ends(*map(float, times)))
    assert max(rate for _, rate in points) == pytest.approx(10.0)
    assert min(rate for at_s, rate in points if 45 < at_s < 75) < 1.0
    assert pace(ends()) == pace(ends(1.0)) == pace(ends(1.0, 1.0)) == []


def test_stalls_have_causes() -> None:
    steps = ends(*[0.1 * at for at in range(50)], 20.0, 20.1, 20.2, 28.2)
    events = [(6.0, "site.lost", "a"), (7.0, "site.lost", "b"), (21.0, "run.replanned", "")]
    first, second = StepGaps(steps).stalls(events)
    assert first == Stall(steps[49].at_s, 20.0, 51, "a and 1 more were lost")
    assert second.length_s == pytest.approx(8.0)
    assert second.cause == "the plan changed"


def test_an_evaluation_is_no_stall() -> None:
    steps = ends(*[0.1 * at for at in range(50)], 20.0)
    assert StepGaps(steps).stalls([])
    assert not StepGaps(steps).stalls([], expected=[51])
    assert StepGaps(steps).stalls([(10.0, "rank.stalled", "a")], expected=[51])
    assert not StepGaps(ends(1.0)).stalls([])
    assert not StepGaps(ends(1.0, 2.0, 3.0, 5.0, 9.0, 11.0)).stalls([])


def test_what_sites_do() -> None:
    def event(wall_s: float, kind: str, site: str = "", **detail: object) -> RecordedEvent:
        return RecordedEvent(
            sequence=0, wall_s=wall_s, run_id="r", generation=1, kind=kind, site=site, detail=detail
        )

    lost = detail_of(Epoch(1, ("a",), GATHER, 2), "b is lost", lost={"b": "gone"})
    follows = detail_of(Epoch(2, ("a", "b"), GATHER, 9, follows=("b",)), "b follows")
    events = [
        event(0.0, "run.submitted", name="n", folder="f", sites=["a", "b"], links=[]),
        *(event(1.0, "site.joined", site, host="h") for site in "ab"),
        *(event(8.0, "site.running", site) for site in "ab"),
        event(10.0, "run.active"),
        event(30.0, "epoch.begun", "", **lost),
        event(30.0, "site.lost", "b", message="b is lost"),
        event(50.0, "site.returning", "b"),
        event(60.0, "epoch.begun", "", **follows),
        event(70.0, "site.ended", "a", succeeded=True),
        event(70.0, "run.ended", state="SUCCEEDED", reason_code="", reason=""),
    ]
    found, view = SiteLanes(["a", "b"]), JournaledRun("r")
    for each in events:
        view.apply(each)
        found.take(each, view)
    a, b = found.until(60.0)
    assert a.phases == (Phase(0.0, 60.0, "training"),)
    assert b.phases == (
        Phase(0.0, 20.0, "training"),
        Phase(20.0, 40.0, "out"),
        Phase(40.0, 50.0, "starting"),
        Phase(50.0, 60.0, "catching up"),
    )
