"""Has all sites write a last checkpoint before this one ends, if time permits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from isthmus.protos.checkpoint.requests import request_checkpoint, saved_step, steps_ahead
from isthmus.protos.failure import one_line, text_of

_LOOK_S = 0.2
T = TypeVar("T")

log = logging.getLogger(__name__)


async def save_before_end(
    stores: tuple[str, ...],
    latest_step: int,
    step_times_s: Sequence[float],
    within_s: float,
    ended: asyncio.Event,
    *,
    sync_every: int = 1,
) -> str:
    """Have all sites write a checkpoint, and wait; return in time even if the store hangs.

    Args:
        stores: Folders or URLs of the run's checkpoint stores.
        latest_step: Latest step known of any rank here.
        step_times_s: Durations of the latest steps.
        within_s: Time limit.
        ended: Set once the run is over anyway.
        sync_every: Steps between those after which all sites have the same to save.

    Returns:
        Why no checkpoint was written; empty if it was.
    """
    shortest_s = min(step_times_s, default=0.0)
    ahead = steps_ahead(stores, shortest_s)
    ahead += -(latest_step + ahead) % sync_every
    comes_s = ahead * statistics.median(step_times_s) if step_times_s else 0.0
    if comes_s > within_s:
        return (
            f"all ranks can save after step {latest_step + ahead} at the earliest, in some "
            f"{comes_s:.0f} s, and the site has {within_s:g} s"
        )
    why = "the store does not answer"
    try:
        async with asyncio.timeout(within_s):
            try:
                step = await _in_thread(request_checkpoint, stores, latest_step, shortest_s)
            except OSError as error:
                return f"none can be asked for: {one_line(text_of(error))}"
            log.info("waiting for the checkpoint of step %d", step)
            why = f"that of step {step} was not written in time"
            while not ended.is_set():
                try:
                    if await _in_thread(saved_step, stores, step, latest_step) is not None:
                        return ""
                except OSError as error:  # try again at the next poll
                    why = f"that of step {step} cannot be seen: {one_line(text_of(error))}"
                await asyncio.sleep(_LOOK_S)
            return "the run was over before"
    except TimeoutError:
        return f"{why}, within {within_s:g} s"


async def _in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Run a call that may hang on a thread that does not delay the process's end.

    asyncio.to_thread would not do: the interpreter waits for its threads.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type] # without an error it is one

    def run() -> None:
        result, failed = None, None
        try:
            result = call(*arguments)
        except Exception as error:  # noqa: BLE001 - a thread's root: who waits gets it
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="store", daemon=True).start()
    return await done
