"""Which sites have been heard lately."""

import pytest

from isthmus.orchestrator.core.leases import Leases


def test_a_lease_ends_after_silence_only() -> None:
    leases = Leases(5.0)
    leases.hear("a", 0.0)
    leases.hear("b", 0.0)
    for tick in range(1, 51):
        leases.hear("b", tick * 0.1)
        assert leases.expired(tick * 0.1) == {}
    assert leases.expired(5.1) == {"a": 5.1}
    leases.drop("a")
    assert leases.expired(5.2) == {}


def test_a_coordinator_that_stood_still_blames_nobody() -> None:
    leases = Leases(5.0)
    leases.hear("a", 0.0)
    assert leases.expired(0.5) == {}
    assert leases.expired(60.0) == {}
    for tick in range(50):
        assert leases.expired(60.0 + tick * 0.1) == {}
    assert list(leases.expired(65.1)) == ["a"]


@pytest.mark.parametrize("gap_s", [1.1, 2.0, 4.9])
def test_a_coordinator_that_stands_still_again_and_again_misses_a_dead_site(gap_s: float) -> None:
    leases = Leases(5.0)
    for site in ("a", "b"):
        leases.hear(site, 0.0)
    now_s = 0.0
    lost: dict[str, float] = {}
    while not lost:
        now_s += gap_s
        lost = leases.expired(now_s)
        leases.hear("b", now_s + 0.01)
    assert list(lost) == ["a"]
    assert now_s <= 2 * (5.0 + gap_s), "it looks no more often"


def test_a_long_stall_is_told_for_as_long_as_its_consequences_come_in() -> None:
    leases = Leases(5.0)
    assert leases.stood_still_s(100.0) == 0.0
    leases.expired(100.0)
    assert leases.stood_still_s(102.4) == 0.0, "too short to cost a site"
    assert leases.stood_still_s(108.0) == 8.0, "a broken session may be read before the clock ticks"
    leases.expired(108.0)
    for tick in range(52):
        leases.expired(108.0 + tick * 0.1)
    assert leases.stood_still_s(113.0) == 8.0
    assert leases.stood_still_s(113.1) == 0.0
