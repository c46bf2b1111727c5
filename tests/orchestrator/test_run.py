"""The machine of a run: its stages, its ends, and what holds in every order of events."""

import itertools
import random
from collections.abc import Sequence

import pytest

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epoch_record import detail_of
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.members import Member, Stage
from isthmus.orchestrator.core.run_events import Endpoint, RecordEvent, RunState
from isthmus.orchestrator.core.stall_watch import AbsentRank
from isthmus.topology.spec.epoch import Epoch
from tests.fakes.run_worlds import (
    COLLECT_S,
    GATHER,
    GRACE_S,
    LEASE_S,
    START_S,
    World,
    digest,
    failure,
    prepared,
    recorded_events,
    stepped,
)

LACKS_STATE = "does not call `start = site.checkpoint(model, optimizer)`"


def test_a_run_that_goes_well() -> None:
    world = World(3)
    world.tell(run_events.SiteJoined("a", "h"), run_events.SiteJoined("b", "h"))
    assert world.sent(run_events.SendPrepare) == []
    world.tell(run_events.SiteJoined("c", "h"))
    assert world.sent(run_events.SendPrepare) == ["a", "b", "c"]
    world.tell(prepared("c"), prepared("a"))
    assert world.sent(run_events.SendStart) == []
    started = [a for a in world.tell(prepared("b")) if isinstance(a, run_events.SendStart)]
    assert [start.site for start in started] == ["a", "b", "c"]
    assert [endpoint.site for endpoint in started[1].endpoints] == ["a", "c"]
    world.tell(*(run_events.SiteRunning(site) for site in "ab"))
    assert world.is_in(RunState.FORMING)
    world.tell(run_events.SiteRunning("c"))
    assert world.is_in(RunState.ACTIVE)
    world.now_s += 7
    world.tell(*(run_events.SiteEnded(site, succeeded=True) for site in "bca"))
    assert world.finish == run_events.FinishRun(RunState.SUCCEEDED, "", "", None)
    assert world.machine.active_for_s(world.now_s + 50) == 7
    assert world.sent(run_events.SendStop) == []


@pytest.mark.parametrize(
    ("come", "named", "stopped"),
    [
        ([run_events.SiteJoined("a", "h")], "site b: absent, no agent has joined", []),
        ([], "sites a, b: absent", []),
        (
            [run_events.SiteJoined("a", "h"), run_events.SiteJoined("b", "h"), prepared("b")],
            "site a: joined, its gateways do not listen yet",
            ["a", "b"],
        ),
        (
            [
                *(run_events.SiteJoined(site, "h") for site in "ab"),
                *(prepared(site) for site in "ab"),
                run_events.SiteRunning("a"),
            ],
            "site b: starting, its ranks have not all joined",
            ["a", "b"],
        ),
    ],
    ids=["absent", "nobody", "unprepared", "starting"],
)
def test_a_late_start_names_who_was_missing_and_rolls_back(
    come: Sequence[run_events.Event], named: str, stopped: list[str]
) -> None:
    world = World(2)
    world.tell(*come)
    world.wait(START_S - 0.1)
    assert world.is_in(RunState.FORMING)
    world.wait(0.2)
    assert world.sent(run_events.SendStop) == stopped
    world.tell(*(run_events.SiteEnded(site, succeeded=False) for site in stopped))
    assert world.finish.reason_code == "START_TIMED_OUT"
    assert named in world.finish.reason


def test_a_site_that_fetches_puts_off_the_end_of_the_start() -> None:
    world = World(2)
    world.tell(*(run_events.SiteJoined(site, "host") for site in "ab"))
    world.wait(START_S - 0.1)
    world.tell(run_events.SiteFetching("b"))
    world.wait(START_S - 0.1)
    assert world.is_in(RunState.FORMING)
    world.wait(0.2)
    assert sorted(world.sent(run_events.SendStop)) == ["a", "b"]


FORMING: dict[str, list[run_events.Event]] = {
    "joined": [run_events.SiteJoined(site, "h") for site in "abc"],
    "prepared": [prepared(site) for site in "abc"],
    "running": [run_events.SiteRunning("a")],
}


def formed_up_to(stage: str, **more: bool) -> World:
    """Return a run of three sites that has got so far."""
    world = World(3, may_return=True, **more)  # type: ignore[arg-type]
    for reached, events in FORMING.items():
        world.tell(*events)
        if reached == stage:
            break
    return world


def come_back(world: World, site: str = "b") -> None:
    """An agent is back, has nothing left of the run, and the others have ended what they had."""
    world.tell(run_events.SiteJoined(site, "h"))
    world.tell(*(run_events.SiteEnded(each, succeeded=False) for each in "abc"))


def is_formed(world: World) -> bool:
    """Go on from Prepare; return whether the run is active then."""
    world.tell(*FORMING["prepared"], *(run_events.SiteRunning(each) for each in "abc"))
    return world.is_in(RunState.ACTIVE)


@pytest.mark.parametrize("stage", FORMING)
def test_a_site_lost_while_the_run_forms_rolls_all_back_and_they_begin_again(stage: str) -> None:
    world = formed_up_to(stage)
    world.tell(run_events.SiteLost("b", "the agent of site b ended with SIGKILL"))
    assert world.is_in(RunState.FORMING)
    assert world.machine.restarts_agents
    assert world.sent(run_events.SendStop) == ["a", "c"]
    world.tell(run_events.SiteEnded("a", succeeded=False), run_events.SiteRunning("c"))
    assert world.sent(run_events.SendPrepare) == ["a", "b", "c"], "not before all have ended"
    come_back(world)
    assert world.sent(run_events.SendStop) == ["a", "c", "b"]
    assert world.sent(run_events.SendPrepare) == ["a", "b", "c"] * 2
    (told,) = [each for each in recorded_events(world) if each.kind == "run.rolled_back"]
    assert told.site == "b"
    assert "all sites begin again if it is back within 30 s" in str(told.detail["note"])
    assert is_formed(world)
    assert not world.machine.restarts_agents, "it has offered no state"


def test_what_was_said_before_all_were_rolled_back_counts_no_more() -> None:
    world = World(2, may_return=True)
    world.prepare()
    world.tell(run_events.SiteRunning("a"), digest("a", 1))
    world.tell(run_events.SiteLost("b", "silent", 6.0))
    world.tell(run_events.SiteEnded("a", False, (failure(world, "PEER_LOST", "a"),)))
    # Its agent had not died: it tells all that nobody has heard, and each stale thing is stopped.
    world.tell(run_events.SiteJoined("b", "h"), prepared("b"), run_events.SiteEnded("b", False))
    assert world.sent(run_events.SendPrepare) == ["a", "b"] * 2
    world.tell(run_events.SiteEnded("b", succeeded=False))  # the answer to the second Stop
    world.prepare()
    world.tell(run_events.SiteRunning("b"), run_events.SiteRunning("a"))
    assert world.is_in(RunState.ACTIVE)
    assert not [each for each in world.tell(digest("b", 2)) if isinstance(each, RecordEvent)]


