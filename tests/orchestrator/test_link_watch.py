"""What counts as drift: medians, how long, hysteresis, and links that several nodes share."""

from __future__ import annotations

import dataclasses
import math

import pytest

from isthmus.orchestrator.core.link_watch import BANDWIDTH, BELIEVED, RTT, SAMPLES, LinkWatch
from isthmus.protos import metrics
from isthmus.topology.spec.measured_links import LinkFigures
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.world import Topology
from tests.fakes.worlds import topology

PLANNED = 12.5e6
"""Bytes per second of each link in tests.fakes.worlds."""
AB = ("a", "b")
SETTINGS = Replan(drift=0.2, lasting_s=10.0)


class Reports:
    """What gateways would report of one link, a second apart."""

    def __init__(self, world: Topology | None = None, settings: Replan = SETTINGS) -> None:
        self.watch = LinkWatch(world or topology(3), settings)
        self.now_s = 50.0
        self._totals: dict[str, list[float]] = {}

    def carry(self, *rates: float, gateway: str = "0", for_s: float = 0.4) -> None:
        """A second passes for each rate, in which the link was the limit for a while."""
        for rate in rates:
            self.now_s += 1.0
            self.at_once(rate, gateway=gateway, for_s=for_s)

    def at_once(self, rate: float, *, gateway: str = "0", for_s: float = 0.4) -> None:
        totals = self._totals.setdefault(gateway, [0.0, 0.0])
        totals[0] += rate * for_s
        totals[1] += for_s
        values = {metrics.LIMITED_BYTES: totals[0], metrics.LIMITED_S: totals[1]}
        self.watch.add(AB, gateway, values, self.now_s)

    def greet(self, *rtts_s: float) -> None:
        for rtt_s in rtts_s:
            self.now_s += 1.0
            self.watch.add(AB, "0", {metrics.IDLE_RTT_S: rtt_s}, self.now_s)


def test_drift_counts_once_it_has_lasted() -> None:
    reports = Reports()
    reports.carry(*[PLANNED] * 20)
    reports.carry(*[PLANNED / 10] * 12)
    assert reports.watch.drifts() == ()
    reports.carry(PLANNED / 10)
    (drift,) = reports.watch.drifts()
    assert (drift.source, drift.target, drift.what) == ("a", "b", BANDWIDTH)
    assert drift.now == pytest.approx(PLANNED / 10)
    assert (drift.planned, drift.for_s) == (PLANNED, 10.0)
    assert str(drift).startswith("a to b: bandwidth 10Mbit/s for 10 s, 100Mbit/s planned (-90%; ")
    assert reports.watch.figures() == {AB: LinkFigures(bytes_per_s=drift.now)}


def test_a_gateway_that_starts_again_is_measured_from_its_first_report_on() -> None:
    reports = Reports()
    reports.carry(*[PLANNED] * 20)
    reports._totals.clear()
    reports.carry(*[PLANNED / 10] * 13)
    (drift,) = reports.watch.drifts()
    assert drift.now == pytest.approx(PLANNED / 10)


def test_single_measurements_move_nothing() -> None:
    reports = Reports()
    for _ in range(30):
        reports.carry(PLANNED / 10, PLANNED, PLANNED / 10, PLANNED, PLANNED)
    assert reports.watch.drifts() == ()


def test_between_half_and_all_of_the_threshold_time_neither_begins_nor_ends() -> None:
    reports = Reports()
    reports.carry(*[0.7 * PLANNED] * 8)
    reports.carry(*[0.85 * PLANNED] * 12)  # less far off, but not back
    assert reports.watch.drifts() == (), "it is not told while it is not far off"
    reports.carry(*[0.7 * PLANNED] * 4)
    assert reports.watch.drifts()
    reports.carry(*[0.95 * PLANNED] * 3)
    reports.carry(*[0.7 * PLANNED] * 8)
    assert reports.watch.drifts() == (), "it was back for a moment"
    steady = Reports()
    steady.carry(*[0.85 * PLANNED] * 50)
    assert steady.watch.drifts() == ()


def test_a_link_that_is_not_used_any_more_has_not_drifted_for_longer() -> None:
    reports = Reports()
    reports.carry(*[PLANNED / 10] * 8)
    reports.now_s += 1000
    reports.greet(0.01, 0.01)
    assert reports.watch.drifts() == ()


def test_what_a_plan_was_made_with_is_what_counts_from_then_on() -> None:
    reports = Reports()
    reports.carry(*[PLANNED / 10] * 20)
    reports.watch.assume(reports.watch.figures())
    reports.carry(*[PLANNED / 10] * 50)
    assert reports.watch.drifts() == ()
    narrow_bytes_per_s = reports.watch.figures()[AB].bytes_per_s
    assert narrow_bytes_per_s == pytest.approx(PLANNED / 10), "later plans count on it, too"
    reports.carry(*[PLANNED] * 20)
    (drift,) = reports.watch.drifts()
    assert drift.planned == pytest.approx(PLANNED / 10)
    assert drift.now == pytest.approx(PLANNED)


def believe(reports: Reports, rate: float) -> None:
    """Measure a link for long, and let a plan be made with that."""
    reports.carry(*[rate] * 20)
    assert reports.watch.forget(reports.now_s) == ()
    reports.watch.assume(reports.watch.figures())


