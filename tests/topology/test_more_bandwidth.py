"""Wider links never make a plan slower: the same plan over them, and what is planned for them."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from isthmus.topology.model.site_timing import trainer_timing
from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.search import Search
from isthmus.topology.spec.job import Job, Model
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.channels import SEND_BUFFER_BYTES, chunks_in_flight
from isthmus.topology.trees.packing import NEAR_ENOUGH
from isthmus.topology.trees.pairs import pairs_of
from isthmus.topology.trees.shapes import ring_paths, widest_tree
from isthmus.topology.trees.tree_choice import plan_reduction, weighted_sets
from isthmus.topology.trees.tree_times import plan_times_s
from isthmus.topology.trees.wire_load import Load, chunk_bytes_of
from tests.fakes.plannable import (
    a_job,
    a_job_of_one_size,
    a_random_world,
    randomly_widened,
)

EXACT = 1 + 1e-9
"""What sums in another order may differ by."""
NEARLY = 1.02
"""Of what is planned for wider links: the search is not complete."""


def a_random_tree(chance: random.Random, num_sites: int) -> Tree:
    order = chance.sample(range(num_sites), num_sites)
    parent = {order[place]: order[chance.randrange(place)] for place in range(1, num_sites)}
    return Tree(order[0], parent, chance.randint(1, 4))


def a_random_plan(chance: random.Random, topology: Topology) -> ReductionPlan:
    """Return a gather, one tree, some stars or trees, a ring, or what the linear program says."""
    count = len(topology.sites)
    kind = chance.choice(("gather", "tree", "stars", "trees", "ring", "packing"))
    if kind == "gather" or count == 2:
        trees: tuple[Tree, ...] = ()
    elif kind == "stars":
        hubs = chance.sample(range(count), chance.randint(2, count))
        trees = tuple(star(count, hub, chance.randint(1, 4)) for hub in hubs)
    elif kind == "ring":
        trees = ring_paths(chance.sample(range(count), count))
    elif kind == "packing":
        pairs = pairs_of(topology)
        widest = widest_tree(pairs)
        assert widest is not None
        *_, trees = weighted_sets(pairs, widest, (NEAR_ENOUGH,))
    else:
        trees = tuple(
            a_random_tree(chance, count)
            for _ in range(1 if kind == "tree" else chance.randint(2, 4))
        )
    return ReductionPlan(count, trees, kind)


@pytest.mark.slow
def test_an_exchange_over_the_same_trees_is_never_slower() -> None:
    for seed in range(400):
        chance = random.Random(seed)
        topology = a_random_world(chance, chance.choice((2, 3, 4, 5)))
        plan = a_random_plan(chance, topology)
        sizes = [chance.choice((64, 256)) * 1024.0 for _ in plan.trees or (0,)]
        load = Load(chance.randint(1, 80), chance.choice((1, 1, 2, 4)), tuple(sizes), None)
        before = plan_times_s(plan, topology, load)
        after = plan_times_s(plan, randomly_widened(chance, topology), load)
        slower = {pair for pair, each_s in after.items() if each_s > before[pair] * EXACT}
        assert not slower, f"{seed=} {plan.why}"


@pytest.mark.slow
@pytest.mark.parametrize("emulator", ["relay", "netns"])
def test_a_step_of_the_same_plan_is_never_longer(emulator: str) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        topology = with_bbr(a_random_world(chance, chance.choice((2, 3, 4, 5))), emulator)
        plan = a_random_plan(chance, topology)
        job = a_random_job(chance, topology)
        counts = [chance.randint(1, 6) for _ in topology.sites]
        timings = [trainer_timing(job, *each) for each in zip(topology.sites, counts, strict=True)]
        before_s = StepModel(job, topology, plan).step_s(timings)
        wider = randomly_widened(chance, topology)
        assert StepModel(job, wider, plan).step_s(timings) <= before_s * EXACT, (
            f"{seed=} {plan.why}"
        )


def with_bbr(topology: Topology, emulator: str) -> Topology:
    """Return a topology of connections that do not start slowly."""
    links = tuple(dataclasses.replace(link, congestion="bbr") for link in topology.links)
    return dataclasses.replace(topology, links=links, emulator=emulator)


def a_random_job(chance: random.Random, topology: Topology) -> Job:
    """Return a job of few or many chunks, as large as its links allow, whatever others would."""
    job = a_job(chance.choice((8, 16)))
    model = Model(layers=chance.choice((2, 4)), heads=2, width=chance.choice((64, 128)), context=32)
    exchange = dataclasses.replace(
        job.exchange,
        codec=chance.choice(("fp32", "int8")),
        schedule=chance.choice(("overlap", "serial")),
    )
    job = dataclasses.replace(
        job, exchange=exchange, trainer=dataclasses.replace(job.trainer, model=model)
    )
    cut_bytes = chunk_bytes_of(job, topology, plan_reduction(job, topology))
    exchange = dataclasses.replace(exchange, chunk_bytes=cut_bytes, is_cut=True)
    return dataclasses.replace(job, exchange=exchange)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_side_by_side_take_no_longer_on_a_wider_link(seed: int) -> None:
    chance = random.Random(seed)
    rtt_s, buffer_bytes = chance.uniform(0.001, 0.2), chance.choice((None, SEND_BUFFER_BYTES))
    most, rates = chance.choice((1, 2, 32)), [10**5 * 1.2**power for power in range(60)]
    in_flight = [chunks_in_flight(None, most, rate, rtt_s, buffer_bytes) for rate in rates]
    assert all(1 <= each <= most for each in in_flight)
    assert in_flight == sorted(in_flight), f"{seed=}"
    per_byte_s = [each / rate for each, rate in zip(in_flight, rates, strict=True)]
    for narrow_s, wide_s in itertools.pairwise(per_byte_s):
        assert wide_s <= narrow_s * EXACT, f"{seed=}"


def steps_of_wider_links(seed: int, job: Job, topology: Topology) -> list[float]:
    """Return the steps that are planned for links that become wider, one after another."""
    chance, steps_s = random.Random(seed), []
    for _ in range(4):
        choice = Search(job, topology).best()
        assert choice is not None
        steps_s.append(choice.step_s)
        topology = randomly_widened(chance, topology)
    return steps_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_sites", "seed"),
    [
        (2, 0),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in ((3, 1), (3, 2), (4, 3), (4, 4), (5, 5))
        ),
    ],
)
def test_the_plan_for_wider_links_is_hardly_ever_slower(num_sites: int, seed: int) -> None:
    chance = random.Random(seed)
    topology = a_random_world(chance, num_sites, rates=chance.choice(((4.5, 7.0), (5.5, 8.0))))
    made = a_job_of_one_size if seed % 2 else a_job
    job = made(2 * num_sites, codecs=("fp32", "int8"), sites=chance.choice(("auto", "all")))
    for before_s, after_s in itertools.pairwise(steps_of_wider_links(seed, job, topology)):
        assert after_s <= before_s * NEARLY, f"{seed=}"