def test_a_site_that_is_lost_again_and_again_while_the_run_forms_ends_it() -> None:
    world = formed_up_to("prepared")
    for _ in range(3):
        world.tell(run_events.SiteLost("b", "it has died"))
        come_back(world)
        world.tell(*FORMING["prepared"])
    assert world.is_in(RunState.FORMING)
    world.tell(run_events.SiteLost("b", "it has died again"))
    world.wait(COLLECT_S)
    world.tell(*(run_events.SiteEnded(each, succeeded=False) for each in "ac"))
    assert (world.finish.reason_code, world.finish.reason) == (
        "SITE_LOST",
        "site b: it has died again",
    )


def test_a_site_that_does_not_come_back_while_the_run_forms_is_named_at_the_deadline() -> None:
    world = formed_up_to("prepared")
    world.tell(run_events.SiteLost("b", "it has died"))
    world.tell(*(run_events.SiteEnded(each, succeeded=False) for each in "ac"))
    world.wait(START_S)
    assert world.finish.reason_code == "START_TIMED_OUT"
    assert "site b: lost, its agent has not come back" in world.finish.reason


@pytest.mark.parametrize("came", [run_events.StepTaken("a"), run_events.SiteDone("a")])
def test_what_has_come_of_a_run_is_not_rolled_back(came: run_events.Event) -> None:
    world = formed_up_to("running")
    world.tell(came, run_events.SiteLost("b", "it has died"))
    world.wait(COLLECT_S)
    assert world.is_in(RunState.STOPPING)


def test_a_cancelled_run_is_not_formed_again() -> None:
    world = formed_up_to("prepared")
    world.tell(run_events.SiteLost("b", "it has died"), run_events.CancelRequested("enough"))
    assert not world.machine.restarts_agents
    come_back(world)
    assert world.finish.state is RunState.CANCELLED
    assert world.sent(run_events.SendPrepare) == ["a", "b", "c"]


@pytest.mark.parametrize("at", ["rolled back", "prepared again"])
def test_the_next_coordinator_goes_on_with_a_run_that_was_rolled_back(at: str) -> None:
    before = formed_up_to("running")
    before.tell(run_events.SiteLost("b", "it has died"))
    if at == "prepared again":
        come_back(before)
    world = World(3, may_return=True)
    world.recall(recorded_events(before))
    if at == "rolled back":
        world.tell(*(run_events.SiteReturned(each, "h", 0, has_run=True) for each in "ac"))
        assert world.sent(run_events.SendStop) == ["a", "c"]
        come_back(world)
        assert world.sent(run_events.SendPrepare) == ["a", "b", "c"]
    else:
        world.tell(*(run_events.SiteReturned(each, "h", 0, has_run=False) for each in "abc"))
        assert world.sent(run_events.SendPrepare) == ["a", "b", "c"]
    assert is_formed(world)


def test_the_relay_leads_to_those_who_have_begun_again() -> None:
    world = World(2, may_return=True, emulate=True, emulator="relay")
    world.prepare()
    world.tell(run_events.SiteLost("b", "it has died"))
    world.tell(run_events.SiteJoined("b", "h"))
    world.tell(*(run_events.SiteEnded(each, succeeded=False) for each in "ab"))
    elsewhere = {site: Endpoint(site, 0, "127.0.0.1", 2000 + ord(site)) for site in "ab"}
    asked = world.tell(
        *(run_events.SitePrepared(site, (where,)) for site, where in elsewhere.items())
    )
    (relay,) = [each for each in asked if isinstance(each, run_events.OpenRelay)]
    assert set(relay.endpoints) == set(elsewhere.values())


def test_the_first_failure_is_found_among_those_that_come_later() -> None:
    world = World(3)
    world.activate()
    world.tell(run_events.SiteEnded("a", False, (failure(world, "PEER_LOST", "a"),)))
    world.wait(COLLECT_S / 2)
    assert world.sent(run_events.SendStop) == []
    real = failure(world, "RANK_KILLED", "b", COLLECT_S, rank=3, exit_code=-9, log_path="x.log")
    world.tell(run_events.SiteEnded("b", False, (real,)))
    world.wait(COLLECT_S / 2)
    assert world.sent(run_events.SendStop) == ["c"]
    assert world.is_in(RunState.STOPPING)
    late = failure(world, "RANK_KILLED", "c", -0.01)
    world.tell(run_events.SiteEnded("c", False, (late,)))
    assert world.finish == run_events.FinishRun(RunState.FAILED, "RANK_KILLED", real.reason, real)


def test_nothing_is_waited_for_once_all_sites_have_reported() -> None:
    world = World(2)
    world.activate()
    for site in "ab":
        world.tell(run_events.SiteEnded(site, False, (failure(world, "RANK_EXITED", site),)))
    assert world.finish.failure is not None
    assert world.finish.failure.site == "a"


def test_a_lost_site_ends_the_run_and_is_stopped_when_it_comes_back() -> None:
    world = World(2)
    world.activate()
    world.tell(run_events.SiteLost("b", "site b: its agent was silent", silent_s=5.0))
    world.wait(COLLECT_S)
    assert world.sent(run_events.SendStop) == ["a"]
    world.tell(run_events.SiteJoined("b", "h"))
    assert world.sent(run_events.SendStop) == ["a", "b"]
    world.tell(run_events.SiteEnded("a", succeeded=False))
    assert (world.finish.reason_code, world.finish.reason) == (
        "SITE_LOST",
        "site b: its agent was silent",
    )


def test_a_site_that_takes_no_part_is_nothing_to_the_run() -> None:
    world = World(2)
    assert not world.tell(run_events.SiteJoined("z", "host-z"))
    world.activate()
    assert not world.tell(run_events.SiteLost("z", "its agent was silent", 1.0))
    assert world.is_in(RunState.ACTIVE)


def test_an_agent_that_leaves_before_prepare_may_come_back() -> None:
    world = World(2)
    world.tell(
        run_events.SiteJoined("a", "h"), run_events.SiteLost("a", "gone"), run_events.Ticked()
    )
    world.tell(run_events.SiteJoined("b", "h"))
    assert world.sent(run_events.SendPrepare) == []
    world.tell(run_events.SiteJoined("a", "h"))
    assert world.sent(run_events.SendPrepare) == ["a", "b"]


def test_an_agent_that_could_not_start_is_not_waited_for() -> None:
    world = World(2)
    world.tell(run_events.SiteJoined("a", "h"), run_events.AgentEnded("b", "status 1", "log"))
    assert (world.finish.reason_code, world.finish.reason) == (
        "LAUNCH_FAILED",
        "site b: status 1",
    )


