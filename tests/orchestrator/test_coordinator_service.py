"""A real server over loopback, and agents that only talk.

Gang start, ends, fencing; who may join, and what becomes of a run whose agent is gone; operators'
calls, and what is streamed to them.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from isthmus.orchestrator.coordinator import active_run, control, runs, submission
from isthmus.orchestrator.coordinator.control_messages import run_message
from isthmus.orchestrator.coordinator.journal import Journal, JournalError, JournalReader
from isthmus.orchestrator.coordinator.submission import Submission
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.leases import Leases
from isthmus.orchestrator.run_folder.log_files import LogReader
from isthmus.protos.blobs import Blobs
from isthmus.protos.control.v1 import control_pb2 as pb
from isthmus.topology.spec.lanes import AgentMachine
from tests.fakes.coordinators import (
    DEADLINE_S,
    FakeAgent,
    active,
    beating,
    coordinating,
    status_of,
)
from tests.fakes.worlds import JOB, topology_text

pytestmark = pytest.mark.slow


def step(number: int, loss: float, tokens: float) -> pb.Metric:
    values = {"loss": loss, "site_tokens": tokens, "compute_s": 0.1}
    return pb.Metric(kind="step", rank=0, step=number, values=values)


async def test_a_run_from_submit_to_its_summary(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        a, b = await bench.join("a", "b")
        assert a.welcome.lease_s == 5
        assert await bench.submit() == "run-1"
        await a.prepare(1111)
        await b.prepare(2222)
        start = await a.run()
        assert [(each.site, each.port) for each in start.endpoints] == [("b", 2222)]
        await b.run()
        for agent, loss in ((a, 1.0), (b, 3.0)):
            batch = pb.MetricBatch(metrics=[step(1, loss, 10), step(2, float("nan"), 10)])
            await agent.say(metrics=batch)
            labels = {"source": agent.site, "target": "b" if agent is a else "a"}
            sent = {"sent_bytes": 100.0, "raw_bytes": 200.0, "busy_s": 2.0}
            link = pb.Metric(kind="link", rank=-1, step=2, values=sent, labels=labels)
            await agent.say(metrics=pb.MetricBatch(metrics=[link]))
            labels = {"reason": "the disk is full"}
            failed = pb.Metric(kind="checkpoint_failed", rank=0, step=2, labels=labels)
            stays = pb.Metric(kind="checkpoint_stays", rank=0, step=1, labels=labels)
            state = pb.Metric(kind="state_failed", rank=0, step=2, labels=labels)
            batch = pb.MetricBatch(metrics=[failed, failed, stays, state])
            await agent.say(metrics=batch)
            digest = pb.Digest(step=1, rank=0, combined=7, tensors=[7], names=["w"])
            await agent.say(digest=digest)
            await agent.end(succeeded=True)
        ended = await bench.ended()
        assert ended.state == pb.RUN_STATE_SUCCEEDED, ended
        assert list(ended.notes) == [
            note
            for site in "ab"
            for note in (
                f"checkpoint of step 2 failed at site {site}: the disk is full",
                f"checkpoint of step 1 cannot be removed at site {site}: the disk is full",
                f"site {site} could not write its state for a site that comes back: "
                "the disk is full",
            )
        ]
        assert ended.totals["verified_steps"] == 1
        assert ended.totals["tokens"] == 40
        assert [site.step for site in ended.sites] == [2, 2]
        assert ended.links[0].latest["throughput_bytes_per_s"] == 50
        assert ended.links[0].rtt_s == 0.01

        folder = Path(ended.folder)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert lines[0]["site"] == "a"
        assert lines[0]["values"]["loss"] == 1.0
        assert lines[1]["values"]["loss"] is None
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["losses"] == [[1, 2.0], [2, None]]
        assert summary["compression_ratio"] == 2.0
        assert (folder / "job.yaml").read_text() == JOB

        with JournalReader(tmp_path) as reader:
            kept = run_message(reader.final_view("run-1"), reader.progress("run-1"))
        ended.totals.clear()  # a loss that is not a number is not equal to itself
        kept.totals.clear()
        for site in (*ended.sites, *kept.sites):
            site.latest.clear()
        assert kept == ended


class SetClock:
    """`time`, whose wall clock is set while a test goes on."""

    def __init__(self) -> None:
        self.set_by_s = 0.0

    def time(self) -> float:
        return time.time() + self.set_by_s

    def monotonic(self) -> float:
        return time.monotonic()


async def test_a_clock_that_is_set_costs_no_site_its_lease_and_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SetClock()
    for module in (active_run, control):
        monkeypatch.setattr(module, "time", clock)

    async with coordinating(tmp_path) as bench:
        agents = await active(bench, "a", "b")
        for by_s, told in ((-7200.0, "back"), (7200.0, "forward")):
            clock.set_by_s += by_s
            note = f"clock was set {told} by 7200 s"
            await bench.until(lambda run, note=note: any(note in each for each in run.notes))  # type: ignore[misc]
        for agent in agents:
            await agent.end(succeeded=True)
        ended = await bench.ended()
        assert ended.state == pb.RUN_STATE_SUCCEEDED, ended


async def test_the_first_failure_is_told_with_its_place(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        a, b = await active(bench, "a", "b")
        lost = pb.Failure(code="PEER_LOST", message="no b", site="b", node=-1, rank=-1, age_s=2)
        await a.end(lost)
        cause = pb.Failure(
            code="RANK_KILLED",
            message="rank 1 of site b was killed",
            site="b",
            rank=1,
            exit_code=-9,
            log_path="/x/rank1.log",
            age_s=1,
        )
        await b.end(cause)
        ended = await bench.ended()
        assert (ended.state, ended.reason_code) == (pb.RUN_STATE_FAILED, "RANK_KILLED")
        assert (ended.failure.rank, ended.failure.exit_code) == (1, -9)
        assert ended.failure.log_path == "/x/rank1.log"


async def test_cancel_stops_all_and_is_idempotent(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        agents = await active(bench, "a", "b")
        request = pb.CancelRunRequest()
        first = await bench.stub.CancelRun(request, timeout=DEADLINE_S)
        assert first.state == pb.RUN_STATE_STOPPING
        for agent in agents:
            await agent.hear("stop")
            await agent.end()
        assert (await bench.ended()).state == pb.RUN_STATE_CANCELLED
        again = await bench.stub.CancelRun(request, timeout=DEADLINE_S)
        assert (again.state, again.reason_code) == (pb.RUN_STATE_CANCELLED, "CANCELLED")


async def test_a_stale_generation_is_refused_and_news_of_an_end_are_not(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        a, b = await active(bench, "a", "b")
        generation = a.generation
        for agent in (a, b):
            await agent.end(succeeded=True)
        await bench.ended()
        await bench.submit("run-2")
        stale = pb.SiteEnded(run_id="run-1", generation=generation, succeeded=True)
        await a.say(ended=stale)
        await a.prepare()
        assert (a.run_id, a.generation) == ("run-2", generation + 1)
        await b.hear("prepare")
        for _ in range(2):
            await b.say(running=pb.SiteRunning(run_id="run-1", generation=generation))
        stop = (await b.hear("stop")).stop
        assert (stop.run_id, stop.generation) == ("run-1", generation)
        await b.say(heartbeat=pb.Heartbeat(sequence=3))
        await b.hear("heartbeat_ack")

        line = pb.LogLine(site="a", source="rank0", text="x")
        late = pb.ShipLogsRequest(run_id="run-1", generation=generation, site="a", lines=[line])
        shipped = bench.stub.ShipLogs(late, timeout=DEADLINE_S)
        assert (await status_of(shipped))[0] == grpc.StatusCode.ABORTED


async def test_while_a_run_is_decided_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_answered = threading.Event()
    decide = submission.decided

    def slowly(
        request: pb.SubmitRequest,
        own_hash: str,
        machines: Mapping[str, AgentMachine],
        blobs: Blobs,
    ) -> Submission:
        assert is_answered.wait(DEADLINE_S)
        return decide(request, own_hash, machines, blobs)

    monkeypatch.setattr(runs, "decided", slowly)

    async with coordinating(tmp_path) as bench:
        submitted = asyncio.create_task(bench.submit())
        (agent,) = await bench.join("a")
        await agent.say(heartbeat=pb.Heartbeat())
        await agent.hear("heartbeat_ack")
        is_answered.set()
        assert await submitted == "run-1"


async def test_submit_tells_all_mistakes_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        bad = "version: 1\nname: x\ntopology: t\nstepz: 3\ntrainer: {steps: many}\n"
        code, detail = await status_of(bench.submit(job=bad))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "job.yaml:4:1" in detail
        assert "job.yaml:5:" in detail
        many = JOB + "".join(f"key_{number}: {number}\n" for number in range(300))
        code, detail = await status_of(bench.submit(job=many))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "more lines" in detail
        assert (await status_of(bench.submit("../x")))[0] == grpc.StatusCode.INVALID_ARGUMENT
        assert (await status_of(bench.get()))[0] == grpc.StatusCode.NOT_FOUND
        own, bench.topology = bench.topology, topology_text(3)
        code, detail = await status_of(bench.submit())
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        bench.topology = own

        assert await bench.submit("one") == "one"
        assert await bench.submit("one") == "one"
        assert (await status_of(bench.get("none")))[0] == grpc.StatusCode.NOT_FOUND
        runs = await bench.stub.ListRuns(pb.ListRunsRequest(), timeout=DEADLINE_S)
        assert [each.run_id for each in runs.runs] == ["one"]


@pytest.mark.multiprocess
async def test_a_gateway_at_the_last_port_has_none_for_frames_and_is_refused(
    tmp_path: Path,
) -> None:
    async with coordinating(tmp_path) as bench:
        a, _ = await bench.join("a", "b")
        await bench.submit()
        await a.prepare(port=65536)
        code, why = await a.end_of_session()
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "site a: a gateway at port 65536: want at most 65535" in why


async def test_an_emulated_wan_gives_each_site_its_own_ports(tmp_path: Path) -> None:
    async with coordinating(tmp_path, topology_text(emulate=True, emulator="relay")) as bench:
        echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
        async with echo:
            port = echo.sockets[0].getsockname()[1]
            a, b = await bench.join("a", "b")
            await bench.submit()
            for agent in (a, b):
                await agent.prepare(port)
            start = await a.run()
            (endpoint,) = start.endpoints
            assert endpoint.site == "b"
            assert endpoint.port != port
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.close()
            await b.run()
            for agent in (a, b):
                await agent.end(succeeded=True)
            assert (await bench.ended()).state == pb.RUN_STATE_SUCCEEDED


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


async def test_an_event_that_could_not_be_written_ends_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Journal.append

    def refuse(journal: Journal, kind: str, **fields: Any) -> RecordedEvent:  # noqa: ANN401
        if kind == "run.ended":
            raise JournalError("journal.sqlite3: database or disk is full")
        return written(journal, kind, **fields)

    async with coordinating(tmp_path) as bench:
        agents = await active(bench, "a", "b")
        monkeypatch.setattr(Journal, "append", refuse)
        await agents[0].end(succeeded=True)
        await bench.until(lambda run: run.sites[0].state == pb.SITE_STATE_ENDED)
        await agents[1].end(succeeded=True)
        _, said = await agents[1].end_of_session()
        assert "disk is full" in said
        monkeypatch.undo()  # there is space again, but nobody would ever tell the end
        with pytest.raises(JournalError, match="disk is full"):
            await asyncio.wait_for(bench.control.run(), DEADLINE_S)


async def test_a_broken_session_is_a_lost_site_when_its_lease_ends(tmp_path: Path) -> None:
    topology = topology_text(detect_within="1s", start_within="20s")
    async with coordinating(tmp_path, topology) as bench, beating() as alive:
        a, b = await active(bench, "a", "b")
        alive(a)
        b.call.cancel()
        stop = (await a.hear("stop")).stop
        assert "site b" in stop.reason
        assert stop.grace_s == 0.2
        await a.end()
        ended = await bench.ended()
        assert (ended.reason_code, ended.failure.site) == ("SITE_LOST", "b")
        kinds = [each.kind for each in bench.control.runs.events_of("run-1", 0)]
        assert kinds.index("session.broken") < kinds.index("site.lost")


async def test_what_was_on_the_way_when_a_connection_broke_is_said_again(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        a, b = await bench.join("a", "b")
        await bench.submit()
        await b.prepare()
        prepared = await a.hear("prepare")
        assert prepared.sequence == 1
        a.call.cancel()
        endpoint = pb.GatewayEndpoint(site="a", gateway=0, host="127.0.0.1", port=9)
        told = pb.SitePrepared(run_id=a.run_id, generation=a.generation, endpoints=[endpoint])
        again = await bench.dial("a", session=a.welcome.session, received=0)
        welcome = (await again.hear("welcome")).welcome
        assert (welcome.session, welcome.received) == (a.welcome.session, 0)
        assert await again.hear("prepare") == prepared
        for _ in range(2):  # twice: the answer to the first may have been lost
            await again.call.write(pb.AgentMessage(prepared=told, sequence=1, received=1))
        start = await again.hear("start")
        assert (start.sequence, start.received) == (2, 1)
        again.call.cancel()
        last = await bench.dial("a", session=a.welcome.session, received=2)
        assert (await last.hear("welcome")).welcome.received == 1
        last.run_id, last.generation = a.run_id, a.generation
        await last.call.write(pb.AgentMessage(heartbeat=pb.Heartbeat(sequence=1)))
        await last.hear("heartbeat_ack")  # and no Start before it
        for agent in (last, b):
            await agent.end(succeeded=True)
        assert (await bench.ended()).state == pb.RUN_STATE_SUCCEEDED
        kinds = [each.kind for each in bench.control.runs.events_of("run-1", 0)]
        assert kinds.count("site.prepared") == 2
        assert kinds.count("session.resumed") == 2


async def test_an_agent_that_began_anew_has_lost_its_site(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        a, _ = await active(bench, "a", "b")
        a.call.cancel()
        (new,) = await bench.join("a")
        assert new.welcome.session != a.welcome.session
        run = await bench.until(lambda run: run.state == pb.RUN_STATE_STOPPING)
        assert run.sites[0].state == pb.SITE_STATE_LOST


async def test_a_coordinator_that_is_not_the_newest_is_refused_by_what_agents_know(
    tmp_path: Path,
) -> None:
    async with coordinating(tmp_path) as bench:
        (a,) = await bench.join("a")
        newer = a.welcome.generation + 1
        late = await bench.dial("b", journal=a.welcome.journal, generation=newer)
        code, detail = await late.end_of_session()
        assert code == grpc.StatusCode.ABORTED
        assert "a newer one has its journal" in detail


async def test_an_agent_with_a_run_that_does_not_go_on_is_told_to_stop_it(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        report = pb.RunReport(run_id="old", generation=7)
        agent = await bench.dial("a", run=report)
        await agent.hear("welcome")
        stop = (await agent.hear("stop")).stop
        assert (stop.run_id, stop.generation) == ("old", 7)


async def test_a_silent_agent_loses_its_lease(tmp_path: Path) -> None:
    topology = topology_text(detect_within="1s", start_within="20s")
    async with coordinating(tmp_path, topology) as bench, beating() as alive:
        a, b = await active(bench, "a", "b")
        alive(a)
        code, detail = await b.end_of_session()
        assert code == grpc.StatusCode.ABORTED
        assert "its lease has ended" in detail
        ended = await bench.ended()
        assert (ended.reason_code, ended.failure.site) == ("SITE_LOST", "b")
        assert "silent for 1." in ended.reason


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"site": "c"}, grpc.StatusCode.FAILED_PRECONDITION, "no site 'c'; there are a, b"),
        ({"topology_hash": "0" * 64}, grpc.StatusCode.FAILED_PRECONDITION, "another topology"),
        ({"protocol_min": 7, "protocol_max": 9}, grpc.StatusCode.FAILED_PRECONDITION, "7 to 9"),
        ({"incarnation": "a-2"}, grpc.StatusCode.ABORTED, "has an agent already, on host host-a"),
    ],
    ids=["site", "topology", "version", "second agent"],
)
async def test_who_may_not_join(
    tmp_path: Path, fields: dict[str, object], code: grpc.StatusCode, said: str
) -> None:
    async with coordinating(tmp_path) as bench:
        await bench.join("a")
        refused = await bench.dial("a", **fields)
        status, detail = await refused.end_of_session()
        assert status == code
        assert said in detail


async def test_the_same_agent_may_replace_its_own_session(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        (old,) = await bench.join("a")
        (new,) = await bench.join("a")
        assert (await old.end_of_session())[0] == grpc.StatusCode.ABORTED
        await new.say(heartbeat=pb.Heartbeat(sequence=7))
        assert (await new.hear("heartbeat_ack")).heartbeat_ack.sequence == 7


async def test_a_session_begins_with_hello_and_keeps_to_its_limits(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        rude = FakeAgent("a", bench.stub.Session(timeout=60))
        await rude.say(heartbeat=pb.Heartbeat())
        code, detail = await rude.end_of_session()
        assert (code, "Hello" in detail) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        (again,) = await bench.join("a")
        await again.say(digest=pb.Digest(names=["x" * 70_000]))
        code, detail = await again.end_of_session()
        assert (code, "limit" in detail) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_site_that_is_lost_after_a_stall_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = topology_text(detect_within="1s", start_within="20s")
    async with coordinating(tmp_path, topology) as bench, beating() as alive:
        a, b = await active(bench, "a", "b")
        alive(a)
        monkeypatch.setattr(Leases, "stood_still_s", lambda _self, _now_s: 12.0)
        b.call.cancel()
        await a.hear("stop")
        await a.end()
        said = (await bench.ended()).failure.message
        assert "site b" in said
        assert "this coordinator had itself stood still for 12.0 s" in said


async def collect(stream: AsyncIterable[pb.LogLine]) -> list[tuple[str, int, str]]:
    return [(f"{each.site}/{each.source}", each.sequence, each.text) async for each in stream]


async def test_logs_come_once_in_order_and_are_followed_to_the_end(tmp_path: Path) -> None:
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
        following = asyncio.create_task(collect(bench.stub.ReadLogs(follow, timeout=DEADLINE_S)))
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


async def test_events_are_followed_to_the_end(tmp_path: Path) -> None:
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


async def test_a_long_log_does_not_hold_up_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answered = threading.Event(), threading.Event()

    def skip_to_tail(_reader: LogReader, _num_lines: int) -> None:
        begun.set()
        assert answered.wait(5), "the coordinator answered nobody in the meantime"

    monkeypatch.setattr(LogReader, "skip_to_tail", skip_to_tail)
    async with coordinating(tmp_path) as bench:
        await bench.submit()
        request = pb.ReadLogsRequest(rank=-1, tail=3)
        reading = bench.stub.ReadLogs(request, timeout=DEADLINE_S)
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        await bench.get()
        answered.set()
        assert [line async for line in reading] == []
