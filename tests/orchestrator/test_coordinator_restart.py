"""A coordinator that is started again on the same state goes on with the run of the one before."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from isthmus.orchestrator.coordinator.control import Control
from isthmus.orchestrator.coordinator.journal import Journal, JournalReader
from isthmus.orchestrator.coordinator.runs import UnreadableRunError
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.run_folder.home import SPEC
from isthmus.orchestrator.run_folder.run_files import METRICS, read_metrics
from isthmus.protos.control.v1 import control_pb2 as pb
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.epoch import Epoch
from tests.fakes.coordinators import Bench, FakeAgent, active, beating, coordinating
from tests.fakes.worlds import topology_text

pytestmark = pytest.mark.slow


async def come_back(bench: Bench, old: FakeAgent, **fields: object) -> FakeAgent:
    """Return the same agent, which still has its run, in a session with another coordinator."""
    report = pb.RunReport(run_id=old.run_id, generation=old.generation)
    known: dict[str, object] = {
        "session": old.welcome.session,
        "journal": old.welcome.journal,
        "generation": old.welcome.generation,
        "run": report,
    }
    agent = await bench.dial(old.site, **{**known, **fields})
    agent.run_id, agent.generation = old.run_id, old.generation
    agent.welcome = (await agent.hear("welcome")).welcome
    return agent


def kinds_of(bench: Bench) -> list[str]:
    events: list[RecordedEvent] = bench.control.runs.events_of("run-1", 0)
    return [event.kind for event in events]


async def test_an_active_run_goes_on_and_succeeds(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        old = await active(bench, "a", "b")
        for agent in old:
            for step in (1, 2):
                metric = pb.Metric(kind="step", step=step, values={"site_tokens": 5.0})
                await agent.say(metrics=pb.MetricBatch(metrics=[metric]))
        await bench.until(lambda run: run.totals.get("tokens") == 20)
    async with coordinating(tmp_path) as bench:
        agents = [await come_back(bench, agent) for agent in old]
        for before, now in zip(old, agents, strict=True):
            assert now.welcome.journal == before.welcome.journal
            assert now.welcome.generation > before.welcome.generation
            assert now.welcome.session != before.welcome.session
        run = await bench.get()
        assert (run.state, run.generation) == (pb.RUN_STATE_ACTIVE, old[0].generation)
        for agent in agents:
            metric = pb.Metric(kind="step", step=3, values={"site_tokens": 5.0})
            await agent.say(metrics=pb.MetricBatch(metrics=[metric]))
            await agent.end(succeeded=True)
        ended = await bench.ended()
        assert ended.state == pb.RUN_STATE_SUCCEEDED, ended
        assert ended.totals["tokens"] == 30
        kinds = kinds_of(bench)
        assert kinds.count("run.resumed") == kinds.count("run.submitted") == 1
        assert kinds.count("agent.returned") == 2
        assert await bench.submit("run-2") == "run-2"


async def test_what_was_measured_is_counted_after_each_of_two_crashes(tmp_path: Path) -> None:
    """Each has cut the line that was being written, and agents send again what it had taken."""

    def have_all(tokens: int, run: pb.Run) -> bool:
        return run.totals.get("tokens", 0) == tokens

    agents: list[FakeAgent] = []
    for step in (1, 2, 3):
        sent = [
            pb.Metric(kind="step", step=number, values={"site_tokens": 5.0})
            for number in range(max(1, step - 1), step + 1)
        ]
        async with coordinating(tmp_path) as bench:
            if agents:
                agents = [await come_back(bench, agent) for agent in agents]
            else:
                agents = list(await active(bench, "a", "b"))
            for agent in agents:
                await agent.say(metrics=pb.MetricBatch(metrics=sent))
            await bench.until(partial(have_all, step * 10))
        with (bench.runs / "run-1" / METRICS).open("a") as file:
            file.write('{"run": "run-1", "ki')
    kept = read_metrics(tmp_path / "runs" / "run-1" / METRICS, on_damaged=lambda _: None)
    assert Counter(
        (each["site"], each["step"]) for each in kept if each["kind"] == "step"
    ) == dict.fromkeys(itertools.product("ab", (1, 2, 3)), 1)


async def test_what_was_not_got_across_is_said_again(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        a, b = await bench.join("a", "b")
        await bench.submit()
        await a.prepare(1111)
        await b.hear("prepare")
        await bench.until(lambda run: run.sites[0].state == pb.SITE_STATE_PREPARED)
    async with coordinating(tmp_path) as bench:
        a, b = [await come_back(bench, agent) for agent in (a, b)]
        await b.prepare(2222)
        assert [each.port for each in (await a.hear("start")).start.endpoints] == [2222]
    async with coordinating(tmp_path) as bench:
        a, b = [await come_back(bench, agent) for agent in (a, b)]
        for agent in (a, b):
            await agent.run()
        await bench.until(lambda run: run.state == pb.RUN_STATE_ACTIVE)


async def test_a_site_that_does_not_come_back_is_lost_and_the_other_is_stopped(
    tmp_path: Path,
) -> None:
    topology = topology_text(detect_within="1s", start_within="20s")
    async with coordinating(tmp_path, topology) as bench:
        old = await active(bench, "a", "b")
    async with coordinating(tmp_path, topology) as bench, beating() as alive:
        a = await come_back(bench, old[0])
        alive(a)
        assert "site b" in (await a.hear("stop")).stop.reason
        await a.end()
        ended = await bench.ended()
        assert (ended.reason_code, ended.failure.site) == ("SITE_LOST", "b")


async def test_when_nobody_comes_back_the_run_is_lost_and_a_late_one_is_stopped(
    tmp_path: Path,
) -> None:
    topology = topology_text(detect_within="500ms", start_within="20s", coordinator_within="500ms")
    async with coordinating(tmp_path, topology) as bench:
        old = await active(bench, "a", "b")
    async with coordinating(tmp_path, topology) as bench:
        waiting = await bench.until(lambda run: bool(run.notes))
        assert waiting.notes == ["no agent is heard: waiting for up to 0.5 s"]
        ended = await bench.ended()
        assert ended.reason_code == "SITE_LOST"
        late = await come_back(bench, old[0])
        assert (await late.hear("stop")).stop.run_id == "run-1"


async def test_a_run_that_sites_may_hold_is_not_ended_by_who_cannot_read_it(tmp_path: Path) -> None:
    def refused(topology: str) -> str:
        with Journal(tmp_path) as journal, pytest.raises(UnreadableRunError) as raised:
            Control(load_topology(topology, "topology.yaml"), journal, tmp_path / "runs")
        return str(raised.value)

    async with coordinating(tmp_path) as bench:
        old = await active(bench, "a", "b")
    folder = tmp_path / "runs" / "run-1"
    with JournalReader(tmp_path) as reader:
        before = [reader.events("run-1"), reader.events("")]
    told = refused(topology_text(3))
    assert told.startswith("run run-1 may go on at its sites, and this coordinator cannot")
    assert told.endswith(f"{folder}: this coordinator was started with another topology")
    away = folder.rename(tmp_path / "away")
    assert "No such file" in refused(topology_text())
    away.rename(folder)
    spec = (folder / SPEC).read_bytes()
    (folder / SPEC).write_bytes(b"{}")
    assert str(folder) in refused(topology_text())
    (folder / SPEC).write_bytes(spec)
    with JournalReader(tmp_path) as reader:
        assert [reader.events("run-1"), reader.events("")] == before
    async with coordinating(tmp_path) as bench:
        for agent in [await come_back(bench, each) for each in old]:
            await agent.end(succeeded=True)
        assert (await bench.ended()).state == pb.RUN_STATE_SUCCEEDED


def test_a_run_that_has_ended_is_read_once(tmp_path: Path) -> None:
    submitted = {"name": "n", "folder": "f", "sites": ["a"], "links": []}
    ended = {"state": "SUCCEEDED", "reason_code": "", "reason": "", "failure": None, "active_s": 1}
    with Journal(tmp_path) as journal:
        for kind, detail in (("run.submitted", submitted), ("run.ended", ended)):
            journal.append(kind, wall_s=1.0, generation=1, run_id="r", detail=detail)
        control = Control(load_topology(topology_text(), "topology.yaml"), journal, tmp_path)
        [run] = control.runs.messages()
        assert (run.run_id, run.state) == ("r", pb.RUN_STATE_SUCCEEDED)
        journal.append("odd", wall_s=2.0, generation=1, run_id="r", detail={"state": "FAILED"})
        assert control.runs.messages() == [run]
        assert control.runs.message("r") is run


@pytest.mark.parametrize("removed", ["", SPEC, "job.yaml", "topology.yaml"])
async def test_what_is_removed_under_an_active_run_is_told_and_does_not_end_it(
    tmp_path: Path, removed: str
) -> None:
    """The coordinator that comes next needs the documents."""
    folder = tmp_path / "runs" / "run-1"

    async with coordinating(tmp_path) as bench:
        old = await active(bench, "a", "b")
        kept = {name: (folder / name).read_bytes() for name in (SPEC, "job.yaml", "topology.yaml")}
        if removed:
            (folder / removed).unlink()
        else:
            shutil.rmtree(folder)
        run = await bench.until(lambda run: any("removed" in note for note in run.notes))
        (note,) = [each for each in run.notes if "removed" in each]
        assert str(folder) in note
        assert "its documents were written again" in note
        for name, written in kept.items():
            assert (folder / name).read_bytes() == written
        assert folder.stat().st_mode & 0o077 == 0
    async with coordinating(tmp_path) as bench:
        for agent in [await come_back(bench, each) for each in old]:
            await agent.end(succeeded=True)
        assert (await bench.ended()).state == pb.RUN_STATE_SUCCEEDED


async def test_one_that_has_not_begun_and_cannot_be_read_ends_as_lost(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        (a,) = await bench.join("a")
        await bench.join("b")
        await bench.submit()
        await a.prepare()
    async with coordinating(tmp_path, topology_text(3)) as bench:
        assert (await bench.get("run-1")).reason_code == "COORDINATOR_LOST"


async def test_leases_begin_when_all_runs_have_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_s = 0.0

    async with coordinating(tmp_path) as bench:
        await active(bench, "a", "b")
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + read_s, time=time.time)
    monkeypatch.setattr("isthmus.orchestrator.coordinator.control.time", clock)
    with Journal(tmp_path) as journal:
        control = Control(
            load_topology(topology_text(), "topology.yaml"), journal, tmp_path / "runs"
        )
        read_s = 100.0  # the metrics of another run
        ticking = asyncio.create_task(control.run())
        await asyncio.sleep(0)
        ticking.cancel()
        await control.close()
        assert control.runs.events_of("run-1", 0)[-1].kind == "run.resumed"


async def test_an_agent_that_began_anew_has_lost_its_site(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        old = await active(bench, "a", "b")
    async with coordinating(tmp_path) as bench:
        b = await come_back(bench, old[1])
        await bench.join("a")
        assert "site a" in (await b.hear("stop")).stop.reason


async def test_a_run_that_was_being_stopped_is_stopped_again(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        old = await active(bench, "a", "b")
        await bench.stub.CancelRun(pb.CancelRunRequest(), timeout=20)
    async with coordinating(tmp_path) as bench:
        for agent in [await come_back(bench, each) for each in old]:
            await agent.hear("stop")
            await agent.end()
        assert (await bench.ended()).state == pb.RUN_STATE_CANCELLED


async def test_a_drop_that_was_asked_for_is_not_forgotten(tmp_path: Path) -> None:
    topology = topology_text(3, min_sites=1, detect_within="20s")
    async with coordinating(tmp_path, topology) as bench:
        old = await active(bench, "a", "b", "c")
        await bench.stub.DropSite(pb.SiteRequest(site="c"), timeout=20)
        await old[0].hear("settle")
    async with coordinating(tmp_path, topology) as bench:
        agents = [await come_back(bench, each) for each in old]
        told: list[Epoch] = []
        for stops in (True, False):  # what the coordinator before had begun ends first
            for each in agents:
                asked = (await each.hear("settle")).settle
                assert (asked.stops, list(asked.lost)) == (stops, [])
                answer = pb.Settled(epoch=asked.epoch, round=5, chain=7, chain_round=4)
                await each.say(settled=answer)
            told = [Epoch.from_bytes((await each.hear("resume")).resume.record) for each in agents]
        last = told[-1]
        assert (last.members, last.from_round) == (("a", "b"), 6)


async def test_what_people_see_may_fail_and_comes_back(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        a, b = await active(bench, "a", "b")
        folder = bench.runs / "run-1"
        gone = folder.rename(folder.with_name("away"))
        folder.write_text("a file where the folder was")
        metric = pb.Metric(kind="step", step=1, values={"site_tokens": 5.0})
        await a.say(metrics=pb.MetricBatch(metrics=[metric]))
        await bench.until(lambda run: run.totals.get("tokens") == 5)
        folder.unlink()
        metric.step = 2
        await a.say(metrics=pb.MetricBatch(metrics=[metric]))
        await bench.until(lambda run: run.totals.get("tokens") == 10)
        assert (folder / "metrics.jsonl").is_file()
        assert gone.is_dir()
        for agent in (a, b):
            await agent.end(succeeded=True)
        assert (await bench.ended()).state == pb.RUN_STATE_SUCCEEDED


async def test_a_coordinator_whose_folder_is_removed_stops_and_ends_no_run(tmp_path: Path) -> None:
    async with coordinating(tmp_path / "state") as bench:
        agents = await active(bench, "a", "b")
        (tmp_path / "state" / "lock").unlink()
        with pytest.raises(Exception, match="removed or replaced"):
            await asyncio.wait_for(bench.control.run(), 10)
        await bench.control.close()
        for agent in agents:
            status, _ = await agent.end_of_session()
            assert status.name == "OK"
        assert kinds_of(bench)[-1] == "run.first_step"