def test_cancelling_is_idempotent_and_reaches_whoever_was_prepared() -> None:
    world = World(2)
    world.join()
    world.tell(prepared("a"))
    for _ in range(3):
        world.tell(run_events.CancelRequested("by hand"))
    assert world.sent(run_events.SendStop) == ["a", "b"]
    world.tell(prepared("b"))
    assert world.sent(run_events.SendStart) == []
    world.tell(*(run_events.SiteEnded(site, succeeded=False) for site in "ab"))
    assert world.finish == run_events.FinishRun(RunState.CANCELLED, "CANCELLED", "by hand", None)
    assert world.tell(run_events.CancelRequested("again")) == []


def test_a_site_that_never_confirms_is_recorded_and_the_run_ends() -> None:
    world = World(2)
    world.activate()
    world.tell(run_events.CancelRequested("by hand"), run_events.SiteEnded("a", succeeded=False))
    assert world.wait(GRACE_S + LEASE_S - 0.1) == []
    world.wait(0.2)
    assert world.finish.state is RunState.CANCELLED
    assert ("site.unconfirmed", "b") in [
        (a.kind, a.site) for a in world.actions if isinstance(a, run_events.RecordEvent)
    ]


def test_different_parameters_end_the_run_and_name_the_tensor() -> None:
    world = World(3)
    world.activate()
    world.tell(digest("a", 1), digest("b", 2), digest("c", 1))
    world.wait(COLLECT_S)
    assert world.sent(run_events.SendStop) == ["a", "b", "c"]
    world.tell(*(run_events.SiteEnded(site, succeeded=False) for site in "abc"))
    assert world.finish.reason_code == "PARAMETERS_DIFFER"
    assert world.finish.failure is not None
    assert (world.finish.failure.site, world.finish.failure.rank) == ("b", 0)
    assert "2.weight" in world.finish.reason


def test_a_difference_that_was_never_certain_still_spoils_success() -> None:
    world = World(3)
    world.activate()
    world.tell(digest("a", 1), digest("b", 2))
    world.tell(*(run_events.SiteEnded(site, succeeded=True) for site in "abc"))
    assert world.finish.reason_code == "PARAMETERS_DIFFER"


@pytest.mark.parametrize("refuses", [True, False])
def test_the_same_data_is_a_warning_first_and_then_ends_the_run(refuses: bool) -> None:
    world = World(2, refuses_same_data=refuses)
    world.activate()
    for step in (1, 2, 3):
        world.tell(*(run_events.GradientReported(site, step, 7) for site in "ab"))
    notes = [a for a in world.actions if getattr(a, "kind", "") == "data.same"]
    assert len(notes) == 1
    world.wait(COLLECT_S)
    assert world.sent(run_events.SendStop) == (["a", "b"] if refuses else [])
    world.tell(*(run_events.SiteEnded(site, succeeded=not refuses) for site in "ab"))
    assert world.finish.reason_code == ("SAME_DATA" if refuses else "")


def test_equal_inputs_of_unlike_gradients_are_noted_once_and_end_nothing() -> None:
    world = World(2)
    world.activate()
    for step in range(1, 9):
        for number, site in enumerate("ba"):
            world.tell(run_events.GradientReported(site, step, 2 * step + number, 100 + step))
        assert len(notes_of(world, "data.same")) == (1 if step >= 3 else 0)
    world.wait(COLLECT_S)
    assert (
        "sites a and b called the model with the same inputs in 3 steps"
        in notes_of(world, "data.same")[0]
    )
    assert world.sent(run_events.SendStop) == []


def test_unlike_inputs_or_such_as_tell_nothing_are_not_noted() -> None:
    world = World(2)
    world.activate()
    for step in range(1, 9):
        world.tell(run_events.GradientReported("a", step, step, step % 2 and step))
        world.tell(run_events.GradientReported("b", step, 50 + step, step % 2 and 50 + step))
    assert notes_of(world, "data.same") == []


def test_samplers_over_own_ranks_and_buffers_that_differ_are_noted_once() -> None:
    world = World(3)
    world.activate()
    for step in (1, 2):
        for site, length in (("a", 64), ("b", 63), ("c", 64)):
            world.tell(run_events.SiteSampled(site, f"{length} samples by seed 0"))
            world.tell(run_events.BuffersReported(site, step, {"bias": float(length)}))
    (sampler,), (buffers,) = notes_of(world, "data.same"), notes_of(world, "buffers.differ")
    assert sampler.startswith("at sites a and c a DistributedSampler divides 64 samples by seed 0")
    assert buffers.startswith("buffer bias differs between sites a and b after step 1")
    assert world.sent(run_events.SendStop) == []


@pytest.mark.parametrize("is_out", [False, True])
def test_samplers_for_other_data_end_the_run_unless_that_site_is_out(is_out: bool) -> None:
    """One that comes back is refused by itself, by the state of the others."""
    world = begun_by_a_and_b() if is_out else World(3)
    if not is_out:
        world.activate()
    assert world.member("c").is_outside is is_out
    for site, num_samples in (("a", 64), ("b", 64), ("c", 63)):
        world.tell(run_events.SamplerMade(site, 0, f"{num_samples} samples and seed 0"))
    world.wait(COLLECT_S)
    assert world.sent(run_events.SendStop) == ([] if is_out else ["a", "b", "c"])
    if is_out:
        return
    world.tell(*(run_events.SiteEnded(site, succeeded=False) for site in "abc"))
    assert world.finish.reason_code == "DATA_DIFFERS"
    assert "64 samples and seed 0 at rank 0 of site a" in world.finish.reason
    assert "63 samples and seed 0 at rank 0 of site c" in world.finish.reason


def test_failed_checkpoints_are_told_once_a_kind_and_end_nothing() -> None:
    world = World(2)
    world.activate()
    for step in (10, 20):
        for site in "ab":
            reason = f"rank 0: No space left: '/store/.step-{step:08}.g1'"
            world.tell(run_events.StorageFailed(EventKind.CHECKPOINT_FAILED, site, step, reason))
    world.tell(
        run_events.StorageFailed(EventKind.CHECKPOINT_FAILED, "a", 30, "rank 0: Permission denied")
    )
    notes = [
        action.detail["note"]
        for action in world.actions
        if isinstance(action, run_events.RecordEvent) and action.kind == "checkpoint.failed"
    ]
    assert notes == [
        "checkpoint of step 10 failed at site a: rank 0: No space left: '/store/.step-00000010.g1'",
        "checkpoint of step 10 failed at site b: rank 0: No space left: '/store/.step-00000010.g1'",
        "checkpoint of step 30 failed at site a: rank 0: Permission denied",
    ]
    later = restarted(world)
    later.tell(
        run_events.StorageFailed(EventKind.CHECKPOINT_FAILED, "a", 40, "rank 1: Permission denied")
    )
    assert not [a for a in later.actions if getattr(a, "kind", "") == "checkpoint.failed"]
    assert world.machine.is_going_on


