"""Simulated training that does not go as planned: stragglers, failures, and links that change."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.topology.faults.script import Change, Kill, Pause, TimedChange
from isthmus.topology.simulator.engine import SimulationError
from isthmus.topology.simulator.settings import Outages, Settings, Stragglers
from isthmus.topology.simulator.simulation import simulate
from isthmus.topology.spec.compute import step_compute_s
from tests.topology.simulated import PLAIN, a_job, a_topology, ends


@pytest.mark.slow
def test_a_seed_repeats_stragglers_and_they_cost_what_the_slowest_of_them_does() -> None:
    job, topology = a_job(global_batch=96), a_topology(2, ranks=[2, 2], bytes_per_s=1e12, rtt_s=0)
    slow = dataclasses.replace(PLAIN, steps=60, stragglers=Stragglers("uniform", 0.2), seed=5)
    run = simulate(job, topology, slow)
    assert list(ends(run)) == list(ends(simulate(job, topology, slow)))
    assert list(ends(run)) != list(ends(simulate(job, topology, dataclasses.replace(slow, seed=6))))
    compute_s = step_compute_s(job, topology, topology.sites[0])
    # The largest of four of U(0, 0.2) has the mean 0.16 and the deviation 0.033: over 60, 0.0043.
    assert run.mean_step_s / compute_s == pytest.approx(1.16, abs=0.015)


def test_failures_cost_what_was_not_kept_and_the_recovery() -> None:
    job, topology = a_job(), a_topology(2)
    plain = simulate(job, topology, Settings(steps=300))
    failing = Settings(
        steps=300, seed=11, outages=Outages(mtbf_s=100.0, recovery_s=7.0, checkpoint_every=10)
    )
    run = simulate(job, topology, failing)
    assert len(run.steps) == 300
    assert run.outages, "with seed 11 there are some"
    for outage in run.outages:
        assert outage.until_s - outage.at_s == pytest.approx(7.0)
        assert 0 <= outage.lost_steps < 10
    assert list(ends(run)) == sorted(ends(run))
    lost_s = run.wall_s - plain.wall_s
    least_s = 7.0 * len(run.outages) + plain.mean_step_s * sum(o.lost_steps for o in run.outages)
    # Beside whole steps, each failure takes the part of one that was under way.
    assert least_s <= lost_s + 1e-6
    assert lost_s <= least_s + (1 + len(run.outages)) * 2 * plain.mean_step_s
    assert run.goodput == pytest.approx(plain.wall_s / run.wall_s, rel=0.02)
    assert plain.goodput == 1.0


def test_failures_that_never_let_a_step_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.topology.simulator.simulation.STUCK_MAX", 5)
    never = Settings(outages=Outages(mtbf_s=0.001, recovery_s=1.0))
    with pytest.raises(SimulationError, match="5 failures in a row, and never more than 0 steps"):
        simulate(a_job(), a_topology(2), never)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Settings(sharing="mine"), "sharing: want one of fifo, fair"),
        (lambda: Settings(steps=0), "steps: want 1 at least"),
        (lambda: Outages(mtbf_s=0.0, recovery_s=1.0), "mtbf_s > 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(make: object, word: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=word):
        make()


def _timed(at_s: float, kind: str, **figures: float) -> list[TimedChange]:
    """Return a change of both directions between s0 and s1."""
    return [
        TimedChange(
            at_s=at_s, change=Change(kind=kind, source=source, target=target, **figures), fault=0
        )
        for source, target in (("s0", "s1"), ("s1", "s0"))
    ]


def test_a_cut_link_sends_nothing_until_it_is_healed() -> None:
    job, topology = a_job(schedule="serial"), a_topology(2)
    plain = simulate(job, topology, PLAIN)
    step_s, compute_s = plain.mean_step_s, plain.steps[0][0].parts.compute_s
    # Cut during the second step's compute, and healed 5 s after its exchange should have begun.
    healed_s = step_s + compute_s + 5.0
    changes = (*_timed(step_s + compute_s / 2, "cut"), *_timed(healed_s, "heal"))
    run = simulate(job, topology, dataclasses.replace(PLAIN, changes=changes))
    lengths_s = [step[0].end_s - step[0].begin_s for step in run.steps]
    assert lengths_s[1] == pytest.approx(step_s + 5.0)
    assert lengths_s[:1] + lengths_s[2:] == pytest.approx([step_s] * 19)
    assert len(run.changes) == 4
    with pytest.raises(SimulationError, match="stays cut"):
        simulate(job, topology, dataclasses.replace(PLAIN, changes=changes[:2]))


def test_a_link_s_new_rate_and_delay_count_from_the_next_flow_on() -> None:
    job, topology = a_job(schedule="serial"), a_topology(2)
    plain = simulate(job, topology, PLAIN)
    changes = (*_timed(0.0, "shape", bytes_per_s=5e6, delay_s=0.1), *_timed(1e9, "heal"))
    run = simulate(job, topology, dataclasses.replace(PLAIN, changes=changes))
    slow = simulate(job, a_topology(2, bytes_per_s=5e6, rtt_s=0.2), PLAIN)
    # But for chunks, whose size follows from the links as described.
    assert run.mean_step_s == pytest.approx(slow.mean_step_s, rel=0.001)
    assert len(run.changes) == 2
    middle_s = plain.mean_step_s * 10
    later = dataclasses.replace(PLAIN, changes=tuple(_timed(middle_s, "shape", bytes_per_s=5e6)))
    lengths_s = [s[0].end_s - s[0].begin_s for s in simulate(job, topology, later).steps]
    assert lengths_s[:10] == pytest.approx([plain.mean_step_s] * 10)
    assert min(lengths_s[10:]) > 2 * plain.mean_step_s


@pytest.mark.parametrize(
    ("change", "sharing", "word"),
    [
        (Change(kind="reset", source="s0", target="s1"), "fifo", "only rate, rtt, cut"),
        (Change(kind="shape", source="s0", target="s1", loss=0.1), "fifo", "only rate, rtt, cut"),
        (Pause(site="s0", is_paused=True), "fifo", "only rate, rtt, cut"),
        (Kill(site="s0"), "fifo", "only rate, rtt, cut"),
        (Change(kind="cut", source="s0", target="s1"), "fair", "want sharing fifo"),
    ],
)
def test_changes_that_are_not_simulated_are_refused(
    change: Change | Pause | Kill, sharing: str, word: str
) -> None:
    asked = Settings(sharing=sharing, changes=(TimedChange(at_s=1.0, change=change, fault=0),))
    with pytest.raises(SimulationError, match=word):
        simulate(a_job(), a_topology(2), asked)
