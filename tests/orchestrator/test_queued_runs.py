"""Runs that wait at a coordinator: their order, their sites, and what a restart leaves of them."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from isthmus.orchestrator.core import run_queue
from isthmus.protos.control.v1 import control_pb2 as pb
from tests.fakes.coordinators import (
    DEADLINE_S,
    Bench,
    FakeAgent,
    active,
    coordinating,
    status_of,
)
from tests.fakes.worlds import JOB, topology_text

pytestmark = pytest.mark.slow


async def state_of(bench: Bench, run_id: str) -> tuple[str, int]:
    """Return a run's state, and its place in the queue."""
    run = await bench.get(run_id)
    return pb.RunState.Name(run.state).removeprefix("RUN_STATE_"), run.position


async def begun(bench: Bench, run_id: str) -> pb.Run:
    """Watch a run until it waits no more."""
    last = pb.Run()
    request = pb.GetRunRequest(run_id=run_id)
    async for last in bench.stub.WatchRun(request, timeout=DEADLINE_S):
        if last.state != pb.RUN_STATE_QUEUED:
            break
    return last


async def train(*agents: FakeAgent) -> None:
    """Bring the next run as far as that its ranks train."""
    for agent in agents:
        await agent.prepare()
    for agent in agents:
        await agent.run()


def placed(*sites: str) -> str:
    """Return a job of these sites only."""
    parts = ", ".join(f"{{site: {site}, sequences: {12 // len(sites)}}}" for site in sites)
    return f"{JOB}trainer: {{global_batch: 12}}\nplacement: [{parts}]\n"


async def test_runs_begin_by_priority_when_their_sites_are_free(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        a, b = await active(bench, "a", "b")
        await bench.submit("later")
        await bench.submit("urgent", priority=3)
        await bench.submit("latest")
        assert await bench.submit("later") == "later"
        assert [await state_of(bench, each) for each in ("urgent", "later", "latest")] == [
            ("QUEUED", 1),
            ("QUEUED", 2),
            ("QUEUED", 3),
        ]
        first = await bench.get("run-1")
        for agent in (a, b):
            await agent.end(succeeded=True)
        run = await begun(bench, "urgent")
        assert run.generation > first.generation
        assert run.priority == 3
        await train(a, b)
        assert await state_of(bench, "later") == ("QUEUED", 1)
        for agent in (a, b):
            await agent.end(succeeded=True)
        assert (await begun(bench, "later")).state == pb.RUN_STATE_FORMING
        assert (await bench.get("urgent")).state == pb.RUN_STATE_SUCCEEDED
        kinds = [event.kind for event in bench.control.runs.events_of("urgent", 0)]
        assert kinds[:2] == ["run.submitted", "run.dequeued"]


async def test_one_that_waits_is_cancelled_and_never_begins(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        a, b = await active(bench, "a", "b")
        await bench.submit("two")
        request = pb.CancelRunRequest(run_id="two")
        cancelled = await bench.stub.CancelRun(request, timeout=DEADLINE_S)
        assert cancelled.state == pb.RUN_STATE_CANCELLED
        assert cancelled.reason_code == "CANCELLED"
        assert (await begun(bench, "two")).state == pb.RUN_STATE_CANCELLED
        for agent in (a, b):
            await agent.end(succeeded=True)
        await bench.submit("three")
        await begun(bench, "three")
        assert (await bench.get("two")).state == pb.RUN_STATE_CANCELLED


async def test_runs_of_other_sites_go_on_beside_each_other(tmp_path: Path) -> None:
    async with coordinating(tmp_path, topology_text(4)) as bench:
        a, b, c, d = await bench.join("a", "b", "c", "d")
        await bench.submit("left", placed("a", "b"))
        await bench.submit("right", placed("c", "d"))
        await bench.submit("all")
        await bench.submit("again", placed("c", "d"))
        assert await state_of(bench, "all") == ("QUEUED", 1)
        assert await state_of(bench, "again") == ("QUEUED", 2)
        await train(a, b)
        await train(c, d)
        # What one says of its run concerns that one only; a site that is lost, too.
        failure = pb.Failure(code="RANK_EXITED", message="rank 0", site="d", rank=0)
        await d.end(failure)
        await c.hear("stop")
        await c.end()
        watched = bench.stub.WatchRun(pb.GetRunRequest(run_id="right"), timeout=DEADLINE_S)
        assert [run async for run in watched][-1].state == pb.RUN_STATE_FAILED
        assert await state_of(bench, "left") == ("ACTIVE", 0)
        # Nobody overtakes the one that waits for all sites.
        assert await state_of(bench, "again") == ("QUEUED", 2)
        for agent in (a, b):
            await agent.end(succeeded=True)
        assert (await begun(bench, "all")).state == pb.RUN_STATE_FORMING
        assert (await bench.get("left")).state == pb.RUN_STATE_SUCCEEDED


async def test_the_queue_outlives_its_coordinator(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        await active(bench, "a", "b")
        await bench.submit("later")
        await bench.submit("urgent", priority=1)
        bench.control.runs.end("it was asked to end")
    async with coordinating(tmp_path) as bench:
        assert (await bench.get("run-1")).state in {
            pb.RUN_STATE_STOPPING,
            pb.RUN_STATE_CANCELLED,
            pb.RUN_STATE_FAILED,
        }
        run = await bench.get("urgent")
        assert (run.state, run.priority) in {
            (pb.RUN_STATE_QUEUED, 1),
            (pb.RUN_STATE_FORMING, 1),
        }
        assert await state_of(bench, "later") in {("QUEUED", 1), ("QUEUED", 2)}


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\xff\x00")])
async def test_one_whose_files_are_gone_fails_and_the_next_begins(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    async with coordinating(tmp_path) as bench:
        a, b = await active(bench, "a", "b")
        await bench.submit("broken")
        await bench.submit("whole")
        for path in (bench.runs / "broken").iterdir():
            damage(path)
        for agent in (a, b):
            await agent.end(succeeded=True)
        assert (await begun(bench, "whole")).state == pb.RUN_STATE_FORMING
        broken = await bench.get("broken")
        assert (broken.state, broken.reason_code) == (pb.RUN_STATE_FAILED, "FILE_ERROR")


async def test_the_queue_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.orchestrator.coordinator.runs.MAX_WAITING", 1)
    assert run_queue.MAX_WAITING > 1

    async with coordinating(tmp_path) as bench:
        await active(bench, "a", "b")
        await bench.submit("two")
        code, detail = await status_of(bench.submit("three"))
        assert code == grpc.StatusCode.ALREADY_EXISTS
        assert "wait already" in detail
