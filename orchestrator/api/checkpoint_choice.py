"""Finds the checkpoints that RUN or PATH on a command line means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isthmus.orchestrator.run_folder.home import find_run
from isthmus.protos.checkpoint.manifest import Manifest
from isthmus.protos.checkpoint.store import StoredCheckpoint, checkpoints_in, newest_good, opened
from isthmus.protos.errors import BadCheckpointError, NoCheckpointError


def named_checkpoints(choice: str, home: Path) -> tuple[str, list[StoredCheckpoint]]:
    """Return what the choice is called, and its checkpoints, newest first.

    Args:
        choice: A run; empty: the latest. Or the folder or URL of a checkpoint, or of a run's.
        home: Where runs are kept.

    Raises:
        NotFoundError: there is no such run.
        NoCheckpointError: it keeps none, or there is nothing at that path.
        OSError: the storage does not answer.
    """
    if "://" in choice or "/" in choice or Path(choice or "?").is_dir():
        place = choice if "://" in choice else str(Path(choice).absolute())
        if StoredCheckpoint(place).has_manifest():
            return place, [StoredCheckpoint(place)]
        found = checkpoints_in(place)
        with opened(place) as (files, root):
            if not found and not files.exists(root):
                raise NoCheckpointError(f"there is no checkpoint in {place}: nothing is there")
        return place, found
    folder = find_run(home, choice)
    store = store_of(folder.run_id, home)
    found = checkpoints_in(store)
    if folder.resumed_checkpoint is not None:  # what it began with is older than all of its own
        found.append(StoredCheckpoint(folder.resumed_checkpoint))
    return f"run {folder.run_id}", found


def newest_good_checkpoint(
    told: Callable[[str], object], choice: str, home: Path
) -> tuple[str, Manifest]:
    """Return the folder or URL of a choice's newest good checkpoint. Tells of bad ones.

    Raises:
        NotFoundError: there is no such run.
        OSError: the storage does not answer.
        NoCheckpointError: none is good, or there is none.
        BadCheckpointError: the choice is a checkpoint itself, and is not good.
    """
    called, found = named_checkpoints(choice, home)
    for stored, outcome in newest_good(found):
        if isinstance(outcome, Manifest):
            return stored.place, outcome
        if called == stored.place:
            raise BadCheckpointError(f"{stored.place} is refused: {outcome}")
        told(f"refused: {outcome}")
    none_good = "no good checkpoint" if found else "no checkpoint"
    raise NoCheckpointError(f"there is {none_good} in {called}")


def store_of(run_id: str, home: Path) -> str:
    """Return the folder or URL of a run's checkpoints.

    Raises:
        NotFoundError: there is no such run.
        NoCheckpointError: it keeps none.
    """
    store = find_run(home, run_id).checkpoint_store
    if store is None:
        raise NoCheckpointError(
            f"run {run_id} keeps no checkpoints: its job has no `checkpoint` section"
        )
    return store
