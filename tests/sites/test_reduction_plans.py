"""Every plan made for some topology reduces completely, the same at all sites, in any order."""

import random
from collections import Counter

import numpy as np
import pytest

from isthmus.protos.frame import Kind
from isthmus.sites.codecs.registry import BY_NAME, EXACT
from isthmus.sites.gateway.reduction.chunk_reduction import (
    Bucket,
    BucketReduction,
    Own,
    Send,
    roles,
)
from isthmus.sites.local.chunk_grid import grid
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from isthmus.topology.trees.tree_choice import plan_reduction
from tests.fakes.reductions import check_rounds
from tests.fakes.tree_worlds import check_plan, given_trees, job, random_world

FORMS = ("auto", "star", "gather", "ring", "hierarchy")


def possible_plans(chance: random.Random) -> list[tuple[str, ReductionPlan]]:
    """Return the plans of a random topology: of each form that it allows, and of given trees."""
    topology = random_world(chance, chance.randint(2, 5))
    trees = given_trees(chance, topology)
    found = [("given", plan_reduction(job(trees=trees), topology))]
    for form in FORMS:
        try:
            found.append((form, plan_reduction(job(form), topology)))
        except ConfigError:
            assert form != "auto"
    for form, plan in found:
        check_plan(plan, topology, form)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
def test_whatever_is_planned_reduces_completely(seed: int) -> None:
    chance = random.Random(seed)
    print(f"{seed=}")
    for form, plan in possible_plans(chance):
        print(form, plan)
        codec = BY_NAME[chance.choice(["fp32", "split", "int8", "int4"])]
        ranks = tuple(chance.randint(1, 4) for _ in range(plan.num_sites))
        numel = chance.randint(1, 120)
        weights = [
            [float(chance.randint(site == 0, 3)) for site in range(plan.num_sites)]
            for _ in range(2)
        ]
        shape = (numel, max(1, numel // chance.randint(1, 9)), ranks)
        check_rounds(plan, codec, shape, weights, seed, chance.random() < 0.5)


def test_trees_take_turns_from_bucket_to_bucket() -> None:
    # Buckets of 4 chunks; by themselves they would give half of all chunks to the first of three
    # trees.
    plan = ReductionPlan(3, tuple(star(3, hub) for hub in range(3)), "")
    cut = grid(40, 10, (1, 1, 1))
    chunks_of_tree: Counter[int] = Counter()
    for index in range(9):
        bucket = Bucket(1, 0, index, 0, (EXACT,) * 3, cut, lambda: 0.0)
        machine = BucketReduction(bucket, plan, roles(plan, 0), None)
        for chunk in range(cut.num_chunks):
            own = Own(np.ones(10, dtype=np.float32), 1.0)
            sent = list(machine.chunk(chunk).handle(own))
            # The root of the first tree waits for the others.
            trees = {action.frame.tree for action in sent if isinstance(action, Send)} or {0}
            chunks_of_tree.update(trees)
            assert all(
                action.frame.key.kind is Kind.CONTRIBUTION
                for action in sent
                if isinstance(action, Send)
            )
    assert chunks_of_tree == {0: 12, 1: 12, 2: 12}
