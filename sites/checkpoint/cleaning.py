"""Removes old checkpoints, and leftovers of failed or killed writers.

Parts that may become a checkpoint, or that another process still writes, are kept:

- A rank writes one checkpoint at a time. Once all ranks of a site have given a step up, or have
  come to a later one, none of them writes that step.
- A site's part with a list of its files may become part of a checkpoint, unless the publishing site
  has given the step up. So only that site removes parts with a list. Every other site removes its
  own part while it has no list.
- Once a checkpoint is complete, leftovers of earlier ones are useless.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from isthmus.protos.checkpoint.manifest import MANIFEST
from isthmus.protos.checkpoint.store import StoredCheckpoint, checkpoints_in
from isthmus.protos.failure import text_of
from isthmus.sites.checkpoint.place import LIST, OWN, PUBLISHES, SHARED, Place

_HALF_WRITTEN = re.compile(r"\.step-(\d{8,})\.g(\d+)")


def remove_parts(place: Place, through_step: int) -> None:
    """Remove this site's leftovers of steps up to `through_step`, which it no longer writes.

    All ranks of the site may call this; one does the work. A failed removal is retried at the next
    checkpoint. At a URL there is nothing to tell leftovers from what is being written: they go with
    `remove_superseded`.
    """
    if place.rank != 0 or place.is_remote:
        return
    for folder in _half_written(Path(place.store), place.generation, through_step):
        part = folder / OWN / place.site
        with suppress(OSError):
            if (part / PUBLISHES).exists():
                _give_up(folder, part)
            elif part.exists() and not (part / LIST).exists():
                shutil.rmtree(part)


def remove_asked(place: Place, through_step: int) -> None:
    """Remove what the node's gateway wrote for steps up to `through_step`."""
    if place.local_rank == 0:
        for folder in _half_written(place.local, place.generation, through_step):
            shutil.rmtree(folder, ignore_errors=True)


def _give_up(folder: Path, own: Path) -> None:
    """Remove the parts of an unpublished checkpoint that no process writes.

    Parts that others still write stay until next time, and with them the mark of the publisher.
    """
    for name in (MANIFEST, f".{MANIFEST}"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / SHARED, ignore_errors=True)
    for file in own.iterdir():
        if file.name != PUBLISHES:
            file.unlink(missing_ok=True)
    others = [part for part in own.parent.iterdir() if part != own]
    listed = [part for part in others if (part / LIST).exists()]
    for left in [folder] if listed == others else listed:
        shutil.rmtree(left, ignore_errors=True)


def remove_superseded(place: Place, step: int) -> list[tuple[int, str]]:
    """Remove superseded checkpoints, now that the checkpoint of `step` is complete.

    That is every older one except the newest `keep` with a manifest. So incomplete ones go, too.
    Newer ones may be under way.

    Returns:
        (step, reason) of those that could not be removed.
    """
    if not place.is_remote:
        for left in _half_written(Path(place.store), place.generation, step - 1):
            shutil.rmtree(left, ignore_errors=True)
    try:
        superseded = _superseded(place, step)
    except OSError as error:
        return [(step, f"older ones cannot be looked for: {text_of(error)}")]
    stay = []
    for each in superseded:
        try:
            each.remove()
        except OSError as error:
            stay.append((each.step, text_of(error)))
    return stay


def _superseded(place: Place, step: int) -> list[StoredCheckpoint]:
    found = checkpoints_in(place.store)
    kept = [each for each in found if each.has_manifest()][: place.keep]
    return [each for each in found if each.step < step and each not in kept]


def _half_written(root: Path, own_generation: int, through_step: int) -> list[Path]:
    """Return unfinished folders of steps up to `through_step`, and of earlier generations."""
    folders = []
    with suppress(OSError):
        for folder in root.glob(".step-*"):
            if match := _HALF_WRITTEN.fullmatch(folder.name):
                step, generation = map(int, match.groups())
                if (generation, step) <= (own_generation, through_step):
                    folders.append(folder)
    return folders
