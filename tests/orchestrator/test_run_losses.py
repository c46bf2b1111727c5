"""What a run may lose and go on, and what is said at its end of what it has lost."""

import pytest

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.run_events import RunState
from tests.fakes.run_worlds import COLLECT_S, World, failure, read_again, recorded_events, stepped


def fail(world: World, code: str, site: str = "b") -> None:
    """Have a site end by a failure; where the run survives it, it goes on without the site."""
    why = failure(world, code, site, rank=1, exit_code=1, log_path="1/stderr.log")
    world.tell(run_events.SiteEnded(site, succeeded=False, failures=(why,)))
    world.tell(run_events.GoOnWithout(site, "it has ended"))


def finish(world: World, sites: str) -> run_events.FinishRun:
    """Have sites end well, and return what the run came to."""
    world.tell(*(run_events.SiteEnded(site, succeeded=True) for site in sites))
    return world.finish


def stopped(world: World, sites: str) -> run_events.FinishRun:
    """Have the run's failure be collected and the sites stopped; return what the run came to."""
    world.wait(COLLECT_S)
    world.tell(*(run_events.SiteEnded(site, succeeded=False) for site in sites))
    return world.finish


def test_a_scripts_error_ends_the_run_and_is_named() -> None:
    world = World(3, needs_all=False)
    world.activate()
    fail(world, "SCRIPT_FAILED")
    end = stopped(world, "ac")
    assert (end.state, end.reason_code) == (RunState.FAILED, "SCRIPT_FAILED")
    assert end.failure is not None
    assert (end.failure.site, end.failure.rank, end.failure.log_path) == ("b", 1, "1/stderr.log")


def test_the_others_go_on_without_a_script_where_that_is_wanted() -> None:
    world = World(3, needs_all=False, ends_on_script_error=False)
    world.activate()
    fail(world, "SCRIPT_FAILED")
    assert finish(world, "ac").reason_code == "WITH_LOSSES"


def test_a_rank_that_computes_wrongly_ends_the_run_and_is_named() -> None:
    world = World(3, needs_all=False)
    world.activate()
    fail(world, "GRADIENTS_DIFFER")
    end = stopped(world, "ac")
    assert (end.state, end.reason_code) == (RunState.FAILED, "GRADIENTS_DIFFER")
    assert end.failure is not None
    assert (end.failure.site, end.failure.rank) == ("b", 1)


@pytest.mark.parametrize("after", ["", "failure.reported", "site.ended", "site.lost"])
def test_where_its_site_is_dropped_only_an_operator_starts_it_again(after: str) -> None:
    """Under the same coordinator, and under one that begins after any of these was written."""

    def begin() -> World:
        return World(3, needs_all=False, may_return=True, drops_corrupt=True)

    world = begin()
    world.activate()
    world.tell(run_events.StateOffered("a"))
    fail(world, "GRADIENTS_DIFFER")
    if after:
        records = recorded_events(world)
        last = [str(each.kind) for each in records].index(after)
        world = begin()
        world.recall(records[: last + 1])
        world.tell(*(run_events.SiteReturned(each, "h", 0, has_run=True) for each in "ac"))
        fail(world, "GRADIENTS_DIFFER")
        world.tell(run_events.SiteJoined("b", "h"))
    assert world.is_in(RunState.ACTIVE)
    world.wait(3600.0)
    assert "site.returning" not in [each.kind for each in recorded_events(world)]
    notes = [str(each.detail.get("note", "")) for each in recorded_events(world)]
    assert any("`isthmus sites add b` starts the site again" in each for each in notes)
    world.tell(run_events.SiteEnded("b", succeeded=False), run_events.AddRequested("b"))
    world.wait(1.0)
    assert [each.kind for each in recorded_events(world)].count(EventKind.SITE_RETURNING) == 1


def test_a_node_that_is_at_fault_twice_is_kept_out_until_an_operator_adds_its_site() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.activate()
    world.tell(run_events.StateOffered("a"))
    for start in (0, 1):
        fail(world, "NODE_FAULTY")
        world.wait(1.0)
        kinds = [each.kind for each in recorded_events(world)]
        assert kinds.count(EventKind.SITE_RETURNING) == 1, start
        assert kinds.count(EventKind.NODE_KEPT_OUT) == start
    [note] = [
        str(each.detail["note"])
        for each in recorded_events(world)
        if each.kind == EventKind.NODE_KEPT_OUT
    ]
    world.wait(7200.0)
    said = "site b is kept out: its machine was at fault twice, last: NODE_FAULTY at site b"
    assert note.startswith(said), note
    assert "isthmus doctor TOPOLOGY --burn-in 60s" in note
    world.tell(run_events.AddRequested("b"))
    world.wait(1.0)
    assert [each.kind for each in recorded_events(world)].count(EventKind.SITE_RETURNING) == 2


