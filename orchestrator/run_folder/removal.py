"""Removes what this machine keeps of a run: a folder is renamed first, and so gone as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from isthmus.orchestrator.run_folder.home import RunFolder

UP = "up"
"""The folder of HOME with what `isthmus up` keeps of each topology."""
_BLOCK_BYTES = 512
"""What `st_blocks` counts, whatever the file system's own blocks are."""
_REMOVED = "removed"


def folders_of(home: Path, folder: RunFolder) -> list[Path]:
    """Return what a run has in HOME, and its files at a coordinator on this machine.

    Its checkpoints are not among them.
    """
    places = [folder.path]
    if folder.state is not None and folder.state != folder.path:
        places.append(folder.state / "runs" / folder.run_id)
    places += (home / UP).glob(f"*/sites/*/state/{folder.run_id}")
    return [place for place in places if place.is_dir()]


def size_of(folders: list[Path]) -> int:
    """Return the bytes of disk that folders take: of a file with holes, what it really takes."""
    return sum(_blocks(path) for folder in folders for path in _inside(folder)) * _BLOCK_BYTES


def remove(folders: list[Path]) -> None:
    """Remove folders, and what an earlier call that was cut short has left beside them.

    Raises:
        OSError: the disk refuses; what was renamed by then is no run's any more.
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
    except OSError:  # gone meanwhile
        return 0
