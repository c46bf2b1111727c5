"""Crossings of trees in closed form, against the simulator that moves every chunk.

Slow start by arrays.
"""

from __future__ import annotations

import dataclasses
import random
import statistics

import numpy as np
import pytest

from isthmus.topology.model.step_model import step_time
from isthmus.topology.planner.reductions import named
from isthmus.topology.simulator.settings import Settings
from isthmus.topology.simulator.simulation import simulate
from isthmus.topology.spec.compute import flops_per_sequence
from isthmus.topology.spec.job import Exchange, Job, Model, Reduction, Trainer
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.packing import NEAR_ENOUGH
from isthmus.topology.trees.pairs import pairs_of
from isthmus.topology.trees.shapes import widest_tree
from isthmus.topology.trees.slow_start import unused_s
from isthmus.topology.trees.tree_choice import weighted_sets
from isthmus.topology.trees.tree_flow import Ramps
from tests.fakes.plannable import a_random_world

MODEL = Model(layers=4, heads=4, width=128, context=64)
SEEDS = range(30)
FEW_SEEDS = range(10)


def a_world_of(chance: random.Random, emulator: str) -> Topology:
    """Return 3 to 6 sites of next to no compute, all joined: 8 to 160 Mbit/s, 5 to 150 ms."""
    topology = a_random_world(chance, chance.choice((3, 4, 5, 6)))
    figures = {
        frozenset((link.source, link.target)): (
            10 ** chance.uniform(6, 7.3),
            chance.uniform(0.005, 0.15),
        )
        for link in topology.links
        if link.source < link.target
    }
    links = []
    for link in topology.links:
        rate, rtt_s = figures[frozenset((link.source, link.target))]
        links.append(dataclasses.replace(link, bytes_per_s=rate, rtt_s=rtt_s))
    sites = tuple(
        dataclasses.replace(
            site,
            accelerator=dataclasses.replace(site.accelerator, peak_flops_per_s={"bf16": 1e15}),
        )
        for site in topology.sites
    )
    return dataclasses.replace(topology, sites=sites, links=tuple(links), emulator=emulator)


def reduction_of(shape: str, topology: Topology) -> Reduction:
    """Return a reduction: `relay` is a line whose sites pass everything on."""
    count, names = len(topology.sites), [site.name for site in topology.sites]
    if shape == "relay":
        root = count // 2
        line = {
            site: site + 1 if site < root else site - 1 for site in range(count) if site != root
        }
        return named(ReductionPlan(count, (Tree(root, line),), ""), names)
    if shape == "other ways":
        # Up a path to the first site, and down by a star: each link in one direction alone.
        up = {site: site - 1 for site in range(1, count)}
        down = dict.fromkeys(range(1, count), 0)
        return named(ReductionPlan(count, (Tree(0, up, down=down),), ""), names)
    if shape == "weighted":
        pairs = pairs_of(topology)
        widest = widest_tree(pairs)
        assert widest is not None
        *_, trees = weighted_sets(pairs, widest, (NEAR_ENOUGH,))
        return named(ReductionPlan(count, trees, ""), names)
    return Reduction(tree=shape)


def off(seed: int, shape: str, emulator: str) -> float:
    """Return by what share the closed form of one exchange is longer than the simulated one."""
    topology = a_world_of(random.Random(seed), emulator)
    job = Job(
        name="j",
        topology="t",
        reduction=reduction_of(shape, topology),
        exchange=Exchange(
            codec="fp32", chunk_bytes=64 << 10, bucket_bytes=1 << 20, schedule="serial"
        ),
        trainer=Trainer(compute="modelled", global_batch=16, micro_batch=8, model=MODEL),
    )
    run = simulate(job, topology, Settings(steps=1))
    return step_time(job, topology).exchange_s / run.wall_s - 1


