"""The machine of a run: its stages, its ends, and what holds in every order of events."""

from collections.abc import Sequence

import pytest

from orchestrator.core import events
from orchestrator.core.states import RunState
from tests.fakes.run_worlds import (
    COLLECT_S,
    GRACE_S,
    LEASE_S,
    START_S,
    World,
    digest,
    failure,
    prepared,
)


def test_a_run_that_goes_well() -> None:
    world = World(3)
    world.tell(events.SiteJoined("a", "h"), events.SiteJoined("b", "h"))
    assert world.sent(events.SendPrepare) == []
    world.tell(events.SiteJoined("c", "h"))
    assert world.sent(events.SendPrepare) == ["a", "b", "c"]
    world.tell(prepared("c"), prepared("a"))
    assert world.sent(events.SendStart) == []
    started = [a for a in world.tell(prepared("b")) if isinstance(a, events.SendStart)]
    assert [start.site for start in started] == ["a", "b", "c"]
    assert [endpoint.site for endpoint in started[1].endpoints] == ["a", "c"]
    world.tell(*(events.SiteRunning(site) for site in "ab"))
    assert world.is_in(RunState.FORMING)
    world.tell(events.SiteRunning("c"))
    assert world.is_in(RunState.ACTIVE)
    world.now_s += 7
    world.tell(*(events.SiteEnded(site, succeeded=True) for site in "bca"))
    assert world.finish == events.FinishRun(RunState.SUCCEEDED, "", "", None)
    assert world.machine.active_for_s(world.now_s + 50) == 7
    assert world.sent(events.SendStop) == []


@pytest.mark.parametrize(
    ("come", "named", "stopped"),
    [
        ([events.SiteJoined("a", "h")], "site b: absent, no agent has joined", []),
        ([], "sites a, b: absent", []),
        (
            [events.SiteJoined("a", "h"), events.SiteJoined("b", "h"), prepared("b")],
            "site a: joined, its gateways do not listen yet",
            ["a", "b"],
        ),
        (
            [
                *(events.SiteJoined(site, "h") for site in "ab"),
                *(prepared(site) for site in "ab"),
                events.SiteRunning("a"),
            ],
            "site b: starting, its ranks have not all joined",
            ["a", "b"],
        ),
    ],
    ids=["absent", "nobody", "unprepared", "starting"],
)
def test_a_late_start_names_who_was_missing_and_rolls_back(
    come: Sequence[events.Event], named: str, stopped: list[str]
) -> None:
    world = World(2)
    world.tell(*come)
    world.wait(START_S - 0.1)
    assert world.is_in(RunState.FORMING)
    world.wait(0.2)
    assert world.sent(events.SendStop) == stopped
    world.tell(*(events.SiteEnded(site, succeeded=False) for site in stopped))
    assert world.finish.reason_code == "START_TIMED_OUT"
    assert named in world.finish.reason


def test_the_first_failure_is_found_among_those_that_come_later() -> None:
    world = World(3)
    world.activate()
    world.tell(events.SiteEnded("a", False, (failure(world, "PEER_LOST", "a"),)))
    world.wait(COLLECT_S / 2)
    assert world.sent(events.SendStop) == []
    real = failure(world, "RANK_KILLED", "b", COLLECT_S, rank=3, exit_code=-9, log_path="x.log")
    world.tell(events.SiteEnded("b", False, (real,)))
    world.wait(COLLECT_S / 2)
    assert world.sent(events.SendStop) == ["c"]
    assert world.is_in(RunState.STOPPING)
    late = failure(world, "RANK_KILLED", "c", -0.01)
    world.tell(events.SiteEnded("c", False, (late,)))
    assert world.finish == events.FinishRun(RunState.FAILED, "RANK_KILLED", real.reason, real)


def test_nothing_is_waited_for_once_all_sites_have_reported() -> None:
    world = World(2)
    world.activate()
    for site in "ab":
        world.tell(events.SiteEnded(site, False, (failure(world, "RANK_EXITED", site),)))
    assert world.finish.failure is not None
    assert world.finish.failure.site == "a"


