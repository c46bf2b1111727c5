"""Which buckets are so small that every site sends its part to every other."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, among, star
from isthmus.topology.trees.small_buckets import gathered_bytes
from tests.fakes.tree_worlds import both_ways, world

RATE, RTT_S = 25e6, 0.04
THREE = world(3, both_ways((0, 1, RATE, RTT_S), (0, 2, RATE, RTT_S), (1, 2, RATE, RTT_S)))
STARS = ReductionPlan(3, (star(3, 0), star(3, 1), star(3, 2)), "")


def test_a_bucket_is_gathered_that_takes_an_eighth_of_the_time_that_it_saves() -> None:
    assert gathered_bytes(THREE, STARS, ("fp32",) * 3) == RATE * RTT_S / 2 / 8
    assert gathered_bytes(THREE, STARS, ("bf16",) * 3) == RATE * RTT_S / 8


def test_the_slowest_link_and_the_longest_decide() -> None:
    links = both_ways((0, 1, RATE, RTT_S), (0, 2, RATE, RTT_S), (1, 2, RATE / 10, 1.5 * RTT_S))
    saved_s = RTT_S - 0.75 * RTT_S
    assert gathered_bytes(world(3, links), STARS, ("fp32",) * 3) == pytest.approx(
        saved_s / 8 * RATE / 10, abs=1
    )
    far = both_ways((0, 1, RATE, RTT_S), (0, 2, RATE, RTT_S), (1, 2, RATE, 3 * RTT_S))
    assert gathered_bytes(world(3, far), STARS, ("fp32",) * 3) == 0, "the tree is there sooner"


def test_it_uses_no_link_that_the_trees_do_not_use() -> None:
    assert gathered_bytes(THREE, ReductionPlan(3, (star(3, 0),), ""), ("fp32",)) == 0
    path = Tree(0, {1: 0, 2: 1}, 1, {2: 0, 1: 2})
    assert gathered_bytes(THREE, ReductionPlan(3, (path,), ""), ("fp32",)) > 0
    line = world(3, both_ways((0, 1, RATE, RTT_S), (0, 2, RATE, RTT_S)))
    assert gathered_bytes(line, STARS, ("fp32",) * 3) == 0


def test_every_chunk_keeps_its_codec() -> None:
    assert gathered_bytes(THREE, STARS, ("fp32", "fp32", "int8")) == 0


def test_two_sites_and_gathers_have_nothing_to_choose() -> None:
    two = world(2, both_ways((0, 1, RATE, RTT_S)))
    assert gathered_bytes(two, ReductionPlan(2, (star(2, 0),), ""), ("fp32",)) == 0
    assert gathered_bytes(THREE, ReductionPlan(3, (), ""), ("fp32",)) == 0


def test_it_goes_with_the_plan_among_more_sites() -> None:
    plan = dataclasses.replace(STARS, gathered_bytes=7)
    assert among(plan, 5, (0, 2, 4)).gathered_bytes == 7
