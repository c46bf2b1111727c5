"""Planning again in a process of its own: answers as they come, and no process is left."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from isthmus.orchestrator.coordinator.replanning import Answer, Replanner
from isthmus.orchestrator.core.replan_machine import (
    PlanAgain,
    PlanningFailed,
    RelaunchPlanned,
    SwitchPlanned,
)
from isthmus.orchestrator.core.speed_watch import Division
from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.measured_links import LinkFigures
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, has_same_turns
from isthmus.topology.spec.run_spec import CodedPlan, RunSpec
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.link_codecs import plan_codecs
from tests.fakes.run_specs import spec_of
from tests.fakes.worlds import JOB, topology

DEADLINE_S = 60.0
PLANNED_JOB = JOB + "plan: {}\nexchange: {codec: fp32}\nreduction: {tree: star, hub: a}\n"
CUT = {("a", "b"): LinkFigures(bytes_per_s=1e6), ("b", "a"): LinkFigures(bytes_per_s=1e6)}


def answers(
    asked: PlanAgain, count: int, spec: RunSpec, described: Topology | None = None
) -> list[Answer]:
    """Return what a planner answers, once that is so much."""

    async def plan() -> list[Answer]:
        told: asyncio.Queue[Answer] = asyncio.Queue()
        replanner = Replanner(spec, described or topology(3), told.put_nowait)
        try:
            async with asyncio.timeout(DEADLINE_S):
                replanner.plan(asked)
                return [await told.get() for _ in range(count)]
        finally:
            await replanner.close()

    return asyncio.run(plan())


def first(one: RunSpec) -> Epoch:
    return Epoch(0, one.site_names, one.reduction, 0)


def spec(job: str = PLANNED_JOB) -> RunSpec:
    return spec_of(load_job(job, "job.yaml"), topology(3))


@pytest.mark.no_cover
@pytest.mark.multiprocess
@pytest.mark.slow
def test_other_trees_and_what_a_relaunch_would_give() -> None:
    one = spec()
    switch, relaunch = answers(PlanAgain(first(one), CUT), 2, one)
    assert isinstance(switch, SwitchPlanned)
    assert switch.after_s < switch.before_s
    assert switch.reduction.plan != one.reduction.plan
    assert set(switch.reduction.codecs) == {"fp32"}
    assert isinstance(relaunch, RelaunchPlanned)
    assert relaunch.step_s <= switch.after_s


@pytest.mark.no_cover
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_run_that_may_goes_over_to_another_codec_and_back() -> None:
    job = PLANNED_JOB.replace("plan: {}", "plan: {replan: {least_exact: int4}}")
    one = spec_of(load_job(job, "job.yaml"), topology(2), Replan(least_exact="int4"))
    began = first(one)
    links = [("a", "b"), ("b", "a")]
    narrow = dict.fromkeys(links, LinkFigures(bytes_per_s=2e4))
    (down,) = answers(PlanAgain(began, narrow), 1, one, topology(2))
    assert isinstance(down, SwitchPlanned)
    assert set(down.reduction.codecs) == {"int4"}
    assert (down.other_codec, down.is_more_exact) == ("int4", False)
    less_exact = dataclasses.replace(began, number=1, reduction=down.reduction)
    wide = dict.fromkeys(links, LinkFigures(bytes_per_s=1e12))
    (up,) = answers(PlanAgain(less_exact, wide), 1, one, topology(2))
    assert isinstance(up, SwitchPlanned)
    assert set(up.reduction.codecs) == {"fp32"}
    assert (up.other_codec, up.is_more_exact) == ("fp32", True)
    (kept,) = answers(PlanAgain(began, narrow, keeps_codecs=True), 1, one, topology(2))
    assert isinstance(kept, SwitchPlanned)
    assert set(kept.reduction.codecs) == {"fp32"}
    assert kept.other_codec == ""


@pytest.mark.no_cover
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.exhaustive
def test_trees_have_the_codecs_of_their_links_and_mistakes_are_told() -> None:
    codecs = "exchange: {codec: fp32, codecs: [{between: [b, c], codec: int8}]}"
    trees = "trees: [{root: a, parents: {b: a, c: a}}, {root: b, parents: {a: b, c: b}}]"
    job = PLANNED_JOB.replace("exchange: {codec: fp32}", codecs)
    one = spec(job.replace("tree: star, hub: a", trees))
    began = one.reduction
    (switch, _) = answers(PlanAgain(first(one), CUT), 2, one)
    assert isinstance(switch, SwitchPlanned)
    found = switch.reduction
    assert "int8" in found.codecs
    assert found.codecs == plan_codecs(one.job, one.topology, found.plan)
    assert switch.after_s < switch.before_s
    (kept,) = answers(PlanAgain(first(one), CUT, keeps_codecs=True), 1, one)
    assert isinstance(kept, SwitchPlanned)
    assert has_same_turns((began.plan, began.codecs), (kept.reduction.plan, kept.reduction.codecs))
    assert switch.after_s < kept.after_s <= kept.before_s == switch.before_s
    circle = CodedPlan(ReductionPlan(3, (Tree(0, {1: 2, 2: 1}),), ""), ("fp32",))
    (failed,) = answers(PlanAgain(dataclasses.replace(first(one), reduction=circle), CUT), 1, one)
    assert isinstance(failed, PlanningFailed)
    assert "is a circle" in failed.why


@pytest.mark.multiprocess
@pytest.mark.slow
def test_other_trees_for_those_who_are_left_around_a_dead_link() -> None:
    one = spec_of(load_job(PLANNED_JOB, "job.yaml"), topology(4))
    members = ("b", "c", "d")
    slow = {
        (source, target): LinkFigures(bytes_per_s=1e5)
        for source, target in (("b", "c"), ("c", "b"))
    }
    star_at_b = ReductionPlan(4, (Tree(1, {2: 1, 3: 1}),), "", (1, 2, 3))
    epoch = Epoch(1, members, CodedPlan(star_at_b, ("fp32",)), 5)
    (switch,) = answers(PlanAgain(epoch, slow), 1, one, topology(4))
    assert isinstance(switch, SwitchPlanned)
    assert switch.after_s < switch.before_s
    plan = switch.reduction.plan
    assert (plan.members, plan.num_sites) == ((1, 2, 3), 4)
    used = {hop for tree in range(max(1, len(plan.trees))) for hop in plan.hops(tree)}
    assert not used & {(1, 2), (2, 1)}
    star_at_d = CodedPlan(ReductionPlan(4, (Tree(3, {1: 3, 2: 3}),), "", (1, 2, 3)), ("fp32",))
    dead = frozenset({("b", "c")})
    epoch = Epoch(2, members, star_at_d, 5)
    (kept,) = answers(PlanAgain(epoch, {}, dead_links=dead), 1, one, topology(4))
    assert isinstance(kept, SwitchPlanned)
    used = {hop for tree in kept.reduction.plan.trees for hop in tree.hops()}
    assert used <= {(1, 3), (3, 1), (2, 3), (3, 2)}


@pytest.mark.multiprocess
@pytest.mark.slow
def test_another_division_is_taken_where_a_step_is_predicted_to_be_shorter() -> None:
    one = spec()
    division = Division(
        parts=(24, 16, 8),
        members={"a": 24, "b": 16, "c": 8},
        compute_s={"a": 16.0, "b": 23.0, "c": 40.0},
        gain=0.4,
    )
    (switch,) = answers(PlanAgain(first(one), {}, division=division), 1, one)
    assert isinstance(switch, SwitchPlanned)
    assert switch.divides
    assert switch.before_s == pytest.approx(40, rel=0.01), "as was measured"
    assert switch.after_s == pytest.approx(24, rel=0.01)
    even = dataclasses.replace(division, compute_s=dict.fromkeys("abc", 16.0))
    (kept,) = answers(PlanAgain(first(one), {}, division=even), 1, one)
    assert isinstance(kept, SwitchPlanned)
    assert not kept.divides


@pytest.mark.multiprocess
def test_a_process_that_says_nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "isthmus.orchestrator.coordinator.replanning.MODULE", "keyword"
    )  # of Python: does nothing
    one = spec()
    failed = PlanningFailed(why="its process ended with status 0")
    assert answers(PlanAgain(first(one), CUT), 1, one) == [failed]
