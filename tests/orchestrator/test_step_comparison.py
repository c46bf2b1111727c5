"""Which step ends in which round is the same at all sites, or the run fails and names both."""

import random

import pytest

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.run_events import RunState
from isthmus.orchestrator.core.step_comparison import WINDOW_STEPS, StepComparison, StepEnd
from tests.fakes.run_worlds import World


def took(site: str, step: int, round_: int, rank: int = 0) -> run_events.StepEnded:
    return run_events.StepEnded(site, rank, step, round_)


def test_unlike_steps_fail_the_run_and_name_both_sites_ranks_step_and_rounds() -> None:
    world = World(2)
    world.activate()
    world.tell(took("a", 4, 3), took("b", 4, 3), took("a", 5, 4), took("b", 5, 5, rank=1))
    world.wait(10.0)
    world.tell(*(run_events.SiteEnded(site, False) for site in "ab"))
    failure = world.finish.failure
    assert world.finish.state is RunState.FAILED
    assert world.finish.reason_code == "STEPS_DIFFER"
    assert failure is not None
    assert (failure.site, failure.rank) == ("", -1), "nobody is blamed"
    for said in ("step 5", "site a (rank 0)", "round 4", "site b (rank 1)", "round 5"):
        assert said in failure.message
    assert "Site b has taken fewer steps" in failure.message


def test_unlike_steps_are_named_before_unlike_parameters() -> None:
    """Parameters that differ follow from it, and their hint would lead astray."""
    world = World(2)
    world.activate()
    for site, round_ in (("a", 4), ("b", 5)):
        world.tell(run_events.DigestReported(site, 0, 5, round_, (round_,), ("w",), round_))
    world.wait(10.0)
    world.tell(*(run_events.SiteEnded(site, False) for site in "ab"))
    assert world.finish.reason_code == "STEPS_DIFFER"


@pytest.mark.parametrize("seed", range(20))
def test_reports_in_any_order_twice_and_late_raise_no_alarm(seed: int) -> None:
    """Accumulation over three rounds, a step that crossed nothing, and sites that fall behind."""
    ends = [
        StepEnd(site, rank, step, 3 * step - 1 + (step > 40))
        for step in range(1, 100)
        for site in "abc"
        for rank in range(2)
    ]
    told = ends + random.Random(seed).sample(ends, 100)
    random.Random(seed).shuffle(told)
    comparison = StepComparison()
    assert [each for each in told if comparison.report(each)] == [], f"{seed=}"


def test_who_follows_is_not_compared_and_who_was_dropped_is_no_measure() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.activate()
    world.tell(took("c", 7, 9), run_events.GoOnWithout("c", "lost"))
    world.tell(took("a", 7, 6), took("b", 7, 6), took("c", 8, 12))
    assert world.machine.is_going_on


def test_a_site_that_has_come_back_is_compared_again() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.activate()
    world.tell(run_events.StateOffered("a"))
    world.tell(run_events.SiteEnded("c", False), run_events.GoOnWithout("c", "lost"))
    world.tell(run_events.SiteJoined("c", "host"))
    world.wait(60.0)
    assert world.member("c").is_returning
    world.tell(took("a", 7, 6), run_events.SiteRejoined("c", 7), took("c", 7, 6))
    assert world.machine.is_going_on
    world.tell(took("a", 8, 7), took("c", 8, 8))
    assert not world.machine.is_going_on


def test_a_step_without_a_round_says_nothing_of_it() -> None:
    world = World(2)
    world.activate()
    for site, round_ in (("a", -1), ("b", 5)):
        world.tell(run_events.DigestReported(site, 0, 5, 1, (1,), ("w",), round_))
    assert world.machine.is_going_on


def test_memory_is_bounded_and_what_was_forgotten_is_not_compared() -> None:
    comparison = StepComparison()
    for step in range(1, 10 * WINDOW_STEPS):
        assert comparison.report(StepEnd("a", 0, step, step - 1)) is None
    assert len(comparison._known) == WINDOW_STEPS
    assert comparison.report(StepEnd("b", 0, 1, 77)) is None
    assert len(comparison._known) == WINDOW_STEPS
    last = 10 * WINDOW_STEPS - 1
    assert comparison.report(StepEnd("b", 0, last, last)) is not None
