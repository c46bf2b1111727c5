"""What a coordinator streams to whoever asks: logs and events."""

import asyncio
import threading
from collections.abc import AsyncIterable
from pathlib import Path

import grpc
import pytest

from orchestrator.run_folder.log_files import LogReader
from protos.control.v1 import control_pb2 as pb
from tests.fakes.coordinators import (
    DEADLINE_S,
    FakeAgent,
    active,
    coordinating,
    run_scenario,
    status_of,
)

pytestmark = pytest.mark.slow


async def collect(stream: AsyncIterable[pb.LogLine]) -> list[tuple[str, int, str]]:
    return [(f"{each.site}/{each.source}", each.sequence, each.text) async for each in stream]


def test_logs_come_once_in_order_and_are_followed_to_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path) as bench:
            a, b = await active(bench, "a", "b")

            async def ship(agent: FakeAgent, source: str, first: int, *texts: str) -> None:
                lines = [
                    pb.LogLine(site=agent.site, source=source, sequence=first + place, text=text)
                    for place, text in enumerate(texts)
                ]
                request = pb.ShipLogsRequest(
                    run_id="run-1", generation=agent.generation, site=agent.site, lines=lines
                )
                await bench.stub.ShipLogs(request, timeout=DEADLINE_S)

            await ship(a, "rank0", 0, "one", "two")
            follow = pb.ReadLogsRequest(rank=-1, follow=True)
            following = asyncio.create_task(
                collect(bench.stub.ReadLogs(follow, timeout=DEADLINE_S))
            )
            await ship(a, "rank0", 1, "two", "three\nfour")
            await ship(b, "gateway0", 0, "x" * 9000)
            code, _ = await status_of(ship(b, "../../evil", 0, "x"))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            for agent in (a, b):
                await agent.end(succeeded=True)
            lines = await following
            assert [line for line in lines if line[0] == "a/rank0"] == [
                ("a/rank0", 0, "one"),
                ("a/rank0", 1, "two"),
                ("a/rank0", 2, "three four"),
            ]
            (cut,) = [text for name, _, text in lines if name == "b/gateway0"]
            assert cut.endswith("[cut: 9000 bytes]")
            tail = pb.ReadLogsRequest(site="a", rank=0, tail=1)
            last = await collect(bench.stub.ReadLogs(tail, timeout=DEADLINE_S))
            assert last == [("a/rank0", 2, "three four")]

    run_scenario(scenario())


def test_events_are_followed_to_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path) as bench:
            agents = await active(bench, "a", "b")
            request = pb.ReadEventsRequest(follow=True)
            stream = bench.stub.ReadEvents(request, timeout=DEADLINE_S)
            for agent in agents:
                await agent.end(succeeded=True)
            events = [event async for event in stream]
            kinds = [event.kind for event in events]
            assert kinds[0] == "run.submitted"
            assert kinds[-1] == "run.ended"
            assert kinds.index("run.preparing") < kinds.index("site.starting")
            after = pb.ReadEventsRequest(after=events[-2].sequence)
            rest = bench.stub.ReadEvents(after, timeout=DEADLINE_S)
            assert [event.kind async for event in rest] == ["run.ended"]
            await bench.service.wait_for_streams(DEADLINE_S)

    run_scenario(scenario())


def test_a_long_log_does_not_hold_up_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answered = threading.Event(), threading.Event()

    def skip_to_tail(_reader: LogReader, _num_lines: int) -> None:
        begun.set()
        assert answered.wait(5), "the coordinator answered nobody in the meantime"

    async def scenario() -> None:
        monkeypatch.setattr(LogReader, "skip_to_tail", skip_to_tail)
        async with coordinating(tmp_path) as bench:
            await bench.submit()
            request = pb.ReadLogsRequest(rank=-1, tail=3)
            reading = bench.stub.ReadLogs(request, timeout=DEADLINE_S)
            assert await asyncio.to_thread(begun.wait, DEADLINE_S)
            await bench.get()
            answered.set()
            assert [line async for line in reading] == []

    run_scenario(scenario())
