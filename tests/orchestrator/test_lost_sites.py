"""A run goes on without a site: what the coordinator says to whom, and what people see of it."""

from pathlib import Path

import grpc.aio
import pytest

from isthmus.orchestrator.coordinator.journal import JournalReader
from isthmus.protos.control.v1 import control_pb2 as pb
from isthmus.topology.spec.epoch import (
    Epoch,
    Finished,
    Handover,
    finished_to_bytes,
    handovers_from_bytes,
)
from tests.fakes.coordinators import (
    DEADLINE_S,
    Bench,
    FakeAgent,
    active,
    coordinating,
)
from tests.fakes.worlds import topology_text

pytestmark = pytest.mark.slow
THREE = topology_text(3, min_sites=1, max_restarts=0)


def killed(site: str, age_s: float = 0.0) -> pb.Failure:
    message = f"rank 0 of {site} was killed"
    return pb.Failure(code="RANK_KILLED", message=message, site=site, rank=0, age_s=age_s)


async def settle(agent: FakeAgent, round_: int, *finished: Finished) -> pb.Settle:
    """Answer Settle; say what it was."""
    asked = (await agent.hear("settle")).settle
    answer = pb.Settled(
        epoch=asked.epoch,
        round=round_,
        finished=finished_to_bytes(finished),
        chain=7,
        chain_round=round_ - 1,
    )
    await agent.say(settled=answer)
    return asked


async def go_on_without_c(bench: Bench, a: FakeAgent, b: FakeAgent) -> Epoch:
    """Carry the loss of site c out; return the epoch that a and b are told."""
    asked = await settle(a, 5, Finished(5, 0, ((0, 3),)))
    assert (asked.epoch, list(asked.lost), asked.stops) == (1, ["c"], True)
    await settle(b, 5)
    resume = (await a.hear("resume")).resume
    assert (await b.hear("resume")).resume == resume
    assert handovers_from_bytes(resume.handovers) == (Handover("a", "b", 5, 0, ((0, 3),)),)
    await bench.until(lambda run: run.sites[2].state == pb.SITE_STATE_LOST)
    return Epoch.from_bytes(resume.record)


async def test_a_failed_site_is_lost_and_the_others_succeed_without_it(tmp_path: Path) -> None:
    async with coordinating(tmp_path, THREE) as bench:
        a, b, c = await active(bench, "a", "b", "c")
        await c.end(killed("c"))
        epoch = await go_on_without_c(bench, a, b)
        assert (epoch.members, epoch.from_round) == (("a", "b"), 5)
        for agent in (a, b):
            await agent.say(digest=pb.Digest(step=6, combined=7, tensors=[7], names=["w"]))
            await agent.end(succeeded=True)
        ended = await bench.ended()
        assert (ended.state, ended.reason_code) == (pb.RUN_STATE_SUCCEEDED, "WITH_LOSSES")
        assert ended.totals["verified_steps"] == 1
        assert list(ended.notes) == [
            "the run continues without site c: rank 0 of c was killed",
            "sites lost on the way: c",
        ]
    with JournalReader(tmp_path) as reader:
        kinds = [each.kind for each in reader.events("run-1")]
    told = ["epoch.proposed", "epoch.begun", "site.lost"]
    assert [each for each in kinds if each in told] == told


async def test_a_site_that_others_do_not_reach_is_stopped(tmp_path: Path) -> None:
    async with coordinating(tmp_path, THREE) as bench:
        a, b, c = await active(bench, "a", "b", "c")
        for agent in (a, b):
            await agent.say(suspect=pb.Suspect(site="c", why="silent for 5 s"))
        await go_on_without_c(bench, a, b)
        assert "do not reach each other" in (await c.hear("stop")).stop.reason
        await c.end(killed("c"))
        for agent in (a, b):
            await agent.end(succeeded=True)
        ended = await bench.ended()
        assert (ended.state, ended.sites[2].state) == (
            pb.RUN_STATE_SUCCEEDED,
            pb.SITE_STATE_LOST,
        )


async def test_the_run_fails_by_its_first_cause_when_all_are_lost(tmp_path: Path) -> None:
    async with coordinating(tmp_path, THREE) as bench:
        a, b, c = await active(bench, "a", "b", "c")
        for agent, age_s in ((c, 3.0), (b, 2.0), (a, 1.0)):
            await agent.end(killed(agent.site, age_s))
        ended = await bench.ended()
        assert (ended.state, ended.failure.site) == (pb.RUN_STATE_FAILED, "c")


async def test_a_broken_promise_ends_the_run_whatever_is_left(tmp_path: Path) -> None:
    async with coordinating(tmp_path, THREE) as bench:
        a, b, c = await active(bench, "a", "b", "c")
        await c.end(pb.Failure(code="NON_FINITE", message="a NaN", site="c", node=-1, rank=-1))
        for agent in (a, b):
            await agent.hear("stop")
            await agent.end()
        assert (await bench.ended()).reason_code == "NON_FINITE"


