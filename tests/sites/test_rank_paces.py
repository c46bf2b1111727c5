"""A site's ranks, compared: who is late waits least, and it is told why where facts say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from isthmus.protos import metrics
from isthmus.sites.agent.rank_paces import RankPaces
from isthmus.sites.local.rank_messages import Metric
from isthmus.sites.worker.exchange.rank_pace import EVERY_STEPS, LEAST_S, RankPace

HOST = {metrics.HOST: "gpu17", metrics.NODE: "2"}


def told(rank: int, wait_s: float, num_ranks: int = 4, **facts: float) -> Metric:
    values = {
        metrics.RANK_NUMBER: float(rank),
        metrics.NUM_RANKS: float(num_ranks),
        metrics.NUM_STEPS: 20.0,
        metrics.STEP_S: 0.5,
        metrics.SITE_WAIT_S: wait_s,
        **facts,
    }
    return Metric(kind=metrics.RANK, step=100 + rank, values=values, labels=HOST)


def compared(messages: Sequence[Metric]) -> Metric | None:
    paces = RankPaces()
    results = [paces.take(each) for each in messages]
    assert not any(results[:-1])
    return results[-1]


def test_who_waits_least_is_late_and_costs_what_the_others_wait_more() -> None:
    found = compared([told(0, 0.11), told(1, 0.13), told(2, 0.01), told(3, 0.12)])
    assert found is not None
    assert (found.kind, found.step, found.rank) == (metrics.RANKS, 103, -1)
    assert found.values[metrics.RANK_NUMBER] == 2
    assert found.values[metrics.COST_S] == pytest.approx(0.11)
    assert found.labels == HOST


def test_the_reason_is_told() -> None:
    ranks = [told(rank, 0.1, between_s=0.002, run_queue=0.1) for rank in range(3)]
    found = compared([*ranks, told(3, 0.0, between_s=0.102, run_queue=0.1)])
    assert found is not None
    assert "data loader" in found.labels[metrics.WHY]
    assert found.values[metrics.BETWEEN_S] == pytest.approx(0.027)
    late = told(0, 0.0, clock_hz=1.2e9)
    late = replace(late, labels=HOST | {metrics.SLOWDOWN: "thermal slowdown"})
    found = compared([late, *(told(rank, 0.1, clock_hz=1.9e9) for rank in (1, 2, 3))])
    assert found is not None
    assert "(thermal slowdown)" in found.labels[metrics.WHY]
    assert metrics.SLOWDOWN not in found.labels


@pytest.mark.parametrize("name", [metrics.RANK_NUMBER, metrics.NUM_RANKS, metrics.SITE_WAIT_S])
def test_what_is_no_number_is_not_compared(name: str) -> None:
    """A script may record our kind, with whatever it likes."""
    assert RankPaces().take(Metric(kind=metrics.RANK, values={name: math.nan})) is None
    whole = told(0, 0.1, num_ranks=1)
    assert RankPaces().take(whole) is not None
    assert RankPaces().take(replace(whole, values={**whole.values, name: math.nan})) is None


def test_ranks_are_compared_once_all_have_told() -> None:
    paces = RankPaces()
    assert paces.take(told(0, 0.1, 2)) is None
    assert paces.take(told(0, 0.2, 2)) is None  # the newer one counts
    found = paces.take(told(1, 0.0, 2))
    assert found is not None
    assert found.values[metrics.COST_S] == pytest.approx(0.2)
    assert paces.take(told(1, 0.0, 2)) is None
    assert (
        paces.take(Metric(kind=metrics.RANK, values={"mine": 1.0})) is None
    )  # a script's own record
    alone = RankPaces().take(told(0, 0.3, 1))
    assert alone is not None
    assert alone.values[metrics.COST_S] == 0.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_rank_tells_medians_now_and_then() -> None:
    clock, sent = Clock(), list[Metric]()
    facts = ({metrics.STEAL: 0.25}, HOST)
    pace = RankPace(sent.append, rank=3, num_ranks=8, read_facts=lambda: facts, now_s=clock)
    for step in range(1, 101):
        start_s = clock.now_s
        clock.now_s += 0.1
        pace.note_forward()
        clock.now_s += 0.05
        pace.note_forward()  # of a further micro-batch
        clock.now_s += 9.0 if step == 55 else 0.05
        pace.end_step(step, start_s, clock.now_s, [])
    assert all(each.step % EVERY_STEPS == 0 for each in sent)
    assert sent[0].step > 30  # the first window is for warming up
    assert min(each.values[metrics.NUM_STEPS] for each in sent) >= EVERY_STEPS
    for each in sent:
        assert each.kind == metrics.RANK
        assert each.values[metrics.STEP_S] == pytest.approx(0.2)  # one long step is nothing
        assert each.values[metrics.BETWEEN_S] == pytest.approx(0.1)
        assert each.values[metrics.STEAL] == 0.25
        assert (each.values[metrics.RANK_NUMBER], each.values[metrics.NUM_RANKS]) == (3.0, 8.0)
        assert each.labels == HOST


def test_many_ranks_tell_less_often() -> None:
    num = {}
    for num_ranks in (8, 1000):
        clock, sent = Clock(), list[Metric]()
        pace = RankPace(sent.append, rank=0, num_ranks=num_ranks, now_s=clock)
        for step in range(1, 3001):
            start_s, clock.now_s = clock.now_s, clock.now_s + 0.1
            pace.end_step(step, start_s, clock.now_s, [])
        num[num_ranks] = len(sent)
    assert 300 / LEAST_S > num[8] > 0.8 * 300 / LEAST_S
    assert num[1000] <= 300 / 50
