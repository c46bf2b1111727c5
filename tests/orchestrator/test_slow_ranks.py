"""Which rank its site waits for, since when, at what cost, and why; and why a site is slow."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.orchestrator.coordinator.control_messages import run_message
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.run_metrics import RunMetrics, summarise
from isthmus.orchestrator.core.slow_ranks import SlowRanks
from isthmus.orchestrator.core.slow_sites import SlowPeriod
from isthmus.orchestrator.evidence.view.live import plain_line
from isthmus.protos import metrics

LABELS = {metrics.NODE: "1", metrics.HOST: "gpu17"}


def values(rank: int, cost_s: float, **facts: float) -> dict[str, float]:
    return {
        metrics.RANK_NUMBER: float(rank),
        metrics.NUM_RANKS: 8.0,
        metrics.NUM_STEPS: 20.0,
        metrics.STEP_S: 1.0,
        metrics.COST_S: cost_s,
        **facts,
    }


def told(slow: SlowRanks, site: str, *costs: tuple[int, float]) -> None:
    for index, (rank, cost_s) in enumerate(costs, 1):
        slow.add(site, 20 * index, values(rank, cost_s), LABELS)


def test_a_rank_is_slow_from_a_tenth_of_a_step_until_a_twentieth() -> None:
    slow = SlowRanks()
    told(slow, "a", (3, 0.02), (3, 0.2), (3, 0.07), (3, 0.3))
    [period] = slow.now
    assert period.who == "rank 3 of site a (node 1, host gpu17)"
    assert (period.since_step, period.last_step, period.num_steps) == (21, 80, 60)
    assert period.cost_s == pytest.approx((0.2 + 0.07 + 0.3) / 3)
    slow.add("a", 100, values(3, 0.04), LABELS)
    assert not slow.now
    assert slow.periods == [period]
    assert period.is_over
    assert period.last_step == 80


def test_another_rank_ends_it() -> None:
    slow = SlowRanks()
    told(slow, "a", (3, 0.2), (5, 0.2))
    assert [(each.rank, each.is_over) for each in slow.periods] == [(3, True), (5, False)]
    told(slow, "b", (0, 0.4))
    assert [(each.site, each.rank) for each in slow.now] == [("b", 0), ("a", 5)]


def test_what_makes_no_sense_is_left_out() -> None:
    slow = SlowRanks()
    slow.add("a", 1, {}, {})
    slow.add("a", 1, values(1, float("nan")), LABELS)
    assert not slow.periods


def test_why_a_site_is_slow() -> None:
    period = SlowPeriod("a", 1, 20, num_steps=20, total_s=4.0, for_s=20.0)
    slow = SlowRanks()
    assert slow.why_slow(period) == ""
    slow.add("a", 20, values(1, 0.0, between_s=0.3), LABELS)
    assert slow.why_slow(period) == ""
    slow.add("b", 20, values(1, 0.0, between_s=0.01), LABELS)
    assert "data loader" in slow.why_slow(period)
    slow.add("a", 40, values(3, 0.3), LABELS | {metrics.WHY: "it waits"})
    assert slow.why_slow(period) == "its rank 3 is slow: it waits"


def test_status_and_summary_tell_it() -> None:
    measured = RunMetrics(("a", "b"))
    labels: dict[str, Any] = LABELS | {metrics.WHY: "its GPU runs at 1.20 GHz"}
    measured.add("a", metrics.RANKS, 40, values(3, 0.25), labels)
    run = run_message(JournaledRun("r"), measured.progress())
    assert (
        "slow, not hung: rank 3 of site a (node 1, host gpu17) costs its site's others 250ms a "
        "step (25%) since step 21, for 20s: 5s in all; its GPU runs at 1.20 GHz"
    ) in plain_line(run)
    summary = summarise(JournaledRun("r"), measured, active_s=40.0, verified_steps=0)
    assert summary["slow_ranks"][0]["rank"] == 3
    assert summary["slow_ranks"][0]["why"] == "its GPU runs at 1.20 GHz"
