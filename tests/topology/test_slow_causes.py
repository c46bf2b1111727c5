"""What explains a delay: a fact that differs from the others' by half of it or more, or nothing."""

from __future__ import annotations

import pytest

from isthmus.topology.spec.slow_causes import PaceFacts, cause

USUAL = PaceFacts(
    between_s=0.01, run_queue=0.02, throttled=0.0, steal=0.0, clock_hz=1.98e9, slowdown=""
)


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (PaceFacts(), ""),
        (USUAL, ""),
        (PaceFacts(between_s=0.05), ""),  # of a delay of 100 ms that is too little
        (PaceFacts(between_s=0.11), "takes 110ms a step; the others' takes 10ms"),
        (PaceFacts(clock_hz=1.9e9), ""),
        (PaceFacts(clock_hz=1.2e9), "its GPU runs at 1.20 GHz, the others' at 1.98 GHz"),
        (PaceFacts(clock_hz=1.2e9, slowdown="power cap"), "at 1.98 GHz (power cap)"),
        (PaceFacts(throttled=0.1), "its container's CPU limit stops it 10% of the time"),
        (PaceFacts(throttled=0.01), ""),
        (PaceFacts(steal=0.2), "its hypervisor takes 20% of its machine's CPU time"),
        (PaceFacts(run_queue=0.3), "it waits for a CPU core 30% of the time"),
        (PaceFacts(run_queue=0.06), ""),
        (PaceFacts(between_s=0.2, run_queue=0.5), "data loader"),
    ],
)
def test_the_fact_that_explains_it(late: PaceFacts, words: str) -> None:
    found = cause(late, USUAL, cost_s=0.1, step_s=1.0)
    assert words in found
    assert bool(words) == bool(found)


def test_facts_that_others_have_alike_explain_nothing() -> None:
    alike = PaceFacts(between_s=0.5, run_queue=0.5, throttled=0.3, steal=0.2, clock_hz=1e9)
    assert cause(alike, alike, cost_s=0.1, step_s=1.0) == ""
    assert cause(PaceFacts(between_s=9.0), USUAL, cost_s=0.0, step_s=1.0) == ""


def test_what_others_do_not_know_counts_as_nothing() -> None:
    assert "CPU core" in cause(PaceFacts(run_queue=0.3), PaceFacts(), cost_s=0.1, step_s=1.0)
    assert cause(PaceFacts(clock_hz=1e9), PaceFacts(), cost_s=0.1, step_s=1.0) == ""
