"""Simulated rounds of local steps: DiLoCo and streaming fragments against their closed forms."""

from __future__ import annotations

import dataclasses
import math

import pytest

from isthmus.topology.cost.local_sgd import local_round, open_round
from isthmus.topology.model.step_model import exchange_time_s
from isthmus.topology.simulator.settings import (
    Outages,
    Rounds,
    Settings,
    Stragglers,
    fragment_buckets,
)
from isthmus.topology.simulator.simulation import (
    SimulatedRun,
    coding_s,
    simulate,
    simulate_alone,
)
from isthmus.topology.spec.compute import num_parameters, step_compute_s
from isthmus.topology.spec.job import Job, Placed
from isthmus.topology.spec.regime import regime_of
from isthmus.topology.spec.workload import Parallel
from isthmus.topology.spec.world import Topology
from tests.fakes.described import MODEL, described_job, sites_of_nodes
from tests.topology.simulated import PLAIN, a_job, a_topology, efficiency

RAW_BYTES = 4 * num_parameters(a_job().trainer.model)


def in_rounds(rounds: Rounds, count: int = 4, **changes: object) -> Settings:
    return dataclasses.replace(PLAIN, steps=count * rounds.steps, rounds=rounds, **changes)  # type: ignore[arg-type] # by name


def settled_s(run: SimulatedRun, rounds: Rounds) -> float:
    """Return the mean step of the last round."""
    sites = range(len(run.work.sites))
    skip = len(run.steps) - rounds.steps
    return math.fsum(run.step_s(site, skip) for site in sites) / len(sites)


