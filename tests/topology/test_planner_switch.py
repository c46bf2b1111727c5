"""A running job's trees, chosen again over links as they are now."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.fakes.plannable import a_job, a_random_world, a_world
from topology.job import Job, LinkCodec, Placed, Reduction
from topology.link_codecs import plan_codecs
from topology.measured_links import LinkFigures, Pair, with_measured
from topology.planner.search import Search
from topology.planner.switch import best_switch, relaunched_s
from topology.reduction_plans import plan_reduction
from topology.step_time import step_time
from topology.world import Topology

LINKS = [(0, 1, 2e6, 0.02), (0, 2, 2e6, 0.02), (1, 2, 1.9e6, 0.02)]
WORLD = a_world([4e8] * 3, LINKS)
AT = "2026-05-01T12:00:00Z"
STAR = Reduction(tree="star", hub="s0")


def running(job: Job, topology: Topology) -> Job:
    """Return a job as the planner's choice runs it."""
    choice = Search(job, topology).best()
    assert choice is not None
    return choice.job(dataclasses.replace(job, plan=None))


def now(topology: Topology, pair: Pair, bytes_per_s: float) -> Topology:
    """Return a topology with one link measured, both ways."""
    figures = LinkFigures(bytes_per_s=bytes_per_s)
    return with_measured(topology, {pair: figures, pair[::-1]: figures}, AT)


def test_a_link_that_got_narrow_is_avoided() -> None:
    job = dataclasses.replace(a_job(12), reduction=STAR)
    world = now(WORLD, ("s0", "s1"), 2e5)
    found = best_switch(job, world)
    assert 0 < found.gain < 1
    assert found.before_s == pytest.approx(step_time(job, world).step_s)
    other = dataclasses.replace(job, reduction=found.reduction)
    assert found.after_s == pytest.approx(step_time(other, world).step_s)
    plan = plan_reduction(other, world)
    used = {frozenset(hop) for tree in plan.trees for hop in tree.parent.items()}
    assert frozenset((0, 1)) not in used or len(plan.trees) > 1


def test_what_is_still_best_is_kept() -> None:
    job = running(a_job(12, sites="all"), WORLD)
    found = best_switch(job, WORLD)
    assert found.reduction == job.reduction
    assert found.gain == 0


def test_every_chunk_keeps_the_codecs_that_there_are() -> None:
    job = a_job(12)
    links = (LinkCodec(between=("s1", "s2"), codec="int8"),)
    exchange = dataclasses.replace(job.exchange, codecs=links)
    mixed = dataclasses.replace(job, exchange=exchange, reduction=STAR)
    world = now(WORLD, ("s0", "s1"), 2e4)
    found = best_switch(mixed, world)
    other = dataclasses.replace(mixed, reduction=found.reduction)
    assert set(plan_codecs(other, world, plan_reduction(other, world))) == {"fp32"}


@pytest.mark.parametrize("seed", range(8))
def test_it_is_never_worse_than_what_is_kept(seed: int) -> None:
    chance = random.Random(seed)
    topology = a_random_world(chance, chance.randrange(2, 6))
    job = running(a_job(12, sites="all", codecs=("fp32", "int8")), topology)
    figures = {
        (link.source, link.target): LinkFigures(
            bytes_per_s=link.bytes_per_s * chance.choice((0.1, 0.5, 1.0)),
            rtt_s=link.rtt_s * chance.choice((1.0, 3.0)),
        )
        for link in topology.links
    }
    assert best_switch(job, with_measured(topology, figures, AT)).gain >= 0, f"{seed=}"


def test_a_fresh_plan_may_do_better() -> None:
    job = a_job(12)
    world = now(now(WORLD, ("s0", "s2"), 1e3), ("s1", "s2"), 1e3)
    placement = tuple(Placed(site=f"s{each}", sequences=4) for each in range(3))
    found = best_switch(dataclasses.replace(job, placement=placement), world)
    assert relaunched_s(job, world) < found.after_s
