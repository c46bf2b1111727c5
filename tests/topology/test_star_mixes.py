"""The menu of weighted stars of three sites: what its arrays say is what its plans do; bounds are bounds."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from tests.fakes.plannable import a_job, a_job_of_one_size, a_random_world
from topology.codec_costs import usual_ratio
from topology.job import Job
from topology.planner.mix_bounds import MixBounds, paces_s
from topology.planner.search import Search
from topology.planner.shares import busiest, every_split
from topology.planner.star_mixes import chunks_nk, mix_plan, weights_nk
from topology.timing.step_time import StepModel
from topology.traffic.tree_times import chunks_of_trees
from topology.world import Topology


def test_chunks_are_those_of_the_plans() -> None:
    weights_of = weights_nk().tolist()
    assert len({tuple(weights) for weights in weights_of}) == len(weights_of)
    for num_chunks in (1, 7, 40, 1000):
        carried = chunks_nk(num_chunks)
        assert (carried.sum(axis=1) == num_chunks).all()
        for mix in range(0, len(weights_of), 17):
            plan = mix_plan(mix)
            assert [tree.weight for tree in plan.trees] == [
                each for each in weights_of[mix] if each
            ]
            counts = chunks_of_trees(plan, num_chunks)
            expected = np.zeros(3, dtype=np.int64)
            for index, tree in enumerate(plan.trees):
                expected[tree.root] = counts[index]
            assert carried[mix].tolist() == expected.tolist(), weights_of[mix]


def a_case(seed: int) -> tuple[Job, Topology]:
    chance = random.Random(seed)
    made = chance.choice((a_job, a_job_of_one_size))
    job = made(8)
    exchange = dataclasses.replace(job.exchange, codec=chance.choice(("fp32", "int8")))
    topology = a_random_world(chance, 3, rates=chance.choice(((4.5, 7.0), (7.0, 10.0))))
    emulator = chance.choice(("relay", "netns"))
    return dataclasses.replace(job, exchange=exchange), dataclasses.replace(
        topology, emulator=emulator
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_step_is_shorter_than_its_bounds(seed: int) -> None:
    job, topology = a_case(seed)
    mixes = np.array(random.Random(seed).sample(range(len(weights_nk())), 40))
    links_n, gateways_n = paces_s(job, topology)
    bounds = MixBounds(job, topology, mixes, gateways_n[mixes])
    ranks = [site.num_ranks for site in topology.sites]
    splits = every_split(ranks, job.trainer.global_batch)
    assert splits is not None
    spreads = [busiest(split, ranks) for split in splits]
    least_n = bounds.least_s()
    of_spreads_n = bounds.least_of_spreads_s(np.arange(len(mixes)), spreads)
    for place, mix in enumerate(mixes.tolist()):
        ratio = usual_ratio(job.exchange.codec)
        step_s = min(StepModel(job, topology, mix_plan(mix), ratio).steps_s(spreads))
        told = f"{seed=} {weights_nk()[mix]}"
        assert max(least_n[place], of_spreads_n[place]) <= step_s, told
        assert max(links_n[mix], gateways_n[mix]) <= step_s, told


@pytest.mark.parametrize("seed", range(4))
def test_no_mix_is_better_than_the_planners_choice(seed: int) -> None:
    topology = a_random_world(random.Random(seed), 3, rates=(4.5, 7.0))
    job = a_job_of_one_size(6, sites="all")
    choice = Search(job, topology).best()
    assert choice is not None
    ranks = [site.num_ranks for site in topology.sites]
    splits = every_split(ranks, 6)
    assert splits is not None
    spreads = [busiest(split, ranks) for split in splits]
    for mix in range(0, len(weights_nk()), 13):
        step_s = min(StepModel(job, topology, mix_plan(mix)).steps_s(spreads))
        assert choice.step_s <= step_s * (1 + 1e-9), f"{seed=} {weights_nk()[mix]}"