def test_a_state_that_a_site_cannot_write_is_told_once_and_ends_nothing() -> None:
    world = World(2)
    world.activate()
    for step, epoch in ((10, 3), (20, 5)):
        reason = f"rank 0: /state/node0/entry/epoch-{epoch}: No space left on device"
        world.tell(run_events.StorageFailed(EventKind.STATE_FAILED, "a", step, reason))
    [event] = [a for a in world.actions if getattr(a, "kind", "") == "state.failed"]
    assert isinstance(event, run_events.RecordEvent)
    assert event.site == "a"
    assert event.detail["note"] == (
        "site a could not write its state for a site that comes back: "
        "rank 0: /state/node0/entry/epoch-3: No space left on device"
    )
    later = restarted(world)
    later.tell(
        run_events.StorageFailed(
            EventKind.STATE_FAILED,
            "a",
            30,
            "rank 0: /state/node0/entry/epoch-7: No space left on device",
        )
    )
    assert not [a for a in later.actions if getattr(a, "kind", "") == "state.failed"]
    assert world.machine.is_going_on


def test_a_checkpoint_that_stays_is_told_once_a_kind_beside_failures() -> None:
    world = World(2)
    world.activate()
    world.tell(run_events.StorageFailed(EventKind.CHECKPOINT_FAILED, "a", 30, "Permission denied"))
    for step in (10, 20):
        world.tell(
            run_events.StorageFailed(EventKind.CHECKPOINT_STAYS, "a", step, "Permission denied")
        )
    later = restarted(world)
    later.tell(run_events.StorageFailed(EventKind.CHECKPOINT_STAYS, "a", 40, "Permission denied"))
    notes = [
        action.detail["note"]
        for action in [*world.actions, *later.actions]
        if isinstance(action, run_events.RecordEvent) and action.kind == "checkpoint.stays"
    ]
    assert notes == ["checkpoint of step 10 cannot be removed at site a: Permission denied"]


@pytest.mark.parametrize("succeeded", [False, True])
def test_an_end_that_nobody_asked_for_is_a_failure(succeeded: bool) -> None:
    world = World(2)
    world.join()
    world.tell(run_events.SiteEnded("a", succeeded=succeeded))
    world.wait(COLLECT_S)
    world.tell(run_events.SiteEnded("b", succeeded=False))
    assert world.finish.reason_code == "SITE_LOST"


NAMESPACES = {
    site: run_events.SiteNamespace(
        site=site,
        address=f"10.0.0.{ord(site)}",
        net=f"/proc/1/fd/{ord(site)}",
        user="/proc/1/ns/user",
    )
    for site in "ab"
}


def test_namespaces_come_before_prepare() -> None:
    world = World(2, emulate=True)
    world.join()
    assert world.actions.count(run_events.OpenNamespaces()) == 1
    world.tell(run_events.SiteLost("b", "gone"), run_events.NamespacesOpened(NAMESPACES))
    assert world.sent(run_events.SendPrepare) == [], "only one site is there"
    world.tell(run_events.SiteJoined("b", "h"))
    told = [each for each in world.actions if isinstance(each, run_events.SendPrepare)]
    assert {each.site: each.namespace for each in told} == NAMESPACES
    world.tell(prepared("a"), prepared("b"))
    assert world.sent(run_events.SendStart) == ["a", "b"], "no relay is needed"
    assert world.actions.count(run_events.OpenNamespaces()) == 1
    assert [each for each in world.actions if isinstance(each, run_events.OpenRelay)] == []


def test_without_namespaces_there_is_the_relay_and_a_line_that_says_so() -> None:
    world = World(2, emulate=True)
    world.join()
    world.tell(
        run_events.NamespacesRefused("there is no TUN"), run_events.NamespacesRefused("again")
    )
    (recorded,) = [a for a in recorded_events(world) if a.kind == "wan.fallback"]
    assert "no slow start, congestion control or retransmission" in str(recorded.detail["note"])
    assert str(recorded.detail["note"]).endswith("because there is no TUN")
    assert world.sent(run_events.SendPrepare) == ["a", "b"]
    world.tell(prepared("a"), prepared("b"))
    assert len([each for each in world.actions if isinstance(each, run_events.OpenRelay)]) == 1


def test_namespaces_that_were_asked_for_are_not_replaced() -> None:
    world = World(2, emulate=True, emulator="netns")
    world.join()
    world.tell(run_events.NamespacesRefused("there is no TUN"))
    world.wait(COLLECT_S)
    assert world.finish.reason_code == "LAUNCH_FAILED"
    assert "netns was asked for, and cannot be here: there is no TUN" in world.finish.reason
    assert world.sent(run_events.SendPrepare) == []


def test_the_relay_comes_between_prepare_and_start() -> None:
    world = World(2, emulate=True, emulator="relay")
    world.prepare()
    (opened,) = [a for a in world.actions if isinstance(a, run_events.OpenRelay)]
    assert [endpoint.site for endpoint in opened.endpoints] == ["a", "b"]
    assert world.sent(run_events.SendStart) == []
    book = {"a": (Endpoint("b", 0, "127.0.0.1", 1),), "b": (Endpoint("a", 0, "127.0.0.1", 2),)}
    a, b = opened.endpoints
    ways = {a: {"b": book["b"][0]}, b: {"a": book["a"][0]}}
    started = [
        s for s in world.tell(run_events.RelayOpened(ways)) if isinstance(s, run_events.SendStart)
    ]
    assert {start.site: start.endpoints for start in started} == book
    world.tell(run_events.EmulatorEnded("it ended with SIGKILL", "/run/coordinator.log"))
    world.wait(COLLECT_S)
    assert world.sent(run_events.SendStop) == ["a", "b"]
    world.tell(*(run_events.SiteEnded(site, succeeded=False) for site in "ab"))
    assert world.finish.reason_code == "LAUNCH_FAILED", "killed from outside: no bug of ours"
    assert world.finish.reason == "the WAN emulator is gone: it ended with SIGKILL"
    assert world.finish.failure is not None
    assert world.finish.failure.log_path == "/run/coordinator.log"


def relay_led(world: World) -> run_events.RelayOpened:
    """Return that the relay leads to all gateways of which it was ever asked, from port 1 on."""
    asked = [
        each
        for action in world.actions
        if isinstance(action, run_events.OpenRelay)
        for each in action.endpoints
    ]
    ways = {
        gateway: {
            site: Endpoint(gateway.site, gateway.gateway, "127.0.0.1", number)
            for site in world.sites
            if site != gateway.site
        }
        for number, gateway in enumerate(asked, 1)
    }
    return run_events.RelayOpened(ways)


