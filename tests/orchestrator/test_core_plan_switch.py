"""Two phases: in every order of answers, refusals, losses, deadlines, sites hear one outcome."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from orchestrator.core.plan_switch import Outcome, PlanSwitch, ReductionPrepared

SITES = ("a", "b", "c")
HASH = "f" * 64
GOOD = ReductionPrepared(
    site="a", epoch=3, is_accepted=True, plan_hash=HASH, round=7, is_late=False, why=""
)
LATE = dataclasses.replace(GOOD, is_accepted=False, is_late=True, why="round 9 has begun")
UNABLE = dataclasses.replace(GOOD, is_accepted=False, why="no links with c")
OTHER_HASH = dataclasses.replace(GOOD, plan_hash="0" * 64)
STALE = dataclasses.replace(LATE, epoch=2)


def a_switch() -> PlanSwitch:
    return PlanSwitch(SITES, 3, HASH, deadline_s=10.0)


@pytest.mark.parametrize("order", list(itertools.permutations(SITES)))
def test_all_accept_in_any_order(order: tuple[str, ...]) -> None:
    switch = a_switch()
    for site in order:
        assert switch.outcome is None
        switch.answer(dataclasses.replace(GOOD, site=site))
    assert switch.outcome == Outcome(is_committed=True)
    switch.answer(dataclasses.replace(UNABLE, site="a"))
    switch.gone("b")
    switch.tick(99.0)
    assert switch.outcome.is_committed, "decided is decided"


@pytest.mark.parametrize("order", list(itertools.permutations(SITES)))
@pytest.mark.parametrize("bad", [LATE, UNABLE, OTHER_HASH])
@pytest.mark.parametrize("which", range(3))
def test_one_refusal_is_enough(order: tuple[str, ...], bad: ReductionPrepared, which: int) -> None:
    switch = a_switch()
    for index, site in enumerate(order):
        switch.answer(dataclasses.replace(bad if index == which else GOOD, site=site))
    assert switch.outcome is not None
    assert not switch.outcome.is_committed
    assert switch.outcome.site == order[which]
    assert switch.outcome.may_try_again == bad.is_late


def test_a_deadline_and_a_loss() -> None:
    switch = a_switch()
    switch.answer(GOOD)
    switch.tick(9.9)
    assert switch.outcome is None
    switch.tick(10.0)
    assert switch.outcome == Outcome(
        is_committed=False,
        site="b",
        why="it did not answer in time",
        may_try_again=True,
        is_silent=True,
    )
    lost = a_switch()
    lost.gone("c")
    assert lost.outcome is not None
    assert (lost.outcome.site, lost.outcome.may_try_again) == ("c", False)


@pytest.mark.parametrize("seed", range(50))
def test_the_first_outcome_stays_whatever_comes(seed: int) -> None:
    chance = random.Random(seed)
    switch = a_switch()
    answered: set[str] = set()
    was: Outcome | None = None
    for _ in range(40):
        kind = chance.randrange(6)
        site = chance.choice(SITES)
        if kind < 3:
            answer = chance.choice((GOOD, GOOD, GOOD, GOOD, LATE, UNABLE, OTHER_HASH, STALE))
            switch.answer(dataclasses.replace(answer, site=site))
            if answer is GOOD:
                answered.add(site)
        elif kind == 3 and chance.random() < 0.1:
            switch.gone(site)
        else:
            switch.tick(chance.uniform(0, 10.5))
        if was is not None:
            assert switch.outcome == was, f"{seed=}"
        elif switch.outcome is not None:
            was = switch.outcome
            if was.is_committed:
                assert answered == set(SITES), f"{seed=}"