def test_what_is_not_measured_any_more_is_believed_for_so_long() -> None:
    reports = Reports()
    believe(reports, PLANNED / 10)
    believed_s = BELIEVED * SETTINGS.lasting_s
    assert reports.watch.forget(reports.now_s + believed_s - 1) == ()
    (forgotten,) = reports.watch.forget(reports.now_s + believed_s)
    assert (forgotten.source, forgotten.target, forgotten.what) == ("a", "b", BANDWIDTH)
    assert str(forgotten) == (
        "a to b: bandwidth 10Mbit/s has not been measured again for 100 s, so 100Mbit/s is planned "
        "with, as described"
    )
    assert reports.watch.figures() == {}
    assert reports.watch.forget(reports.now_s + 10 * believed_s) == (), "once"
    reports.carry(*[PLANNED] * 20)
    assert reports.watch.drifts() == ()


def test_a_link_that_proves_slow_again_is_believed_to_be_twice_as_long() -> None:
    reports = Reports()
    believed_s = BELIEVED * SETTINGS.lasting_s
    for _ in range(4):
        believe(reports, PLANNED / 10)
        assert reports.watch.forget(reports.now_s + believed_s - 1) == ()
        reports.now_s += believed_s
        assert len(reports.watch.forget(reports.now_s)) == 1
        believed_s *= 2
    reports.carry(*[PLANNED] * SAMPLES)  # it is well again: the next time is the first
    believe(reports, PLANNED / 10)
    reports.now_s += BELIEVED * SETTINGS.lasting_s
    assert len(reports.watch.forget(reports.now_s)) == 1


def test_a_node_that_is_none_is_not_heard() -> None:
    reports = Reports()
    for number in range(100):
        reports.carry(*[PLANNED / 10] * SAMPLES, gateway=str(number + 1))
    assert reports.watch.figures() == {}
    assert reports.watch._totals == {}, "it keeps nothing of them"


def test_measurements_of_long_ago_are_no_drift() -> None:
    reports = Reports()
    reports.carry(*[PLANNED / 10] * 4)
    assert reports.watch.figures() != {}
    reports.now_s += BELIEVED * SETTINGS.lasting_s
    assert reports.watch.forget(reports.now_s) == (), "no plan has counted on it"
    assert reports.watch.figures() == {}
    reports.carry(PLANNED)
    assert reports.watch.drifts() == ()


def test_a_link_in_use_keeps_what_is_measured() -> None:
    reports = Reports()
    for _ in range(5):
        believe(reports, PLANNED / 10)
        reports.carry(*[PLANNED / 10] * int(BELIEVED * SETTINGS.lasting_s))
        assert reports.watch.drifts() == ()


def test_round_trips_drift_too_but_not_by_milliseconds() -> None:
    reports = Reports()
    reports.greet(*[0.019] * 50)
    assert reports.watch.drifts() == ()
    reports.greet(*[0.05] * 20)
    (drift,) = reports.watch.drifts()
    assert (drift.what, drift.now) == (RTT, 0.05)
    assert reports.watch.figures() == {AB: LinkFigures(rtt_s=0.05)}


def test_nodes_of_a_site_carry_together() -> None:
    world = topology(3)
    sites = tuple(dataclasses.replace(site, nodes=2) for site in world.sites)
    reports = Reports(dataclasses.replace(world, sites=sites))
    for _ in range(20):
        reports.carry(PLANNED / 2, gateway="0")
        reports.at_once(PLANNED / 2, gateway="1")
    assert reports.watch.drifts() == ()
    for _ in range(20):
        reports.carry(PLANNED / 20, gateway="0")
        reports.at_once(PLANNED / 20, gateway="1")
    (drift,) = reports.watch.drifts()
    assert drift.now == pytest.approx(PLANNED / 10)


def test_a_shared_link_never_counts_for_more_than_its_share() -> None:
    world = topology(3)
    links = tuple(dataclasses.replace(link, share=0.5) for link in world.links)
    reports = Reports(dataclasses.replace(world, links=links))
    reports.carry(*[2 * PLANNED] * 50)
    assert reports.watch.drifts() == ()


def test_reports_of_links_that_are_none_and_of_nothing_carried_change_nothing() -> None:
    reports = Reports()
    reports.watch.add(("a", "z"), "0", {metrics.LIMITED_BYTES: 1e9, metrics.LIMITED_S: 1.0}, 1.0)
    for figure in (math.nan, math.inf, -math.inf):
        for values in (
            {metrics.LIMITED_BYTES: figure, metrics.LIMITED_S: 1e9},
            {metrics.LIMITED_BYTES: 1e9, metrics.LIMITED_S: figure},
            {metrics.IDLE_RTT_S: figure},
        ):
            for _ in range(4 * SAMPLES):
                reports.now_s += 10
                reports.watch.add(AB, "0", values, reports.now_s)
    assert reports.watch.figures() == {}
    reports.carry(*[0.0] * (4 * SAMPLES))
    reports.carry(*[PLANNED / 10] * 20, for_s=0.0)
    assert reports.watch.drifts() == ()
