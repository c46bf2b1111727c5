"""Asks a run that goes on for a checkpoint, and waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from isthmus.orchestrator.api.checkpoint_choice import run_stores
from isthmus.orchestrator.client.run_reader import TERMINAL, RunReader
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.protos import metrics
from isthmus.protos.checkpoint.requests import request_checkpoint, saved_step
from isthmus.protos.control.v1 import control_pb2

Item = TypeVar("Item")
_LOOK_S = 0.2
_RATE_S = 1.0


def saved(reader: RunReader, home: Path, deadline_s: float) -> str:
    """Have a run write a checkpoint, and return what came of it in words.

    Raises:
        NoCheckpointError: the run keeps none.
    """
    run = reader.get()
    stores = run_stores(run.run_id, home)
    if run.state in TERMINAL:
        return "the run has ended"
    before = _latest_step(run)
    time.sleep(_RATE_S)
    run = reader.get()
    latest = _latest_step(run)
    if latest == 0:
        return "no checkpoint: the run has taken no step, as far as is known"
    times_s = [site.latest[metrics.STEP_S] for site in run.sites if metrics.STEP_S in site.latest]
    if latest > before:
        times_s.append(_RATE_S / (latest - before))  # one step's time says little of short ones
    shortest_s = min(times_s, default=0.0)
    try:
        step = _answered(deadline_s, lambda: request_checkpoint(stores, latest, shortest_s))
        while time.monotonic() < deadline_s:
            found = _answered(deadline_s, lambda: saved_step(stores, step, latest))
            if found is not None:
                return f"checkpoint of step {found} in {' or '.join(stores)}"
            if reader.get().state in TERMINAL:
                return "the run has ended"
            INTERRUPTION.check()
            time.sleep(_LOOK_S)
    except TimeoutError:
        return f"warning: no checkpoint: {' or '.join(stores)} does not answer"
    return f"warning: no checkpoint of step {step} in time"


def _answered(deadline_s: float, call: Callable[[], Item]) -> Item:
    """Return what a store answers, which may hang: its thread is left behind then.

    Raises:
        TimeoutError: it has not answered by the deadline.
        OSError: it refuses.
    """
    answers: queue.Queue[Item | OSError] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(call())
        except OSError as error:
            answers.put(error)

    threading.Thread(target=ask, name="store", daemon=True).start()
    try:
        answer = INTERRUPTION.next_of(answers, deadline_s - time.monotonic())
    except queue.Empty as error:
        raise TimeoutError from error
    if isinstance(answer, OSError):
        raise answer
    return answer


def _latest_step(run: control_pb2.Run) -> int:
    return max((site.step for site in run.sites), default=0)