def test_who_added_a_site_before_it_was_known_to_compute_wrongly_is_asked_again() -> None:
    world = World(3, needs_all=False, may_return=True, drops_corrupt=True)
    world.activate()
    world.tell(run_events.StateOffered("a"))
    world.tell(run_events.GoOnWithout("b", "a and c do not reach it"))
    world.tell(run_events.AddRequested("b"))
    fail(world, "GRADIENTS_DIFFER")
    world.wait(3600.0)
    kinds = [each.kind for each in recorded_events(world)]
    assert EventKind.NODE_KEPT_OUT in kinds
    assert EventKind.SITE_RETURNING not in kinds
    world.tell(run_events.AddRequested("b"))
    world.wait(1.0)
    assert EventKind.SITE_RETURNING in [each.kind for each in recorded_events(world)]


@pytest.mark.parametrize("code", ["RANK_KILLED", "RANK_EXITED", "GATEWAY_EXITED", "NODE_LOST"])
def test_an_outage_is_survived_and_is_a_loss_at_the_end(code: str) -> None:
    world = World(3, needs_all=False)
    world.activate()
    fail(world, code)
    end = finish(world, "ac")
    assert (end.state, end.reason_code) == (RunState.SUCCEEDED, "WITH_LOSSES")
    assert end.reason == f"site b was lost and did not come back: {code} at site b"
    assert end.failure is not None
    assert end.failure.log_path == "1/stderr.log"


@pytest.mark.parametrize("code", ["SCRIPT_FAILED", "RANK_KILLED", "GATEWAY_EXITED"])
@pytest.mark.parametrize("have_stepped", ["", "a", "ab"])
def test_before_all_have_taken_a_step_the_first_failure_is_the_runs(
    code: str, have_stepped: str
) -> None:
    world = World(3, needs_all=False, may_return=True, ends_on_script_error=False)
    world.activate(steps=False)
    world.tell(run_events.StateOffered("a"), *stepped(*have_stepped))
    fail(world, code, "c")
    innocent = failure(world, "NO_TOKENS", "a", age_s=-0.5)
    world.now_s += 0.5
    world.tell(run_events.SiteEnded("a", succeeded=False, failures=(innocent,)))
    assert stopped(world, "b").reason_code == code


def test_before_the_first_step_a_silent_site_and_a_dead_link_end_the_run() -> None:
    silent, cut = World(3, needs_all=False), World(3, needs_all=False)
    for world in (silent, cut):
        world.activate(steps=False)
    silent.tell(run_events.SiteLost("b", "site b: its agent was silent", silent_s=5.0))
    assert stopped(silent, "ac").reason_code == "SITE_LOST"
    cut.tell(run_events.GoOnWithout("b", "a and b do not reach each other"))
    end = stopped(cut, "abc")
    assert (end.reason_code, end.failure.site if end.failure else "") == ("PEER_LOST", "b")


def test_an_operator_may_drop_a_site_before_the_first_step() -> None:
    world = World(3, needs_all=False)
    world.activate(steps=False)
    world.tell(run_events.DropRequested("b", "dropped"), *stepped("a", "c"))
    world.tell(run_events.GoOnWithout("b", "dropped"))
    assert "run.first_step" in [each.kind for each in recorded_events(world)]
    assert finish(world, "ac") == run_events.FinishRun(RunState.SUCCEEDED, "", "", None)


def test_a_site_that_is_done_has_taken_its_steps() -> None:
    world = World(3, needs_all=False)
    world.activate(steps=False)
    world.tell(*stepped("a"), run_events.SiteDone("b"), run_events.SiteDone("c"))
    fail(world, "RANK_KILLED", "a")
    assert world.is_in(RunState.ACTIVE)


def test_who_was_lost_and_came_back_is_no_loss() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.activate()
    world.tell(run_events.StateOffered("a"))
    fail(world, "GATEWAY_EXITED")
    world.tell(run_events.SitePrepared("b", ()), run_events.SiteRunning("b"))
    world.tell(run_events.SiteRejoined("b", 9))
    assert finish(world, "abc") == run_events.FinishRun(RunState.SUCCEEDED, "", "", None)