def test_the_relay_leads_to_a_site_that_is_added_and_to_one_that_comes_back() -> None:
    world = World(
        3, emulate=True, emulator="relay", needs_all=False, may_return=True, begin_with="ab"
    )
    world.prepare()
    world.tell(relay_led(world), *(run_events.SiteRunning(site) for site in "ab"))
    world.tell(run_events.StateOffered("a"), *stepped(*world.sites))
    assert world.machine.add_problem("c") == ""
    world.tell(run_events.AddRequested("c"))

    def come(gateway: Endpoint) -> run_events.SendStart:
        """Have a site's gateway listen, and then the relay lead there."""
        told = world.tell(run_events.SitePrepared(gateway.site, (gateway,)))
        assert told[1:] == [run_events.OpenRelay((gateway,))], "not started before it is led to"
        assert world.machine.endpoints_of(gateway.site, "a") == ()
        (start,) = [
            each for each in world.tell(relay_led(world)) if isinstance(each, run_events.SendStart)
        ]
        return start

    start = come(Endpoint("c", 0, "127.0.0.1", 2000))
    assert (start.site, [each.port for each in start.endpoints]) == ("c", [1, 2])
    assert [each.port for each in world.machine.endpoints_of("c", "a")] == [3]
    world.tell(run_events.SiteRunning("c"), run_events.SiteRejoined("c", 7))
    lose_b(world)
    start = come(Endpoint("b", 0, "127.0.0.1", 2001))
    assert (start.site, [each.port for each in start.endpoints]) == ("b", [1, 3])
    assert [each.port for each in world.machine.endpoints_of("b", "c")] == [4]
    kinds = [each.kind for each in recorded_events(world)]
    assert kinds.count(EventKind.WAN_EMULATED) == 1


def test_a_site_to_which_the_relay_does_not_lead_ends_and_is_tried_again() -> None:
    world = World(3, emulate=True, emulator="relay", needs_all=False, may_return=True)
    world.prepare()
    world.tell(relay_led(world), *(run_events.SiteRunning(site) for site in "abc"))
    world.tell(run_events.StateOffered("a"), *stepped(*world.sites))
    lose_b(world)
    world.tell(prepared("b"))
    world.tell(run_events.GoOnWithout("b", "the relay does not lead to its gateways"))
    assert world.sent(run_events.SendStop) == ["b"]
    world.wait(5.0)
    world.tell(run_events.SiteEnded("b", succeeded=False))
    assert world.sent(run_events.SendPrepare) == ["a", "b", "c", "b", "b"]
    assert world.is_in(RunState.ACTIVE)


WAN_ANSWERS = ([run_events.NamespacesOpened({})], [run_events.NamespacesRefused("there is no TUN")])


def random_event(draw: random.Random, world: World, risk: float) -> run_events.Event:
    site = draw.choice(world.sites)
    code = draw.choice(("RANK_EXITED", "PEER_LOST", "GATEWAY_EXITED"))
    failures = (failure(world, code, site, draw.random(), is_collateral=draw.random() < 0.3),)
    rare: list[run_events.Event] = [
        run_events.SiteLost(site, f"site {site}: gone", draw.random()),
        run_events.AgentEnded(site, "status 1", ""),
        run_events.SiteEnded(site, False, failures),
        run_events.SiteEnded(site, succeeded=False),
        run_events.CancelRequested("by hand"),
        run_events.EmulatorEnded("status 1"),
        *draw.choice(WAN_ANSWERS),
        digest(site, draw.choice((1, 1, 1, 2))),
    ]
    common: list[run_events.Event] = [
        run_events.SiteJoined(site, "h"),
        prepared(site),
        run_events.SiteRunning(site),
        relay_led(world),
        run_events.Ticked(),
        *([run_events.SiteEnded(site, succeeded=True)] if draw.random() < 0.3 else []),
    ]
    return draw.choice(rare if draw.random() < risk else common)


def check_safety(world: World, seed: int) -> None:
    """Nothing that a run must never do was done."""
    finishes = [
        place for place, a in enumerate(world.actions) if isinstance(a, run_events.FinishRun)
    ]
    assert len(finishes) <= 1, f"two outcomes, {seed=}"
    late = world.actions[finishes[0] + 1 :] if finishes else []
    # What comes up after the end is stopped.
    assert all(isinstance(a, run_events.SendStop) for a in late), f"{late} after the end, {seed=}"
    told_to_prepare: set[str] = set()
    told_to_start: set[str] = set()
    told_to_stop: set[str] = set()
    seen: set[str] = set()
    gone: set[str] = set()
    over = {"site.ended", "site.lost", "site.unconfirmed", "run.rolled_back"}
    for action in world.actions[: len(world.actions) - len(late)]:
        match action:
            case run_events.RecordEvent(kind="run.preparing"):
                assert told_to_prepare <= gone, f"begun again before all had ended, {seed=}"
                for begun in (told_to_prepare, told_to_start, told_to_stop, seen, gone):
                    begun.clear()
            case run_events.RecordEvent(kind="site.prepared", site=site):
                seen.add(site)
            case run_events.RecordEvent(kind=kind, site=site) if kind in over:
                gone.add(site)
            case run_events.SendPrepare(site):
                assert site not in told_to_prepare, f"{seed=}"
                told_to_prepare.add(site)
            case run_events.SendStart(site):
                assert seen == set(world.sites), f"Start before all were prepared, {seed=}"
                assert site not in told_to_start, f"{seed=}"
                assert not told_to_stop, f"Start after Stop, {seed=}"
                told_to_start.add(site)
            case run_events.SendStop(site):
                assert site in told_to_prepare, f"{seed=}"
                told_to_stop.add(site)
            case run_events.FinishRun(state):
                assert told_to_prepare <= gone, f"a site may still have processes, {seed=}"
                if state is RunState.SUCCEEDED:
                    assert told_to_start == set(world.sites), f"{seed=}"
    assert told_to_start in (set(), set(world.sites)), f"a part of the sites was started, {seed=}"


@pytest.mark.no_cover
@pytest.mark.parametrize("emulate", [False, True])
def test_in_every_order_of_events_a_run_is_safe_and_ends(emulate: bool) -> None:
    outcomes = set()
    for seed in range(200):
        draw = random.Random(seed)
        world = World(draw.choice((2, 3)), emulate=emulate)
        risk = draw.choice((0.0, 0.05, 0.1, 0.3))
        for _ in range(draw.choice((15, 40, 80))):
            world.now_s += draw.choice((0.0, 0.0, 0.01, 0.5))
            new = world.tell(random_event(draw, world, risk))
            if run_events.OpenNamespaces() in new:
                world.tell(*draw.choice(WAN_ANSWERS))
            if new:
                check_safety(world, seed)
        world.tell(run_events.CancelRequested("enough"))
        world.wait(COLLECT_S)
        world.wait(GRACE_S + LEASE_S)
        check_safety(world, seed)
        assert world.machine.state.is_terminal, f"it never ends, {seed=}"
        outcomes.add(world.finish.state)
        stopped = set(world.sent(run_events.SendStop))
        ended = {
            action.site
            for action in world.actions
            if isinstance(action, run_events.RecordEvent)
            and action.kind in {"site.ended", "site.lost", "run.rolled_back"}
        }
        assert set(world.sent(run_events.SendPrepare)) <= stopped | ended, f"{seed=}"
    assert outcomes == {RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}


