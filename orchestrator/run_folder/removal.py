"""Removes a run's folders from this machine; a folder is first renamed, so it vanishes at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from isthmus.orchestrator.run_folder.home import RunFolder

UP = "up"
"""Folder in HOME of `isthmus up`'s state by topology."""
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, independent of the file system."""
_REMOVED = "removed"


def folders_of(home: Path, folder: RunFolder) -> list[Path]:
    """Return a run's folders in HOME, and at a coordinator on this machine.

    Checkpoints are not included.
    """
    places = [folder.path]
    if folder.state is not None and folder.state != folder.path:
        places.append(folder.state / "runs" / folder.run_id)
    places += (home / UP).glob(f"*/sites/*/state/{folder.run_id}")
    return [place for place in places if place.is_dir()]


def size_of(folders: list[Path]) -> int:
    """Return the disk space of folders in bytes; holes in files do not count."""
    return sum(_blocks(path) for folder in folders for path in _inside(folder)) * _BLOCK_BYTES


def remove(folders: list[Path]) -> None:
    """Remove folders, and the leftovers of an interrupted earlier call beside them.

    Raises:
        OSError: the disk refuses; folders renamed by then no longer count as runs.
    """
    for folder in folders:
        folder.rename(folder.with_name(f".{folder.name}.{os.getpid()}.{_REMOVED}"))
    for parent in {folder.parent for folder in folders}:
        for left in parent.glob(f".*.{_REMOVED}"):
            shutil.rmtree(left)


def _inside(folder: Path) -> Iterator[Path]:
    yield folder
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(place, name)


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks
    except OSError:  # removed meanwhile
        return 0
