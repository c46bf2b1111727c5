"""Plans where links are faster in one direction: against linear programs over all ways."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from scipy.optimize import linprog  # type: ignore[import-untyped]

from isthmus.topology.model.buckets import gradient_bytes
from isthmus.topology.planner.reductions import menu
from isthmus.topology.planner.search import Search
from isthmus.topology.spec.job import Exchange, Job, LinkCodec, Model, Trainer
from isthmus.topology.spec.plan_wishes import PlanWishes
from isthmus.topology.spec.reduction_plan import Tree
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.packing import ENOUGH
from isthmus.topology.trees.pairs import ASYMMETRIC, Hop, Pairs, pairs_of
from isthmus.topology.trees.tree_choice import plan_reduction
from isthmus.topology.trees.tree_times import seconds_per_byte
from isthmus.topology.trees.two_way_packing import (
    SITES_MAX,
    _cheapest_way,
    pack_two_ways,
    uses_of,
    widest_two_way_tree,
)
from tests.fakes.plannable import a_random_world
from tests.fakes.tree_worlds import both_ways, check_plan, job, world

SCRIPT = Job(
    name="j",
    topology="t.yaml",
    entrypoint="train.py",
    exchange=Exchange(codec="fp32", chunk_bytes=64 << 10),
)
"""A job whose model is not known, and whose chunks are many: bandwidth is what counts."""
LARGE = Job(
    name="j",
    topology="t.yaml",
    plan=PlanWishes(sites="all"),
    exchange=Exchange(codec="fp32"),
    trainer=Trainer(
        compute="modelled",
        global_batch=16,
        model=Model(layers=8, heads=8, width=512, context=64),
    ),
)
"""A job of 100 MB of gradients, which are exchanged by all sites."""


def asymmetric_world(seed: int) -> Topology:
    """Return 3 or 4 sites that compute next to nothing.

    Each direction of each link has a rate of its own, 8 Mbit/s to 2.5 Gbit/s.
    """
    chance = random.Random(seed)
    ways = itertools.permutations(range(chance.choice((3, 4))), 2)
    links = [(*way, 10 ** chance.uniform(6, 8.5), chance.uniform(0.005, 0.08)) for way in ways]
    topology = world(1 + max(one for one, *_ in links), links)
    sites = tuple(
        dataclasses.replace(
            site,
            accelerator=dataclasses.replace(
                site.accelerator, peak_flops_per_s={"bf16": 1e16}, memory_bytes=64 << 30
            ),
        )
        for site in topology.sites
    )
    return dataclasses.replace(topology, sites=sites, emulate=True, emulator="relay")


def every_way(num_sites: int, root: int) -> list[dict[int, int]]:
    """Return all trees with that root, each site with the next one on the way there."""
    others = [site for site in range(num_sites) if site != root]
    found = []
    for above in itertools.product(range(num_sites), repeat=num_sites - 1):
        way = dict(zip(others, above, strict=True))
        at = list(others)
        for _ in others:
            at = [way.get(site, root) for site in at]
        if set(at) == {root}:
            found.append(way)
    return found


def optimum_bytes_per_s(rates: dict[Hop, float], num_sites: int) -> float:
    """Return the most that all pairs of ways up and down carry together, each pair of one root."""
    hops = sorted(rates)
    uses = []
    for root in range(num_sites):
        for up, down in itertools.product(every_way(num_sites, root), repeat=2):
            crossed = [*up.items(), *((giver, site) for site, giver in down.items())]
            uses.append([crossed.count(hop) for hop in hops])
    limits = np.array([rates[hop] for hop in hops]) / max(rates.values())
    found = linprog(-np.ones(len(uses)), A_ub=np.array(uses, dtype=float).T, b_ub=limits)
    assert found.status == 0
    return float(-found.fun * max(rates.values()))


def optimum_of(topology: Topology) -> float:
    rates = {
        (int(link.source[1:]), int(link.target[1:])): link.bytes_per_s for link in topology.links
    }
    return optimum_bytes_per_s(rates, len(topology.sites))


@pytest.mark.parametrize("seed", range(200))
def test_automatic_trees_are_near_the_optimum_over_all_ways_up_and_down(seed: int) -> None:
    topology = asymmetric_world(seed)
    pairs, best = pairs_of(topology), optimum_of(topology)
    packing = pack_two_ways(pairs)
    assert packing is not None
    assert ENOUGH * best <= packing.bytes_per_s * (1 + 1e-5), f"{seed=}"
    assert packing.bytes_per_s <= best * (1 + 1e-5), f"{seed=}"
    for hop, rate in pairs.one_way.items():
        carried = sum(part * uses_of(tree, pairs).get(hop, 0) for tree, part in packing.trees)
        assert carried <= rate * (1 + 1e-6), f"{seed=}"
    plan = plan_reduction(SCRIPT, topology)
    check_plan(plan, topology, f"{seed=}")
    assert max(seconds_per_byte(plan, topology).values()) * best <= 1.05, f"{seed=} {plan.why}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_planned_steps_are_near_the_optimum_over_all_ways_up_and_down(seed: int) -> None:
    topology = asymmetric_world(seed)
    choice = Search(LARGE, topology).best()
    assert choice is not None
    least_s = gradient_bytes(LARGE) / optimum_of(topology)
    longest_s = max(link.rtt_s for link in topology.links)
    assert choice.step_s <= 1.1 * least_s + 2 * longest_s, f"{seed=}"


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_way_is_the_cheapest_of_all(seed: int) -> None:
    chance = random.Random(seed)
    num_sites = chance.randint(2, 5)
    prices = {
        hop: chance.choice((0.0, 1.0, chance.random()))
        for hop in itertools.permutations(range(num_sites), 2)
        if chance.random() < 0.7
    }
    for root in range(num_sites):
        costs = [
            sum(prices[giver, site] for site, giver in way.items())
            for way in every_way(num_sites, root)
            if all((giver, site) in prices for site, giver in way.items())
        ]
        found = _cheapest_way(num_sites, root, prices)
        if found is None:
            assert not costs, f"{seed=}"
            continue
        assert found in every_way(num_sites, root), f"{seed=}"
        cost = sum(prices[giver, site] for site, giver in found.items())
        assert cost == pytest.approx(min(costs)), f"{seed=}"


ROUND = world(
    3,
    [
        *((one, other, 1e8, 0.01) for one, other in ((0, 1), (1, 2), (2, 0))),
        *((other, one, 1e6, 0.01) for one, other in ((0, 1), (1, 2), (2, 0))),
    ],
)
"""Three sites round which bytes go fast in one direction only."""


def test_round_a_circle_sums_and_results_go_on_in_the_same_direction() -> None:
    plan = plan_reduction(SCRIPT, ROUND)
    # A chunk takes two hops up and two down, and there are three fast links.
    assert max(seconds_per_byte(plan, ROUND).values()) == pytest.approx(4 / 3e8, rel=0.03)
    widest = widest_two_way_tree(pairs_of(ROUND))
    assert widest == Tree(0, {1: 2, 2: 0}, down={1: 0, 2: 1})


def test_where_one_tree_takes_every_fast_link_there_is_no_other() -> None:
    fast = [(1, 0), (2, 0), (0, 1), (1, 2)]
    links = [
        (*hop, 1e8 if hop in fast else 1e4, 0.01) for hop in itertools.permutations(range(3), 2)
    ]
    plan = plan_reduction(SCRIPT, world(3, links))
    assert plan.trees == (Tree(0, {1: 0, 2: 0}, down={1: 0, 2: 1}),)
    assert plan.why == "tree at s0, back another way; s0-s1, s0-s2, s1-s2 bind"


@pytest.mark.parametrize("seed", range(10))
def test_links_that_are_alike_both_ways_have_no_other_way_down(seed: int) -> None:
    chance = random.Random(seed)
    topology = a_random_world(chance, chance.choice((3, 4, 5)))
    links = tuple(
        dataclasses.replace(link, bytes_per_s=link.bytes_per_s * chance.uniform(1, ASYMMETRIC))
        for link in topology.links
    )
    measured = dataclasses.replace(topology, links=links)
    assert not pairs_of(measured).one_way
    assert all(tree.down is None for each in menu(job(), measured) for tree in each.plan.trees)


def test_links_codecs_count_on_both_ways() -> None:
    exchange = Exchange(codec="fp32", codecs=(LinkCodec(between=("s0", "s1"), codec="bf16"),))
    pairs = pairs_of(ROUND, exchange)
    tree = widest_two_way_tree(pairs)
    assert uses_of(tree, pairs) == {(1, 2): 2, (2, 0): 1, (0, 1): 1}
    packing = pack_two_ways(pairs)
    assert packing is not None
    assert packing.bytes_per_s > 0.7e8


def test_of_many_sites_one_tree_is_all_that_has_another_way_down() -> None:
    chance = random.Random(1)
    hops = list(itertools.permutations(range(SITES_MAX + 1), 2))
    topology = world(SITES_MAX + 1, [(*hop, 10 ** chance.uniform(6, 8), 0.01) for hop in hops])
    pairs: Pairs = pairs_of(topology)
    assert pack_two_ways(pairs) is None
    plan = plan_reduction(SCRIPT, topology)
    check_plan(plan, topology)
    slowest = min(
        pairs.one_way[hop] / use for hop, use in uses_of(widest_two_way_tree(pairs), pairs).items()
    )
    assert max(seconds_per_byte(plan, topology).values()) <= 1.02 / slowest


def test_where_only_one_tree_reaches_all_it_has_no_other_way_down() -> None:
    line = world(3, [*both_ways((0, 1, 1e7, 0.01)), (1, 2, 1e8, 0.01), (2, 1, 1e6, 0.01)])
    assert plan_reduction(SCRIPT, line).trees == (Tree(1, {0: 1, 2: 1}),)
