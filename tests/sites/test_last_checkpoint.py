"""A checkpoint before a site ends: asked for where it can come in time; no store holds it up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protos.checkpoint.requests import requested_step
from sites.agent import last_checkpoint
from sites.agent.last_checkpoint import save_before_end

DEADLINE_S = 30.0


def saved(
    store: object,
    *,
    step_s: float = 1.0,
    within_s: float = DEADLINE_S,
    is_over: bool = False,
) -> str:
    """Save before the end of a site at step 100; return why there is no checkpoint."""

    async def story() -> str:
        ended = asyncio.Event()
        if is_over:
            ended.set()
        times_s = [step_s] * 32
        return await save_before_end(str(store), 100, times_s, within_s, ended)

    return asyncio.run(asyncio.wait_for(story(), 2 * DEADLINE_S))


@pytest.mark.parametrize(
    ("store", "step_s", "within_s", "comes"),
    [
        ("", 0.5, 20.0, True),  # 12 steps
        ("", 7.0, 20.0, False),  # 3 steps
        ("", 7.0, 40.0, True),
        ("memory://", 1.0, 20.0, True),  # 15 steps
        ("memory://", 4.0, 20.0, False),  # 6 steps
    ],
)
def test_a_step_that_cannot_come_in_time_is_not_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    step_s: float,
    within_s: float,
    comes: bool,
) -> None:
    monkeypatch.setattr(last_checkpoint, "is_written", lambda *_: True)
    place = f"{store}{tmp_path}/store"
    why_not = saved(place, step_s=step_s, within_s=within_s)
    assert (why_not == "") is comes, why_not
    assert (requested_step(place) is not None) is comes, "others are not asked in vain"
    if not comes:
        assert f"the site has {within_s:g} s" in why_not


def test_a_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool | OSError] = [False, OSError("slow down"), True]
    looks = iter(answers)

    def look(store: str, step: int) -> bool:
        assert step == requested_step(store)
        found = next(looks)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(last_checkpoint, "is_written", look)
    monkeypatch.setattr(last_checkpoint, "_LOOK_S", 0.0)
    assert saved(tmp_path) == ""
    assert list(looks) == []


def test_a_run_that_is_over_is_not_waited_for(tmp_path: Path) -> None:
    assert saved(tmp_path, is_over=True) == "the run was over before"


def test_a_store_that_refuses_ends_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError("expired\ntoken")

    monkeypatch.setattr(last_checkpoint, "request_checkpoint", refuse)
    assert saved(tmp_path) == "none can be asked for: expired token"


@pytest.mark.parametrize("call", ["request_checkpoint", "is_written"])
def test_a_store_that_hangs_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    released = threading.Event()
    hang: Callable[..., bool] = lambda *_: released.wait(DEADLINE_S)  # noqa: E731 - it is one call
    monkeypatch.setattr(last_checkpoint, call, hang)
    monkeypatch.setattr(last_checkpoint, "steps_ahead", lambda *_: 1)
    began_s = time.monotonic()
    try:
        why_not = saved(tmp_path, step_s=0.1, within_s=0.3)
    finally:
        released.set()
    assert "within 0.3 s" in why_not
    # The loop is closed, too: it has waited for no thread.
    assert time.monotonic() - began_s < DEADLINE_S
