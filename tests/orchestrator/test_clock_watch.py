"""A clock that is set is noticed, and one that is slewed is not."""

from __future__ import annotations

import pytest

from isthmus.orchestrator.core.clock_watch import ClockWatch


@pytest.mark.parametrize(
    ("set_by_s", "told"),
    [
        (-3600.0, "was set back by 3600 s"),
        (-2.5, "was set back by 2 s"),
        (30.0, "was set forward by 30 s, or its machine was suspended"),
        (0.5, ""),
        (-1.0, ""),
    ],
)
def test_a_clock_that_was_set_is_told_once(set_by_s: float, told: str) -> None:
    watch = ClockWatch()
    found = [watch.look(1e9 + at / 4, at / 4) for at in range(20)]
    found += [watch.look(1e9 + set_by_s + at / 4, at / 4) for at in range(20, 40)]
    assert [told in each and bool(each) for each in found if each] == ([True] if told else [])
    assert bool(found[20]) is bool(told)


def test_a_clock_that_is_slewed_is_not_told() -> None:
    watch, slewed_by = ClockWatch(), 0.0005  # what ntpd and chrony do at most for long
    assert not any(watch.look(1e9 + at * (1 + slewed_by), at) for at in range(100_000))


def test_a_process_that_stood_still_is_no_clock_that_was_set() -> None:
    watch = ClockWatch()
    assert [watch.look(1e9 + at, at) for at in (0.0, 1.0, 500.0)] == ["", "", ""]
