"""Sites are lost in the midst of rounds: who is left goes on, with the same bits everywhere."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree
from tests.fakes.carried_exchanges import World
from tests.fakes.lost_sites import LosingExchanges
from tests.sites.test_gateway_liveness import drawn_world


def plan_among(chance: random.Random, num_sites: int, members: tuple[int, ...]) -> ReductionPlan:
    """Return a plan of any form over some of the sites."""
    num_trees = 0 if len(members) == 1 else chance.choice((0, 1, 2))
    trees = []
    for _ in range(num_trees):
        order = chance.sample(members, len(members))
        ways = [
            {order[at]: order[chance.randrange(at)] for at in range(1, len(order))}
            for _ in range(2)
        ]
        trees.append(Tree(order[0], ways[0], chance.randint(1, 3), chance.choice((None, ways[1]))))
    return ReductionPlan(num_sites, tuple(trees), "", members, chance.choice((0, 512, 2048)))


def lost(seed: int, codec: str, error_feedback: bool) -> LosingExchanges:
    """Let a world in which sites are lost run to its end, and see that it got there."""
    chance = random.Random(seed)
    drawn = drawn_world(chance)
    num_trees = max(1, len(drawn.plan.trees))
    world: World = dataclasses.replace(
        drawn, codecs=(codec,) * num_trees, is_mesh=True, error_feedback=error_feedback
    )

    def make_plan(members: tuple[int, ...]) -> tuple[ReductionPlan, tuple[str, ...]]:
        plan = plan_among(chance, world.plan.num_sites, members)
        return plan, (codec,) * max(1, len(plan.trees))

    carried = LosingExchanges(world, chance, chance.choice((1, 1, 1, 2, 3)), make_plan)
    carried.run()
    assert not carried.failures, (seed, carried.failures[0], world)
    assert carried.is_done, f"{seed=}: nobody can do anything any more: {world}"
    for gateway in carried._gateways:
        exchange = carried.exchanges[gateway]
        assert exchange.held_bytes == 0, (seed, gateway)
        assert exchange._admission.credit.num_bytes == 0, (seed, gateway)
        assert exchange._admission.encoding_bytes == 0, (seed, gateway)
    return carried


def check_means(carried: LosingExchanges, seed: int, tolerance: float) -> None:
    """See that survivors have the same bits, and that each chunk is a mean of some sites."""
    found = [carried.results(site) for site in carried.members]
    for each in found[1:]:
        assert each == found[0], f"{seed=}"
    sites = range(carried.world.plan.num_sites)
    groups = [
        [*carried.members, *more]
        for count in range(len(carried.lost) + 1)
        for more in itertools.combinations(sorted(carried.lost), count)
    ]
    buckets = [each for buckets in carried.world.rounds for each in buckets]
    for index, (_, numel, exact) in enumerate(buckets):
        parts = {site: carried.contribution(site, index) for site in sites}
        result = np.frombuffer(found[0][index], dtype=np.float32)
        means = [
            np.stack([parts[site] for site in group]).sum(axis=0, dtype=np.float64)
            / sum(1.0 + site for site in group)
            for group in groups
        ]
        cut = carried.grid_of(numel)
        for chunk in range(cut.num_chunks):
            start, count = cut.span(chunk)
            part = slice(start, start + count)
            off = min(float(np.abs(mean[part] - result[part]).max()) for mean in means)
            assert off <= (1e-6 if exact else tolerance), (seed, index, chunk, off)


@pytest.mark.no_cover
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_fp32_is_the_mean_of_those_who_took_part(seed: int) -> None:
    check_means(lost(seed, "fp32", error_feedback=True), seed, 1e-6)


@pytest.mark.no_cover
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("error_feedback", [True, False])
def test_int8_is_nearly_that(seed: int, error_feedback: bool) -> None:
    check_means(lost(seed, "int8", error_feedback), seed, 0.15)


@pytest.mark.no_cover
def test_chunks_are_handed_over_in_these_worlds() -> None:
    assert sum(lost(seed, "int8", True).num_handed_over for seed in range(9, 14)) > 20