def lose_b(world: World) -> list[run_events.Action]:
    """Have a site end by a failure, and the run go on without it."""
    why = failure(world, "GATEWAY_EXITED", "b")
    world.tell(run_events.SiteEnded("b", succeeded=False, failures=(why,)))
    return world.tell(run_events.GoOnWithout("b", "its gateway was killed"))


def test_a_lost_site_is_started_again_and_is_out_until_it_has_entered() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.prepare()
    world.tell(*(run_events.SiteRunning(site) for site in world.sites))
    world.tell(run_events.StateOffered("a"), *stepped(*world.sites))
    prepare = [each for each in lose_b(world) if isinstance(each, run_events.SendPrepare)]
    assert [(each.site, each.returns) for each in prepare] == [("b", True)]
    starts = [each for each in world.tell(prepared("b")) if isinstance(each, run_events.SendStart)]
    assert [each.site for each in starts] == ["b"]
    assert [each.site for each in starts[0].endpoints] == ["a", "c"]
    world.tell(run_events.SiteRunning("b"))
    assert world.member("b").is_returning
    world.tell(run_events.SiteRejoined("b", 75))
    assert not world.member("b").is_returning
    world.tell(*(run_events.SiteEnded(site, succeeded=True) for site in "ac"))
    assert world.is_in(RunState.ACTIVE), "it takes part, and is waited for"
    world.tell(run_events.SiteEnded("b", succeeded=True))
    assert world.finish.state is RunState.SUCCEEDED


def test_a_site_is_started_again_only_so_often() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.prepare()
    world.tell(*(run_events.SiteRunning(site) for site in world.sites))
    world.tell(run_events.StateOffered("a"), *stepped(*world.sites))
    lose_b(world)
    world.tell(run_events.SiteEnded("b", False, (failure(world, "LAUNCH_FAILED", "b"),)))
    ended = [each for each in recorded_events(world) if each.kind == "site.ended"]
    assert ended[-1].detail["message"] == "LAUNCH_FAILED at site b", "why it did not come back"
    world.wait(1.0)
    assert world.sent(run_events.SendPrepare).count("b") == 1 + 1, "not again and again at once"
    for _ in range(5):
        world.wait(LEASE_S)
        world.tell(run_events.SiteEnded("b", False, (failure(world, "LAUNCH_FAILED", "b"),)))
    assert world.sent(run_events.SendPrepare).count("b") == 1 + 3
    world.wait(3600.0)
    assert world.sent(run_events.SendPrepare).count("b") == 1 + 4


def notes_of(world: World, kind: str) -> list[str]:
    events = [each for each in recorded_events(world) if each.kind == kind]
    return [str(each.detail["note"]) for each in events if "note" in each.detail]


def test_starts_that_come_to_nothing_are_further_and_further_apart_and_say_why() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.prepare()
    world.tell(*(run_events.SiteRunning(site) for site in world.sites))
    world.tell(run_events.StateOffered("a"), *stepped(*world.sites))
    lose_b(world)
    started_s = [world.now_s]
    full = failure(world, "LAUNCH_FAILED", "b", message="No space left on device")
    for _ in range(2):
        world.tell(run_events.SiteEnded("b", False, (full,)))
        before = world.sent(run_events.SendPrepare).count("b")
        for _ in range(1000):
            world.wait(0.5)
            if world.sent(run_events.SendPrepare).count("b") > before:
                break
        started_s.append(world.now_s)
    pauses_s = [later - earlier for earlier, later in itertools.pairwise(started_s)]
    assert pauses_s[1] == pytest.approx(2 * pauses_s[0], abs=1.0)
    world.tell(run_events.SiteEnded("b", False, (full,)))
    told = notes_of(world, "site.ended")
    assert all("did not come back: " in each and "No space left on device" in each for each in told)
    assert "it is started again in" in told[0]
    assert "it is not started again: `failure.max_restarts` are used up, 3 within" in told[2]
    world.wait(600.0)
    assert world.sent(run_events.SendPrepare).count("b") == 1 + 3


def test_a_site_that_took_part_again_is_started_again_as_soon_as_the_first_time() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.prepare()
    world.tell(*(run_events.SiteRunning(site) for site in world.sites))
    world.tell(run_events.StateOffered("a"), *stepped(*world.sites))
    lose_b(world)
    world.tell(prepared("b"))
    world.tell(run_events.SiteRunning("b"), run_events.SiteRejoined("b", 75))
    world.wait(LEASE_S)
    again = [each for each in lose_b(world) if isinstance(each, run_events.SendPrepare)]
    assert [each.site for each in again] == ["b"]


def test_how_a_site_ended_that_others_saw_go_is_told_when_it_says_so() -> None:
    world = World(3, needs_all=False)
    world.activate()
    world.tell(run_events.GoOnWithout("b", "told by site b: rank 0 went away without leaving"))
    killed = failure(world, "RANK_KILLED", "b", rank=0, exit_code=-9,
                     message="rank 0 of site b was killed by SIGKILL")  # fmt: skip
    world.tell(run_events.SiteEnded("b", False, (killed,)))
    assert notes_of(world, "site.ended") == ["site b ended: rank 0 of site b was killed by SIGKILL"]


def test_what_a_machine_lacks_is_told_while_the_run_goes_on() -> None:
    world = World(2)
    world.activate()
    world.tell(
        run_events.SiteNoted(
            EventKind.SITE_TROUBLE, "b", "site b: the disk of /x is full, or nearly: 0B are left"
        )
    )
    assert notes_of(world, "site.trouble") == [
        "site b: the disk of /x is full, or nearly: 0B are left"
    ]
    assert world.machine.is_going_on


def test_the_end_of_the_others_ends_a_site_that_was_about_to_come_back() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.prepare()
    world.tell(*(run_events.SiteRunning(site) for site in world.sites))
    world.tell(run_events.StateOffered("a"), *stepped(*world.sites))
    lose_b(world)
    world.tell(*(run_events.SiteEnded(site, succeeded=True) for site in "ac"))
    assert world.sent(run_events.SendStop) == ["b"]
    assert world.finish.state is RunState.SUCCEEDED


