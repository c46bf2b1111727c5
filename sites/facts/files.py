"""The files and folders of a run: whether data can be read, and something can be written."""

from __future__ import annotations

import os
import tempfile
from itertools import islice
from pathlib import Path

from topology.machine_facts import Folder, Matches

_OPENED_MAX = 1000
"""Files of one pattern that are opened; more take too long, and most often are all alike."""
_FREE_BYTES = 1 << 12
"""A file of so many bytes must fit."""


def match(pattern: str) -> Matches:
    """Count the files that an absolute pattern matches, and open the first ones."""
    path = Path(pattern)
    try:
        root = Path(path.anchor)
        files = [each for each in root.glob(str(path.relative_to(root))) if each.is_file()]
    except (OSError, ValueError, NotImplementedError) as error:
        return Matches(pattern=pattern, num_files=0, error=str(error))
    for each in islice(sorted(files), _OPENED_MAX):
        try:
            each.open("rb").close()
        except OSError as error:
            reason = f"{each}: {error.strerror}"
            return Matches(pattern=pattern, num_files=len(files), error=reason)
    return Matches(pattern=pattern, num_files=len(files))


def look_at_folder(path: str) -> Folder:
    """Write and delete a file in a folder, or in the nearest one above that is there."""
    there = Path(path)
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there, prefix=".isthmus-") as file:
            file.write(b"\0" * _FREE_BYTES)
            file.flush()
        reason = None
    except OSError as error:
        reason = f"{there}: {error.strerror}"
    try:
        space = os.statvfs(there)
    except OSError:
        return Folder(path=path, error=reason)
    return Folder(
        path=path,
        error=reason,
        free_bytes=space.f_bavail * space.f_frsize,
        free_files=space.f_favail if space.f_files else None,
    )
