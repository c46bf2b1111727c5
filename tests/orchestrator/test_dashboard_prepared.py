"""Answers that take long are given as they were, while they are made anew."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from isthmus.orchestrator.dashboard.prepared import DEAR_S, OLD_S, PreparedAnswers
from tests.fakes.waiting import wait_for


class Clock:
    """Shows what a test says."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def prepared(clock: Clock) -> Iterator[PreparedAnswers]:
    with closing(PreparedAnswers(clock, clock)) as made:
        yield made


def test_what_has_not_changed_is_made_once(prepared: PreparedAnswers) -> None:
    assert prepared.get("page", 1, lambda: "one") == "one"
    assert prepared.get("page", 1, lambda: "not made") == "one"
    assert prepared.get("other", 1, lambda: "two") == "two"


def test_what_is_quickly_made_is_never_old(prepared: PreparedAnswers) -> None:
    for version in range(5):
        assert prepared.get("page", version, partial(str, version)) == str(version)


def test_what_takes_long_is_made_beside_whoever_asks(
    prepared: PreparedAnswers, clock: Clock
) -> None:
    goes_on = threading.Event()

    def slow(answer: str) -> str:
        clock.now_s += 2 * DEAR_S
        return answer

    def waits() -> str:
        assert goes_on.wait(20)
        return slow("second")

    assert prepared.get("page", 1, lambda: slow("first")) == "first"
    assert prepared.get("page", 2, waits) == "first"
    assert prepared.get("page", 2, lambda: slow("twice")) == "first", "it is being made already"
    goes_on.set()
    wait_for(lambda: prepared.get("page", 2, lambda: slow("twice")) == "second")
    clock.now_s += OLD_S
    assert prepared.get("page", 3, lambda: slow("third")) == "third", "the last one is too old"


def test_what_cannot_be_made_tells_whoever_asks_next(
    prepared: PreparedAnswers, clock: Clock
) -> None:
    def slow() -> str:
        clock.now_s += 2 * DEAR_S
        return "first"

    def fails() -> str:
        raise OSError("gone")

    def is_told() -> bool:
        try:
            prepared.get("page", 2, fails)
        except OSError:
            return True
        return False

    prepared.get("page", 1, slow)
    wait_for(is_told)
