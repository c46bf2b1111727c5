"""The machine that plans a running job again.

When it does, what it asks of sites, that it never flaps, and that sites hear one outcome.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

from orchestrator.core import replan_machine, run_events
from orchestrator.core.link_watch import BELIEVED
from orchestrator.core.replan_machine import (
    ATTEMPTS,
    ROUND_MAX,
    LinkReported,
    Outcome,
    PlanAgain,
    PlanningFailed,
    PlanSwitch,
    ReductionPrepared,
    RelaunchPlanned,
    ReplanMachine,
    RoundClock,
    SendDecideReduction,
    SendPrepareReduction,
    SwitchPlanned,
)
from orchestrator.core.run_events import RecordEvent
from protos import metrics
from tests.fakes.run_specs import spec_of
from tests.fakes.worlds import topology
from topology.job import Job
from topology.plan_wishes import Replan
from topology.run_spec import CodedPlan
from topology.trees.trees import ReductionPlan, star

T = TypeVar("T")
SITES = ("a", "b", "c")
PLANNED = 12.5e6
DETECT_S = 5.0
SETTINGS = Replan(drift=0.2, lasting_s=10.0)
SPEC = spec_of(Job(name="j", topology=""), topology(3), SETTINGS)
STAR = CodedPlan(ReductionPlan(3, (star(3, 2),), ""), ("fp32",))
BETTER = SwitchPlanned(form="star at c", reduction=STAR, before_s=2.0, after_s=0.5)


class World:
    """A machine, its clock, and rounds that go on: one in half a second."""

    def __init__(self) -> None:
        self.machine = ReplanMachine(SPEC)
        self.now_s = 100.0
        self.round = 0
        self.actions: list[replan_machine.Action] = []
        self._totals = [0.0, 0.0]

    def tell(self, *told: replan_machine.Event) -> list[replan_machine.Action]:
        new = [action for event in told for action in self.machine.handle(event, self.now_s)]
        self.actions += new
        return new

    def go(self, seconds: float, bytes_per_s: float = PLANNED) -> list[replan_machine.Action]:
        new: list[replan_machine.Action] = []
        for _ in range(int(2 * seconds)):
            self.now_s += 0.5
            self.round += 1
            self._totals[0] += 0.1 * bytes_per_s
            self._totals[1] += 0.1
            values = {metrics.LIMITED_BYTES: self._totals[0], metrics.LIMITED_S: self._totals[1]}
            new += self.tell(LinkReported("a", "b", "0", self.round, values), run_events.Ticked())
        return new

    def leave(self, seconds: float) -> list[replan_machine.Action]:
        """No tree uses the link: rounds go on, and it is not measured."""
        new: list[replan_machine.Action] = []
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.round += 2
            new += self.tell(LinkReported("c", "b", "0", self.round, {}), run_events.Ticked())
        return new

    def switch(self) -> None:
        """All sites go over to the plan that is answered."""
        for each in of(self.tell(BETTER), SendPrepareReduction):
            self.tell(accepted(each.site, each))

    def drift(self) -> PlanAgain:
        self.go(20)
        (asked,) = of(self.go(30, PLANNED / 10), PlanAgain)
        return asked

    def propose(self) -> SendPrepareReduction:
        self.drift()
        asked = of(self.tell(BETTER), SendPrepareReduction)
        assert [each.site for each in asked] == list(SITES)
        assert len({(each.epoch, each.from_round) for each in asked}) == 1
        return asked[0]

    def kinds(self) -> list[str]:
        return [each.kind for each in self.actions if isinstance(each, RecordEvent)]


def of(actions: Sequence[object], kind: type[T]) -> list[T]:
    return [each for each in actions if isinstance(each, kind)]


def rates_of(asked: PlanAgain) -> dict[tuple[str, str], float | None]:
    return {pair: figures.bytes_per_s for pair, figures in asked.figures.items()}


def accepted(site: str, asked: SendPrepareReduction, **changes: object) -> ReductionPrepared:
    fields = {
        "site": site,
        "epoch": asked.epoch,
        "is_accepted": True,
        "plan_hash": STAR.hash,
        "round": 1,
        "is_late": False,
        "why": "",
    }
    return ReductionPrepared(**{**fields, **changes})  # type: ignore[arg-type]


def test_lasting_drift_is_planned_for_once() -> None:
    world = World()
    asked = world.drift()
    assert asked.reduction is SPEC.reduction
    assert rates_of(asked) == {("a", "b"): pytest.approx(PLANNED / 10)}
    assert world.kinds() == ["link.drifted"]
    assert world.go(500, PLANNED / 10) == [], "it waits for the plan"


def test_all_sites_switch_at_a_round_that_none_has_begun() -> None:
    world = World()
    asked = world.propose()
    assert asked.from_round > world.round + 2
    assert asked.reduction is STAR
    for site in "ab":
        assert world.tell(accepted(site, asked)) == []
    decided = world.tell(accepted("c", asked))
    assert isinstance(decided[0], RecordEvent), "it is written down before anybody is told"
    assert decided[0].kind == "run.replanned"
    assert decided[0].detail["from_round"] == asked.from_round
    assert (decided[0].detail["before_s"], decided[0].detail["after_s"]) == (2.0, 0.5)
    assert decided[1:] == [SendDecideReduction(site, asked.epoch, commit=True) for site in SITES]
    assert "10Mbit/s" in str(decided[0].detail["note"])
    (begun,) = world.tell(replan_machine.ReductionBegun("b", asked.epoch, asked.from_round))
    assert begun == RecordEvent(
        "site.replanned", "b", {"epoch": asked.epoch, "round": asked.from_round}
    )
    assert world.go(500, PLANNED / 10) == [], "the plan counts on the narrow link now"
    again = of(world.go(50), PlanAgain)
    assert [each.reduction for each in again] == [STAR]
    assert rates_of(again[0]) == {("a", "b"): pytest.approx(PLANNED)}


def test_a_link_that_was_left_is_tried_again_ever_more_seldom() -> None:
    world = World()
    world.drift()
    world.switch()
    waits_s = []
    for _ in range(4):
        left_s = world.now_s
        while not (asked := of(world.leave(1), PlanAgain)):
            assert world.now_s < left_s + 100 * SETTINGS.lasting_s
        waits_s.append(world.now_s - left_s)
        assert rates_of(asked[0]) == {}, "as described"
        world.switch()  # to trees that use it
        (again,) = of(world.go(3 * SETTINGS.lasting_s, PLANNED / 10), PlanAgain)
        assert rates_of(again) == {("a", "b"): pytest.approx(PLANNED / 10)}
        world.switch()  # and off it again
    first_s = BELIEVED * SETTINGS.lasting_s
    assert waits_s == [
        pytest.approx(first_s * 2**tried, abs=2 * SETTINGS.lasting_s) for tried in range(4)
    ]
    forgotten = [
        each
        for each in world.actions
        if isinstance(each, RecordEvent) and each.kind == "link.forgotten"
    ]
    assert len(forgotten) == 4
    replanned = [
        str(each.detail["note"])
        for each in world.actions
        if isinstance(each, RecordEvent) and each.kind == "run.replanned"
    ]
    assert "has not been measured again for" in replanned[1]
    assert "10Mbit/s" in replanned[2]


def test_a_plan_that_saves_little_is_no_reason_to_switch() -> None:
    world = World()
    world.drift()
    little = SwitchPlanned(form="x", reduction=STAR, before_s=1.0, after_s=0.96)
    (kept,) = world.tell(little)
    assert isinstance(kept, RecordEvent)
    assert kept.kind == "plan.kept"
    assert "4.0%" in str(kept.detail["why"])
    assert world.go(300, PLANNED / 10) == []


def test_a_link_that_goes_up_and_down_is_not_followed() -> None:
    world = World()
    plans = 0
    for _ in range(20):
        for rate in (PLANNED, PLANNED / 10):
            if of(world.go(30, rate), PlanAgain):
                plans += 1
                asked = of(world.tell(BETTER), SendPrepareReduction)
                world.tell(*(accepted(each.site, each) for each in asked))
    assert 1 <= plans <= 20 * 60 / SETTINGS.gap_s + 1
    assert world.kinds().count("run.replanned") == plans


def test_plans_that_a_site_cannot_take_are_given_up_and_said_so() -> None:
    world = World()
    asked = world.propose()
    why = "ranks of site b encode on their devices"
    told = world.tell(accepted("b", asked, is_accepted=False, why=why))
    assert [each.commit for each in of(told, SendDecideReduction)] == [False] * 3
    aborted, kept = of(told, RecordEvent)
    assert (aborted.kind, aborted.site, kept.kind) == ("plan.aborted", "b", "plan.kept")
    assert kept.detail["why"] == f"not all sites could switch: site b: {why}"


def test_a_late_site_means_nobody_and_a_later_round() -> None:
    world = World()
    asked = world.propose()
    world.tell(accepted("a", asked))
    told = world.tell(accepted("b", asked, is_accepted=False, is_late=True, why="late"))
    assert of(told, SendDecideReduction) == [
        SendDecideReduction(site, asked.epoch, commit=False) for site in SITES
    ]
    assert world.tell(accepted("c", asked)) == []
    (again, *_) = of(world.go(2, PLANNED / 10), SendPrepareReduction)
    assert again.epoch == asked.epoch + 1
    ahead = asked.from_round - 2
    assert again.from_round - world.round > (ahead - world.round) / 2


def test_it_gives_up_after_some_attempts_and_rests() -> None:
    world = World()
    world.propose()
    decided = of(world.go(SETTINGS.gap_s, PLANNED / 10), SendDecideReduction)
    assert len(decided) == ATTEMPTS * len(SITES), "nobody ever answered"
    assert not any(each.commit for each in decided)
    assert "plan.kept" in world.kinds()
    assert world.kinds().count("plan.aborted") == ATTEMPTS


def test_where_ranks_encode_another_plan_is_looked_for_that_leaves_codecs_alone() -> None:
    world = World()
    assert not world.drift().keeps_codecs
    again: list[PlanAgain] = []
    for _ in range(2):
        (asked, *_) = of(world.tell(BETTER), SendPrepareReduction)
        refusal = accepted("b", asked, is_accepted=False, why="encoded", must_keep_codecs=True)
        told = world.tell(refusal)
        assert not any(each.commit for each in of(told, SendDecideReduction))
        again = of(told, PlanAgain)
        if asked.epoch == 1:
            (planning,) = again
            assert planning.keeps_codecs
            assert planning.figures
    assert not again, "it is looked for once"
    assert world.kinds()[-1] == "plan.kept"
    (later,) = of(world.go(SETTINGS.gap_s, PLANNED / 100), PlanAgain)
    assert later.keeps_codecs, "ranks encode until the end"


def test_a_site_that_never_answers_holds_ranks_up_once_and_for_a_lease_at_most() -> None:
    """Ranks go on as the gateways let them: none begins a proposed round before its outcome."""
    world = World()
    asked: SendPrepareReduction | None = world.propose()
    held_s = 0.0
    for _ in range(int(2 * SETTINGS.gap_s)):
        world.now_s += 0.5
        if asked is not None and world.round + 1 >= asked.from_round:
            held_s += 0.5
        else:
            world.round += 1
        told = world.tell(LinkReported("a", "b", "0", world.round, {}), run_events.Ticked())
        if of(told, SendDecideReduction):
            asked = None
        asked = next(iter(of(told, SendPrepareReduction)), asked)
    assert world.kinds().count("plan.aborted") == ATTEMPTS
    assert 0 < held_s <= DETECT_S


@pytest.mark.parametrize(
    "event",
    [run_events.SiteEnded("b", succeeded=True), run_events.SiteLost("b", "gone")],
)
def test_a_site_that_goes_away_ends_a_switch(event: replan_machine.Event) -> None:
    world = World()
    asked = world.propose()
    told = of(world.tell(event), SendDecideReduction)
    assert told == [SendDecideReduction(site, asked.epoch, commit=False) for site in SITES]


def test_people_are_told_what_only_a_relaunch_would_bring() -> None:
    world = World()
    asked = world.propose()
    assert world.tell(RelaunchPlanned(0.46)) == []
    for site in SITES:
        world.tell(accepted(site, asked))
    (told,) = world.tell(RelaunchPlanned(0.4))
    assert isinstance(told, RecordEvent)
    assert told.detail["note"] == (
        "relaunching with a new plan would give 400ms a step instead of 500ms"
    )


@pytest.mark.parametrize("seed", range(30))
def test_in_every_order_sites_hear_one_outcome_of_each_proposal(seed: int) -> None:
    chance = random.Random(seed)
    world = World()
    world.go(20)
    for _ in range(300):
        world.go(1, chance.choice((PLANNED, PLANNED / 10, PLANNED / 10)))
        asked = of(world.actions, SendPrepareReduction)
        choices: list[replan_machine.Event] = [BETTER, PlanningFailed("no"), RelaunchPlanned(0.1)]
        for each in asked[-4:]:
            answer = accepted(each.site, each)
            if chance.random() < 0.2:
                answer = accepted(each.site, each, is_accepted=False, is_late=True, why="late")
            choices += [answer] * 4
        world.tell(*chance.sample(choices, min(3, len(choices))))
    outcomes: dict[int, set[bool]] = {}
    for decided in of(world.actions, SendDecideReduction):
        outcomes.setdefault(decided.epoch, set()).add(decided.commit)
    assert all(len(each) == 1 for each in outcomes.values()), f"{seed=}"
    switched = [
        int(str(each.detail["from_round"]))
        for each in of(world.actions, RecordEvent)
        if each.kind == "run.replanned"
    ]
    assert switched == sorted(set(switched)), f"{seed=}"


HASH = "f" * 64
GOOD = ReductionPrepared(
    site="a", epoch=3, is_accepted=True, plan_hash=HASH, round=7, is_late=False, why=""
)
LATE = dataclasses.replace(GOOD, is_accepted=False, is_late=True, why="round 9 has begun")
UNABLE = dataclasses.replace(GOOD, is_accepted=False, why="no links with c")
OTHER_HASH = dataclasses.replace(GOOD, plan_hash="0" * 64)
STALE = dataclasses.replace(LATE, epoch=2)


def a_switch() -> PlanSwitch:
    return PlanSwitch(set(SITES), 3, HASH, deadline_s=10.0)


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


def test_a_round_that_nobody_has_begun() -> None:
    clock = RoundClock()
    assert clock.after(5.0) == 1
    for tenth in range(100):
        clock.note(tenth // 2, tenth / 10)  # five a second
        clock.note(max(0, tenth // 2 - 1), tenth / 10)
    assert clock.newest == 49
    assert clock.per_s == pytest.approx(5.0, rel=0.05)
    assert clock.after(2.0) == pytest.approx(49 + 2 + 10, abs=1)


@pytest.mark.parametrize("round_", [ROUND_MAX, (1 << 63) - 1])
def test_a_round_that_no_run_gets_to_can_still_be_followed_by_one_that_has_a_name(
    round_: int,
) -> None:
    clock = RoundClock()
    clock.note(1, 0.0)
    clock.note(round_, 1e-6)
    assert clock.newest == (round_ if round_ <= ROUND_MAX else 1)
    assert clock.after(1e3) < 1 << 63
