"""A checkpoint before a site ends: asked for where it can come in time; no store holds it up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.protos.checkpoint.manifest import MANIFEST, Manifest
from isthmus.protos.checkpoint.requests import requested_step, steps_ahead
from isthmus.protos.checkpoint.store import checkpoint_name
from isthmus.sites.agent import last_checkpoint
from isthmus.sites.agent.last_checkpoint import save_before_end
from tests.fakes.waiting import until

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
        return await save_before_end((str(store),), 100, times_s, within_s, ended)

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
    monkeypatch.setattr(last_checkpoint, "saved_step", lambda *_: 1)
    place = f"{store}{tmp_path}/store"
    why_not = saved(place, step_s=step_s, within_s=within_s)
    assert (why_not == "") is comes, why_not
    assert (requested_step(place) is not None) is comes, "others are not asked in vain"
    if not comes:
        assert f"the site has {within_s:g} s" in why_not


def test_a_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[int | OSError | None] = [None, OSError("slow down"), 1]
    looks = iter(answers)

    def look(stores: tuple[str, ...], step: int, after: int) -> int | None:
        assert step == requested_step(stores[0])
        found = next(looks)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(last_checkpoint, "saved_step", look)
    monkeypatch.setattr(last_checkpoint, "_LOOK_S", 0.0)
    assert saved(tmp_path) == ""
    assert list(looks) == []


def test_sites_that_end_together_have_the_checkpoint_of_the_last_to_ask(tmp_path: Path) -> None:
    """As `isthmus down` ends them: each knows other steps, and ranks heed the latest request."""
    store = tmp_path / "store"

    async def asked(latest_step: int) -> tuple[asyncio.Task[str], int]:
        step = latest_step + steps_ahead((str(store),), 0.5)
        saving = save_before_end((str(store),), latest_step, [0.5], DEADLINE_S, asyncio.Event())
        task = asyncio.create_task(saving)
        await until(lambda: requested_step(str(store)) == step)
        return task, step

    async def story() -> list[str]:
        (one, _), (other, step) = await asked(100), await asked(101)
        place = store / checkpoint_name(step)
        place.mkdir()
        manifest = Manifest(run="run", job="job", step=step, written_s=0.0, ranks={})
        (place / MANIFEST).write_bytes(manifest.to_bytes())
        return [await one, await other]

    assert asyncio.run(story()) == ["", ""]


def test_a_run_that_is_over_is_not_waited_for(tmp_path: Path) -> None:
    assert saved(tmp_path, is_over=True) == "the run was over before"


def test_a_store_that_refuses_ends_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError("expired\ntoken")

    monkeypatch.setattr(last_checkpoint, "request_checkpoint", refuse)
    assert saved(tmp_path) == "none can be asked for: expired token"


@pytest.mark.parametrize("call", ["request_checkpoint", "saved_step"])
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
