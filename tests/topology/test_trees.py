"""Reduction plans: stars, gather, the widest tree, shares, and links that are missing."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.errors import ConfigError
from topology.job import Job, Reduction
from topology.trees import ReductionPlan, Tree, plan_reduction, star
from topology.world import Accelerator, Endpoint, Failure, Link, Site, Topology

CPU = Accelerator(name="cpu", peak_flops_per_s={"fp32": 1e9}, memory_bytes=1 << 30, mfu=0.3)


def world(num_sites: int, links: Iterable[tuple[int, int, float, float]]) -> Topology:
    """Return a topology of sites s0, s1, ... with directed links (source, target, rate, RTT)."""
    return Topology(
        name="t",
        sites=tuple(
            Site(
                name=f"s{index}",
                index=index,
                nodes=1,
                accelerators_per_node=1,
                accelerator=CPU,
                address="127.0.0.1",
            )
            for index in range(num_sites)
        ),
        links=tuple(
            Link(
                source=f"s{one}",
                target=f"s{other}",
                bytes_per_s=rate,
                rtt_s=rtt_s,
                rtt_origin="rtt",
            )
            for one, other, rate, rtt_s in links
        ),
        failure=Failure(detect_within_s=15, min_sites=1, start_within_s=120),
        coordinator=Endpoint(host="127.0.0.1", port=0),
    )


def both_ways(*links: tuple[int, int, float, float]) -> list[tuple[int, int, float, float]]:
    return [*links, *((other, one, rate, rtt) for one, other, rate, rtt in links)]


def job(tree: str = "auto", hub: str | None = None) -> Job:
    return Job(name="j", topology="t.yaml", reduction=Reduction(tree=tree, hub=hub))


TRIANGLE = world(3, both_ways((0, 1, 20.0, 0.06), (1, 2, 50.0, 0.01), (0, 2, 10.0, 0.07)))
LINE = world(4, both_ways((0, 1, 20.0, 0.01), (1, 2, 20.0, 0.01), (2, 3, 20.0, 0.01)))


def refusal(wanted: Job, topology: Topology) -> str:
    """Return `path: message` of the one problem."""
    with pytest.raises(ConfigError) as raised:
        plan_reduction(wanted, topology)
    (problem,) = raised.value.problems
    return f"{problem.path}: {problem.message}"


def test_automatic_is_the_star_whose_slowest_link_is_fastest() -> None:
    plan = plan_reduction(job(), TRIANGLE)
    assert plan.trees == (Tree(1, {0: 1, 2: 1}),)
    assert not plan.is_gather
    assert plan.neighbours(1) == (0, 2)
    assert plan.neighbours(0) == (1,)
    assert plan.trees[0].children(1) == (0, 2)
    assert plan.trees[0].children(0) == ()


def test_equal_stars_are_told_apart_by_rtt_then_by_order() -> None:
    near_two = both_ways((0, 1, 5.0, 0.03), (1, 2, 5.0, 0.01), (0, 2, 5.0, 0.02))
    assert plan_reduction(job(), world(3, near_two)).trees[0].root == 2
    even = both_ways((0, 1, 5.0, 0.01), (1, 2, 5.0, 0.01), (0, 2, 5.0, 0.01))
    assert plan_reduction(job(), world(3, even)).trees[0].root == 0


def test_a_slow_direction_makes_the_whole_star_slow() -> None:
    links = dict.fromkeys([(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)], 50.0)
    links[0, 1] = 1.0
    topology = world(3, [(*pair, rate, 0.01) for pair, rate in links.items()])
    assert plan_reduction(job(), topology).trees[0].root == 2


def test_two_sites_gather_unless_the_job_names_a_hub() -> None:
    pair = world(2, both_ways((0, 1, 1.0, 0.01)))
    plan = plan_reduction(job(), pair)
    assert plan.is_gather
    assert plan.neighbours(0) == (1,)
    assert plan_reduction(job(hub="s1"), pair).trees == (star(2, 1),)


def test_gather_has_everyone_as_a_neighbour() -> None:
    plan = plan_reduction(job("gather"), TRIANGLE)
    assert [plan.neighbours(site) for site in range(3)] == [(1, 2), (0, 2), (0, 1)]


def test_one_site_exchanges_nothing() -> None:
    assert plan_reduction(job(), world(1, [])).neighbours(0) == ()


def test_where_no_star_reaches_all_the_widest_lowest_tree_is_taken() -> None:
    plan = plan_reduction(job(), LINE)
    assert plan.trees == (Tree(1, {0: 1, 2: 1, 3: 2}),)
    assert plan.neighbours(2) == (1, 3)


def test_the_widest_tree_goes_round_a_narrow_link() -> None:
    ring = world(
        4, both_ways((0, 1, 9.0, 0.01), (1, 2, 1.0, 0.01), (2, 3, 9.0, 0.01), (3, 0, 9.0, 0.01))
    )
    (tree,) = plan_reduction(job(), ring).trees
    assert {frozenset(edge) for edge in tree.parent.items()} == {
        frozenset({0, 1}),
        frozenset({2, 3}),
        frozenset({0, 3}),
    }


def test_what_the_links_do_not_allow_is_refused() -> None:
    assert refusal(job("star"), LINE) == (
        "reduction.tree: no site has links to all others: a star has no centre"
    )
    assert refusal(job("gather"), LINE) == (
        "reduction.tree: gather needs links both ways between all sites; 's0' lacks them with s2, s3"
    )
    assert refusal(job("star", "s0"), LINE) == (
        "reduction.hub: 's0' has no links both ways with s2, s3"
    )
    assert refusal(job("star", "s9"), LINE) == "reduction.hub: unknown site 's9'"
    assert "not connected" in refusal(job(), world(3, both_ways((0, 1, 1.0, 0.01))))


def test_a_link_back_is_needed_for_a_star() -> None:
    one_way = [*both_ways((0, 1, 5.0, 0.01), (1, 2, 5.0, 0.01)), (0, 2, 99.0, 0.01)]
    assert plan_reduction(job(), world(3, one_way)).trees[0].root == 1
    assert "has no links both ways with s2" in refusal(job("star", "s0"), world(3, one_way))


def test_chunks_are_shared_by_weight_and_evenly_spread() -> None:
    plan = ReductionPlan(3, (Tree(0, {}, 3.0), Tree(1, {}, 1.0)), "")
    assert [plan.tree_index(chunk) for chunk in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.slow
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5), st.integers(1, 256))
def test_no_tree_is_ever_a_whole_chunk_ahead_of_its_share(
    weights: list[float], num_chunks: int
) -> None:
    trees = tuple(Tree(index, {}, weight) for index, weight in enumerate(weights))
    plan = ReductionPlan(len(trees), trees, "")
    given_chunks = [plan.tree_index(chunk) for chunk in range(num_chunks)]
    for index, weight in enumerate(weights):
        share = weight / sum(weights) * num_chunks
        assert given_chunks.count(index) < share + 1 + 1e-9
    assert plan.tree_index(num_chunks + 256) == plan.tree_index(num_chunks)


@pytest.mark.parametrize("seed", range(20))
def test_every_plan_reaches_every_site_over_links_that_exist(seed: int) -> None:
    chance = random.Random(seed)
    num_sites = chance.randint(2, 8)
    # A random tree keeps the sites connected; some more links make other shapes possible.
    pairs = {(chance.randrange(child), child) for child in range(1, num_sites)}
    pairs |= {tuple(sorted(chance.sample(range(num_sites), 2))) for _ in range(num_sites)}  # type: ignore[misc]
    links = both_ways(*((*pair, chance.choice([1.0, 5.0, 9.0]), 0.01) for pair in sorted(pairs)))
    topology = world(num_sites, links)
    plan = plan_reduction(job(), topology)
    for site in range(num_sites):
        for other in plan.neighbours(site):
            assert site in plan.neighbours(other), f"{seed=}"
            assert topology.link(f"s{site}", f"s{other}") is not None, f"{seed=}"
    for tree in plan.trees:
        assert set(tree.parent) | {tree.root} == set(range(num_sites)), f"{seed=}"
        for site in range(num_sites):
            steps, at = 0, site
            while at != tree.root:
                at, steps = tree.parent[at], steps + 1
                assert steps < num_sites, f"a circle, {seed=}"
