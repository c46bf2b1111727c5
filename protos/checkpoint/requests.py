"""Requests for an extra checkpoint, before a run is stopped, through the checkpoint store.

STORE/request.json holds the step after which all ranks save. The step is so far ahead that each
rank polls the file before it gets there. With several stores, a request goes into each of them, and
the first that answers will do: each is asked in a thread of its own, since one that fails may take
minutes to do so.
"""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from isthmus.protos.checkpoint.store import (
    StoredCheckpoint,
    checkpoint_name,
    joined,
    opened,
    steps_in,
)
from isthmus.protos.errors import BadCheckpointError

_REQUEST = "request.json"
_LOOK_S = 1.0
_LOOK_REMOTE_S = 5.0
_STALE_S = 3.0
"""Age up to which knowledge of a run's steps may be outdated."""
_REQUEST_BYTES = 4096
T = TypeVar("T")


def look_every_s(store: str) -> float:
    """Return the interval at which each rank polls a store."""
    return _LOOK_REMOTE_S if "://" in store else _LOOK_S


def steps_ahead(stores: tuple[str, ...], shortest_step_s: float) -> int:
    """Return the number of steps from the latest known one to the first that all can save.

    Args:
        stores: the run's checkpoint stores.
        shortest_step_s: shortest duration of a step.
    """
    ahead_s = 2 * max(map(look_every_s, stores)) + _STALE_S
    return 2 + math.ceil(ahead_s / max(shortest_step_s, 1e-3))


def request_checkpoint(stores: tuple[str, ...], latest_step: int, shortest_step_s: float) -> int:
    """Request a checkpoint from all ranks; return the step after which they save.

    Args:
        stores: the run's checkpoint stores.
        latest_step: latest step known of any rank; possibly seconds old.
        shortest_step_s: shortest duration of a step. A rank that passes the step before it polls
            saves nothing, and the others of its site give this checkpoint up.

    Raises:
        OSError: no store can be written.
    """
    step = latest_step + steps_ahead(stores, shortest_step_s)
    _first_answer(stores, partial(_request, step=step))
    return step


def requested_step(store: str) -> int | None:
    """Return the step of the latest request; None: there is no request, or none can be read."""
    try:
        with opened(store) as (files, root):
            files.invalidate_cache()
            with files.open(f"{root}/{_REQUEST}", "rb") as file:
                written = file.read(_REQUEST_BYTES)
        step = json.loads(written)["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def saved_step(stores: tuple[str, ...], step: int, after: int) -> int | None:
    """Return the step of the requested checkpoint, once it is written; None: not yet.

    Ranks obey only the latest request, so this may be the step of a later one. Where they take
    steps of their own, all sites have the same to save only some steps later.

    Args:
        stores: the run's checkpoint stores.
        step: result of `request_checkpoint`.
        after: the latest step known at that time.
    """
    return _first_answer(stores, partial(_saved_step, step=step, after=after))


def _first_answer(stores: tuple[str, ...], ask: Callable[[str], T | None]) -> T | None:
    """Return what the first store answers that does not answer None; None: all do.

    Raises:
        OSError: all stores fail.
    """
    if len(stores) == 1:
        return ask(stores[0])
    answers: queue.SimpleQueue[T | OSError | None] = queue.SimpleQueue()

    def answer(store: str) -> None:
        try:
            answers.put(ask(store))
        except OSError as error:
            answers.put(error)

    for store in stores:
        threading.Thread(target=answer, args=(store,), name="store", daemon=True).start()
    errors = []
    for _ in stores:
        found = answers.get()
        if isinstance(found, OSError):
            errors.append(found)
        elif found is not None:
            return found
    if len(errors) == len(stores):
        raise errors[0]
    return None


def _request(store: str, step: int) -> bool:
    with opened(store) as (files, root):
        files.makedirs(root, exist_ok=True)
        files.pipe_file(f"{root}/{_REQUEST}", json.dumps({"step": step}).encode())
    return True


def _saved_step(store: str, step: int, after: int) -> int | None:
    wanted = requested_step(store)
    least = step if wanted is None or wanted <= after else min(step, wanted)
    try:
        later = [each for each in steps_in(store) if each >= least and each > after]
    except OSError:
        return None
    return next((each for each in later if is_written(store, each)), None)


def is_written(store: str, step: int) -> bool:
    """Return whether the checkpoint of a step has a manifest."""
    try:
        with opened(store) as (files, _):
            files.invalidate_cache()
        StoredCheckpoint(joined(store, checkpoint_name(step))).manifest()
    except (BadCheckpointError, OSError):
        return False
    return True