def once_s(job: Job, topology: Topology, fragments: int = 1) -> float:
    """Return what a fragment's exchange takes by itself."""
    return exchange_time_s(job, topology, RAW_BYTES // fragments)


@pytest.mark.parametrize("num_sites", [2, 4])
@pytest.mark.parametrize("tree", ["gather", "star"])
@pytest.mark.parametrize("steps", [1, 3, 20])
def test_diloco_is_h_steps_and_one_exchange(num_sites: int, tree: str, steps: int) -> None:
    """T = H c + x: nothing hides the exchange."""
    topology = a_topology(num_sites, bytes_per_s=5e6, rtt_s=0.08)
    job, rounds = a_job(tree=tree, global_batch=24 * num_sites), Rounds(steps=steps)
    run = simulate(job, topology, in_rounds(rounds))
    compute_s = step_compute_s(job, topology, topology.sites[0])
    wanted_s = steps * compute_s + once_s(job, topology)
    assert settled_s(run, rounds) * steps == pytest.approx(wanted_s, rel=0.02)
    alone = simulate_alone(job, topology, in_rounds(rounds))
    assert alone.mean_step_s == pytest.approx(compute_s)
    assert efficiency(run, alone) == pytest.approx(steps * compute_s / wanted_s, rel=0.02)


@pytest.mark.parametrize("bytes_per_s", [0.5e6, 2e6, 20e6])
@pytest.mark.parametrize(("fragments", "overlap_steps"), [(1, 0), (4, 0), (4, 1), (4, 2), (2, 4)])
def test_streaming_is_that_of_the_closed_form(
    bytes_per_s: float, fragments: int, overlap_steps: int
) -> None:
    topology = a_topology(2, bytes_per_s=bytes_per_s, rtt_s=0.02)
    job = a_job(tree="star", global_batch=48)
    rounds = Rounds(steps=8, fragments=fragments, overlap_steps=overlap_steps)
    run = simulate(job, topology, in_rounds(rounds, 6))
    compute_s = step_compute_s(job, topology, topology.sites[0])
    wanted = local_round(8, compute_s, once_s(job, topology, fragments), fragments, overlap_steps)
    found_s = settled_s(run, rounds)
    assert found_s <= 1.02 * wanted.step_s
    # Where a fragment is sent before the one before it is back, both are under way at once.
    at_once = bytes_per_s < 1e6 and overlap_steps * fragments == rounds.steps
    assert found_s >= (0.95 if at_once else 0.98) * wanted.step_s


SPEEDS = [1.0, 0.7, 0.4]


def test_rounds_that_wait_for_nobody_have_nearly_the_speed_of_all_sites() -> None:
    topology = a_topology(3, bytes_per_s=1e9, rtt_s=0.001, speeds=SPEEDS)
    job, all_wait = a_job(tree="gather", global_batch=72), Rounds(steps=30)
    rounds = dataclasses.replace(all_wait, min_steps=2)
    alone = simulate_alone(job, topology, in_rounds(rounds))
    locked = efficiency(simulate(job, topology, in_rounds(all_wait)), alone)
    assert locked == pytest.approx(3 * min(SPEEDS) / sum(SPEEDS), rel=0.02)
    run = simulate(job, topology, in_rounds(rounds))
    assert efficiency(run, alone) > 0.97
    alone_s = [step_compute_s(job, topology, site) for site in topology.sites]
    wanted = open_round(regime_of("diloco", sync_every=30, min_steps=2), alone_s, [1] * 3, 0.0)
    assert settled_s(run, rounds) * 30 == pytest.approx(wanted.round_s, rel=0.02)
    taken = [sum(not step[site].is_left_out for step in run.steps) for site in range(3)]
    assert taken == [4 * 30, 4 * 21, 4 * 12]


@pytest.mark.slow
def test_where_speeds_vary_rounds_that_wait_for_nobody_lose_less() -> None:
    topology = a_topology(4, bytes_per_s=1e9, rtt_s=0.001, speeds=[1.0, 0.9, 0.7, 0.6])
    job, stragglers = a_job(tree="gather", global_batch=96), Stragglers("exponential", 0.2)
    found = []
    for rounds in (Rounds(steps=20), Rounds(steps=20, min_steps=2)):
        settings = in_rounds(rounds, stragglers=stragglers)
        alone = simulate_alone(job, topology, settings)
        found.append(efficiency(simulate(job, topology, settings), alone))
    assert found[0] < 0.8 < 0.9 < found[1]


def test_a_step_is_the_sum_of_its_parts_and_those_that_send_tell_of_their_buckets() -> None:
    topology = a_topology(3, bytes_per_s=2e6, ranks=[2, 2, 2], speeds=[1.0, 1.0, 0.8])
    job, rounds = (
        a_job(tree="gather", timeline_every=7),
        Rounds(steps=6, fragments=2, overlap_steps=1),
    )
    run = simulate(job, topology, Settings(steps=30, rounds=rounds))
    for number, step in enumerate(run.steps, 1):
        sends = number % 3 == 0
        for site in step:
            parts = site.parts
            total = parts.compute_s + parts.intra_s + parts.exposed_inter_s + parts.wait_s
            assert total == pytest.approx(site.end_s - site.begin_s)
            # A step that waits is the one after that which sent.
            assert (parts.hidden_inter_s > 0) == ((number - 1) % 3 == 0 and number > 1)
            assert (parts.inter_s > 0) == sends
            assert (site.buckets is not None) == (
                (number <= 18 and (sends or number <= 3)) or number % 7 == 0
            )
            for bucket in site.buckets or ():
                assert sends
                assert site.computed_s <= bucket.posted_s <= bucket.reduced_s <= bucket.finished_s
    raw_bytes = sum(each.raw_bytes for each in run.work.buckets)
    assert raw_bytes == RAW_BYTES
    assert all(each.raw_bytes == pytest.approx(raw_bytes / 6) for each in run.links)
    assert [run.work.exchanged(steps) for steps in (0, 2, 3, 6, 12, 30)] == pytest.approx(
        [0, 0, 3, 6, 12, 30], rel=0.01
    )
    every_step = simulate(job, topology, Settings(steps=3))
    assert coding_s(run.work)[0] == pytest.approx([s / 6 for s in coding_s(every_step.work)[0]])


@pytest.mark.parametrize("rounds", [Rounds(steps=3), Rounds(steps=5, fragments=3, overlap_steps=1)])
@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0], [1.0, 0.7, 0.4]])
def test_rounds_that_repeat_themselves_are_those_that_a_simulation_would_make(
    rounds: Rounds, speeds: list[float]
) -> None:
    job, topology = a_job(tree="star", global_batch=72), a_topology(3, speeds=speeds)
    reused = simulate(job, topology, in_rounds(rounds, 20))
    each = simulate(job, topology, in_rounds(rounds, 20, reuse_steps=False))
    for one, other in zip(reused.steps, each.steps, strict=True):
        assert [s.end_s for s in one] == pytest.approx([s.end_s for s in other], rel=1e-7)
    assert reused.num_actions < each.num_actions