def test_a_lost_site_ends_the_run_and_is_stopped_when_it_comes_back() -> None:
    world = World(2)
    world.activate()
    world.tell(events.SiteLost("b", "site b: its agent was silent", silent_s=5.0))
    world.wait(COLLECT_S)
    assert world.sent(events.SendStop) == ["a"]
    world.tell(events.SiteJoined("b", "h"))
    assert world.sent(events.SendStop) == ["a", "b"]
    world.tell(events.SiteEnded("a", succeeded=False))
    assert (world.finish.reason_code, world.finish.reason) == (
        "SITE_LOST",
        "site b: its agent was silent",
    )


def test_a_site_that_takes_no_part_is_nothing_to_the_run() -> None:
    world = World(2)
    assert not world.tell(events.SiteJoined("z", "host-z"))
    world.activate()
    assert not world.tell(events.SiteLost("z", "its agent was silent", 1.0))
    assert world.is_in(RunState.ACTIVE)


def test_an_agent_that_leaves_before_prepare_may_come_back() -> None:
    world = World(2)
    world.tell(events.SiteJoined("a", "h"), events.SiteLost("a", "gone"), events.Ticked())
    world.tell(events.SiteJoined("b", "h"))
    assert world.sent(events.SendPrepare) == []
    world.tell(events.SiteJoined("a", "h"))
    assert world.sent(events.SendPrepare) == ["a", "b"]


def test_an_agent_that_could_not_start_is_not_waited_for() -> None:
    world = World(2)
    world.tell(events.SiteJoined("a", "h"), events.AgentEnded("b", "status 1", "log"))
    assert (world.finish.reason_code, world.finish.reason) == (
        "LAUNCH_FAILED",
        "site b: status 1",
    )


def test_cancelling_is_idempotent_and_reaches_whoever_was_prepared() -> None:
    world = World(2)
    world.join()
    world.tell(prepared("a"))
    for _ in range(3):
        world.tell(events.CancelRequested("by hand"))
    assert world.sent(events.SendStop) == ["a", "b"]
    world.tell(prepared("b"))
    assert world.sent(events.SendStart) == []
    world.tell(*(events.SiteEnded(site, succeeded=False) for site in "ab"))
    assert world.finish == events.FinishRun(RunState.CANCELLED, "CANCELLED", "by hand", None)
    assert world.tell(events.CancelRequested("again")) == []


def test_a_site_that_never_confirms_is_recorded_and_the_run_ends() -> None:
    world = World(2)
    world.activate()
    world.tell(events.CancelRequested("by hand"), events.SiteEnded("a", succeeded=False))
    assert world.wait(GRACE_S + LEASE_S - 0.1) == []
    world.wait(0.2)
    assert world.finish.state is RunState.CANCELLED
    assert ("site.unconfirmed", "b") in [
        (a.kind, a.site) for a in world.actions if isinstance(a, events.RecordEvent)
    ]


def test_different_parameters_end_the_run_and_name_the_tensor() -> None:
    world = World(3)
    world.activate()
    world.tell(digest("a", 1), digest("b", 2), digest("c", 1))
    world.wait(COLLECT_S)
    assert world.sent(events.SendStop) == ["a", "b", "c"]
    world.tell(*(events.SiteEnded(site, succeeded=False) for site in "abc"))
    assert world.finish.reason_code == "PARAMETERS_DIFFER"
    assert world.finish.failure is not None
    assert (world.finish.failure.site, world.finish.failure.rank) == ("b", 0)
    assert "2.weight" in world.finish.reason


def test_a_difference_that_was_never_certain_still_spoils_success() -> None:
    world = World(3)
    world.activate()
    world.tell(digest("a", 1), digest("b", 2))
    world.tell(*(events.SiteEnded(site, succeeded=True) for site in "abc"))
    assert world.finish.reason_code == "PARAMETERS_DIFFER"


@pytest.mark.parametrize("succeeded", [False, True])
def test_an_end_that_nobody_asked_for_is_a_failure(succeeded: bool) -> None:
    world = World(2)
    world.join()
    world.tell(events.SiteEnded("a", succeeded=succeeded))
    world.wait(COLLECT_S)
    world.tell(events.SiteEnded("b", succeeded=False))
    assert world.finish.reason_code == "SITE_LOST"
