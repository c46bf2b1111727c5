"""Simulated training whose steps apply the gradients of the step before (`regime: delayed`)."""

from __future__ import annotations

import dataclasses
import math

import pytest

from isthmus.topology.model.step_model import exchange_time_s
from isthmus.topology.simulator.settings import Rounds, Settings, Stragglers
from isthmus.topology.simulator.simulation import SimulatedRun, simulate, simulate_alone
from isthmus.topology.spec.compute import num_parameters, step_compute_s
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.regime import Regime
from tests.topology.simulated import PLAIN, a_job, a_topology, efficiency, ends

TWENTY = dataclasses.replace(PLAIN, steps=20)


def delayed(job: Job) -> Job:
    return dataclasses.replace(job, regime=Regime(kind="delayed"))


def settled_s(run: SimulatedRun) -> float:
    """Return the mean step once the first ones are over."""
    sites = range(len(run.work.sites))
    return math.fsum(run.step_s(site, skip=10) for site in sites) / len(sites)


def crossing_in(share: float, job: Job, num_sites: int = 2, rtt_s: float = 0.02) -> float:
    """Return the rate of links on which an exchange takes that share of a step's compute."""
    topology = a_topology(num_sites, bytes_per_s=1e6, rtt_s=rtt_s)
    raw_bytes = 4 * num_parameters(job.trainer.model)
    sent_s = exchange_time_s(job, topology, raw_bytes) - 2 * rtt_s
    return 1e6 * sent_s / (share * step_compute_s(job, topology, topology.sites[0]) - 2 * rtt_s)


@pytest.mark.parametrize("num_sites", [2, 4])
@pytest.mark.parametrize("schedule", ["overlap", "serial"])
def test_an_exchange_that_fits_a_step_is_hidden_by_it(num_sites: int, schedule: str) -> None:
    job = a_job(tree="star", schedule=schedule, global_batch=32 * num_sites)
    topology = a_topology(num_sites, bytes_per_s=crossing_in(0.9, job, num_sites))
    alone = simulate_alone(job, topology, TWENTY)
    late, sync = simulate(delayed(job), topology, TWENTY), simulate(job, topology, TWENTY)
    assert efficiency(late, alone, skip=10) >= 0.97
    assert efficiency(sync, alone, skip=10) <= 0.75


@pytest.mark.parametrize("share", [1.5, 3.0])
def test_a_step_takes_as_long_as_an_exchange_that_is_longer(share: float) -> None:
    """One round is under way at a time, from a step's first bucket to the next step's."""
    job = a_job(tree="star", global_batch=48)
    topology = a_topology(2, bytes_per_s=crossing_in(share, job))
    compute_s = step_compute_s(job, topology, topology.sites[0])
    late, sync = simulate(delayed(job), topology, TWENTY), simulate(job, topology, TWENTY)
    assert settled_s(late) == pytest.approx(share * compute_s, rel=0.05)
    assert settled_s(late) < 0.85 * settled_s(sync)


def test_a_step_is_the_sum_of_its_parts_and_tells_of_its_own_buckets() -> None:
    job = delayed(a_job(tree="star", timeline_every=1))
    topology = a_topology(2, bytes_per_s=crossing_in(1.5, job), ranks=[2, 2])
    run = simulate(job, topology, Settings(steps=12))
    for number, step in enumerate(run.steps):
        for site in step:
            parts = site.parts
            total = parts.compute_s + parts.intra_s + parts.exposed_inter_s + parts.wait_s
            assert total == pytest.approx(site.end_s - site.begin_s)
            # The first step waits for nothing.
            assert (parts.exposed_inter_s > 0) == (number > 0)
            assert parts.hidden_inter_s > 0
            assert site.buckets is not None
            posted_s = [each.posted_s for each in site.buckets]
            assert site.begin_s <= min(posted_s) <= max(posted_s) <= site.end_s
            # Gradients leave in backward, and come back in the next step.
            assert min(posted_s) < site.computed_s
            assert max(each.finished_s for each in site.buckets) > site.end_s
    for before, after in zip(run.steps, run.steps[1:], strict=False):
        for one, other in zip(before, after, strict=True):
            assert one.buckets is not None
            assert other.buckets is not None
            back_s = max(each.finished_s for each in one.buckets)
            assert back_s <= min(each.submitted_s for each in other.buckets)


def test_a_wait_for_a_slower_site_is_no_crossing() -> None:
    job, topology = (
        delayed(a_job(global_batch=48)),
        a_topology(2, speeds=[1.0, 0.5], bytes_per_s=1e9),
    )
    run = simulate(job, topology, TWENTY)
    quick, slow = (run.steps[-1][site].parts for site in range(2))
    assert quick.wait_s > 0.9 * (quick.wait_s + quick.exposed_inter_s) > 0
    assert slow.wait_s == slow.exposed_inter_s == 0
    assert run.step_s(0, skip=10) == pytest.approx(run.step_s(1, skip=10))


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0], [1.0, 0.7, 0.4]])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_steps_that_repeat_themselves_are_those_that_a_simulation_would_make(
    speeds: list[float], share: float
) -> None:
    job = delayed(a_job(tree="star", global_batch=72))
    topology = a_topology(3, speeds=speeds, bytes_per_s=crossing_in(share, job, 3))
    settings = dataclasses.replace(PLAIN, steps=60)
    reused = simulate(job, topology, settings)
    each = simulate(job, topology, dataclasses.replace(settings, reuse_steps=False))
    assert list(ends(reused)) == pytest.approx(list(ends(each)), rel=1e-7)
    assert reused.num_actions < each.num_actions


def test_a_delay_hides_what_stragglers_differ_by() -> None:
    """A site may be a step ahead of another, less the time from its first bucket to its end."""
    job, topology = a_job(global_batch=96), a_topology(4, bytes_per_s=1e12, rtt_s=0)
    settings = dataclasses.replace(PLAIN, steps=200, stragglers=Stragglers("exponential", 0.3))
    late, sync = (simulate(each, topology, settings) for each in (delayed(job), job))
    assert late.wall_s < 0.97 * sync.wall_s


def test_a_delay_changes_nothing_where_nothing_or_something_else_crosses() -> None:
    job, topology = a_job(), a_topology(2)
    off = dataclasses.replace(job, exchange=dataclasses.replace(job.exchange, schedule="off"))
    for each, settings in (
        (off, TWENTY),
        (job, dataclasses.replace(TWENTY, rounds=Rounds(steps=5))),
    ):
        late, sync = (simulate(one, topology, settings) for one in (delayed(each), each))
        assert list(ends(late)) == list(ends(sync))
