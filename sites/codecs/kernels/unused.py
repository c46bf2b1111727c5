"""Removes kernels that nothing has used for a month: other versions', and other processors'.

A home folder may be many machines', so another processor's kernels are in use for as long as
somebody loads them. Each process that loads some notes it as the time of their folder. Whoever
compiles new ones removes what has an old time. A folder is moved away at once and then emptied: who
begins to use it at that moment finds it whole or not at all, and compiles again; of several who
remove it one does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

UNUSED_S: Final = 30 * 86400.0
NOTED_S: Final = 86400.0
"""How exactly use is noted: most starts then write nothing."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+-[0-9a-f]{16}")
_REMOVED: Final = ".removed-"


def note_use(folder: Path, now_s: float) -> None:
    """Keep a folder of kernels for UNUSED_S from now.

    Args:
        folder: it need not be there.
        now_s: since 1970.
    """
    with contextlib.suppress(OSError):  # not there yet, or a disk that is only read
        if now_s - folder.stat().st_mtime > NOTED_S:
            os.utime(folder, (now_s, now_s))


def remove_unused(kept: Path, now_s: float) -> None:
    """Remove unused kernels beside a folder that is kept. What the system refuses to remove stays.

    Args:
        kept: a folder of kernels.
        now_s: since 1970.
    """
    for folder in kept.parent.glob(f"{_REMOVED}*"):  # who moved it was ended at that moment
        shutil.rmtree(folder, ignore_errors=True)
    for folder in kept.parent.iterdir():
        with contextlib.suppress(OSError):
            if folder != kept and _is_unused(folder, now_s):
                _remove(folder)


def _is_unused(folder: Path, now_s: float) -> bool:
    if _NAME.fullmatch(folder.name) is None or folder.is_symlink() or not folder.is_dir():
        return False
    return now_s - folder.stat().st_mtime > UNUSED_S


def _remove(folder: Path) -> None:
    away = Path(tempfile.mkdtemp(prefix=_REMOVED, dir=folder.parent))
    try:
        folder.rename(away / folder.name)
    finally:
        shutil.rmtree(away, ignore_errors=True)
