"""Of many reports of a gradient that is not finite, the first is noted, and no consequence."""

from __future__ import annotations

import pytest

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.non_finite_watch import MAX_NOTES, NonFiniteWatch, note_of
from tests.fakes.run_worlds import COLLECT_S, World

WAIT_S = 2.0


def found(site: str, step: int, rank: int = 0, tensor: str = "w") -> run_events.NonFiniteReported:
    return run_events.NonFiniteReported(site, rank, step, tensor, f"in step {step} NaN")


def average(site: str, step: int) -> run_events.NonFiniteReported:
    return found(site, step, rank=-1)


def test_each_sites_first_report_of_the_first_step_is_noted() -> None:
    watch = NonFiniteWatch(WAIT_S)
    assert watch.report(found("b", 5, rank=3), 0.0) is not None
    assert watch.report(found("b", 5, rank=4), 0.0) is None
    assert watch.report(found("a", 5), 0.0) is not None
    for step in (6, 7):  # the parameters have it now
        for site in "abc":
            assert watch.report(found(site, step), 0.0) is None
    assert watch.explained(99.0) is None


def test_the_average_accuses_nobody_where_a_rank_knows_more() -> None:
    watch = NonFiniteWatch(WAIT_S)
    assert watch.report(average("a", 5), 10.0) is None
    assert watch.explained(11.0) is None
    noted = watch.report(found("b", 5, rank=1), 11.5)
    assert noted is not None
    assert (noted.site, noted.rank) == ("b", 1)
    assert watch.explained(99.0) is None
    assert watch.report(average("c", 5), 99.0) is None
    assert watch.report(found("a", 6), 99.0) is None, "a consequence"


def test_an_average_that_nobody_explains_is_noted_of_no_site() -> None:
    watch = NonFiniteWatch(WAIT_S)
    for site in "ab":
        assert watch.report(average(site, 5), 10.0) is None
    noted = watch.explained(12.0)
    assert noted is not None
    assert "site" not in note_of(noted)
    assert watch.explained(99.0) is None


def test_a_scaler_that_skips_its_step_reports_the_same_step_again() -> None:
    watch = NonFiniteWatch(WAIT_S)
    assert watch.report(found("a", 1), 0.0) is not None
    assert watch.report(found("a", 1), 0.0) is None
    assert watch.report(found("a", 2000), 0.0) is not None, "steps were finite again"


def test_notes_are_few() -> None:
    watch = NonFiniteWatch(WAIT_S)
    noted = [watch.report(found("a", step), 0.0) for step in range(1, 200, 2)]
    assert sum(each is not None for each in noted) == MAX_NOTES


@pytest.mark.parametrize("rank", [1, -1])
def test_a_run_that_carries_it_notes_it_at_once_and_goes_on(rank: int) -> None:
    world = World(2)
    world.activate()
    world.tell(
        run_events.NonFiniteReported("b", rank, 7, "layers.3.weight", "in step 7 it was NaN")
    )
    world.wait(COLLECT_S)
    (event,) = [a for a in world.actions if getattr(a, "kind", "") == "gradient.non_finite"]
    assert isinstance(event, run_events.RecordEvent)
    assert (event.site, event.detail["step"], event.detail["tensor"]) == (
        "b" if rank == 1 else "", 7, "layers.3.weight",
    )  # fmt: skip
    place = "site b, rank 1: " if rank == 1 else ""
    assert event.detail["note"] == (
        f"NON_FINITE: {place}in step 7 it was NaN; `exchange.non_finite: carry` lets it cross"
    )
    assert world.machine.is_going_on
