"""The planner's choice, against every other that there is, and against random ones."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
from collections.abc import Iterator

import pytest

from tests.fakes.plannable import a_job, a_job_of_one_size, a_random_world, a_world
from topology.codec_costs import RELATIVE_ERRORS
from topology.documents.placement import restricted, unreached
from topology.job import Job, LinkCodec, Reduction
from topology.model.step_model import StepModel
from topology.model.wire_load import chunk_bytes_of
from topology.planner.choice import Sizing
from topology.planner.search import Search
from topology.planner.shares import Split, busiest
from topology.planner.sizings import sizings
from topology.planner.ways import ways
from topology.trees.link_codecs import plan_codecs
from topology.trees.pairs import pairs_of
from topology.trees.shapes import ring_paths
from topology.trees.trees import ReductionPlan, star
from topology.world import Topology

ROUNDING = ("fp32", "bf16", "int8")
SLOW = ("fp32", "split", "bf16-split")


def every_split(ranks: list[int], batch: int) -> Iterator[Split]:
    ranges = [range(each, batch + 1) for each in ranks]
    return (split for split in itertools.product(*ranges) if sum(split) == batch)


def every_plan(job: Job, topology: Topology) -> Iterator[ReductionPlan]:
    """Yield what the planner has to choose from, and named forms made here, by themselves."""
    yield from (way.plan for way in ways(job, topology))
    pairs, count = pairs_of(topology), len(topology.sites)
    for hub in range(count):
        if count > 1 and not pairs.missing(hub):
            yield ReductionPlan(count, (star(count, hub),), "")
    if count > 2 and not any(pairs.missing(site) for site in range(count)):
        for order in itertools.permutations(range(count)):
            yield ReductionPlan(count, ring_paths(order), "")


def with_exchange(
    job: Job, sizing: Sizing, codec: str = "fp32", codecs: tuple[LinkCodec, ...] = ()
) -> Job:
    exchange = dataclasses.replace(
        job.exchange,
        codec=codec,
        codecs=codecs,
        chunk_bytes=sizing.chunk_bytes,
        bucket_bytes=sizing.bucket_bytes,
    )
    return dataclasses.replace(job, exchange=exchange)


def every_codecs(job: Job, topology: Topology) -> Iterator[tuple[LinkCodec, ...]]:
    """Yield every assignment of the permitted codecs to links."""
    assert job.plan is not None
    links = sorted({tuple(sorted((link.source, link.target))) for link in topology.links})
    for codecs in itertools.product(job.plan.codecs, repeat=len(links)):
        yield tuple(
            LinkCodec(between=(one, other), codec=codec)
            for (one, other), codec in zip(links, codecs, strict=True)
        )


def every_exchange(job: Job, topology: Topology) -> Iterator[tuple[Job, ReductionPlan, float]]:
    """Yield all that can be decided for all these sites but the spread of the batch; and its loss.

    What comes to the same, codecs of trees and chunks, once.
    """
    seen = set()
    plans, assigned = list(every_plan(job, topology)), list(every_codecs(job, topology))
    for plan, codecs, sizing in itertools.product(plans, assigned, sizings(job)):
        tried = with_exchange(job, sizing, codecs[0].codec if codecs else "fp32", codecs)
        cut_bytes = chunk_bytes_of(tried, topology)
        trees = str([(tree.root, tree.parent, tree.weight) for tree in plan.trees])
        found = plan_codecs(tried, topology, plan)
        key = (trees, found, cut_bytes, sizing.bucket_bytes)
        if key not in seen:
            seen.add(key)
            weights = [tree.weight for tree in plan.trees] or [1]
            squares = [RELATIVE_ERRORS[codec] ** 2 for codec in found]
            loss = sum(map(operator.mul, squares, weights)) / sum(weights)
            yield tried, plan, loss


def exhaustive(job: Job, topology: Topology) -> tuple[float, int, float]:
    """Return the best of all that can be decided: seconds of a step, sites, what codecs lose."""
    names = [site.name for site in topology.sites]
    best = (float("inf"), 0, 0.0)
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            part = restricted(topology, chosen)
            if unreached(part):
                continue
            ranks = [site.num_ranks for site in part.sites]
            splits = [
                busiest(split, ranks) for split in every_split(ranks, job.trainer.global_batch)
            ]
            for tried, plan, loss in every_exchange(job, part) if splits else ():
                step_s = min(StepModel(tried, part, plan).steps_s(splits))
                best = min(best, (float(f"{step_s:.10g}"), count, loss))
    return best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "num_sites", "codecs"),
    [
        (1, 2, ROUNDING),
        (2, 3, ROUNDING),
        (5, 3, SLOW),
        (9, 4, ROUNDING),
        (12, 4, SLOW),
    ],
)
def test_of_few_sites_it_is_the_best_of_all(
    seed: int, num_sites: int, codecs: tuple[str, ...]
) -> None:
    chance = random.Random(seed)
    # Where links are as fast as gateways, a smaller codec that is slow to make may be slower.
    rates = (6.0, 9.5) if codecs == SLOW else (5.5, 8.0)
    topology = a_random_world(chance, num_sites, density=0.8, rates=rates)
    # Of four sites one size: chunks, buckets and all else go together in those of three.
    made = a_job if num_sites < 4 else a_job_of_one_size
    job = made(batch=num_sites + 2, codecs=codecs)
    choice = Search(job, topology).best()
    assert choice is not None
    step_s, count, loss = exhaustive(job, topology)
    assert choice.step_s == pytest.approx(step_s, rel=1e-9), f"{seed=}"
    assert len(choice.sites) == count, f"{seed=}"
    assert choice.coding.loss == pytest.approx(loss), f"{seed=}"


def random_steps_s(
    chance: random.Random, job: Job, topology: Topology, count: int
) -> Iterator[float]:
    """Yield the seconds of steps of anything a plan could be, over two random sets of sites."""
    for _ in range(2):
        part = random_part(chance, topology)
        known = ways(job, part)  # most of what this takes: each set is asked once
        for _ in range(count // 2):
            way = chance.choice(known)
            sized = with_exchange(
                job, chance.choice(sizings(job)), *random_codecs(chance, job, part)
            )
            split = [1] * len(part.sites)
            for _ in range(job.trainer.global_batch - len(split)):
                split[chance.randrange(len(split))] += 1
            yield StepModel(sized, part, way.plan).step_s(split)


def random_codecs(
    chance: random.Random, job: Job, topology: Topology
) -> tuple[str, tuple[LinkCodec, ...]]:
    """Return a codec for all links, and one for some."""
    permitted = (job.plan and job.plan.codecs) or (job.exchange.codec,)
    pairs = sorted({tuple(sorted((link.source, link.target))) for link in topology.links})
    return chance.choice(permitted), tuple(
        LinkCodec(between=(one, other), codec=chance.choice(permitted))
        for one, other in pairs
        if chance.random() < 0.5
    )


def random_part(chance: random.Random, topology: Topology) -> Topology:
    while True:
        names = [site.name for site in topology.sites if chance.random() < 0.7]
        part = restricted(topology, names)
        if names and not unreached(part):
            return part


@pytest.mark.slow
@pytest.mark.parametrize("num_sites", [6, 8, 11, 16])
def test_of_many_sites_it_is_no_worse_than_random_plans(num_sites: int) -> None:
    job = a_job_of_one_size(batch=16, codecs=("fp32", "int8"))
    chance = random.Random(num_sites)
    topology = a_random_world(chance, num_sites, density=chance.choice((0.0, 0.3)))
    choice = Search(job, topology).best()
    assert choice is not None
    for step_s in random_steps_s(chance, job, topology, count=16):
        assert choice.step_s <= step_s * (1 + 1e-9), f"{num_sites=}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_of_more_sites_it_is_no_worse_than_random_plans(seed: int) -> None:
    job = a_job_of_one_size(batch=8)
    chance = random.Random(seed)
    topology = a_random_world(chance, 5, density=chance.choice((0.0, 0.3, 0.6)))
    choice = Search(job, topology).best()
    assert choice is not None
    for step_s in random_steps_s(chance, job, topology, count=8):
        assert choice.step_s <= step_s * (1 + 1e-9), f"{seed=}"


def test_a_site_that_slows_the_others_is_left_out() -> None:
    near = [(0, 1, 1e9, 0.001), (0, 2, 1e4, 0.2), (1, 2, 1e4, 0.2)]
    search = Search(a_job(codecs=("fp32",)), a_world([4e8, 4e8, 4e8], near))
    choice = search.best()
    assert choice is not None
    assert choice.sites == ("s0", "s1")
    everybody = Search(a_job(codecs=("fp32",), sites="all"), search.topology).best()
    assert everybody is not None
    assert everybody.sites == ("s0", "s1", "s2")
    assert everybody.step_s > 2 * choice.step_s


def test_a_faster_site_takes_more() -> None:
    world = a_world([3e8, 1e8], [(0, 1, 1e10, 0.0)])
    choice = Search(a_job(16), world).best()
    assert choice is not None
    assert choice.sequences == (12, 4)


def test_what_the_job_names_is_kept() -> None:
    world = a_world([1e8] * 3, [(0, 1, 1e7, 0.01), (0, 2, 1e7, 0.01), (1, 2, 1e7, 0.01)])
    job = dataclasses.replace(a_job(), reduction=Reduction(tree="star", hub="s1"))
    choice = Search(job, world).best()
    assert choice is not None
    assert "s1" in choice.sites
    assert choice.coding.codecs == ("fp32",)
    assert choice.way.plan.trees == (star(len(choice.sites), choice.sites.index("s1")),)


def test_money_leaves_out_what_costs_more_than_it_brings() -> None:
    links = [(0, 1, 1e9, 0.001)]
    world = a_world([4e8, 1e8], links, price=2.0, egress=1e-9)
    fast = Search(a_job(16), world).best()
    cheap = Search(a_job(16, objective="cost"), world).best()
    assert fast is not None
    assert cheap is not None
    assert (fast.sites, cheap.sites) == (("s0", "s1"), ("s0",))
    assert cheap.usd_per_step < fast.usd_per_step
    assert cheap.step_s > fast.step_s


def test_too_few_sequences_leave_sites_out_or_give_no_plan() -> None:
    world = a_world([1e8, 1e8], [(0, 1, 1e10, 0.0)], ranks=[3, 5])
    choice = Search(a_job(4), world).best()
    assert choice is not None
    assert choice.sites == ("s0",)
    assert Search(a_job(2), world).best() is None


def test_links_that_cost_nothing_leave_nothing_but_compute() -> None:
    world = a_world([1e8] * 3, [(0, 1, 1e15, 0.0), (0, 2, 1e15, 0.0), (1, 2, 1e15, 0.0)])
    choice = Search(a_job(12), world).best()
    assert choice is not None
    assert choice.sequences == (4, 4, 4)
    ranks = [1, 1, 1]
    compute_s = max(choice.model(a_job(12), world).compute_s(busiest(choice.sequences, ranks)))
    # What a gateway needs for its last bucket is no cost of the links.
    assert compute_s / choice.step_s == pytest.approx(1.0, abs=0.005)
