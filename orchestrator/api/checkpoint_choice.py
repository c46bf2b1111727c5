"""Finds the checkpoints that RUN or PATH on a command line means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isthmus.orchestrator.run_folder.home import find_run
from isthmus.protos.checkpoint.manifest import Manifest
from isthmus.protos.checkpoint.store import StoredCheckpoint, checkpoints_in, newest_good, opened
from isthmus.protos.errors import BadCheckpointError, NoCheckpointError
from isthmus.protos.failure import text_of


def named_checkpoints(
    say: Callable[[str], object], choice: str, home: Path
) -> tuple[str, list[StoredCheckpoint]]:
    """Return what the choice is called, and its checkpoints, newest first.

    Args:
        say: Called with each store of a run that does not answer while another does.
        choice: A run; empty: the latest. Or the folder or URL of a checkpoint, or of a run's.
        home: Where runs are kept.

    Raises:
        NotFoundError: there is no such run.
        NoCheckpointError: it keeps none, or there is nothing at that path.
        OSError: no storage answers.
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
    found, errors, stores = [], [], run_stores(folder.run_id, home)
    for store in stores:
        try:
            found += checkpoints_in(store)
        except OSError as error:
            errors.append(error)
    if len(errors) == len(stores):
        raise errors[0]
    for silent in errors:
        say(f"warning: a store does not answer: {text_of(silent)}")
    found.sort(key=lambda stored: stored.step, reverse=True)
    if folder.resumed_checkpoint is not None:  # what it began with is older than all of its own
        found.append(StoredCheckpoint(folder.resumed_checkpoint))
    return f"run {folder.run_id}", found


def newest_good_checkpoint(
    say: Callable[[str], object], choice: str, home: Path
) -> tuple[str, Manifest]:
    """Return the folder or URL of a choice's newest good checkpoint. Tells of bad ones.

    Raises:
        NotFoundError: there is no such run.
        OSError: no storage answers.
        NoCheckpointError: none is good, or there is none.
        BadCheckpointError: the choice is a checkpoint itself, and is not good.
    """
    called, found = named_checkpoints(say, choice, home)
    for stored, outcome in newest_good(found):
        if isinstance(outcome, Manifest):
            return stored.place, outcome
        if called == stored.place:
            raise BadCheckpointError(f"{stored.place} is refused: {outcome}")
        say(f"refused: {outcome}")
    none_good = "no good checkpoint" if found else "no checkpoint"
    raise NoCheckpointError(f"there is {none_good} in {called}")


def run_stores(run_id: str, home: Path) -> tuple[str, ...]:
    """Return the folders or URLs of a run's checkpoints.

    Raises:
        NotFoundError: there is no such run.
        NoCheckpointError: it keeps none.
    """
    stores = find_run(home, run_id).checkpoint_stores
    if not stores:
        raise NoCheckpointError(
            f"run {run_id} keeps no checkpoints: its job has no `checkpoint` section"
        )
    return stores