def test_a_site_whose_script_cannot_take_the_state_over_is_not_started_again() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.prepare()
    world.tell(*(run_events.SiteRunning(site) for site in world.sites))
    world.tell(*stepped(*world.sites))
    lose_b(world)
    world.wait(LEASE_S)
    assert world.sent(run_events.SendPrepare).count("b") == 1
    lost = [each for each in recorded_events(world) if each.kind == "site.lost"]
    for told in (str(lost[0].detail["note"]), world.machine.add_problem("b")):
        assert LACKS_STATE in told
    world.tell(run_events.StateOffered("a"), *stepped(*world.sites))
    assert world.sent(run_events.SendPrepare).count("b") == 2, "it is later with it than the loss"


def begun_by_a_and_b() -> World:
    """Return a run that has begun without site c, an agent of which is there."""
    world = World(3, needs_all=False, may_return=True, begin_with="ab")
    world.tell(run_events.SiteJoined("a", "h"), run_events.SiteJoined("b", "h"))
    assert world.sent(run_events.SendPrepare) == ["a", "b"]
    world.tell(*(prepared(site) for site in "ab"), *(run_events.SiteRunning(site) for site in "ab"))
    assert world.is_in(RunState.ACTIVE)
    world.tell(run_events.SiteJoined("c", "h"), run_events.StateOffered("a"), *stepped(*"ab"))
    return world


def test_a_site_that_the_run_did_not_begin_with_is_started_when_it_is_added() -> None:
    world = begun_by_a_and_b()
    world.tell(*(digest(site, 7) for site in "ab"))
    assert world.machine.verified_steps == 1, "nobody waits for its hashes"
    assert "takes no part yet" in world.machine.drop_problem("c")
    world.wait(1000.0)
    assert world.sent(run_events.SendPrepare) == ["a", "b"]
    assert world.machine.add_problem("c") == ""
    (prepare,) = (
        each
        for each in world.tell(run_events.AddRequested("c"))
        if isinstance(each, run_events.SendPrepare)
    )
    assert (prepare.site, prepare.returns) == ("c", True)
    assert "coming back already" in world.machine.add_problem("c")
    world.tell(prepared("c"))
    assert world.sent(run_events.SendStart) == ["a", "b", "c"]
    world.tell(run_events.SiteRunning("c"))
    assert is_ready_to_rejoin(world.member("c"))
    world.tell(run_events.SiteRejoined("c", 75))
    notes = [each.detail["note"] for each in recorded_events(world) if "note" in each.detail]
    assert notes == ["site c is started", "site c takes part"]
    world.tell(*(run_events.SiteEnded(site, succeeded=True) for site in "ab"))
    assert world.is_in(RunState.ACTIVE), "it is waited for"
    lost = failure(world, "RANK_KILLED", "c")
    world.tell(run_events.SiteEnded("c", succeeded=False, failures=(lost,)))
    world.tell(run_events.GoOnWithout("c", "killed"))
    assert world.finish.state is RunState.SUCCEEDED


def test_a_site_that_was_never_added_is_no_loss() -> None:
    world = begun_by_a_and_b()
    world.tell(run_events.SiteLost("c", "its agent was silent", 5.0))
    world.tell(run_events.AgentEnded("c", "it could not start", ""))
    world.tell(*(run_events.SiteEnded(site, succeeded=True) for site in "ab"))
    assert world.finish == run_events.FinishRun(RunState.SUCCEEDED, "", "", None)
    (ended,) = (each for each in recorded_events(world) if each.kind == "run.ended")
    assert "note" not in ended.detail


def test_a_site_that_took_no_part_yet_does_not_explain_the_runs_end() -> None:
    world = begun_by_a_and_b()
    world.tell(run_events.AddRequested("c"), run_events.SiteLost("c", "its agent has left"))
    world.wait(1000.0)
    too_few = "0 sites are left, want at least 1"
    world.tell(run_events.CannotGoOn("SITE_LOST", too_few))
    world.tell(*(run_events.SiteEnded(site, succeeded=False) for site in "ab"))
    assert world.finish.reason == too_few


def test_a_site_that_waits_to_be_started_can_be_dropped() -> None:
    world = begun_by_a_and_b()
    world.tell(run_events.SiteLost("c", "its agent was silent", 5.0))
    world.tell(run_events.AddRequested("c"))
    assert world.machine.drop_problem("c") == ""
    world.tell(run_events.DropRequested("c", "dropped"), run_events.SiteJoined("c", "h"))
    assert "c" not in world.sent(run_events.SendPrepare)
    assert "takes no part yet" in world.machine.drop_problem("c")
    assert world.machine.add_problem("c") == ""
    world.tell(run_events.AddRequested("c"))
    assert "c" in world.sent(run_events.SendPrepare)


def test_why_a_site_cannot_be_added() -> None:
    world = World(3, needs_all=False, may_return=True, begin_with="ab")
    world.tell(*(run_events.SiteJoined(site, "h") for site in "ab"))
    world.tell(*(prepared(site) for site in "ab"), *(run_events.SiteRunning(site) for site in "ab"))
    problem = world.machine.add_problem("c")
    assert "site c has no agent: start one there" in problem
    assert "isthmus agent --site c --coordinator " in problem
    world.tell(run_events.SiteJoined("c", "h"))
    assert world.machine.add_problem("c") == "", "the first step tells"
    world.tell(run_events.AddRequested("c"))
    assert world.sent(run_events.SendPrepare) == ["a", "b"]
    _, told = recorded(world.tell(run_events.StepTaken("a")))
    assert LACKS_STATE in str(told.detail["note"])
    assert LACKS_STATE in world.machine.add_problem("c")


def test_a_site_without_a_link_to_who_takes_part_is_told_what_it_lacks() -> None:
    world = World(3, needs_all=False, may_return=True, begin_with="ab", cut="ac")
    world.tell(*(run_events.SiteJoined(site, "h") for site in "abc"))
    world.tell(*(prepared(site) for site in "ab"), *(run_events.SiteRunning(site) for site in "ab"))
    world.tell(run_events.StateOffered("a"), *stepped(*world.sites))
    assert world.machine.add_problem("c") == ""
    lose_b(world)
    problem = world.machine.add_problem("c")
    assert "no link, both ways, between site c and any that takes part (a)" in problem
    assert "`links`" in problem


def let_b_come_back(world: World) -> None:
    """Lose a site, and have it up again; it follows once that is written down."""
    world.prepare()
    world.tell(*(run_events.SiteRunning(site) for site in world.sites))
    world.tell(run_events.StateOffered("a"), *stepped(*world.sites))
    lose_b(world)
    world.tell(prepared("b"), run_events.SiteRunning("b"))
    world.actions.append(epoch_begun("b"))


