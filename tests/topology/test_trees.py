"""Plans as the gateways use them.

Shares, turns, neighbours; and the shapes of trees that have names.
"""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.pairs import pairs_of
from isthmus.topology.trees.shapes import groups_by_delay, hierarchy, ring_paths, rooted, way_up
from isthmus.topology.trees.tree_choice import plan_reduction
from isthmus.topology.trees.tree_times import carried
from tests.fakes.tree_worlds import (
    LINE,
    SQUARE,
    TRIANGLE,
    both_ways,
    check_plan,
    job,
    random_world,
    world,
)


def refusals(wanted: Job, topology: Topology) -> list[str]:
    """Return `path: message` of each problem."""
    with pytest.raises(ConfigError) as raised:
        plan_reduction(wanted, topology)
    return [f"{problem.path}: {problem.message}" for problem in raised.value.problems]


def test_a_star_is_the_one_whose_slowest_link_is_fastest() -> None:
    plan = plan_reduction(job("star"), TRIANGLE)
    assert plan.trees == (Tree(1, {0: 1, 2: 1}),)
    assert plan.why == "star at s1: its slowest link is the fastest of all stars'"
    assert not plan.is_gather
    assert plan.neighbours(1) == (0, 2)
    assert plan.neighbours(0) == (1,)
    assert plan.trees[0].children(1) == (0, 2)
    assert plan.trees[0].children(0) == ()


def test_equal_stars_are_told_apart_by_rtt_then_by_order() -> None:
    near_two = both_ways((0, 1, 5.0, 0.03), (1, 2, 5.0, 0.01), (0, 2, 5.0, 0.02))
    assert plan_reduction(job("star"), world(3, near_two)).trees[0].root == 2
    even = both_ways((0, 1, 5.0, 0.01), (1, 2, 5.0, 0.01), (0, 2, 5.0, 0.01))
    assert plan_reduction(job("star"), world(3, even)).trees[0].root == 0


def test_a_slow_direction_makes_the_whole_star_slow() -> None:
    links = dict.fromkeys([(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)], 50.0)
    links[0, 1] = 1.0
    topology = world(3, [(*pair, rate, 0.01) for pair, rate in links.items()])
    assert plan_reduction(job("star"), topology).trees[0].root == 2


def test_gather_has_everyone_as_a_neighbour() -> None:
    plan = plan_reduction(job("gather"), TRIANGLE)
    assert [plan.neighbours(site) for site in range(3)] == [(1, 2), (0, 2), (0, 1)]


@pytest.mark.parametrize("tree", ["auto", "star", "gather", "ring", "hierarchy"])
def test_one_site_exchanges_nothing(tree: str) -> None:
    assert plan_reduction(job(tree), world(1, [])).neighbours(0) == ()


def test_a_ring_is_a_path_for_each_site_with_that_site_in_its_middle() -> None:
    plan = plan_reduction(job("ring"), SQUARE)
    assert plan.trees == (
        Tree(0, {1: 0, 2: 1, 3: 0}),
        Tree(1, {2: 1, 3: 2, 0: 1}),
        Tree(2, {3: 2, 0: 3, 1: 2}),
        Tree(3, {0: 3, 1: 0, 2: 3}),
    )
    assert plan.neighbours(0) == (1, 3)
    assert "s0 - s1 - s2 - s3 - s0" in plan.why


@pytest.mark.parametrize("size", range(2, 9))
def test_every_link_of_a_ring_carries_its_fair_share(size: int) -> None:
    trees = ring_paths(range(size))
    assert [tree.root for tree in trees] == list(range(size))
    shares = carried(ReductionPlan(size, trees, ""))
    around = {(site, (site + 1) % size) for site in range(size)}
    assert set(shares) == around | {hop[::-1] for hop in around}
    if size > 2:
        assert [*shares.values()] == pytest.approx([(size - 1) / size] * len(shares))
    for tree in trees:
        longest = max(len(way_up(tree, site)) for site in range(size))
        assert longest == size // 2, "no root is farther from the ends than it must be"


def test_groups_are_sites_much_nearer_to_each_other_than_to_the_rest() -> None:
    near = [(0, 2, 9.0, 0.002), (1, 3, 9.0, 0.003)]
    far = [(0, 1, 9.0, 0.08), (0, 3, 9.0, 0.09), (1, 2, 9.0, 0.07), (2, 3, 9.0, 0.08)]
    two = world(4, both_ways(*near, *far))
    assert groups_by_delay(pairs_of(two)) == ((0, 2), (1, 3))
    even = world(3, both_ways((0, 1, 9.0, 0.05), (1, 2, 9.0, 0.06), (0, 2, 9.0, 0.07)))
    assert groups_by_delay(pairs_of(even)) == ((0, 1, 2),)
    assert groups_by_delay(pairs_of(TRIANGLE)) == ((0,), (1, 2))
    assert groups_by_delay(pairs_of(world(2, both_ways((0, 1, 1.0, 0.1))))) == ((0, 1),)
    same_place = world(3, both_ways((0, 1, 9.0, 0.0), (1, 2, 9.0, 0.01), (0, 2, 9.0, 0.01)))
    assert groups_by_delay(pairs_of(same_place)) == ((0, 1), (2,))