async def test_a_second_failure_while_sites_settle_begins_anew(tmp_path: Path) -> None:
    async with coordinating(tmp_path, THREE) as bench:
        a, b, c = await active(bench, "a", "b", "c")
        await c.end(killed("c"))
        await a.hear("settle")
        await b.end(killed("b"))
        asked = await settle(a, 5)
        assert (asked.epoch, list(asked.lost)) == (2, ["b", "c"])
        epoch = Epoch.from_bytes((await a.hear("resume")).resume.record)
        assert (epoch.number, epoch.members) == (2, ("a",))
        await a.end(succeeded=True)
        assert (await bench.ended()).state == pb.RUN_STATE_SUCCEEDED


async def test_a_site_that_is_done_hands_the_last_round_over_to_others(tmp_path: Path) -> None:
    async with coordinating(tmp_path, THREE) as bench:
        a, b, c = await active(bench, "a", "b", "c")
        await a.say(done=pb.SiteDone())
        await c.end(killed("c"))
        await go_on_without_c(bench, a, b)
        await b.say(done=pb.SiteDone())
        for agent in (a, b):
            await agent.hear("release")
        await a.end(killed("a"))  # nobody needs anything of it
        await b.end(succeeded=True)
        run = await bench.ended()
        assert run.state == pb.RUN_STATE_SUCCEEDED
        assert "sites lost on the way: c" in run.notes


async def test_the_run_ends_for_those_who_are_done_when_the_last_one_is_lost(
    tmp_path: Path,
) -> None:
    async with coordinating(tmp_path, THREE) as bench:
        agents = await active(bench, "a", "b", "c")
        for agent in agents[:2]:
            await agent.say(done=pb.SiteDone())
        await agents[2].end(killed("c"))
        for agent in agents[:2]:
            await agent.hear("release")
            await agent.end(succeeded=True)
        run = await bench.ended()
        assert run.state == pb.RUN_STATE_SUCCEEDED
        assert "sites lost on the way: c" in run.notes


async def test_an_operator_drops_a_site_and_adds_it_again(tmp_path: Path) -> None:
    async with coordinating(tmp_path, THREE) as bench:
        a, b, c = await active(bench, "a", "b", "c")
        request = pb.SiteRequest(site="c")
        with pytest.raises(grpc.aio.AioRpcError, match="site c takes part"):
            await bench.stub.AddSite(request, timeout=DEADLINE_S)
        await a.say(metrics=pb.MetricBatch(metrics=[pb.Metric(kind="state")]))
        await bench.stub.DropSite(request, timeout=DEADLINE_S)
        for agent, round_ in ((a, 5), (b, 6), (c, 5)):
            asked = await settle(agent, round_)
            assert (asked.epoch, list(asked.lost), asked.stops) == (1, [], False)
        for agent in (a, b, c):
            epoch = Epoch.from_bytes((await agent.hear("resume")).resume.record)
            assert (epoch.members, epoch.from_round) == (("a", "b"), 7)
        with pytest.raises(grpc.aio.AioRpcError, match="about to leave"):
            await bench.stub.AddSite(request, timeout=DEADLINE_S)
        await c.end(succeeded=True)
        await bench.until(lambda run: run.sites[2].state == pb.SITE_STATE_DROPPED)
        run = await bench.get()
        assert (list(run.members), run.epoch) == (["a", "b"], 1)
        assert "site c was dropped, and the run continues without it" in run.notes
        for site, why in {
            "c": "dropped already",
            "x": "has no site 'x'; its topology has a, b, c",
        }.items():
            with pytest.raises(grpc.aio.AioRpcError, match=why):
                await bench.stub.DropSite(pb.SiteRequest(site=site), timeout=DEADLINE_S)

        await bench.stub.AddSite(request, timeout=DEADLINE_S)
        assert (await c.hear("prepare")).prepare.returns
        await bench.until(lambda run: run.sites[2].state == pb.SITE_STATE_RETURNING)
        await bench.stub.DropSite(request, timeout=DEADLINE_S)
        await c.hear("stop")
        await bench.until(lambda run: run.sites[2].state == pb.SITE_STATE_DROPPED)
        for agent in (a, b):
            await agent.end(succeeded=True)
        assert (await bench.ended()).state == pb.RUN_STATE_SUCCEEDED


async def test_a_site_is_not_dropped_that_the_run_needs(tmp_path: Path) -> None:
    async with coordinating(tmp_path, topology_text(3, min_sites=3)) as bench:
        await active(bench, "a", "b", "c")
        with pytest.raises(grpc.aio.AioRpcError, match="2 would be left, want at least 3"):
            await bench.stub.DropSite(pb.SiteRequest(site="c"), timeout=DEADLINE_S)
