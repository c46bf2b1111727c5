"""A site that goes away in the midst of a switch.

The others hear one outcome, and the run names the site.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from orchestrator.coordinator.journal import Journal
from protos import metrics
from protos.control.v1 import control_pb2 as pb
from tests.fakes.coordinators import DEADLINE_S, Bench, FakeAgent, coordinating
from tests.fakes.worlds import JOB, topology_text
from topology.run_spec import CodedPlan

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


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def proposed(bench: Bench) -> tuple[list[FakeAgent], pb.PrepareReduction]:
    """Return the agents of an active run, and what they were asked once a link became narrow."""
    agents = await bench.join(*SITES)
    await bench.submit(job=PLANNED_JOB)
    for agent in agents:
        await agent.prepare()
    for agent in agents:
        await agent.run()
    await bench.until(lambda now: now.state == pb.RUN_STATE_ACTIVE)
    asked = [asyncio.create_task(agent.hear("prepare_reduction")) for agent in agents]
    sent = 0
    async with asyncio.timeout(DEADLINE_S):
        while not all(each.done() for each in asked):
            sent += 1
            for agent, target in zip(agents, "caa", strict=True):
                await agent.say(metrics=_link(agent.site, target, sent))
            await asyncio.wait(asked, timeout=0.05)
    prepares = [each.result().prepare_reduction for each in asked]
    assert {each.from_round for each in prepares} == {prepares[0].from_round}
    return agents, prepares[0]


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


def hash_of(prepare: pb.PrepareReduction) -> str:
    """Return what a site answers that has understood a proposal."""
    return CodedPlan.from_bytes(prepare.reduction).hash


async def accept(agent: FakeAgent, prepare: pb.PrepareReduction) -> None:
    answer = pb.ReductionPrepared(
        epoch=prepare.epoch, accepted=True, plan_hash=hash_of(prepare), round=1
    )
    await agent.say(reduction_prepared=answer)


async def ends_without(bench: Bench, lost: FakeAgent, others: list[FakeAgent]) -> None:
    """The others are stopped, and the run names the site that is lost."""
    for agent in others:
        await agent.hear("stop")
        await agent.end()
    ended = await bench.ended()
    assert ended.state == pb.RUN_STATE_FAILED
    assert (ended.reason_code, ended.failure.site) == ("SITE_LOST", lost.site)


def kinds(folder: Path) -> list[str]:
    with Journal(folder) as journal:
        return [event.kind for event in journal.events("run-1")]


def test_nobody_switches_when_a_site_goes_away_before_it_has_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, topology_text(3)) as bench:
            (a, b, c), prepare = await proposed(bench)
            await accept(a, prepare)
            await accept(b, prepare)
            await c.end(GONE)
            for agent in (a, b):
                decided = (await agent.hear("decide_reduction")).decide_reduction
                assert (decided.epoch, decided.commit) == (prepare.epoch, False)
            await ends_without(bench, c, [a, b])

    run(scenario())
    assert "run.replanned" not in kinds(tmp_path)


def test_all_others_switch_when_a_site_goes_away_after_the_last_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, topology_text(3)) as bench:
            (a, b, c), prepare = await proposed(bench)
            for agent in (a, b, c):
                await accept(agent, prepare)
            await c.hear("decide_reduction")
            await c.end(GONE)
            for agent in (a, b):
                decided = (await agent.hear("decide_reduction")).decide_reduction
                assert (decided.epoch, decided.commit) == (prepare.epoch, True)
            await ends_without(bench, c, [a, b])

    run(scenario())
    told = kinds(tmp_path)
    assert told.index("run.replanned") < told.index("site.ended")
