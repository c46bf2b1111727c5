"""Moving chunks from tree to tree: never worse, always the same, until no move helps."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.fakes.plannable import a_job_of_one_size, a_random_world
from topology.model.site_timing import trainer_timing
from topology.model.step_model import StepModel
from topology.planner.reductions import Score, WeightMoves
from topology.trees.trees import WEIGHT_MAX, ReductionPlan, Tree, star
from topology.world import Topology

WORLD = a_random_world(random.Random(0), 3)


def moves(trees: list[Tree], topology: Topology, score: Score) -> WeightMoves:
    return WeightMoves(trees, topology, score, lambda _: 0.0, 500)


@pytest.mark.parametrize("seed", range(4))
def test_moves_make_a_star_better_and_nothing_worse(seed: int) -> None:
    job, topology = a_job_of_one_size(12), a_random_world(random.Random(seed), 6)
    stars = [star(6, hub) for hub in range(6)]
    timings = [trainer_timing(job, site, 2) for site in topology.sites]

    def score(plan: ReductionPlan, below: float = 0.0) -> float:
        return StepModel(job, topology, plan).step_s(timings)

    begun = min((ReductionPlan(6, (each,), "") for each in stars), key=score)
    found = moves(stars, topology, score).best(begun)
    assert score(found) < score(begun), f"{seed=}"
    assert found == moves(stars, topology, score).best(begun)
    assert {tree.root for tree in found.trees} <= {each.root for each in stars}
    assert max(tree.weight for tree in found.trees) <= WEIGHT_MAX


def test_it_ends_where_no_small_part_is_better_elsewhere() -> None:
    """Stars that are slower the more they carry: by shares as their rates are."""
    rates = {0: 5.0, 1: 3.0, 2: 2.0}
    stars = [star(3, hub) for hub in rates]

    def score(plan: ReductionPlan, below: float = 0.0) -> float:
        total = sum(tree.weight for tree in plan.trees)
        return max(tree.weight / total / rates[tree.root] for tree in plan.trees)

    found = moves(stars, WORLD, score).best(ReductionPlan(3, (stars[2],), ""))
    total = sum(tree.weight for tree in found.trees)
    carried = {tree.root: tree.weight / total for tree in found.trees}
    # Shares as the rates are take 1 / 10; a forty-eighth elsewhere is what is not tried any more.
    assert score(found) == pytest.approx(0.1, rel=48 / 96 / 2)
    for giver, taker in itertools.permutations(rates, 2):
        moved = {**carried, giver: carried[giver] - 2 / total, taker: carried[taker] + 2 / total}
        if moved[giver] >= 0:
            worst = max(share / rates[root] for root, share in moved.items())
            assert worst >= score(found) * (1 - 1e-9), (giver, taker)


def test_what_nothing_improves_stays_as_it_is() -> None:
    plan = ReductionPlan(3, (star(3, 0),), "alone")
    assert moves([star(3, 1)], WORLD, lambda each, _: len(each.trees)).best(plan) is plan
