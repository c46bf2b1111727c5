"""Weighted trees of three to five sites: a menu's arrays say what plans do; bounds are bounds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

from tests.fakes.plannable import a_job, a_job_of_one_size, a_random_world, a_world
from topology.codec_costs import usual_ratio
from topology.job import Job
from topology.model.buckets import releases
from topology.model.step_model import StepModel
from topology.model.tree_times import chunks_of_trees
from topology.model.wire_load import wire_loads
from topology.planner.mix_bounds import MixBounds
from topology.planner.mix_crossings import MixCrossings
from topology.planner.mix_links import busy_s, shared_nr
from topology.planner.search import Search
from topology.planner.shares import busiest, every_split
from topology.planner.tree_mixes import (
    Mixes,
    Part,
    chunks_pnj,
    menu,
    mix_plan,
    mixes_within,
    plan_of_mix,
    sets_of,
    spanning_trees,
)
from topology.trees.pairs import pairs_of
from topology.trees.shapes import ring_paths
from topology.trees.trees import ReductionPlan
from topology.world import Topology


def random_mixes(chance: random.Random, part: Part, num_all: int, count: int) -> Mixes:
    sets_uj = sets_of(num_all, part.num_trees)
    cuts = [sorted(chance.sample(range(1, part.total), part.num_trees - 1)) for _ in range(count)]
    weights = [
        [last - first for first, last in itertools.pairwise([0, *each, part.total])]
        for each in cuts
    ]
    chosen = np.array([chance.randrange(len(sets_uj)) for _ in range(count)])
    return Mixes(part.total, sets_uj, chosen, np.array(weights))


@pytest.mark.parametrize(("num_sites", "num_trees"), [(3, 3), (4, 16), (5, 125)])
def test_all_trees_are_there_once(num_sites: int, num_trees: int) -> None:
    trees = spanning_trees(pairs_of(a_random_world(random.Random(0), num_sites)))
    edges = {frozenset(map(frozenset, tree.parent.items())) for tree in trees}
    assert len(edges) == len(trees) == num_trees


def test_chunks_are_those_of_the_plans() -> None:
    chance = random.Random(1)
    trees = spanning_trees(pairs_of(a_random_world(chance, 4)))
    for part in (Part(8, 4), Part(48, 3), Part(96, 2)):
        mixes = random_mixes(chance, part, len(trees), 30)
        sizes = (1, 7, 40, 1000)
        for num_chunks, carried in zip(sizes, chunks_pnj(mixes.weights_nj, sizes), strict=True):
            for row in range(30):
                counts = chunks_of_trees(plan_of_mix(trees, mixes, row), num_chunks)
                expected = [counts[place] for place in range(part.num_trees)]
                assert carried[row].tolist() == expected, mixes.weights_nj[row]


@pytest.mark.parametrize("seed", range(6))
def test_what_fits_is_all_that_fits(seed: int) -> None:
    generator = np.random.default_rng(seed)
    part = Part(7, 3)
    time_kr = generator.uniform(0.1, 1.0, (6, 4)) * (generator.random((6, 4)) < 0.6)
    sets_uj, most_k = sets_of(6, 3), generator.integers(1, 7, 6) * (generator.random(6) < 0.9)
    most_ur = generator.uniform(0.3, 0.9, (len(sets_uj), 4))
    found = mixes_within(
        part,
        sets_uj[most_k[sets_uj].min(axis=1) > 0],
        time_kr,
        most_ur[most_k[sets_uj].min(axis=1) > 0],
        most_k,
    )
    got = {
        tuple(sorted(zip(trees, weights, strict=True)))
        for trees, weights in zip(found.trees_nj.tolist(), found.weights_nj.tolist(), strict=True)
    }
    assert len(got) == len(found.set_n)
    # Which of two trees of one weight goes first shows in steps: what fits must not decide it.
    assert (np.diff(found.sets_uj, axis=1) > 0).all()
    expected = set()
    for trees, most_r in zip(sets_uj.tolist(), most_ur, strict=True):
        for weights in itertools.product(range(1, 7), repeat=3):
            if sum(weights) != 7 or any(most_k[trees] < weights):
                continue
            if (np.array(weights) @ time_kr[trees] <= most_r * 7).all():
                expected.add(tuple(zip(trees, weights, strict=True)))
    assert got == expected, f"{seed=}"
    assert expected


def test_all_bytes_cross_as_in_each_set_by_itself() -> None:
    job, chance = a_job_of_one_size(8), random.Random(3)
    topology = a_random_world(chance, 4, rates=(4.5, 7.0))
    trees = spanning_trees(pairs_of(topology))
    loads = [
        dataclasses.replace(each, first_window_bytes=None)
        for each in wire_loads(job, topology, ReductionPlan(4, trees, ""), [1 << 20, 1 << 18])
    ]
    crossings = MixCrossings(topology, trees, loads)
    mixes = random_mixes(chance, Part(8, 3), len(trees), 40)
    by_set = mixes.of(mixes.set_n.argsort(kind="stable"))
    together = crossings.of_all_bytes(by_set)
    for row in range(40):
        [alone] = crossings.of_set(by_set.of(slice(row, row + 1)))
        assert together[row] == pytest.approx(alone[0], rel=1e-12)


def a_case(seed: int) -> tuple[Job, Topology]:
    chance = random.Random(seed)
    made = chance.choice((a_job, a_job_of_one_size))
    job = made(8)
    exchange = dataclasses.replace(job.exchange, codec=chance.choice(("fp32", "int8")))
    topology = a_random_world(
        chance, chance.choice((3, 4, 5)), rates=chance.choice(((4.5, 7.0), (7.0, 10.0)))
    )
    emulator = chance.choice(("relay", "netns"))
    return dataclasses.replace(job, exchange=exchange), dataclasses.replace(
        topology, emulator=emulator
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_step_is_shorter_than_its_bounds(seed: int) -> None:
    chance = random.Random(seed)
    job, topology = a_case(seed)
    trees = spanning_trees(pairs_of(topology))
    bounds = MixBounds(job, topology, trees, busy_s(job, topology, trees))
    ranks = [site.num_ranks for site in topology.sites]
    splits = every_split(ranks, job.trainer.global_batch)
    assert splits is not None
    spreads = [busiest(split, ranks) for split in splits]
    ratio = usual_ratio(job.exchange.codec)
    for part in menu(len(ranks), bounds.num_chunks, len(releases(job))):
        mixes = random_mixes(chance, part, len(trees), 12)
        least_n = bounds.least_s(mixes, math.inf)
        for row in range(12):
            one = mixes.of(slice(row, row + 1))
            step_s = min(
                StepModel(job, topology, plan_of_mix(trees, mixes, row), ratio).steps_s(spreads)
            )
            told = f"{seed=} {part} {mixes.trees_nj[row]} {mixes.weights_nj[row]}"
            crossed = bounds.crossed(one)
            [of_spreads_s] = bounds.of_spreads_s(crossed, spreads)
            assert max(least_n[row], of_spreads_s) <= step_s, told
            assert bounds.least_s(one, step_s) < math.inf, told
            assert bounds.fits(crossed, step_s).all(), told
            assert bounds.may_fit(one, step_s).all(), told
            assert (
                mixes.weights_nj[row]
                <= bounds.largest_weights(part.total, step_s)[mixes.trees_nj[row]]
            ).all(), told
            assert len(bounds.sets_that_fit(mixes.trees_nj[row : row + 1], step_s)), told
            most_r = bounds.may_be_busy_s(mixes.trees_nj[row : row + 1], step_s)
            assert (shared_nr(one, bounds.busy_kr) <= most_r * (1 + 1e-9)).all(), told


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "num_sites"), [(0, 3), (1, 3), (2, 4), (3, 4), (4, 5)])
def test_no_mix_is_better_than_the_planners_choice(seed: int, num_sites: int) -> None:
    chance = random.Random(seed)
    topology = a_random_world(chance, num_sites, rates=(4.5, 7.0))
    job = a_job_of_one_size(6, sites="all")
    choice = Search(job, topology).best()
    assert choice is not None
    trees, ranks = spanning_trees(pairs_of(topology)), [1] * num_sites
    splits = every_split(ranks, 6)
    assert splits is not None
    for part in menu(num_sites, 8, 1):
        mixes = random_mixes(chance, part, len(trees), 60)
        for row in range(60):
            step_s = min(StepModel(job, topology, plan_of_mix(trees, mixes, row)).steps_s(splits))
            assert choice.step_s <= step_s * (1 + 1e-9), f"{seed=} {mixes.weights_nj[row]}"


def few_links(seed: int) -> Topology:
    """Return five sites in a ring, and perhaps one link across it: 5 trees, or a few more."""
    chance = random.Random(seed)
    pairs = [(site, (site + 1) % 5) for site in range(5)] + [(0, 2)] * (seed % 2)
    links = [(*pair, 10 ** chance.uniform(4.5, 7.0), chance.uniform(0.002, 0.2)) for pair in pairs]
    return a_world([chance.choice((4e8, 2e8, 1e8)) for _ in range(5)], links)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_of_five_sites_the_choice_is_the_best_of_the_whole_menu(seed: int) -> None:
    topology, job = few_links(seed), a_job_of_one_size(6, sites="all")
    choice = Search(job, topology).best()
    assert choice is not None
    trees = spanning_trees(pairs_of(topology))
    splits = every_split([1] * 5, 6)
    assert splits is not None
    found = [
        min(StepModel(job, topology, mix_plan(chosen, weights)).steps_s(splits))
        for part in menu(5, 8, 1)
        for chosen in itertools.combinations(trees, part.num_trees)
        for weights in itertools.product(range(1, part.total + 1), repeat=part.num_trees)
        if sum(weights) == part.total
    ]
    ring = ReductionPlan(5, ring_paths(range(5)), "")
    found += StepModel(job, topology, ring).steps_s(splits)
    assert choice.step_s == pytest.approx(min(found), rel=1e-9), f"{seed=}"
