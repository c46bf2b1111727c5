"""A rank's watch for checkpoints out of turn outlives a store that does not answer."""

from __future__ import annotations

import threading

import pytest

from isthmus.sites.checkpoint import request_watch
from isthmus.sites.checkpoint.request_watch import RequestWatch

LONG_S = 30.0


def test_a_request_stays_known_while_the_store_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [None, 7, None, 9, None]
    has_looked = threading.Event()

    def look(_: str) -> int | None:
        if not answers:
            has_looked.set()
            return None
        return answers.pop(0)

    monkeypatch.setattr(request_watch, "look_every_s", lambda _: 0.001)
    monkeypatch.setattr(request_watch, "requested_step", look)
    watch = RequestWatch(["memory://bucket/run"])
    assert has_looked.wait(LONG_S)
    watch.close()
    assert watch.step == 9


def test_a_store_that_hangs_keeps_no_request_of_another_one_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_released, is_seen = threading.Event(), threading.Event()

    def look(store: str) -> int | None:
        if store == "memory://gone/run":
            is_released.wait(LONG_S)
            return None
        if watch.step == 7:
            is_seen.set()
        return 7

    monkeypatch.setattr(request_watch, "look_every_s", lambda _: 0.001)
    monkeypatch.setattr(request_watch, "requested_step", look)
    watch = RequestWatch(["memory://gone/run", "memory://bucket/run"])
    assert is_seen.wait(LONG_S)
    is_released.set()
    watch.close()