def test_a_hierarchy_has_a_head_in_each_group_with_the_best_links() -> None:
    inside = [(0, 1, 90.0, 0.001), (2, 3, 90.0, 0.001)]
    between = [(0, 2, 5.0, 0.08), (0, 3, 9.0, 0.08), (1, 2, 5.0, 0.08), (1, 3, 5.0, 0.08)]
    topology = world(4, both_ways(*inside, *between))
    plan = plan_reduction(job("hierarchy"), topology)
    assert plan.trees == (Tree(0, {1: 0, 2: 3, 3: 0}),)
    assert plan.why == "two levels, [s0, s1], [s2, s3]: within each to its head, then to s0"
    other = plan_reduction(job("hierarchy", groups=(("s0", "s3"), ("s2", "s1"))), topology)
    assert other.trees == (Tree(0, {1: 0, 2: 1, 3: 0}),)
    # A group whose members do not reach each other has no head.
    assert hierarchy(pairs_of(LINE), ((0, 2), (1, 3))) is None
    assert refusals(job("hierarchy", groups=(("s0", "s2"), ("s1", "s3"))), LINE) == [
        "reduction.groups: no members with links to their groups reach each other, "
        "of the groups [s0, s2], [s1, s3]"
    ]


def test_a_tree_hangs_from_the_site_that_is_nearest_to_the_farthest() -> None:
    line = ((0, 1), (1, 2), (2, 3))
    assert rooted(pairs_of(LINE), line, 7) == Tree(1, {0: 1, 2: 1, 3: 2}, 7)
    far_end = world(4, both_ways((0, 1, 20.0, 0.01), (1, 2, 20.0, 0.01), (2, 3, 20.0, 0.05)))
    assert rooted(pairs_of(far_end), line, 1).root == 2


def test_what_the_links_do_not_allow_is_refused() -> None:
    assert refusals(job("star"), LINE) == [
        "reduction.tree: no site has links to all others: a star has no centre"
    ]
    assert refusals(job("gather"), LINE) == [
        "reduction.tree: gather needs links both ways between all sites; 's0' lacks them with s2, s3"
    ]
    assert refusals(job("star", "s0"), LINE) == [
        "reduction.hub: 's0' has no links both ways with s2, s3"
    ]
    assert refusals(job("star", "s9"), LINE) == ["reduction.hub: unknown site 's9'"]
    assert refusals(job("ring"), LINE) == [
        "reduction.tree: a ring goes round the sites in the topology's order; "
        "there are no links both ways between 's3' and 's0'"
    ]
    assert "not connected" in refusals(job(), world(3, both_ways((0, 1, 1.0, 0.01))))[0]


def test_a_link_back_is_needed_for_a_star() -> None:
    one_way = [*both_ways((0, 1, 5.0, 0.01), (1, 2, 5.0, 0.01)), (0, 2, 99.0, 0.01)]
    assert plan_reduction(job("star"), world(3, one_way)).trees[0].root == 1
    assert refusals(job("star", "s0"), world(3, one_way)) == [
        "reduction.hub: 's0' has no links both ways with s2"
    ]


def weighted(weights: Sequence[int]) -> ReductionPlan:
    trees = tuple(Tree(index, {}, weight) for index, weight in enumerate(weights))
    return ReductionPlan(len(trees), trees, "")


def test_chunks_are_shared_by_weight_and_evenly_spread() -> None:
    plan = weighted([3, 1])
    assert [plan.tree_index(turn) for turn in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]
    assert weighted([30, 10]).turns == plan.turns
    assert weighted([5, 5, 5]).turns == (0, 1, 2)
    assert weighted([7]).turns == (0,)
    assert ReductionPlan(3, (), "").tree_index(5) == 0


@pytest.mark.slow
@given(st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_no_tree_is_ever_a_whole_chunk_ahead_of_its_share_or_behind(weights: list[int]) -> None:
    plan = weighted(weights)
    given_chunks = [0] * len(weights)
    for turn in range(len(plan.turns)):
        given_chunks[plan.tree_index(turn)] += 1
        for index, weight in enumerate(weights):
            assert abs(given_chunks[index] * sum(weights) - weight * (turn + 1)) < sum(weights)
    shares = Counter(plan.turns)
    assert all(
        shares[index] * sum(weights) == weight * len(plan.turns)
        for index, weight in enumerate(weights)
    )
    assert plan.tree_index(len(plan.turns) + 1) == plan.tree_index(1)


def test_a_turn_costs_the_same_whatever_its_number() -> None:
    plan = weighted([100, 99, 98, 1])
    assert len(plan.turns) == 298
    assert plan.tree_index(10**15) == plan.turns[10**15 % 298]


@pytest.mark.parametrize("seed", range(20))
def test_every_plan_reaches_every_site_over_links_that_exist(seed: int) -> None:
    chance = random.Random(seed)
    topology = random_world(chance, chance.randint(2, 8))
    for tree in ("auto", "star", "gather", "ring", "hierarchy"):
        try:
            plan = plan_reduction(job(tree), topology)
        except ConfigError:
            assert tree != "auto", f"{seed=}"
            continue
        assert plan.why
        check_plan(plan, topology, f"{tree} {seed=}")


def test_a_star_by_hub_and_its_weight() -> None:
    assert star(3, 1, 4) == Tree(1, {0: 1, 2: 1}, 4)
    assert plan_reduction(job("auto", "s2"), TRIANGLE).trees == (star(3, 2),)
