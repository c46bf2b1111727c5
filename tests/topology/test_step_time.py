"""Steps in the long run, against the recurrence itself and against sums made by hand."""

import dataclasses
import math
import random

import numpy as np
import pytest

from isthmus.topology.model.step_model import exchange_time_s, largest_cycle_means, step_time
from isthmus.topology.spec.compute import num_parameters, step_compute_s
from isthmus.topology.spec.job import Job, Model, Trainer
from isthmus.topology.spec.world import Topology
from tests.fakes.tree_worlds import TRIANGLE, both_ways, world
from tests.topology.test_wire_time import job, relayed

MODEL = Model(layers=1, heads=1, width=4, context=4)
RAW_BYTES = 4 * num_parameters(MODEL)


def training(tree: str = "auto") -> Job:
    trainer = Trainer(compute="modelled", model=MODEL, global_batch=12)
    exchange = dataclasses.replace(job(tree).exchange, schedule="serial")
    return dataclasses.replace(job(tree), trainer=trainer, exchange=exchange)


def with_speeds(topology: Topology, *speeds: float) -> Topology:
    """Change what the sites' accelerators reach."""
    sites = tuple(
        dataclasses.replace(
            site,
            accelerator=dataclasses.replace(site.accelerator, peak_flops_per_s={"fp32": speed}),
        )
        for site, speed in zip(topology.sites, speeds, strict=True)
    )
    return dataclasses.replace(topology, sites=sites)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_the_recurrence_comes_to(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 6)
    weights = [
        [
            rng.uniform(0, 10) if one == other or rng.random() < 0.8 else -math.inf
            for other in range(size)
        ]
        for one in range(size)
    ]
    ends_s, steps = [rng.uniform(0, 5) for _ in range(size)], 5_000
    for _ in range(steps):
        ends_s = [max(ends_s[u] + weights[u][v] for u in range(size)) for v in range(size)]
    # The start is forgotten at a rate of 1 over the number of steps.
    [mean_s] = largest_cycle_means(np.array([weights]))
    assert max(ends_s) / steps == pytest.approx(mean_s, rel=0.01), f"{seed=}"


def test_equal_sites_take_compute_and_wire() -> None:
    pair = relayed(world(2, both_ways((0, 1, 5000.0, 0.2))))
    compute_s = step_compute_s(training(), pair, pair.sites[0])
    expected_s = compute_s + exchange_time_s(training(), pair, RAW_BYTES)
    assert step_time(training(), pair).step_s == pytest.approx(expected_s)


def test_a_gather_of_two_averages_what_differs() -> None:
    pair = relayed(world(2, [(0, 1, 5000.0, 0.2), (1, 0, 20_000.0, 0.1)]))
    unequal = with_speeds(pair, 1e6, 2e6)
    slow_s, fast_s = (step_compute_s(training(), unequal, site) for site in unequal.sites)
    assert slow_s == pytest.approx(2 * fast_s)
    there_s = exchange_time_s(training(), unequal, RAW_BYTES)
    num_chunks = math.ceil(RAW_BYTES / 1000)
    back_s = (RAW_BYTES + num_chunks * 69) / 20_000 + 0.05
    expected_s = (slow_s + there_s + fast_s + back_s) / 2
    assert expected_s > slow_s
    assert step_time(training(), unequal).step_s == pytest.approx(expected_s)


def test_a_slow_site_decides_where_the_wire_is_fast() -> None:
    pair = with_speeds(relayed(world(2, both_ways((0, 1, 1e12, 0.0)))), 1e3, 1e6)
    slow_s = step_compute_s(training(), pair, pair.sites[0])
    assert step_time(training(), pair).step_s == pytest.approx(slow_s)


def test_a_star_waits_for_its_slowest_leaf() -> None:
    star = with_speeds(relayed(TRIANGLE), 1e9, 1e9, 1e9)
    compute_s = step_compute_s(training("star"), star, star.sites[0])
    expected_s = compute_s + exchange_time_s(training("star"), star, RAW_BYTES)
    assert step_time(training("star"), star).step_s == pytest.approx(expected_s)


def test_a_site_by_itself_only_computes() -> None:
    alone = world(1, [])
    compute_s = step_compute_s(training(), alone, alone.sites[0])
    assert step_time(training(), alone).step_s == compute_s
