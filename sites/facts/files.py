"""The files and folders of a run: whether data can be read, and something can be written."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from pathlib import Path

from isthmus.protos.failure import text_of
from isthmus.topology.spec.machine_facts import Folder, Matches

_OPENED_MAX = 1000
"""Files of one pattern that are opened; more take too long, and most often are all alike."""
_WITHIN_S = 3.0
"""One pattern may take so long: a tree of millions of files is not walked to its end."""
_FREE_BYTES = 1 << 12
"""A file of so many bytes must fit."""


def match(pattern: str) -> Matches:
    """Count the first files that an absolute pattern matches, and open them."""
    path, found = Path(pattern), 0
    deadline_s = time.monotonic() + _WITHIN_S
    try:
        root = Path(path.anchor)
        for each in root.glob(str(path.relative_to(root))):
            if time.monotonic() > deadline_s or found == _OPENED_MAX:
                return Matches(pattern=pattern, num_files=found, is_complete=False)
            if not each.is_file():
                continue
            found += 1
            try:
                each.open("rb").close()
            except OSError as error:
                reason = f"{each}: {error.strerror}"
                return Matches(pattern=pattern, num_files=found, error=reason, is_complete=False)
    except (OSError, ValueError, NotImplementedError) as error:
        return Matches(pattern=pattern, num_files=0, error=text_of(error))
    return Matches(pattern=pattern, num_files=found)


def cannot_enter(path: str) -> str | None:
    """Return why a process cannot run in a folder; None: it can."""
    try:
        if not stat.S_ISDIR(Path(path).stat().st_mode):
            return os.strerror(errno.ENOTDIR)
    except OSError as error:
        return error.strerror or type(error).__name__
    return None if os.access(path, os.X_OK) else os.strerror(errno.EACCES)


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
