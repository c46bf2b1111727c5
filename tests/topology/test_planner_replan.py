"""A running job's trees, chosen again over links as they were measured."""

from __future__ import annotations

import dataclasses
import pickle
import random

import pytest

from tests.fakes.plannable import a_job, a_random_world, a_world
from topology.job import Job, LinkCodec, Placed, Reduction
from topology.link_codecs import plan_codecs
from topology.planner.replan import (
    MeasuredLink,
    fresh_step_s,
    replan_reduction,
    with_measured,
)
from topology.planner.search import Search
from topology.reduction_plans import plan_reduction
from topology.step_time import step_time
from topology.world import Topology

LINKS = [(0, 1, 2e6, 0.02), (0, 2, 2e6, 0.02), (1, 2, 1.9e6, 0.02)]
WORLD = a_world([4e8] * 3, LINKS)


def running(job: Job, topology: Topology) -> tuple[Job, Topology]:
    """Return a job as the planner's choice runs it, and the part of the topology that it runs on."""
    choice = Search(job, topology).best()
    assert choice is not None
    return choice.job(dataclasses.replace(job, plan=None)), choice.topology(topology)


def both_ways(one: str, other: str, bytes_per_s: float) -> dict[tuple[str, str], MeasuredLink]:
    link = MeasuredLink(bytes_per_s=bytes_per_s)
    return {(one, other): link, (other, one): link}


def test_a_link_that_got_narrow_is_avoided() -> None:
    job = dataclasses.replace(a_job(12), reduction=Reduction(tree="star", hub="s0"))
    found = replan_reduction(job, WORLD, both_ways("s0", "s1", 2e5))
    assert found is not None
    assert found.is_other
    assert found.assumed_s < found.step_s < found.kept_s
    assert 0 < found.gain < 1
    plan = plan_reduction(dataclasses.replace(job, reduction=found.reduction), WORLD)
    now = with_measured(WORLD, both_ways("s0", "s1", 2e5))
    expected = step_time(dataclasses.replace(job, reduction=found.reduction), now)
    assert found.step_s == pytest.approx(expected.step_s)
    used = {frozenset(hop) for tree in plan.trees for hop in tree.parent.items()}
    assert frozenset((0, 1)) not in used or len(plan.trees) > 1
    assert pickle.loads(pickle.dumps(found)) == found


def test_what_is_still_best_is_kept() -> None:
    job, topology = running(a_job(12, sites="all"), WORLD)
    found = replan_reduction(job, topology, {})
    assert found is not None
    assert not found.is_other
    assert found.reduction == job.reduction
    assert found.step_s == found.kept_s == found.assumed_s


def test_where_nothing_crosses_there_is_nothing_to_choose() -> None:
    assert replan_reduction(a_job(), a_world([1e8], []), {}) is None
    job = a_job()
    off = dataclasses.replace(job, exchange=dataclasses.replace(job.exchange, schedule="off"))
    assert replan_reduction(off, WORLD, {}) is None


def test_every_chunk_keeps_the_codecs_that_there_are() -> None:
    job = a_job(12)
    links = (LinkCodec(between=("s1", "s2"), codec="int8"),)
    mixed = dataclasses.replace(
        job,
        exchange=dataclasses.replace(job.exchange, codecs=links),
        reduction=Reduction(tree="star", hub="s0"),
    )
    found = replan_reduction(mixed, WORLD, both_ways("s0", "s1", 2e4))
    assert found is not None
    other = dataclasses.replace(mixed, reduction=found.reduction)
    assert set(plan_codecs(other, WORLD, plan_reduction(other, WORLD))) == {"fp32"}


@pytest.mark.parametrize("seed", range(8))
def test_it_is_never_worse_than_what_is_kept(seed: int) -> None:
    chance = random.Random(seed)
    topology = a_random_world(chance, chance.randrange(2, 6))
    job, part = running(a_job(12, codecs=("fp32", "int8")), topology)
    measured = {
        (link.source, link.target): MeasuredLink(
            bytes_per_s=link.bytes_per_s * chance.choice((0.1, 0.5, 1.0)),
            rtt_s=link.rtt_s * chance.choice((1.0, 3.0)),
        )
        for link in part.links
    }
    found = replan_reduction(job, part, measured)
    if len(part.sites) == 1:
        assert found is None, f"{seed=}"
        return
    assert found is not None
    assert found.step_s <= found.kept_s, f"{seed=}"


def test_a_job_of_its_own_script_is_judged_by_its_exchange() -> None:
    job = dataclasses.replace(
        a_job(12), entrypoint="train.py", reduction=Reduction(tree="star", hub="s0")
    )
    found = replan_reduction(job, WORLD, both_ways("s0", "s1", 2e5))
    assert found is not None
    assert found.is_exchange
    assert found.step_s < found.kept_s
    assert fresh_step_s(job, WORLD, {}) is None


def test_a_fresh_plan_may_do_better() -> None:
    job = a_job(12)
    cut = {**both_ways("s0", "s2", 1e3), **both_ways("s1", "s2", 1e3)}
    placement = tuple(Placed(site=f"s{each}", sequences=4) for each in range(3))
    found = replan_reduction(dataclasses.replace(job, placement=placement), WORLD, cut)
    fresh_s = fresh_step_s(job, WORLD, cut)
    assert found is not None
    assert fresh_s is not None
    assert fresh_s < found.step_s


def test_the_figures_before_are_remembered() -> None:
    now = with_measured(WORLD, both_ways("s0", "s1", 1e6))
    link, other = now.link("s0", "s1"), now.link("s0", "s2")
    assert link is not None
    assert (link.bytes_per_s, link.described_bytes_per_s) == (1e6, 2e6)
    assert link.bandwidth_origin == "measured"
    assert other == WORLD.link("s0", "s2")
