"""The site that others wait for is named, with how much and since when; noise is nobody's fault."""

from __future__ import annotations

import math
import random

import pytest

from isthmus.orchestrator.core.slow_sites import MAX_PERIODS, OPEN_STEPS, WINDOW, SlowSites
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


def test_it_is_named_with_how_much_and_since_when() -> None:
    sites = SlowSites()
    for step in range(1, 41):
        tell(sites, step, late("b", 0.0))
    assert sites.now is None
    for step in range(41, 61):
        tell(sites, step, late("b", 0.3))
    now = sites.now
    assert now is not None
    assert now.site == "b"
    assert 41 - WINDOW <= now.since_step <= 41
    assert now.last_step == 60
    assert now.total_s == pytest.approx(20 * 0.3)
    assert now.cost_s == pytest.approx(0.3, rel=0.4)
    assert now.share == pytest.approx(now.cost_s)


def test_it_is_over_when_it_catches_up_or_another_is_slower() -> None:
    sites = SlowSites()
    for step in range(30):
        tell(sites, step, late("b", 0.3))
    for step in range(30, 60):
        tell(sites, step, late("c", 0.4))
    for step in range(60, 90):
        tell(sites, step, late("a", 0.01))
    assert sites.now is None
    assert [each.site for each in sites.periods] == ["b", "c"]
    assert all(each.is_over for each in sites.periods)
    assert sites.periods[0].last_step < sites.periods[1].last_step < 75


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_one_long_step_are_nobodys_fault(seed: int) -> None:
    chance, sites = random.Random(seed), SlowSites()
    for step in range(200):
        tell(sites, step, {name: 0.1 * chance.random() for name in ABC})
    tell(sites, 200, late("a", 0.9))
    for step in range(201, 230):
        tell(sites, step, {name: 0.1 * chance.random() for name in ABC})
    assert not sites.periods, f"{seed=}"


def test_where_sites_meet_once_in_several_steps_these_count_as_one() -> None:
    sites = SlowSites()
    for step in range(1, 8 * WINDOW + 1):
        meets = step % 4 == 0
        for site in ABC:
            values = {metrics.STEP_S: 1.0, metrics.WAIT_S: 0.8 * (meets and site != "b")}
            if meets:
                values[metrics.ROUND] = step // 4
            sites.add(site, step, values, ABC)
    now = sites.now
    assert now is not None
    assert now.site == "b"
    assert now.share == pytest.approx(0.2, rel=0.01)
    assert now.cost_s == pytest.approx(now.share)


def test_who_takes_no_part_is_not_judged_and_others_begin_anew() -> None:
    sites = SlowSites()
    for step in range(30):
        tell(sites, step, late("b", 0.3))
    assert sites.now is not None
    for step in range(30, 35):
        tell(sites, step, {"a": 0.3, "c": 0.3, "b": 0.0}, frozenset("ac"))
    assert sites.now is None
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
    for step in range(3 * OPEN_STEPS, 3 * OPEN_STEPS + WINDOW):
        tell(sites, step, late("c", 0.5))
    assert sites.now is not None
    assert sites.now.site == "c"


def test_the_periods_are_bounded_over_a_long_run() -> None:
    sites = SlowSites()
    for step in range(4 * WINDOW * MAX_PERIODS):
        tell(sites, step, late("ab"[step // WINDOW // 2 % 2], 0.5))
    assert len(sites.periods) == MAX_PERIODS
