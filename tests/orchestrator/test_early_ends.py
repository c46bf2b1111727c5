"""A site whose script ends while others go on is named; they go on without it, or the run ends."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epoch_changes import Action
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import fold
from isthmus.orchestrator.core.quorum import Limits
from isthmus.orchestrator.core.run_events import (
    GoOnWithout,
    RecordEvent,
    RoundBegun,
    RunState,
    SendPause,
    SendRelease,
    SendStop,
    SiteDone,
    SiteEnded,
    SiteEndedEarly,
    SiteJoined,
    SiteLost,
    SitePaused,
    SiteRunning,
    StepEnded,
)
from tests.fakes.run_worlds import World, read_again, recorded_events
from tests.orchestrator.test_epochs import LIMITS, Core, begun, kinds, machine, settled

TWO = ("ap", "eu")


def done(core: Core, *names: str, round_: int = 9) -> list[Action]:
    return [each for name in names for each in core.tell(SiteDone(name, round_), 10)]


# ---------------------------------------------------------------- epochs


def test_the_others_do_the_round_again_that_waits_for_a_site_which_is_done() -> None:
    core = machine()
    assert core.tell(RoundBegun("ap", 9), 10) == []
    assert done(core, "sa") == []
    actions = core.tell(RoundBegun("eu", 10), 10)
    assert actions[0] == SiteEndedEarly("sa", 9, "eu", 10, num_left=2)
    assert kinds(actions[1:]) == ["epoch.proposed", "SendPause", "SendPause"]
    assert actions[2] == SendPause("ap", 1, ("sa",), is_redo=True)
    core.tell(settled("ap", 1, 10), 11)
    actions = core.tell(settled("eu", 1, 10), 11)
    epoch, handovers = begun(actions)
    assert (epoch.members, epoch.from_round, handovers) == (("ap", "eu"), 10, ())
    why = "it ended after round 9, and site eu is in round 10"
    assert actions[-1] == GoOnWithout("sa", why)


def test_what_one_has_of_its_last_round_the_others_get_from_who_goes_on() -> None:
    """A site is in the next round, and another has not had all of the last one."""
    core = machine()
    done(core, "sa")
    core.tell(RoundBegun("eu", 10), 10)
    chunks = settled("eu", 1, 9, (0, 3)).finished
    core.tell(SitePaused(site="eu", epoch=1, round=10, finished=chunks, chain_round=9), 11)
    actions = core.tell(settled("ap", 1, 9, (0, 1)), 11)
    epoch, (handover,) = begun(actions)
    assert epoch.from_round == 9
    assert (handover.donor, handover.receiver, handover.round) == ("eu", "ap", 9)


@pytest.mark.parametrize("is_done_first", [True, False])
def test_the_only_site_that_is_left_goes_on_alone(is_done_first: bool) -> None:
    core = machine(names=TWO)
    told = (SiteDone("eu", 9), RoundBegun("ap", 10))
    first, second = told if is_done_first else told[::-1]
    assert core.tell(first, 10) == []
    assert core.tell(second, 10)[0] == SiteEndedEarly("eu", 9, "ap", 10, num_left=1)
    actions = core.tell(settled("ap", 1, 10), 11)
    assert begun(actions)[0].members == ("ap",)
    core.tell(SiteDone("ap", 13), 20)
    assert core.tell(SiteLost("ap", "its gateway was killed"), 21) == [], "all are done"


def test_sites_that_end_with_the_same_round_at_unlike_times_are_not_early() -> None:
    core = machine()
    for name in core.epoch.members:
        assert core.tell(RoundBegun(name, 9), 10) == []
    assert done(core, "sa") == []
    assert core.tell(RoundBegun("sa", 9), 500) == []
    assert done(core, "ap") == []
    assert core.tell(RoundBegun("eu", 9), 3000) == []
    assert done(core, "eu") == []


def test_two_sites_that_are_done_leave_together() -> None:
    core = machine()
    done(core, "sa", "eu")
    actions = core.tell(RoundBegun("ap", 10), 10)
    assert [each.site for each in actions if isinstance(each, SiteEndedEarly)] == ["eu", "sa"]
    actions = core.tell(settled("ap", 1, 10), 11)
    assert begun(actions)[0].members == ("ap",)


def test_who_is_dead_is_no_witness() -> None:
    """What it had begun, nobody has to go on with."""
    core = machine()
    core.tell(RoundBegun("ap", 10), 9)
    core.tell(SiteLost("ap", "killed"), 9)
    actions = done(core, "sa")
    assert not any(isinstance(each, SiteEndedEarly) for each in actions)


def test_a_site_whose_last_round_is_not_known_stays() -> None:
    core = machine()
    done(core, "sa", round_=-1)
    assert core.tell(RoundBegun("ap", 10), 10) == []


@pytest.mark.parametrize(
    "limits",
    [
        dataclasses.replace(LIMITS, ends_on_early_end=True),
        dataclasses.replace(LIMITS, min_sites=3),
    ],
)
def test_where_the_others_are_not_to_go_on_no_epoch_begins(limits: Limits) -> None:
    core = machine(limits)
    done(core, "sa")
    actions = core.tell(RoundBegun("ap", 10), 10)
    assert actions == [SiteEndedEarly("sa", 9, "ap", 10, num_left=2)]
    assert core.tell(RoundBegun("ap", 10), 11) == []


def test_a_change_that_is_under_way_gives_way() -> None:
    core = machine()
    core.tell(SiteLost("sa", "killed"), 5)
    for name in TWO:
        core.tell(settled(name, 1, 5), 6)
    core.tell(SiteRunning("sa"), 7)
    done(core, "eu")
    actions = core.tell(RoundBegun("ap", 10), 10)
    assert actions[0] == SiteEndedEarly("eu", 9, "ap", 10, num_left=1)
    assert "SendPause" in kinds(actions)


def test_the_next_coordinator_knows_the_last_round() -> None:
    core, later = machine(), machine()
    done(core, "sa")
    later.restore([RecordEvent(EventKind.SITE_DONE, "sa", {"round": 9})])
    for name in later.epoch.members:
        later.tell(SiteJoined(name, "host", 0), 10)
    assert later.tell(RoundBegun("ap", 10), 11)[0] == SiteEndedEarly("sa", 9, "ap", 10, num_left=2)


# ---------------------------------------------------------------- the run

SAID = "site c ended after 10 steps; site a is at step 11"


def ends_early(world: World, *, num_left: int = 2) -> list[run_events.Action]:
    """Have site c be done after ten steps, when a begins an eleventh, whose record is to come."""
    world.activate()
    for step in range(1, 11):
        told = [StepEnded(site, 0, step, step - 1) for site in world.sites]
        world.tell(*(told if step < 10 else told[-1:]))
    world.tell(run_events.SiteDone("c", 9))
    return world.tell(SiteEndedEarly("c", 9, "a", 10, num_left))


def test_an_early_end_is_said_at_once_and_the_run_is_a_plain_success() -> None:
    world = World(3, needs_all=False, may_return=True)
    (said,) = ends_early(world)
    assert said == RecordEvent(
        EventKind.SITE_ENDED_EARLY,
        "c",
        {"round": 9, "note": f"{SAID}; the others go on without it"},
    )
    actions = world.tell(GoOnWithout("c", "it ended after round 9"))
    assert SendRelease("c") in actions
    assert not any(isinstance(each, SendStop) for each in actions)
    world.tell(SiteEnded("c", succeeded=True))
    world.tell(run_events.StateOffered("a"))
    world.wait(3600.0)
    assert "site.returning" not in [each.kind for each in recorded_events(world)]
    world.tell(run_events.SiteDone("a", 13), run_events.SiteDone("b", 13))
    world.tell(SiteEnded("a", succeeded=True), SiteEnded("b", succeeded=True))
    assert (world.finish.state, world.finish.reason_code) == (RunState.SUCCEEDED, "")
    ended = recorded_events(world)[-1]
    assert ended.detail["note"] == "sites that ended before the others: c"


def test_where_no_step_is_known_rounds_are_told() -> None:
    world = World(3, needs_all=False)
    world.activate()
    world.tell(run_events.SiteDone("c", 9))
    (said,) = world.tell(SiteEndedEarly("c", 9, "a", 10, 2))
    assert isinstance(said, RecordEvent)
    assert "site c ended after round 9; site a is in round 10" in str(said.detail["note"])


@pytest.mark.parametrize(
    ("ends", "num_left", "why"),
    [
        (True, 2, "failure.on_early_end is end"),
        (False, 0, "0 sites would go on, want at least 1"),
    ],
)
def test_the_run_ends_and_says_who_ended_first(ends: bool, num_left: int, why: str) -> None:
    world = World(3, needs_all=False, ends_on_early_end=ends)
    ends_early(world, num_left=num_left)
    world.tell(*(SiteEnded(site, succeeded=False) for site in world.sites))
    assert (world.finish.state, world.finish.reason_code) == (RunState.FAILED, "SITE_ENDED_EARLY")
    assert world.finish.failure is not None
    assert world.finish.failure.site == "c"
    assert world.finish.failure.message == f"{SAID}; {why}"


@pytest.mark.parametrize("up_to", ["site.ended_early", "site.let_go", "site.ended"])
def test_the_next_coordinator_takes_an_early_end_for_no_loss(up_to: str) -> None:
    world, later = World(3, needs_all=False), World(3, needs_all=False)
    ends_early(world)
    world.tell(GoOnWithout("c", "it ended after round 9"), SiteEnded("c", succeeded=True))
    records = recorded_events(world)
    last = [str(each.kind) for each in records].index(up_to, -1 if up_to == "site.ended" else 0)
    later.recall(records[: last + 1])
    if up_to == "site.ended_early":
        later.tell(GoOnWithout("c", "it ended after round 9"))
    later.tell(run_events.SiteDone("a", 13), run_events.SiteDone("b", 13))
    later.tell(SiteEnded("a", succeeded=True), SiteEnded("b", succeeded=True))
    assert (later.finish.state, later.finish.reason_code) == (RunState.SUCCEEDED, "")


def test_the_view_has_the_note_and_the_site_as_ended() -> None:
    world = World(3, needs_all=False)
    ends_early(world)
    world.tell(GoOnWithout("c", "it ended after round 9"), SiteEnded("c", succeeded=True))
    world.tell(run_events.SiteLost("c", "its agent has left"))
    told = {"name": "n", "folder": "f", "sites": ["a", "b", "c"], "links": []}
    records = [RecordEvent(EventKind.RUN_SUBMITTED, detail=told), *recorded_events(world)]
    view = fold("run", [read_again(each, number) for number, each in enumerate(records)])
    assert view.notes == [f"{SAID}; the others go on without it"]
    assert view.sites["c"].state is run_events.SiteState.ENDED
