"""Plans of those who are left."""

from __future__ import annotations

import dataclasses
import random

import pytest

from isthmus.topology.planner.reductions import menu
from isthmus.topology.spec.job import Job, Reduction
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, has_same_turns
from isthmus.topology.spec.run_spec import CodedPlan, RunSpec
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.member_plans import plan_for, plan_with_followers
from tests.fakes.run_specs import spec_of
from tests.fakes.tree_worlds import both_ways, random_world, world
from tests.topology.test_trees_packing import script

RING = world(4, both_ways((0, 1, 4e6, 0.02), (1, 2, 2e6, 0.02), (2, 3, 3e6, 0.02), (0, 3, 1e6, 0)))


def spec(topology: Topology, tree: str = "auto", **changes: object) -> RunSpec:
    job: Job = dataclasses.replace(script(), reduction=Reduction(tree=tree))
    exchange = dataclasses.replace(job.exchange, **changes)  # type: ignore[arg-type]
    return spec_of(dataclasses.replace(job, exchange=exchange), topology)


def test_all_members_keep_the_plan_of_the_run() -> None:
    given = spec(RING)
    assert plan_for(given, given.site_names) is given.reduction


def test_who_is_left_has_the_widest_tree_by_the_indices_of_the_run() -> None:
    found = plan_for(spec(RING, codec="int8"), ("s3", "s1", "s2"))
    assert found is not None
    assert found.codecs == ("int8",)
    plan = found.plan
    assert (plan.members, [set(tree.hops()) for tree in plan.trees]) == (
        (1, 2, 3),
        [{(1, 2), (2, 1), (3, 2), (2, 3)}],
    )


def test_every_chunk_keeps_its_codec_whoever_is_left() -> None:
    given = spec(RING)
    trees = (Tree(0, {1: 0, 3: 0, 2: 1}, 2), Tree(2, {1: 2, 3: 2, 0: 1}))
    own = CodedPlan(ReductionPlan(4, trees, ""), ("fp32", "int8"))
    given = dataclasses.replace(given, reduction=own)
    for members in (given.site_names[:3], given.site_names[:2], given.site_names[:1]):
        found = plan_for(given, members)
        assert found is not None
        assert has_same_turns((own.plan, own.codecs), (found.plan, found.codecs))


def test_a_lone_site_and_two() -> None:
    given = spec(RING)
    lone, two = plan_for(given, ("s2",)), plan_for(given, ("s2", "s1"))
    assert lone is not None
    assert two is not None
    assert (lone.plan.is_gather, lone.plan.members, len(lone.codecs)) == (True, (2,), 1)
    assert (two.plan.is_gather, two.plan.members) == (True, (1, 2))
    assert plan_for(given, ("s0", "s2")) is None, "there is no link"


def test_trees_go_around_dead_links() -> None:
    given = spec(RING)
    found = plan_for(given, given.site_names, [("s1", "s0")])
    assert found is not None
    used = {frozenset(hop) for tree in found.plan.trees for hop in tree.hops()}
    assert used == {frozenset({1, 2}), frozenset({2, 3}), frozenset({0, 3})}
    assert plan_for(given, given.site_names, [("s0", "s1"), ("s3", "s2")]) is None


@pytest.mark.parametrize("seed", range(20))
def test_nothing_ever_crosses_where_no_link_is_described(seed: int) -> None:
    chance = random.Random(seed)
    given = spec(random_world(chance, 6))
    names = given.site_names
    linked = {(link.source, link.target) for link in given.topology.links}
    left = [name for name in names if chance.random() < 0.7]
    dead = chance.sample(sorted(linked), 2)
    plans = [given.reduction.plan]
    plans += [each.plan for each in menu(given.job, given.topology)]
    plans += [found.plan for found in [plan_for(given, left or names, dead)] if found is not None]
    for plan in plans:
        for tree in range(max(1, len(plan.trees))):
            hops = {(names[one], names[other]) for one, other in plan.hops(tree)}
            assert hops <= linked, f"{seed=} {plan.why}"


@pytest.mark.parametrize("seed", range(10))
def test_any_members_that_are_connected_have_a_plan_of_their_own(seed: int) -> None:
    chance = random.Random(seed)
    given = spec(random_world(chance, 5))
    names = [name for name in given.site_names if chance.random() < 0.7] or ["s0"]
    found = plan_for(given, names)
    if found is None:
        return
    plan: ReductionPlan = found.plan
    members = tuple(given.site_names.index(name) for name in names)
    assert plan.members == members
    for tree in plan.trees:
        assert {tree.root, *tree.parent} == set(members), f"{seed=}"


def test_a_site_that_follows_gets_each_result_from_somebody_who_reaches_it() -> None:
    given = spec(RING, codec="int8")
    pair = plan_for(given, ("s0", "s1"))
    assert pair is not None
    assert pair.plan.is_gather
    found = plan_with_followers(given, pair, ("s2",))
    assert (found.plan.members, found.codecs) == ((0, 1), ("int8", "int8"))
    assert [each.root for each in found.plan.trees] == [0, 1], "a star each in place of the gather"
    for tree in found.plan.trees:
        assert tree.followers == (2,)
        assert tree.giver[2] == 1, "nothing links s0 and s2"
        assert set(tree.parent) == {0, 1} - {tree.root}, "it gives nothing"
    assert has_same_turns((pair.plan, pair.codecs), (found.plan, found.codecs))