def off_in_the_long_run(seed: int, shape: str, schedule: str, emulator: str) -> float:
    """Return the same of steps that follow each other.

    Compute is 0.3 to 3 times an exchange from rest.
    """
    chance = random.Random(seed)
    topology, count = a_world_of(chance, emulator), 8
    job = Job(
        name="j",
        topology="t",
        reduction=reduction_of(shape, topology),
        exchange=Exchange(
            codec="fp32", chunk_bytes=64 << 10, bucket_bytes=1 << 20, schedule=schedule
        ),
        trainer=Trainer(
            compute="modelled",
            global_batch=count * len(topology.sites),
            micro_batch=count,
            model=MODEL,
        ),
    )
    compute_s = step_time(job, topology).exchange_s * 10 ** chance.uniform(-0.5, 0.5)
    flops_per_s = count * flops_per_sequence(MODEL) / compute_s
    sites = tuple(
        dataclasses.replace(
            site,
            accelerator=dataclasses.replace(
                site.accelerator, mfu=1.0, peak_flops_per_s={"bf16": flops_per_s}
            ),
        )
        for site in topology.sites
    )
    computing = dataclasses.replace(topology, sites=sites)
    run = simulate(job, computing, Settings(steps=40))
    steps_s = [run.step_s(site.index, 20) for site in computing.sites]
    return step_time(job, computing).step_s / statistics.fmean(steps_s) - 1


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["overlap", "serial"])
@pytest.mark.parametrize(
    ("shape", "emulator", "median", "each"),
    [
        ("gather", "netns", 0.0005, 0.0005),
        ("star", "netns", 0.0005, 0.015),
        ("relay", "netns", 0.001, 0.07),
        ("ring", "netns", 0.01, 0.085),
        ("weighted", "netns", 0.005, 0.11),
        ("ring", "relay", 0.005, 0.025),
        ("weighted", "relay", 0.015, 0.105),
    ],
)
def test_steps_that_follow_each_other_take_what_simulated_ones_do(
    shape: str, schedule: str, emulator: str, median: float, each: float
) -> None:
    found = {seed: off_in_the_long_run(seed, shape, schedule, emulator) for seed in FEW_SEEDS}
    worst = max(found, key=lambda seed: abs(found[seed]))
    assert abs(found[worst]) <= each, f"seed={worst}"
    assert abs(statistics.median(found.values())) <= median, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "emulator", "median", "each"),
    [
        ("star", "relay", 0.0005, 0.001),
        ("relay", "relay", 0.0015, 0.0075),
        ("other ways", "relay", 0.005, 0.025),
        ("ring", "relay", 0.0125, 0.055),
        ("weighted", "relay", 0.015, 0.16),
        ("star", "netns", 0.0005, 0.015),
        ("relay", "netns", 0.001, 0.03),
        ("other ways", "netns", 0.005, 0.07),
        ("ring", "netns", 0.015, 0.09),
        ("weighted", "netns", 0.005, 0.14),
    ],
)
def test_the_closed_form_is_what_simulated_chunks_take(
    shape: str, emulator: str, median: float, each: float
) -> None:
    found = {seed: off(seed, shape, emulator) for seed in SEEDS}
    worst = max(found, key=lambda seed: abs(found[seed]))
    assert abs(found[worst]) <= each, f"seed={worst}"
    assert abs(statistics.median(found.values())) <= median, found


@pytest.mark.parametrize("seed", range(20))
def test_slow_start_by_arrays_is_the_sum_over_windows(seed: int) -> None:
    chance = random.Random(seed)
    num_bytes, rate = 10 ** chance.uniform(3, 9), 10 ** chance.uniform(5, 9)
    rtt_s, window = chance.uniform(0.001, 0.3), chance.choice((1, 4, 8)) * 15_000.0
    ramps = Ramps(*(np.array([figure]) for figure in (rate, rtt_s, window)))
    [found] = ramps.unused_s(np.array([num_bytes])).tolist()
    assert found == pytest.approx(unused_s(num_bytes, rate, rtt_s, window), abs=1e-9), f"{seed=}"


def test_bbr_does_not_start_slowly_again() -> None:
    topology = a_world_of(random.Random(1), "netns")
    job = Job(
        name="j",
        topology="t",
        exchange=Exchange(codec="fp32"),
        trainer=Trainer(compute="modelled", global_batch=16, model=MODEL),
    )
    with_bbr = tuple(dataclasses.replace(link, congestion="bbr") for link in topology.links)
    steady = dataclasses.replace(topology, links=with_bbr)
    assert step_time(job, steady).exchange_s < step_time(job, topology).exchange_s
    told = simulate(job, topology, Settings(steps=3, slow_start=False)).mean_step_s
    assert simulate(job, steady, Settings(steps=3)).mean_step_s == pytest.approx(told)
