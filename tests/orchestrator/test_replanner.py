"""Planning again in a process of its own: answers as they come, and no process is left."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from orchestrator.coordinator.reduction_json import reduction_from, reduction_to
from orchestrator.coordinator.replanner import Answer, Replanner
from orchestrator.coordinator.replanning import settings_of
from orchestrator.core.replan_machine import (
    PlanAgain,
    PlanningFailed,
    RelaunchPlanned,
    SwitchPlanned,
)
from protos.control.v1 import control_pb2
from tests.fakes.worlds import JOB, topology_text
from topology.documents.load import load_job, load_topology
from topology.hashing import reduction_hash
from topology.job import NamedTree, Reduction
from topology.measured.measured_links import LinkFigures
from topology.model.reduction_plans import plan_reduction
from topology.plan_wishes import Replan
from topology.trees.codec_turns import has_same_turns
from topology.trees.link_codecs import plan_codecs

DEADLINE_S = 60.0
PLANNED_JOB = JOB + "plan: {}\nexchange: {codec: fp32}\nreduction: {tree: star, hub: a}\n"
CUT = {("a", "b"): LinkFigures(bytes_per_s=1e6), ("b", "a"): LinkFigures(bytes_per_s=1e6)}


def answers(asked: PlanAgain, count: int, job: str = PLANNED_JOB) -> list[Answer]:
    """Return what a planner answers, once that is so much."""

    async def plan() -> list[Answer]:
        told: asyncio.Queue[Answer] = asyncio.Queue()
        documents = (
            control_pb2.Document(text=job, source="job.yaml"),
            control_pb2.Document(text=topology_text(3), source="topology.yaml"),
        )
        replanner = Replanner(*documents, told.put_nowait)
        try:
            async with asyncio.timeout(DEADLINE_S):
                replanner.plan(asked)
                return [await told.get() for _ in range(count)]
        finally:
            await replanner.close()

    return asyncio.run(plan())


@pytest.mark.multiprocess
@pytest.mark.slow
def test_other_trees_and_what_a_relaunch_would_give() -> None:
    switch, relaunch = answers(PlanAgain(None, CUT), 2)
    assert isinstance(switch, SwitchPlanned)
    assert switch.after_s < switch.before_s
    world = load_topology(topology_text(3), "topology.yaml")
    overrides = [f"reduction={json.dumps(_written(switch.reduction))}"]
    job = load_job(PLANNED_JOB, "job.yaml", overrides)
    plan = plan_reduction(job, world)
    assert switch.plan_hash == reduction_hash(plan, plan_codecs(job, world, plan))
    assert isinstance(relaunch, RelaunchPlanned)
    assert relaunch.step_s <= switch.after_s


@pytest.mark.multiprocess
@pytest.mark.slow
def test_trees_have_codecs_as_sites_derive_them_and_mistakes_are_told() -> None:
    codecs = "exchange: {codec: fp32, codecs: [{between: [b, c], codec: int8}]}"
    trees = "trees: [{root: a, parents: {b: a, c: a}}, {root: b, parents: {a: b, c: b}}]"
    job = PLANNED_JOB.replace("exchange: {codec: fp32}", codecs)
    job = job.replace("tree: star, hub: a", trees)
    (switch, _) = answers(PlanAgain(None, CUT), 2, job)
    assert isinstance(switch, SwitchPlanned)
    world = load_topology(topology_text(3), "topology.yaml")
    planned = dataclasses.replace(load_job(job, "job.yaml"), reduction=switch.reduction)
    plan = plan_reduction(planned, world)
    sites_codecs = plan_codecs(planned, world, plan)
    assert "int8" in sites_codecs
    assert switch.after_s < switch.before_s
    assert switch.plan_hash == reduction_hash(plan, sites_codecs)
    (kept,) = answers(PlanAgain(None, CUT, keeps_codecs=True), 1, job)
    assert isinstance(kept, SwitchPlanned)
    began = load_job(job, "job.yaml")
    ones = []
    for each in (began, dataclasses.replace(began, reduction=kept.reduction)):
        plan = plan_reduction(each, world)
        ones.append((plan, plan_codecs(each, world, plan)))
    assert has_same_turns(*ones)
    assert switch.after_s < kept.after_s <= kept.before_s == switch.before_s
    (failed,) = answers(PlanAgain(Reduction(tree="star", hub="z"), CUT), 1)
    assert isinstance(failed, PlanningFailed)
    assert "unknown site 'z'" in failed.why


@pytest.mark.multiprocess
def test_a_process_that_says_nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "orchestrator.coordinator.replanner.MODULE", "keyword"
    )  # of Python: does nothing
    assert answers(PlanAgain(None, CUT), 1) == [PlanningFailed("its process ended with status 0")]


def test_reductions_are_read_as_they_were_written() -> None:
    tree = NamedTree(root="b", parents={"a": "b"}, weight=3)
    for reduction in (
        Reduction(),
        Reduction(tree="star", hub="a"),
        Reduction(tree="hierarchy", groups=(("a", "b"), ("c",))),
        Reduction(trees=(tree, tree)),
    ):
        assert reduction_from(json.loads(json.dumps(reduction_to(reduction)))) == reduction


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("", None),
        ("plan: {}\n", Replan()),
        ("plan: {replan: off}\n", None),
        ("plan: {replan: {lasting: 2s, gain: 10%}}\n", Replan(lasting_s=2.0, gain=0.1)),
        ("plan: {}\nexchange: {schedule: off}\n", None),
        ("plan: {}\nreduction: {tree: ring}\n", None),
    ],
)
def test_which_jobs_are_planned_again(section: str, expected: Replan | None) -> None:
    document = control_pb2.Document(text=JOB + section, source="job.yaml")
    assert settings_of(load_job(document.text, "job.yaml"), document) == expected


def test_a_plans_reduction_is_planned_again_and_a_users_is_not() -> None:
    text, planned = JOB + "plan: {}\n", 'reduction={"tree": "gather"}'
    for overrides, expected in (
        ([planned], Replan()),
        (["reduction.tree=ring", planned], None),
        (["reduction={tree: ring}", planned], None),
    ):
        document = control_pb2.Document(text=text, source="job.yaml", overrides=overrides)
        assert settings_of(load_job(text, "job.yaml", [planned]), document) == expected


def _written(reduction: Reduction) -> dict[str, object]:
    if not reduction.trees:
        return {"tree": reduction.tree}
    return {
        "trees": [
            {"root": tree.root, "parents": dict(tree.parents), "weight": tree.weight}
            for tree in reduction.trees
        ]
    }
