"""How good the automatic trees are: against linear programs over every spanning tree, by scipy."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from scipy.optimize import linprog  # type: ignore[import-untyped]

from isthmus.topology.model.step_model import exchange_time_s
from isthmus.topology.spec.job import Exchange, Job, Reduction
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.packing import (
    EDGES_MAX,
    ENOUGH,
    PERIOD_MAX,
    pack_stars,
    pack_trees,
    small_weights,
)
from isthmus.topology.trees.pairs import Edge, Pairs, pairs_of
from isthmus.topology.trees.tree_choice import plan_reduction
from isthmus.topology.trees.tree_times import seconds_per_byte
from tests.fakes.tree_worlds import both_ways, check_plan, random_world, world

GIGABIT = 125e6


def all_spanning_trees(pairs: Pairs) -> list[tuple[Edge, ...]]:
    """Return every one, by trying all sets of edges."""
    found = []
    for edges in itertools.combinations(sorted(pairs.bytes_per_s), pairs.num_sites - 1):
        label = list(range(pairs.num_sites))
        for one, other in edges:
            label = [label[one] if each == label[other] else each for each in label]
        if len(set(label)) == 1:
            found.append(edges)
    return found


def optimum_bytes_per_s(pairs: Pairs, trees: list[tuple[Edge, ...]]) -> float:
    """Return the most that these trees carry together over all links, both ways each.

    `uses` has shape (edges, trees): a tree's chunks have as many bytes as its smallest edge's codec
    makes.
    """
    edges = sorted(pairs.bytes_per_s)
    uses = np.array(
        [[(edge in tree) * pairs.load(tree) for tree in trees] for edge in edges], dtype=float
    )
    limits = np.array([pairs.bytes_per_s[edge] for edge in edges], dtype=float)
    # Scaled, for HiGHS' tolerances are absolute.
    scale = limits.max()
    found = linprog(-np.ones(len(trees)), A_ub=uses, b_ub=limits / scale, method="highs")
    assert found.status == 0
    return float(-found.fun * scale)


def all_stars(pairs: Pairs) -> list[tuple[Edge, ...]]:
    sites = range(pairs.num_sites)
    return [
        tuple(sorted((min(hub, site), max(hub, site)) for site in sites if site != hub))
        for hub in sites
        if not pairs.missing(hub)
    ]


def random_pairs(seed: int) -> Pairs:
    """Return sites with rates of very different sizes.

    Every other seed, with codecs of their own.
    """
    chance = random.Random(seed)
    topology = random_world(chance, chance.randint(2, 5))
    rates = {pair: round(10 ** chance.uniform(5, 10)) for pair in pairs_of(topology).bytes_per_s}
    loads = {pair: chance.choice((256, 128, 65, 33)) for pair in rates} if seed % 2 else {}
    return Pairs(pairs_of(topology).names, rates, dict.fromkeys(rates, 1_000_000), loads)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_the_packing_is_the_linear_program_s_optimum(seed: int) -> None:
    pairs = random_pairs(seed)
    packing = pack_trees(pairs)
    best = optimum_bytes_per_s(pairs, all_spanning_trees(pairs))
    assert ENOUGH * best <= packing.bytes_per_s * (1 + 1e-6), f"{seed=}"
    assert packing.bytes_per_s <= best * (1 + 1e-6), f"{seed=}"
    assert sum(part for _, part in packing.trees) == pytest.approx(packing.bytes_per_s, rel=1e-5)
    for edge, rate in pairs.bytes_per_s.items():
        carried = [part * pairs.load(edges) for edges, part in packing.trees if edge in edges]
        assert sum(carried) <= rate * (1 + 1e-6), f"{seed=}"
    stars = all_stars(pairs)
    found = pack_stars(pairs)
    assert (found is None) == (not stars)
    if found is not None:
        best = optimum_bytes_per_s(pairs, stars)
        assert ENOUGH * best <= found.bytes_per_s <= best * (1 + 1e-6), f"{seed=}"


def test_prices_prove_the_optimum_where_trees_are_too_many_to_list() -> None:
    # Ten sites with equal links: 45 links, of which each tree uses 9 (and of stars, all use all).
    equal = dict.fromkeys(itertools.combinations(range(10), 2), 1000)
    packing = pack_trees(Pairs(tuple("abcdefghij"), equal, equal))
    assert packing.bytes_per_s == pytest.approx(5000)


def test_of_very_many_links_each_site_keeps_several() -> None:
    rates = {
        (one, other): 10 if other == 19 else 1000
        for one, other in itertools.combinations(range(20), 2)
    }
    packing = pack_trees(Pairs(tuple(f"s{site}" for site in range(20)), rates, rates))
    used = {edge for edges, _ in packing.trees for edge in edges}
    assert len(used) <= EDGES_MAX
    assert packing.bytes_per_s == pytest.approx(10 * 19, rel=1e-2) or packing.bytes_per_s > 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 60))
def test_whole_weights_are_small_and_nearly_as_good(seed: int) -> None:
    pairs = random_pairs(seed)
    packing = pack_trees(pairs)
    [weights] = small_weights(packing, pairs)
    assert sum(weights) <= PERIOD_MAX
    loads = dict.fromkeys(pairs.bytes_per_s, 0)
    for (edges, _), weight in zip(packing.trees, weights, strict=True):
        for edge in edges:
            loads[edge] += weight * pairs.load(edges)
    busiest = max(load / pairs.bytes_per_s[edge] for edge, load in loads.items())
    assert busiest / sum(weights) * packing.bytes_per_s <= 1.03, f"{seed=}"


def script(tree: str = "auto") -> Job:
    """Return a job whose model is not known, and whose chunks are many.

    Bandwidth is what counts.
    """
    return Job(
        name="j",
        topology="t.yaml",
        entrypoint="train.py",
        exchange=Exchange(codec="fp32", chunk_bytes=64 << 10),
        reduction=Reduction(tree=tree),
    )


def one_at_a_tenth(num_sites: int) -> Topology:
    last = num_sites - 1
    return world(
        num_sites,
        both_ways(
            *(
                (one, other, GIGABIT / 10 if other == last else GIGABIT, 0.04)
                for one, other in itertools.combinations(range(num_sites), 2)
            )
        ),
    )


def test_four_sites_with_one_at_a_tenth_are_near_the_optimum_and_far_from_the_ring() -> None:
    topology = one_at_a_tenth(4)
    pairs = pairs_of(topology)
    best_s = 1 / optimum_bytes_per_s(pairs, all_spanning_trees(pairs))
    plan = plan_reduction(script(), topology)
    busiest_s = max(seconds_per_byte(plan, topology).values())
    assert busiest_s <= 1.05 * best_s
    ring_s = max(seconds_per_byte(plan_reduction(script("ring"), topology), topology).values())
    assert ring_s >= 2 * busiest_s
    # And with all delays, on 256 MiB.
    auto_s = exchange_time_s(script(), topology, 256 << 20)
    assert exchange_time_s(script("ring"), topology, 256 << 20) >= 2 * auto_s
    assert plan.why == (
        "3 trees with roots at s0 33%, s1 33%, s2 33%: 3 times the bandwidth of the best single tree; "
        "s0-s3, s1-s3, s2-s3 bind"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
def test_automatic_is_near_the_optimum_over_all_spanning_trees(seed: int) -> None:
    chance = random.Random(seed)
    rates = [chance.choice([0.1, 0.3, 1.0, 2.0]) * 1e6 for _ in range(6)]
    links = [
        (*pair, rate, 0.001)
        for pair, rate in zip(itertools.combinations(range(4), 2), rates, strict=True)
    ]
    topology = world(4, both_ways(*links))
    plan = plan_reduction(script(), topology)
    check_plan(plan, topology, f"{seed=}")
    pairs = pairs_of(topology)
    best_s = 1 / optimum_bytes_per_s(pairs, all_spanning_trees(pairs))
    assert max(seconds_per_byte(plan, topology).values()) <= 1.05 * best_s, f"{seed=} {plan.why}"


def test_automatic_gathers_where_delay_is_all() -> None:
    far = world(3, both_ways((0, 1, 1e9, 0.1), (1, 2, 1e9, 0.1), (0, 2, 1e9, 0.1)))
    small = Job(name="j", topology="t.yaml", exchange=Exchange(codec="int8"))
    plan = plan_reduction(small, far)
    assert plan.is_gather
    assert plan.why == (
        "gather, one way instead of two, for so few chunks; s0-s1, s0-s2, s1-s2 bind"
    )
    assert not plan_reduction(script(), world(3, both_ways(*slower(far, 100)))).is_gather


def slower(topology: Topology, times: int) -> list[tuple[int, int, float, float]]:
    return [
        (int(link.source[1:]), int(link.target[1:]), link.bytes_per_s / times, link.rtt_s)
        for link in topology.links
        if link.source < link.target
    ]


def test_two_sites_gather_unless_the_job_names_a_hub() -> None:
    pair = world(2, both_ways((0, 1, 1.0, 0.01)))
    plan = plan_reduction(script(), pair)
    assert plan.is_gather
    assert plan.neighbours(0) == (1,)


def test_where_one_tree_is_all_there_is_it_hangs_from_its_middle() -> None:
    line = world(4, both_ways((0, 1, 20.0, 0.01), (1, 2, 20.0, 0.01), (2, 3, 20.0, 0.01)))
    plan = plan_reduction(script(), line)
    assert [(tree.root, tree.parent) for tree in plan.trees] == [(1, {0: 1, 2: 1, 3: 2})]
    assert plan.why == "tree at s1; s0-s1, s1-s2, s2-s3 bind"


def test_trees_go_round_a_link_that_is_missing_or_narrow() -> None:
    # 0 and 2 have no link: their sums meet at 1 and at 3, and both ways are used.
    relay = world(4, both_ways(*((one, other, GIGABIT, 0.01) for one, other in _around(4))))
    plan = plan_reduction(script(), relay)
    check_plan(plan, relay)
    assert max(seconds_per_byte(plan, relay).values()) == pytest.approx(0.75 / GIGABIT)
    narrow = both_ways((0, 1, 9e6, 0.01), (1, 2, 1e3, 0.01), (2, 3, 9e6, 0.01), (0, 3, 9e6, 0.01))
    (tree,) = plan_reduction(script(), world(4, narrow)).trees
    assert {frozenset(edge) for edge in tree.parent.items()} == {
        frozenset({0, 1}),
        frozenset({2, 3}),
        frozenset({0, 3}),
    }


def test_a_link_so_slow_that_one_chunk_takes_too_long_is_left_alone() -> None:
    around = [(one, other, GIGABIT, 0.01) for one, other in _around(4)]
    across = [(0, 2, GIGABIT / 50, 0.01), (1, 3, GIGABIT / 50, 0.01)]
    topology = world(4, both_ways(*around, *across))
    large = dataclasses.replace(script(), exchange=Exchange(codec="fp32", chunk_bytes=4 << 20))
    plan = plan_reduction(large, topology)
    assert [plan.neighbours(site) for site in range(4)] == [(1, 3), (0, 2), (1, 3), (0, 2)]
    assert max(seconds_per_byte(plan, topology).values()) == pytest.approx(0.75 / GIGABIT, rel=0.03)


def _around(size: int) -> list[tuple[int, int]]:
    return [(site, (site + 1) % size) for site in range(size)]


def test_equal_sites_are_equally_roots() -> None:
    even = world(
        4, both_ways(*((*pair, GIGABIT, 0.05) for pair in itertools.combinations(range(4), 2)))
    )
    plan = plan_reduction(script(), even)
    assert [(tree.root, tree.weight) for tree in plan.trees] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert max(seconds_per_byte(plan, even).values()) == pytest.approx(0.5 / GIGABIT)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_in_which_links_are_written_does_not_matter(seed: int) -> None:
    chance = random.Random(seed)
    topology = random_world(chance, 6)
    links = [
        (int(link.source[1:]), int(link.target[1:]), link.bytes_per_s, link.rtt_s)
        for link in topology.links
    ]
    chance.shuffle(links)
    assert plan_reduction(script(), world(6, links)) == plan_reduction(script(), topology)