def test_who_follows_at_the_end_did_not_come_back() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.activate()
    world.tell(run_events.StateOffered("a"))
    fail(world, "GATEWAY_EXITED")
    world.tell(run_events.SitePrepared("b", ()), run_events.SiteRunning("b"))
    assert finish(world, "ac").reason_code == "WITH_LOSSES"


def test_losses_that_are_allowed_are_noted_only() -> None:
    world = World(3, needs_all=False, allows_losses=True)
    world.activate()
    fail(world, "GATEWAY_EXITED")
    assert finish(world, "ac") == run_events.FinishRun(RunState.SUCCEEDED, "", "", None)
    assert recorded_events(world)[-1].detail["note"] == "sites lost on the way: b"


def test_a_site_that_comes_back_and_fails_again_is_said_at_once() -> None:
    world = World(3, needs_all=False, may_return=True)
    world.activate()
    world.tell(run_events.StateOffered("a"))
    fail(world, "GATEWAY_EXITED")
    why = failure(world, "SCRIPT_FAILED", "b")
    world.tell(run_events.SiteEnded("b", succeeded=False, failures=(why,)))
    assert world.is_in(RunState.ACTIVE), "it takes no part"
    notes = [str(each.detail.get("note")) for each in recorded_events(world)]
    said = "site b did not come back: SCRIPT_FAILED at site b; it is started again in "
    assert any(note.startswith(said) for note in notes), notes


def written(step: int) -> run_events.CheckpointWritten:
    return run_events.CheckpointWritten("a", step)


def unwritten(step: int) -> run_events.StorageFailed:
    return run_events.StorageFailed(
        EventKind.CHECKPOINT_FAILED, "b", step, "rank 0: No space left on device"
    )


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([written(10), written(20)], ""),
        ([written(10), unwritten(20)], "the last checkpoint, of step 20, failed at site b: rank 0"),
        ([unwritten(10), written(20)], ""),
        ([written(20), unwritten(20)], ""),  # the site's own part, which can be done without
        ([unwritten(20), written(20)], ""),
        ([unwritten(20)], "the last checkpoint, of step 20, failed"),
        ([], "no checkpoint was written"),
    ],
)
def test_a_run_without_its_last_checkpoint_says_so(told: list[run_events.Event], said: str) -> None:
    world = World(2, saves=True)
    world.activate()
    world.tell(run_events.StateOffered("a"), *told)
    end = finish(world, "ab")
    assert (end.state, end.reason_code) == (RunState.SUCCEEDED, "WITH_LOSSES" if said else "")
    assert end.reason.startswith(said)


def test_of_checkpoints_the_latest_is_noted_and_crowds_out_no_loss() -> None:
    world = World(3, needs_all=False, saves=True)
    world.activate()
    fail(world, "GATEWAY_EXITED")
    world.tell(*(written(step) for step in range(10, 1000, 10)))
    run = JournaledRun("run-1")
    for place, each in enumerate(recorded_events(world)):
        run.apply(read_again(each, place))
    assert run.notes[-1] == "checkpoint of step 990 is written"
    assert [each.kind for each in run.noted if each.site == "b"] == ["site.lost"], run.notes
    assert len([each for each in run.noted if each.kind == "checkpoint.written"]) == 1


def test_a_script_that_never_saves_is_told_what_it_lacks() -> None:
    world = World(2, saves=True)
    world.activate()
    assert "does not call `start = site.checkpoint(" in finish(world, "ab").reason


def test_a_job_that_was_done_before_it_was_resumed_lacks_no_checkpoint() -> None:
    world = World(2, saves=True)
    world.activate(steps=False)
    assert finish(world, "ab").reason_code == ""


def test_the_next_coordinator_knows_of_steps_losses_and_checkpoints() -> None:
    world = World(3, needs_all=False, saves=True)
    world.activate()
    world.tell(run_events.StateOffered("a"), written(10), unwritten(20))
    fail(world, "GATEWAY_EXITED")
    later = World(3, needs_all=False, saves=True)
    later.recall(recorded_events(world))
    end = finish(later, "ac")
    first, second = end.reason.split("; ")
    assert first == "site b was lost and did not come back: GATEWAY_EXITED at site b"
    assert second.startswith("the last checkpoint, of step 20, failed at site b")
