"""How a rank leaves its run when its process exits."""

from __future__ import annotations

import multiprocessing
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.sites.worker.api.life import Life


class RecordedLink:
    """Records how it was ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def leave(self, *, has_averaged: bool) -> None:
        self.ended.append(f"left, averaged: {has_averaged}")

    def close(self) -> None:
        self.ended.append("closed")


@pytest.mark.parametrize(
    ("exception", "parent", "ended"),
    [
        (None, None, "left, averaged: True"),
        (ValueError(), None, "closed"),
        # multiprocessing keeps a child's exception to itself.
        (None, object(), "closed"),
    ],
)
def test_who_has_not_left_leaves_at_exit_unless_it_may_have_crashed(
    monkeypatch: pytest.MonkeyPatch, exception: Exception | None, parent: object, ended: str
) -> None:
    link: Any = RecordedLink()
    context: Any = SimpleNamespace(must_average=True)
    members: Any = None
    life = Life(context, link, members, has_averaged=lambda: True, before=(), after=())
    monkeypatch.setattr(sys, "last_value", exception, raising=False)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    life._leave_at_exit()
    assert link.ended == [ended]
    life.leave()
    assert link.ended[:1] == [ended]
