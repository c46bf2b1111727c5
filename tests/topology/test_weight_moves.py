"""Moving chunks from tree to tree: never worse, always the same, until no move helps."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.fakes.plannable import a_job_of_one_size, a_random_world
from topology.model.step_model import StepModel
from topology.planner.choice import Rank
from topology.planner.search import Search
from topology.planner.weight_moves import WeightMoves
from topology.trees.trees import WEIGHT_MAX, ReductionPlan, star


@pytest.mark.parametrize("seed", range(4))
def test_moves_make_a_star_better_and_nothing_worse(seed: int) -> None:
    job, topology = a_job_of_one_size(12), a_random_world(random.Random(seed), 6)
    stars = [star(6, hub) for hub in range(6)]

    def rank(plan: ReductionPlan) -> Rank:
        return (StepModel(job, topology, plan).step_s([2] * 6),)

    begun = min((ReductionPlan(6, (each,), "") for each in stars), key=rank)
    found = WeightMoves(stars, rank).best(begun)
    assert rank(found) < rank(begun), f"{seed=}"
    assert found == WeightMoves(stars, rank).best(begun)
    assert {tree.root for tree in found.trees} <= {each.root for each in stars}
    assert max(tree.weight for tree in found.trees) <= WEIGHT_MAX


def test_it_ends_where_no_small_part_is_better_elsewhere() -> None:
    """Stars that are slower the more they carry: by shares as their rates are."""
    rates = {0: 5.0, 1: 3.0, 2: 2.0}
    stars = [star(3, hub) for hub in rates]

    def rank(plan: ReductionPlan) -> Rank:
        total = sum(tree.weight for tree in plan.trees)
        return (max(tree.weight / total / rates[tree.root] for tree in plan.trees),)

    found = WeightMoves(stars, rank).best(ReductionPlan(3, (stars[2],), ""))
    total = sum(tree.weight for tree in found.trees)
    carried = {tree.root: tree.weight / total for tree in found.trees}
    # Shares as the rates are take 1 / 10; a forty-eighth elsewhere is what is not tried any more.
    assert rank(found)[0] == pytest.approx(0.1, rel=48 / 96 / 2)
    for giver, taker in itertools.permutations(rates, 2):
        moved = {**carried, giver: carried[giver] - 2 / total, taker: carried[taker] + 2 / total}
        if moved[giver] >= 0:
            worst = max(share / rates[root] for root, share in moved.items())
            assert worst >= rank(found)[0] * (1 - 1e-9), (giver, taker)


def test_what_nothing_improves_stays_as_it_is() -> None:
    plan = ReductionPlan(3, (star(3, 0),), "alone")
    assert WeightMoves([star(3, 1)], lambda each: (len(each.trees),)).best(plan) is plan


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_of_many_sites_is_no_worse_than_its_links_best_star(seed: int) -> None:
    job, topology = a_job_of_one_size(8, sites="all"), a_random_world(random.Random(seed), 7)
    choice = Search(job, topology).best()
    assert choice is not None
    for hub in range(7):
        plan = ReductionPlan(7, (star(7, hub),), "")
        step_s = StepModel(job, topology, plan).step_s(choice.sequences)
        assert choice.step_s <= step_s * (1 + 1e-9), f"{seed=} {hub=}"
