"""The site that others wait for is named, with how much and since when; noise is nobody's fault."""

from __future__ import annotations

import math
import random

import pytest

from isthmus.orchestrator.core.slow_sites import LEAST_SHARE, OPEN_STEPS, WINDOW, SlowSites
from isthmus.protos import metrics

ABC = frozenset("abc")


def tell(
    sites: SlowSites, step: int, waits_s: dict[str, float], members: frozenset[str] = ABC
) -> None:
    for site, wait_s in waits_s.items():
        values = {metrics.WAIT_S: wait_s, metrics.STEP_S: 1.0}
        sites.add(site, step, values, members)


def late(site: str, cost_s: float) -> dict[str, float]:
    return {name: 0.02 if name == site else 0.02 + cost_s for name in ABC}


def carry(sites: SlowSites, steps: range, waits_s: dict[str, float]) -> None:
    for step in steps:
        tell(sites, step, waits_s)


def test_it_is_named_with_how_much_and_since_when() -> None:
    sites = SlowSites()
    carry(sites, range(1, 41), late("b", 0.0))
    carry(sites, range(41, 140), late("b", 0.3))
    assert not sites.now, "so far it has cost less than LEAST_S"
    carry(sites, range(140, 161), late("b", 0.3))
    [now] = sites.now
    assert now.site == "b"
    assert 41 - WINDOW <= now.since_step <= 41
    assert now.last_step == 160
    assert now.total_s == pytest.approx(120 * 0.3, rel=0.1)
    assert now.cost_s == pytest.approx(0.3, rel=0.1)
    assert now.share == pytest.approx(now.cost_s)


@pytest.mark.parametrize("share", [LEAST_SHARE, 0.005])
def test_what_is_small_is_not_told_however_long(share: float) -> None:
    sites = SlowSites()
    carry(sites, range(20_000), late("b", share))
    assert not sites.periods


def test_who_is_late_now_and_then_is_told_of_once() -> None:
    """The times of one site count together, and are one line."""
    sites = SlowSites()
    for begin in range(0, 1000, 100):
        carry(sites, range(begin, begin + 40), late("b", 0.3))
        carry(sites, range(begin + 40, begin + 100), late("b", 0.0))
    [period] = sites.periods
    assert (period.site, period.is_over, period.since_step) == ("b", True, 0)
    assert period.total_s == pytest.approx(10 * 40 * 0.3, rel=0.15)
    carry(sites, range(1000, 5000), late("b", 0.0))
    assert period.last_step < 3000, "what has passed is forgotten"
    carry(sites, range(5000, 5200), late("b", 0.3))
    assert sites.now == [period]
    assert period.total_s == pytest.approx(10 * 40 * 0.3 + 200 * 0.3, rel=0.15)


def test_those_who_are_late_in_turn_are_not_told_of() -> None:
    sites = SlowSites()
    for turn in range(200):
        carry(sites, range(40 * turn, 40 * turn + 40), late("abc"[turn % 3], 0.3))
    assert not sites.periods


def test_it_is_over_when_it_catches_up_and_another_may_be_slow_then() -> None:
    sites = SlowSites()
    carry(sites, range(300), late("b", 0.3))
    carry(sites, range(300, 600), late("c", 0.4))
    carry(sites, range(600, 630), late("a", 0.01))
    assert not sites.now
    assert [each.site for each in sites.periods] == ["b", "c"]
    assert all(each.is_over for each in sites.periods)


def test_one_that_begins_late_in_a_long_run_is_told_of_as_soon() -> None:
    sites = SlowSites()
    carry(sites, range(50_000), late("b", 0.0))
    carry(sites, range(50_000, 50_120), late("b", 0.3))
    assert [each.site for each in sites.now] == ["b"]


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_one_long_step_are_nobodys_fault(seed: int) -> None:
    chance, sites = random.Random(seed), SlowSites()
    for step in range(2000):
        tell(sites, step, {name: 0.5 * chance.random() for name in ABC})
    tell(sites, 2000, late("a", 600.0))
    for step in range(2001, 2030):
        tell(sites, step, {name: 0.5 * chance.random() for name in ABC})
    assert not sites.periods, f"{seed=}"


def test_where_sites_meet_once_in_several_steps_these_count_as_one() -> None:
    sites = SlowSites()
    for step in range(1, 30 * WINDOW + 1):
        meets = step % 4 == 0
        for site in ABC:
            values = {metrics.STEP_S: 1.0, metrics.WAIT_S: 0.8 * (meets and site != "b")}
            if meets:
                values[metrics.ROUND] = step // 4
            sites.add(site, step, values, ABC)
    [now] = sites.now
    assert now.site == "b"
    assert now.share == pytest.approx(0.2, rel=0.01)
    assert now.cost_s == pytest.approx(now.share)


def test_who_takes_no_part_is_not_judged_and_others_begin_anew() -> None:
    sites = SlowSites()
    carry(sites, range(200), late("b", 0.3))
    assert sites.now
    for step in range(200, 205):
        tell(sites, step, {"a": 0.3, "c": 0.3, "b": 0.0}, frozenset("ac"))
    assert not sites.now
    assert [each.site for each in sites.periods] == ["b"]


@pytest.mark.parametrize("members", [frozenset("a"), frozenset()])
def test_one_site_waits_for_nobody(members: frozenset[str]) -> None:
    sites = SlowSites()
    for step in range(50):
        tell(sites, step, {"a": 0.9}, members)
    assert not sites.periods


def test_steps_without_figures_or_of_a_lost_site_are_left_out_and_bounded() -> None:
    sites = SlowSites()
    sites.add("a", 1, {metrics.STEP_S: 1.0}, ABC)
    sites.add("a", 1, {metrics.STEP_S: 1.0, metrics.WAIT_S: math.nan}, ABC)
    for step in range(3 * OPEN_STEPS):
        tell(sites, step, {"a": 0.5, "b": 0.0})
    assert not sites.periods
    carry(sites, range(3 * OPEN_STEPS, 3 * OPEN_STEPS + 100), late("c", 0.5))
    assert [each.site for each in sites.now] == ["c"]
