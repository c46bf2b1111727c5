"""Requests for an extra checkpoint, before a run is stopped, through the checkpoint store.

STORE/request.json holds the step after which all ranks save. The step is so far ahead that each
rank polls the file before it gets there.
"""

from __future__ import annotations

import json
import math

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


def look_every_s(store: str) -> float:
    """Return the interval at which each rank polls."""
    return _LOOK_REMOTE_S if "://" in store else _LOOK_S


def steps_ahead(store: str, shortest_step_s: float) -> int:
    """Return the number of steps from the latest known one to the first that all can save.

    Args:
        store: the run's checkpoint store.
        shortest_step_s: shortest duration of a step.
    """
    ahead_s = 2 * look_every_s(store) + _STALE_S
    return 2 + math.ceil(ahead_s / max(shortest_step_s, 1e-3))


def request_checkpoint(store: str, latest_step: int, shortest_step_s: float) -> int:
    """Request a checkpoint from all ranks; return the step after which they save.

    Args:
        store: the run's checkpoint store.
        latest_step: latest step known of any rank; possibly seconds old.
        shortest_step_s: shortest duration of a step. A rank that passes the step before it polls
            saves nothing, and the others of its site give this checkpoint up.

    Raises:
        OSError: the store cannot be written.
    """
    step = latest_step + steps_ahead(store, shortest_step_s)
    with opened(store) as (files, root):
        files.makedirs(root, exist_ok=True)
        files.pipe_file(f"{root}/{_REQUEST}", json.dumps({"step": step}).encode())
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


def saved_step(store: str, step: int, after: int) -> int | None:
    """Return the step of the requested checkpoint, once it is written; None: not yet.

    Ranks obey only the latest request, so this may be the step of a later one. Where they take
    steps of their own, all sites have the same to save only some steps later.

    Args:
        store: the run's checkpoint store.
        step: result of `request_checkpoint`.
        after: the latest step known at that time.
    """
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