def epoch_begun(*follows: str) -> RecordEvent:
    epoch = Epoch(1, ("a", "b", "c"), GATHER, 75, follows)
    return RecordEvent(EventKind.EPOCH_BEGUN, detail=detail_of(epoch, f"site {follows} follows"))


def is_ready_to_rejoin(site: Member) -> bool:
    return site.is_returning and site.stage is Stage.RUNNING


def recorded(actions: Sequence[run_events.Action]) -> list[RecordEvent]:
    return [each for each in actions if isinstance(each, RecordEvent)]


def restarted(world: World, *before: World, begin_with: str = "") -> World:
    """Return the world with a coordinator that has read what was written down."""
    later = World(3, needs_all=False, may_return=True, begin_with=begin_with)
    told = [each for one in (*before, world) for each in recorded_events(one)]
    later.recall(told)
    return later


def test_a_site_that_follows_goes_on_under_the_next_coordinator() -> None:
    world = World(3, needs_all=False, may_return=True)
    let_b_come_back(world)
    later = restarted(world)
    later.tell(*(run_events.SiteReturned(site, "h", 2) for site in "abc"))
    assert later.sent(run_events.SendStop) == []
    later.tell(run_events.SiteRejoined("b", 75))
    assert [each.kind for each in recorded_events(later)][-1] == "site.returned"


@pytest.mark.parametrize("stage", ["returning", "prepared", "running"])
def test_a_site_that_is_coming_up_goes_on_under_the_next_coordinator(stage: str) -> None:
    world = begun_by_a_and_b()
    world.tell(run_events.AddRequested("c"))
    if stage != "returning":
        world.tell(prepared("c"))
    if stage == "running":
        world.tell(run_events.SiteRunning("c"))
    later = restarted(world, begin_with="ab")
    assert set(later.machine.awaited) == {*"abc"}
    assert later.member("c").is_coming_up is (stage != "running")
    actions = later.tell(*(run_events.SiteReturned(site, "h", 0) for site in "abc"))
    assert later.sent(run_events.SendStop) == []
    prepare = [each for each in actions if isinstance(each, run_events.SendPrepare)]
    wanted = [("c", True)] if stage == "returning" else []
    assert [(each.site, each.returns) for each in prepare] == wanted
    assert later.sent(run_events.SendStart) == (["c"] if stage == "prepared" else [])
    if stage == "returning":
        later.tell(prepared("c"))
    if stage != "running":
        later.tell(run_events.SiteRunning("c"))
    assert is_ready_to_rejoin(later.member("c"))
    later.tell(run_events.SiteRejoined("c", 75))
    assert restarted(later, world, begin_with="ab").machine.add_problem("c") == "site c takes part"


def test_a_site_that_is_gone_after_all_were_done_is_no_failure() -> None:
    world = World(2, needs_all=False)
    world.activate()
    world.tell(run_events.SiteDone("a"), run_events.SiteDone("b"))
    assert world.sent(run_events.SendRelease) == ["a", "b"]
    world.tell(run_events.SiteLost("b", "its agent was silent", 5.0))
    world.tell(run_events.SiteEnded("a", succeeded=True))
    assert world.finish == run_events.FinishRun(RunState.SUCCEEDED, "", "", None)
    told = [each.kind for each in recorded_events(world)]
    assert not {"failure.reported", "site.lost"} & {*told}


def test_a_rank_that_hangs_when_its_site_enters_holds_nobody_up_for_long() -> None:
    """Also where it has hung before, and its site has come back since."""
    world = World(3, needs_all=False, may_return=True)
    let_b_come_back(world)
    for has_entered in (False, True):
        if has_entered:
            world.tell(run_events.SiteRejoined("b", 75))
        stuck = AbsentRank(
            rank=0,
            for_s=20.0,
            round=75,
            is_stopped=False,
            is_in_collective=False,
            doing="in step",
            stack_path="",
        )
        stops = world.sent(run_events.SendStop).count("b")
        world.tell(run_events.StallReported("a", (), is_waiting=True))
        world.tell(run_events.StallReported("b", (stuck,), is_waiting=False))
        assert world.sent(run_events.SendStop).count("b") == stops + 1
        world.tell(run_events.SiteEnded("b", succeeded=False))
        world.tell(run_events.GoOnWithout("b", "stalled"))
        world.wait(LEASE_S)
        world.tell(prepared("b"), run_events.SiteRunning("b"))


def test_a_site_that_came_back_is_not_done_again_for_the_next_coordinator() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.prepare()
    world.tell(*(run_events.SiteRunning(site) for site in world.sites))
    world.tell(run_events.StateOffered("a"), *stepped(*"abc"), run_events.SiteDone("b"))
    lose_b(world)
    assert not restarted(world).machine.has_done_sites


def test_a_site_that_follows_to_the_end_is_waited_for_where_the_others_are_lost() -> None:
    world = World(3, needs_all=False, may_return=True)
    let_b_come_back(world)
    world.tell(run_events.SiteDone("b"))
    world.tell(*(run_events.SiteEnded(site, succeeded=False) for site in "ac"))
    world.tell(run_events.SiteRejoined("b", 75))
    world.tell(*(run_events.GoOnWithout(site, "lost") for site in "ac"))
    assert world.sent(run_events.SendRelease) == ["b"]
    world.tell(run_events.SiteEnded("b", succeeded=True))
    assert world.finish.state is RunState.SUCCEEDED


def test_a_dropped_site_that_is_coming_back_is_stopped_by_the_next_coordinator() -> None:
    """The one before died with the drop written down, and nothing of what comes of it."""
    world = World(3, needs_all=False, may_return=True)
    let_b_come_back(world)
    world.actions.append(RecordEvent(EventKind.SITE_DROP_REQUESTED, "b", {"message": "dropped"}))
    later = restarted(world)
    later.wait(0.1)
    assert later.sent(run_events.SendStop) == ["b"]
    assert [each.site for each in recorded_events(later) if each.kind == "site.dropped"] == ["b"]
    assert later.machine.drop_problem("b") == "site b is dropped already"


def test_sites_that_are_about_to_leave_do_not_count_as_left() -> None:
    world = World(3, needs_all=False)
    world.activate()
    world.tell(run_events.DropRequested("c", "by an operator"))
    assert world.machine.drop_problem("b") == ""
    world.tell(run_events.DropRequested("b", "by an operator"))
    assert "0 would be left" in world.machine.drop_problem("a")


def test_a_drop_that_cannot_be_is_taken_back_and_told() -> None:
    world = World(3, needs_all=False)
    world.activate()
    world.tell(run_events.DropRequested("c", "by an operator"))
    assert world.member("c").is_dropped
    (told,) = world.tell(run_events.DropRefused("c", "no other has the state"))
    assert isinstance(told, RecordEvent)
    assert told.detail["note"] == "site c is not dropped: no other has the state"
    assert not world.member("c").is_dropped
    assert world.machine.drop_problem("c") == ""
