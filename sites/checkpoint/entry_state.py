"""Finds the checkpoint that others have saved for a site which comes back."""

from __future__ import annotations

import time

from protos.checkpoint.requests import look_every_s
from protos.checkpoint.store import checkpoints_in
from protos.errors import BadCheckpointError, DeadlineExceededError

_LOOKED_AT = 4
"""The newest checkpoints; no others are saved before the site has entered."""


def wait_for_entry(store: str, epoch: int, within_s: float) -> str:
    """Return the place of the checkpoint with which an epoch begins, once it is whole.

    Raises:
        DeadlineExceededError: it did not come.
    """
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        for stored in checkpoints_in(store)[:_LOOKED_AT]:
            try:
                if stored.manifest().epoch == epoch:
                    return stored.place
            except (BadCheckpointError, OSError):  # one that is being written, to a URL say
                continue
        time.sleep(look_every_s(store))
    raise DeadlineExceededError(
        f"{store}: the others have saved no checkpoint for epoch {epoch} within {within_s:g} s"
    )
