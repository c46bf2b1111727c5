"""No chunk waits for ever: real executors of random worlds, in which everybody may be late."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from isthmus.protos.frame import HEADER_BYTES
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree
from tests.fakes.carried_exchanges import CarriedExchanges, World

CODECS = ("fp32", "fp32", "bf16", "int8", "int4")


def drawn_tree(chance: random.Random, num_sites: int) -> Tree:
    """Return a tree of any form: some are stars, some are paths, some have another way down."""
    root = chance.randrange(num_sites)
    parent = drawn_way(chance, num_sites, root)
    down = drawn_way(chance, num_sites, root) if chance.random() < 0.5 else None
    return Tree(root, parent, chance.randint(1, 3), down)


def drawn_way(chance: random.Random, num_sites: int, root: int) -> dict[int, int]:
    others = [site for site in range(num_sites) if site != root]
    order = [root, *chance.sample(others, num_sites - 1)]
    reach = chance.choice((1, 2, num_sites))
    return {
        order[at]: order[chance.randrange(max(0, at - reach), at)] for at in range(1, num_sites)
    }


def drawn_world(chance: random.Random) -> World:
    num_sites = chance.randint(2, 5)
    num_trees = chance.choice((0, 1, 2, 4, 6))
    trees = tuple(drawn_tree(chance, num_sites) for _ in range(num_trees))
    chunk_bytes = chance.choice((256, 512, 1024))
    frame_bytes = chunk_bytes + HEADER_BYTES
    num_buckets = chance.randint(1, 12)
    longest = chance.choice((1, 4, 12)) * chunk_bytes // 4
    world = World(
        plan=ReductionPlan(num_sites, trees, ""),
        codecs=tuple(chance.choice(CODECS) for _ in range(max(1, num_trees))),
        gateways_per_site=tuple(chance.randint(1, 2) for _ in range(num_sites)),
        ranks_per_gateway=tuple(chance.randint(1, 2) for _ in range(num_sites)),
        chunk_bytes=chunk_bytes,
        held_bytes=chance.choice((0, 1 << 14, 1 << 20)),
        window_bytes=chance.choice((1, 2, 4, 12)) * frame_bytes,
        ahead_bytes=chance.choice((1, 8, 24)) * frame_bytes,
        num_streams=chance.choice((1, 2, 4)),
        num_slots=chance.choice((1, 2, num_buckets)),
        rounds=tuple(
            tuple(
                (first + bucket, chance.randint(0, longest), chance.random() < 0.2)
                for bucket in range(num_buckets)
            )
            for first in [chance.choice((0, 1 << 16)) for _ in range(chance.randint(1, 3))]
        ),
        breaks=chance.choice((0.0, 0.05)),
    )
    if chance.random() < 0.5:
        return world
    gathered_bytes = chance.choice((4, 512, 2048))
    return replace(world, plan=replace(world.plan, gathered_bytes=gathered_bytes), is_mesh=True)


def check(seed: int) -> CarriedExchanges:
    """Let a world run to its end, and see that it got there."""
    chance = random.Random(seed)
    world = drawn_world(chance)
    carried = CarriedExchanges(world, chance)
    carried.run()
    assert not carried.failures, (seed, carried.failures[0], world)
    assert carried.is_done, f"{seed=}: nobody can do anything any more: {world}"
    for site in range(1, world.plan.num_sites):
        assert carried.results(site) == carried.results(0), f"{seed=}"
    for gateway, exchange in carried.exchanges.items():
        assert exchange.held_bytes == 0, (seed, gateway)
        assert exchange._admission.credit.num_bytes == 0, (seed, gateway)
    return carried


@pytest.mark.no_cover
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_every_bucket_comes_back_whoever_is_late(seed: int) -> None:
    check(seed)
