"""Which rank its site waits for, since when, at what cost, and why; and why a site is slow."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.orchestrator.coordinator.control_messages import run_message
from isthmus.orchestrator.core.run_metrics import RunMetrics
from isthmus.orchestrator.core.run_record import RunRecord
from isthmus.orchestrator.core.slow_ranks import SlowRanks
from isthmus.orchestrator.core.slow_sites import SlowPeriod
from isthmus.orchestrator.evidence.view.live import plain_line
from isthmus.orchestrator.runs.facts import summarise
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


def test_a_rank_is_told_of_once_it_has_cost_much() -> None:
    slow = SlowRanks()
    told(slow, "a", *[(3, 0.02)] * 5, *[(3, 0.3)] * 4)
    assert not slow.periods
    slow.add("a", 200, values(3, 0.4), LABELS)
    slow.add("a", 220, values(3, 0.4), LABELS)
    [period] = slow.now
    assert period.who == "rank 3 of site a (node 1, host gpu17)"
    assert (period.since_step, period.last_step, period.num_steps) == (101, 220, 120)
    assert period.cost_s == pytest.approx((4 * 0.3 + 2 * 0.4) / 6)
    slow.add("a", 240, values(3, 0.01), LABELS)
    assert not slow.now
    assert slow.periods == [period]
    assert period.is_over


def test_ranks_that_are_late_in_turn_are_not_told_of() -> None:
    slow = SlowRanks()
    told(slow, "a", *[(rank, 0.3) for _ in range(200) for rank in (3, 5, 1)])
    assert not slow.periods
    told(slow, "b", *[(0, 0.4)] * 5)
    told(slow, "a", *[(5, 0.2)] * 10)
    assert {(each.site, each.rank) for each in slow.now} == {("b", 0), ("a", 5)}


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
    for step in range(40, 200, 20):
        slow.add("a", step, values(3, 0.3), LABELS | {metrics.WHY: "it waits"})
    assert slow.why_slow(period) == "its rank 3 is slow: it waits"


def test_status_and_summary_tell_it() -> None:
    record = RunRecord("r", ("a", "b"))
    measured = record.measured
    labels: dict[str, Any] = LABELS | {metrics.WHY: "its GPU runs at 1.20 GHz"}
    for step in range(20, 201, 20):
        measured.add("a", metrics.RANKS, step, values(3, 0.25), labels)
    run = run_message(record.view, measured.progress())
    assert (
        "slow, not hung: rank 3 of site a (node 1, host gpu17) costs its site's others 250ms a "
        "step (25%) since step 1, for 3min 20s: 50s in all; its GPU runs at 1.20 GHz"
    ) in plain_line(run)
    summary = summarise(record, active_s=200.0, verified_steps=0)
    assert summary["slow_ranks"][0]["rank"] == 3
    assert summary["slow_ranks"][0]["why"] == "its GPU runs at 1.20 GHz"


def slow_ranks_of(measured: RunMetrics, *sites: str) -> None:
    for number, site in enumerate(sites):
        for step in range(20, 401, 20):
            cost_s = 0.25 + 0.01 * number
            measured.add(site, metrics.RANKS, step, values(number, cost_s), LABELS)


def test_where_sites_share_a_machine_that_is_said_once() -> None:
    measured = RunMetrics(("a", "b", "c", "d"))
    for site, boot in zip("abcd", "xxxy", strict=True):
        labels = {metrics.BOOT: boot, metrics.HOST: "gpu17"}
        measured.add(site, metrics.MACHINE, 0, {}, labels)
    slow_ranks_of(measured, "a", "b", "c", "d")
    found = measured.progress()["slow_ranks"]
    assert [(each["site"], each["why"]) for each in found] == [
        ("d", ""),
        ("c", "sites a, b, c share the machine gpu17"),
    ]
    for step in range(200):
        for site in "abcd":
            figures = {"step_s": 1.0, "wait_s": 0.0 if site == "a" else 0.4}
            measured.add(site, metrics.STEP, step, figures, {})
    progress = measured.progress()
    assert (progress["slow"]["site"], progress["slow"]["why"]) == (
        "a",
        "sites a, b, c share the machine gpu17",
    )
    assert [each["site"] for each in progress["slow_ranks"]] == ["d"]
    assert [each.site for each in measured.slow] == ["a"]


def test_hosts_of_one_name_are_not_one_machine() -> None:
    measured = RunMetrics(("a", "b"))
    for site in "ab":
        measured.add(site, metrics.MACHINE, 0, {}, {metrics.BOOT: site, metrics.HOST: "node0"})
    slow_ranks_of(measured, "a", "b")
    assert [each["why"] for each in measured.progress()["slow_ranks"]] == ["", ""]