@pytest.mark.slow
def test_fewer_exchanges_are_fewer_waits_for_stragglers() -> None:
    """Of H steps the sites' sums differ less than their steps do."""
    job, topology = a_job(global_batch=96), a_topology(4, bytes_per_s=1e12, rtt_s=0)
    slow = Stragglers("exponential", 0.3)
    every_step = simulate(job, topology, dataclasses.replace(PLAIN, steps=200, stragglers=slow))
    seldom = simulate(job, topology, in_rounds(Rounds(steps=20), 10, stragglers=slow))
    assert seldom.wall_s < 0.9 * every_step.wall_s


def test_a_run_goes_on_at_a_round_s_beginning_after_a_failure() -> None:
    rounds = Rounds(steps=5, fragments=2)
    failing = Outages(mtbf_s=60.0, recovery_s=2.0, checkpoint_every=10)
    settings = in_rounds(rounds, 60, outages=failing, seed=11)
    run = simulate(a_job(timeline_every=5), a_topology(2), settings)
    assert run.outages, "with seed 11 there are some"
    for number, step in enumerate(run.steps, 1):
        # Fragments leave after the second and the fifth step.
        assert all((site.parts.inter_s > 0) == (number % 5 in (0, 2)) for site in step)


def test_rounds_go_with_models_that_jobs_describe() -> None:
    cut = Parallel(tensor=2, pipeline=4, data=2)
    placement = tuple(Placed(site=f"s{index}", sequences=8, parallel=cut) for index in range(2))
    job = dataclasses.replace(described_job(MODEL), plan=None, placement=placement)
    topology = sites_of_nodes([4, 4], [(0, 1, 1e9, 0.02)])
    rounds = Rounds(steps=10)
    seldom = simulate(job, topology, dataclasses.replace(PLAIN, steps=40, rounds=rounds))
    alone = simulate_alone(job, topology, PLAIN)
    raw_bytes = sum(each.raw_bytes for each in seldom.work.buckets)
    wanted_s = alone.mean_step_s + exchange_time_s(job, topology, raw_bytes) / 10
    assert seldom.mean_step_s == pytest.approx(wanted_s, rel=0.03)


def test_fragments_are_equal_and_hold_the_whole_model() -> None:
    for total, fragments, bucket_bytes in ((RAW_BYTES, 3, 1 << 20), (400, 7, 4), (1 << 40, 2, 4)):
        buckets, owners = fragment_buckets(
            total, Rounds(steps=10, fragments=fragments), bucket_bytes
        )
        sizes = [
            sum(b.raw_bytes for b, owner in zip(buckets, owners, strict=True) if owner == each)
            for each in range(fragments)
        ]
        assert sum(sizes) == total
        assert max(sizes) - min(sizes) <= 4
        assert len(buckets) <= 256 + fragments


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Rounds(steps=0), "steps: want 1 at least"),
        (lambda: Rounds(steps=4, fragments=5), "fragments: want 1 to 4"),
        (lambda: Rounds(steps=4, overlap_steps=5), "overlap_steps: want 0 to 4"),
        (lambda: Settings(steps=5, rounds=Rounds(steps=4)), "want whole rounds of 4, got 5"),
        (
            lambda: Settings(
                steps=8, rounds=Rounds(steps=4), outages=Outages(mtbf_s=1, recovery_s=1)
            ),
            "checkpoint_every: want whole rounds of 4 steps, got 1",
        ),
    ],
)
def test_rounds_without_a_meaning_are_refused(make: object, word: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=word):
        make()
