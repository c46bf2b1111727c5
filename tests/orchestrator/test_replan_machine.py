"""The machine that plans a running job again.

When it does, what it wants, what it does when sites cannot, and that it never flaps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from isthmus.orchestrator.core import replan_machine, run_events
from isthmus.orchestrator.core.link_watch import BELIEVED
from isthmus.orchestrator.core.replan_machine import (
    ATTEMPTS,
    LinkReported,
    PlanAgain,
    RelaunchPlanned,
    ReplanMachine,
    SiteStepped,
    SwitchPlanned,
)
from isthmus.orchestrator.core.run_events import EpochBegun, RecordEvent, TreesEnded, TreesWanted
from isthmus.protos import metrics
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from isthmus.topology.spec.run_spec import CodedPlan
from isthmus.topology.spec.shares import Shares, parts_of
from tests.fakes.run_specs import spec_of
from tests.fakes.worlds import topology

T = TypeVar("T")
SITES = ("a", "b", "c")
PLANNED = 12.5e6
SETTINGS = Replan(drift=0.2, lasting_s=10.0)
SPEC = spec_of(Job(name="j", topology=""), topology(3), SETTINGS)
STAR = CodedPlan(ReductionPlan(3, (star(3, 2),), ""), ("fp32",))
LEFT = CodedPlan(ReductionPlan(3, (), "", (0, 1)), ("fp32",))
BETTER = SwitchPlanned(form="star at c", reduction=STAR, before_s=2.0, after_s=0.5)


class World:
    """A machine, its clock, and epochs that begin."""

    def __init__(self) -> None:
        self.epoch = Epoch(0, SITES, SPEC.reduction, 0)
        self.machine = ReplanMachine(SPEC, self.epoch)
        self.now_s = 100.0
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
            self._totals[0] += 0.1 * bytes_per_s
            self._totals[1] += 0.1
            values = {metrics.LIMITED_BYTES: self._totals[0], metrics.LIMITED_S: self._totals[1]}
            new += self.tell(LinkReported("a", "b", "0", values), run_events.Ticked())
        return new

    def leave(self, seconds: float) -> list[replan_machine.Action]:
        """No tree uses the link, so it is not measured."""
        new: list[replan_machine.Action] = []
        for _ in range(int(seconds)):
            self.now_s += 1.0
            new += self.tell(LinkReported("c", "b", "0", {}), run_events.Ticked())
        return new

    def compute(self, seconds: float, *speeds: float) -> list[replan_machine.Action]:
        """All members take a step a second, at so many samples a second."""
        new: list[replan_machine.Action] = []
        for _ in range(int(seconds)):
            self.now_s += 1.0
            parts = parts_of(SPEC, self.epoch.members, self.epoch.shares)
            for name, part in zip(self.epoch.members, parts, strict=True):
                values = {
                    metrics.SITE_TOKENS: 10.0 * part,
                    metrics.SITE_SAMPLES: part,
                    metrics.COMPUTE_S: part / speeds[SITES.index(name)],
                }
                new += self.tell(SiteStepped(name, values))
            new += self.tell(run_events.Ticked())
        return new

    def switch(self) -> list[replan_machine.Action]:
        """All sites go over to the plan that is answered."""
        (wanted,) = of(self.tell(BETTER), TreesWanted)
        return self.begin(wanted)

    def begin(self, wanted: TreesWanted) -> list[replan_machine.Action]:
        """All sites go over to trees that are wanted."""
        number, from_round = self.epoch.number + 1, self.epoch.from_round + 10
        shares = Shares(number, wanted.parts) if wanted.parts else self.epoch.shares
        self.epoch = Epoch(number, wanted.members, wanted.reduction, from_round, (), shares)
        return self.tell(TreesEnded(self.epoch), EpochBegun(self.epoch, frozenset()))

    def lose(self, site: str) -> list[replan_machine.Action]:
        """The others go on without a site, by trees that were made at once."""
        members = tuple(name for name in self.epoch.members if name != site)
        number, from_round = self.epoch.number + 1, self.epoch.from_round + 10
        self.epoch = Epoch(number, members, LEFT, from_round, (), self.epoch.shares)
        return self.tell(EpochBegun(self.epoch, frozenset()))

    def refuse(self, wanted: TreesWanted, **why: object) -> list[replan_machine.Action]:
        """A site cannot have them."""
        fields: dict[str, Any] = {"site": "b", "why": "no link to c", **why}
        return self.tell(TreesEnded(None, **fields))

    def drift(self) -> PlanAgain:
        self.go(20)
        (asked,) = of(self.go(30, PLANNED / 10), PlanAgain)
        return asked

    def want(self) -> TreesWanted:
        self.drift()
        (wanted,) = of(self.tell(BETTER), TreesWanted)
        return wanted

    def kinds(self) -> list[str]:
        return [each.kind for each in self.actions if isinstance(each, RecordEvent)]


def of(actions: Sequence[object], kind: type[T]) -> list[T]:
    return [each for each in actions if isinstance(each, kind)]


def rates_of(asked: PlanAgain) -> dict[tuple[str, str], float | None]:
    return {pair: figures.bytes_per_s for pair, figures in asked.figures.items()}


NARROWER = dataclasses.replace(BETTER, other_codec="int8")
EXACT = SwitchPlanned(
    form="gather",
    reduction=STAR,
    before_s=1.0,
    after_s=1.02,
    other_codec="fp32",
    is_more_exact=True,
)


def test_a_codec_changes_at_once_and_back_ever_more_seldom() -> None:
    """A link that goes up and down all the time is followed three times in ten minutes."""
    world = World()
    world.go(20)
    moves: list[float] = []
    begun_s = world.now_s
    while world.now_s < begun_s + 600.0:
        is_narrow = int((world.now_s - begun_s) // 30.0) % 2 == 0
        asked = of(world.go(1, PLANNED / 10 if is_narrow else PLANNED), PlanAgain)
        for _ in asked:
            planned = NARROWER if len(moves) % 2 == 0 else EXACT
            (wanted,) = of(world.tell(planned), TreesWanted)
            (begun,) = world.begin(wanted)
            assert isinstance(begun, RecordEvent)
            assert begun.detail["codec"] == planned.other_codec
            assert f"as {planned.other_codec}" in str(begun.detail["note"])
            moves.append(world.now_s - begun_s)
    assert moves[0] <= 2 * SETTINGS.lasting_s
    assert len(moves) == 3, moves


def test_lasting_drift_is_planned_for_once() -> None:
    world = World()
    asked = world.drift()
    assert asked.epoch is world.epoch
    assert rates_of(asked) == {("a", "b"): pytest.approx(PLANNED / 10)}
    assert world.kinds() == ["link.drifted"]
    assert world.go(500, PLANNED / 10) == [], "it waits for the plan"


def test_trees_that_are_better_are_wanted_and_told_of_once_they_are_there() -> None:
    world = World()
    wanted = world.want()
    assert (wanted.members, wanted.reduction) == (SITES, STAR)
    assert "star at c: predicted 500ms a step instead of 2s" in wanted.why
    (begun,) = world.begin(wanted)
    assert isinstance(begun, RecordEvent)
    assert begun.kind == "run.replanned"
    assert (begun.detail["epoch"], begun.detail["from_round"]) == (1, 10)
    assert (begun.detail["before_s"], begun.detail["after_s"]) == (2.0, 0.5)
    assert "10Mbit/s" in str(begun.detail["note"])
    assert world.go(500, PLANNED / 10) == [], "the plan counts on the narrow link now"
    again = of(world.go(50), PlanAgain)
    assert [each.epoch for each in again] == [world.epoch]
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
                for wanted in of(world.tell(BETTER), TreesWanted):
                    world.begin(wanted)
    assert 1 <= plans <= 20 * 60 / SETTINGS.gap_s + 1
    assert world.kinds().count("run.replanned") == plans


def test_trees_that_a_site_cannot_have_are_planned_again_some_times() -> None:
    world = World()
    wanted = world.want()
    for attempt in range(1, ATTEMPTS + 1):
        (kept,) = world.refuse(wanted)
        assert isinstance(kept, RecordEvent)
        assert kept.kind == "plan.kept"
        assert kept.detail["why"] == "not all sites could switch: site b: no link to c"
        if attempt < ATTEMPTS:
            assert of(world.go(SETTINGS.lasting_s - 1, PLANNED / 10), PlanAgain) == []
            assert of(world.go(2, PLANNED / 10), PlanAgain)
            (wanted,) = of(world.tell(BETTER), TreesWanted)
    assert world.go(500, PLANNED / 10) == [], "until links change again"


def test_where_ranks_encode_another_plan_is_looked_for_that_leaves_codecs_alone() -> None:
    world = World()
    wanted = world.want()
    (planning,) = of(world.refuse(wanted, must_keep_codecs=True), PlanAgain)
    assert planning.keeps_codecs
    assert planning.figures
    (wanted,) = of(world.tell(BETTER), TreesWanted)
    told = world.refuse(wanted, must_keep_codecs=True)
    assert of(told, PlanAgain) == [], "not at once"
    (later,) = of(world.go(SETTINGS.lasting_s + 1, PLANNED / 10), PlanAgain)
    assert later.keeps_codecs, "ranks encode until the end"


def test_better_trees_are_looked_for_after_a_loss_and_a_return() -> None:
    world = World()
    (asked,) = of(world.lose("c"), PlanAgain)
    assert asked.epoch.members == ("a", "b")
    (wanted,) = of(world.tell(BETTER), TreesWanted)
    assert wanted.members == ("a", "b")
    assert "for sites a, b take part by now" in wanted.why
    (begun,) = world.begin(wanted)
    assert isinstance(begun, RecordEvent)
    assert (begun.kind, begun.detail["links"]) == ("run.replanned", [])
    world.epoch = Epoch(7, SITES, SPEC.reduction, 90)
    (asked,) = of(world.tell(EpochBegun(world.epoch, frozenset())), PlanAgain)
    assert asked.epoch.members == SITES
    dead = frozenset({("a", "b")})
    (asked,) = of(world.tell(EpochBegun(world.epoch, dead)), PlanAgain)
    assert asked.dead_links == dead


def test_what_was_planned_for_others_is_void() -> None:
    world = World()
    world.want()
    assert of(world.lose("c"), PlanAgain)
    assert world.tell(TreesEnded(None, why="it makes no sense any more")) == []
    assert of(world.tell(BETTER), TreesWanted)[0].members == ("a", "b")
    assert world.lose("b") == [], "nothing is to be planned for one"


def test_people_are_told_what_only_a_relaunch_would_bring() -> None:
    world = World()
    wanted = world.want()
    assert world.tell(RelaunchPlanned(step_s=0.46)) == []
    world.begin(wanted)
    (told,) = world.tell(RelaunchPlanned(step_s=0.4))
    assert isinstance(told, RecordEvent)
    assert told.detail["note"] == (
        "relaunching with a new plan would give 400ms a step instead of 500ms"
    )


UNLIKE = (30.0, 21.0, 12.0)
DIVIDED = dataclasses.replace(BETTER, form="as before", reduction=SPEC.reduction, divides=True)


def test_sites_get_parts_by_their_speeds_once_these_have_differed_for_long_enough() -> None:
    world = World()
    assert world.compute(SETTINGS.lasting_s, *UNLIKE) == []
    told = world.compute(10, *UNLIKE)
    assert world.kinds() == ["sites.uneven"]
    (asked,) = of(told, PlanAgain)
    assert asked.division is not None
    assert asked.division.members == {"a": 24, "b": 16, "c": 8}, "whole micro-batches"
    (wanted,) = of(world.tell(DIVIDED), TreesWanted)
    assert wanted.parts == (24, 16, 8)
    assert "with other parts of the batch (a 24, b 16, c 8)" in wanted.why
    (replanned, *_) = of(world.begin(wanted), RecordEvent)
    assert replanned.kind == "run.replanned"
    assert replanned.detail["parts"] == {"a": 24, "b": 16, "c": 8}
    assert world.compute(10 * SETTINGS.gap_s, *UNLIKE) == [], "there is no better one"
    assert world.compute(30, 12.0, 21.0, 30.0), "they have changed"


def test_speeds_that_come_and_go_move_nothing() -> None:
    world = World()
    for _ in range(20):
        assert world.compute(SETTINGS.lasting_s / 2, *UNLIKE) == []
        assert world.compute(SETTINGS.lasting_s / 2, 20.0, 20.0, 20.0) == []


def test_a_division_that_was_not_worth_it_is_let_be_until_another_saves_more() -> None:
    world = World()
    world.compute(20, *UNLIKE)
    in_vain = dataclasses.replace(DIVIDED, before_s=1.0, after_s=1.0, divides=False)
    assert [each.kind for each in of(world.tell(in_vain), RecordEvent)] == ["plan.kept"]
    assert world.compute(10 * SETTINGS.lasting_s, *UNLIKE) == []
    assert of(world.compute(3 * SETTINGS.lasting_s, 40.0, 21.0, 3.0), PlanAgain)


def test_those_who_are_left_are_planned_with_their_speeds_at_once() -> None:
    world = World()
    world.compute(SETTINGS.lasting_s, *UNLIKE)
    (asked,) = of(world.lose("b"), PlanAgain)
    assert asked.division is not None
    assert (asked.division.members, len(asked.division.parts)) == ({"a": 40, "c": 8}, 3)


@pytest.mark.parametrize("says", [{}, {metrics.SITE_SAMPLES: 8.0}])
def test_a_script_that_divides_its_data_keeps_that_and_it_is_said_once(
    says: dict[str, float],
) -> None:
    world = World()
    for _ in range(60):
        world.now_s += 1.0
        for name, speed in zip(SITES, UNLIKE, strict=True):
            values = {metrics.SITE_TOKENS: 80.0, metrics.COMPUTE_S: 8 / speed, **says}
            world.tell(SiteStepped(name, values))
        world.tell(run_events.Ticked())
    assert world.kinds() == (["sites.uneven"] if says else ["shares.fixed"])
    assert len(of(world.actions, PlanAgain)) == bool(says)
