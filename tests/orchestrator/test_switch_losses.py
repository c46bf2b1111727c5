"""Other trees for a run, over the wire: wanted, settled for, and had by all sites or none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2 as pb
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.run_spec import CodedPlan
from tests.fakes.coordinators import DEADLINE_S, Bench, FakeAgent, active, coordinating
from tests.fakes.worlds import JOB, topology_text

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]  # a planner's process

SITES = ("a", "b", "c")
PLANNED_JOB = JOB + (
    "exchange: {codec: fp32}\n"
    "plan: {replan: {lasting: 500ms, gain: 1%}}\n"
    "trainer: {compute: modelled, model: {layers: 2, width: 256}}\n"
)
NARROW_BYTES_PER_S = 1.25e5
"""A hundredth of what tests.fakes.worlds describes."""


GONE = pb.Failure(code="SITE_LOST", message="its processes were killed", site="c")


async def proposed(bench: Bench) -> tuple[list[FakeAgent], pb.Settle]:
    """Return the agents of an active run, and what they were asked once a link became narrow."""
    agents = await active(bench, *SITES, job=PLANNED_JOB)
    asked = [asyncio.create_task(agent.hear("settle")) for agent in agents]
    sent = 0
    async with asyncio.timeout(DEADLINE_S):
        while not all(each.done() for each in asked):
            sent += 1
            for agent, target in zip(agents, "caa", strict=True):
                await agent.say(metrics=_link(agent.site, target, sent))
            await asyncio.wait(asked, timeout=0.05)
    settles = [each.result().settle for each in asked]
    assert {(each.epoch, each.stops) for each in settles} == {(1, False)}
    assert CodedPlan.from_bytes(settles[0].reduction).plan.trees
    return agents, settles[0]


def _link(source: str, target: str, count: int) -> pb.MetricBatch:
    """Return what a gateway has counted: that the links between a and c are narrow."""
    values = {"sent_bytes": 1.0}
    if {source, target} == {"a", "c"}:
        limited_s = 0.2 * count
        values[metrics.LIMITED_S] = limited_s
        values[metrics.LIMITED_BYTES] = NARROW_BYTES_PER_S * limited_s
    labels = {"source": source, "target": target, "gateway": "0"}
    link = pb.Metric(kind=metrics.LINK, rank=-1, step=count, values=values, labels=labels)
    return pb.MetricBatch(metrics=[link])


async def settle(agent: FakeAgent, asked: pb.Settle, round_: int = 1) -> None:
    await agent.say(settled=pb.Settled(epoch=asked.epoch, round=round_, chain_round=-1))


def kinds(folder: Path) -> list[str]:
    with Journal(folder) as journal:
        return [event.kind for event in journal.events("run-1")]


async def test_nobody_switches_when_a_site_goes_away_before_it_has_settled(tmp_path: Path) -> None:
    async with coordinating(tmp_path, topology_text(3, min_sites=1, max_restarts=0)) as bench:
        (a, b, c), asked = await proposed(bench)
        await settle(a, asked)
        await settle(b, asked)
        await c.end(GONE)
        for agent in (a, b):
            again = (await agent.hear("settle")).settle
            assert (again.epoch, again.stops, list(again.lost)) == (2, True, ["c"])
    told = kinds(tmp_path)
    assert "run.replanned" not in told
    assert "plan.kept" in told


async def test_all_switch_once_all_have_settled(tmp_path: Path) -> None:
    async with coordinating(tmp_path, topology_text(3, min_sites=1, max_restarts=0)) as bench:
        agents, asked = await proposed(bench)
        for agent, round_ in zip(agents, (4, 5, 4), strict=True):
            await settle(agent, asked, round_)
        for agent in agents:
            epoch = Epoch.from_bytes((await agent.hear("resume")).resume.record)
            assert (epoch.number, epoch.from_round, epoch.members) == (1, 6, SITES)
            assert epoch.reduction == CodedPlan.from_bytes(asked.reduction)
    told = kinds(tmp_path)
    assert told.index("epoch.begun") < told.index("run.replanned")


async def test_a_site_that_cannot_have_other_trees_keeps_the_others_from_it(tmp_path: Path) -> None:
    async with coordinating(tmp_path, topology_text(3, min_sites=1, max_restarts=0)) as bench:
        (a, b, c), asked = await proposed(bench)
        await settle(a, asked)
        why = "site b has not answered"
        await c.say(settled=pb.Settled(epoch=asked.epoch, round=1, why=why))
        for agent in (a, b, c):
            assert (await agent.hear("cancel_settle")).cancel_settle.epoch == asked.epoch
    assert "plan.kept" in kinds(tmp_path)
