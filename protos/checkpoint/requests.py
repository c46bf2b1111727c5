"""A checkpoint out of turn, before a run is stopped: asked for in the store, where all sites look.

STORE/request.json holds the step after which all ranks save. It lies so far ahead that each rank
has looked before it gets there.
"""

from __future__ import annotations

import json
import math

from isthmus.protos.checkpoint.store import StoredCheckpoint, checkpoint_name, joined, opened
from isthmus.protos.errors import BadCheckpointError

_REQUEST = "request.json"
_LOOK_S = 1.0
_LOOK_REMOTE_S = 5.0
_STALE_S = 3.0
"""What is known of a run's steps may be so old."""
_REQUEST_BYTES = 4096


def look_every_s(store: str) -> float:
    """Return how often each rank looks."""
    return _LOOK_REMOTE_S if "://" in store else _LOOK_S


def steps_ahead(store: str, shortest_step_s: float) -> int:
    """Return how many steps lie between the latest known one and the first that all can save.

    Args:
        store: the run's.
        shortest_step_s: what a step takes at least.
    """
    ahead_s = 2 * look_every_s(store) + _STALE_S
    return 2 + math.ceil(ahead_s / max(shortest_step_s, 1e-3))


def request_checkpoint(store: str, latest_step: int, shortest_step_s: float) -> int:
    """Ask all ranks of the run to save, and return after which step they will.

    Args:
        store: the run's.
        latest_step: that any rank is known to have taken; it may be seconds old.
        shortest_step_s: what a step takes at least. A rank that passes the step before it has
            looked saves nothing, and the others of its site give this checkpoint up.

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
    """Return the step of the checkpoint that was asked for, once it is there; None: not yet.

    Ranks heed the latest request only. So it may be that of another who has asked since.

    Args:
        store: the run's.
        step: what `request_checkpoint` returned.
        after: the latest step that was known then.
    """
    wanted = requested_step(store)
    others = () if wanted is None or wanted <= after else (wanted,)
    return next((each for each in (step, *others) if is_written(store, each)), None)


def is_written(store: str, step: int) -> bool:
    """Return whether the checkpoint of a step is there, as far as its manifest says."""
    try:
        with opened(store) as (files, _):
            files.invalidate_cache()
        StoredCheckpoint(joined(store, checkpoint_name(step))).manifest()
    except (BadCheckpointError, OSError):
        return False
    return True
