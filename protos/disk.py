"""Frees disk space at the beginning of files that other processes go on writing.

The beginning is replaced by a hole: sizes and offsets stay, and it reads as zeros. So the writers,
which cannot be asked to switch files, notice nothing. Agents use it for files of gateways and
ranks, a coordinator for its own and its children's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from typing import Final

ON_DISK_BYTES = 16 << 20
"""Bytes of already read data kept on the disk; up to twice as many may stay."""
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
"""Flags of fallocate(2)."""


class Beginning:
    """The beginning of a file that is no longer needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._freed_bytes = 0

    def free(self, used_bytes: int) -> None:
        """Free all but the last `ON_DISK_BYTES` of the used part, in steps of that size.

        If the file system cannot, the file stays whole.

        Args:
            used_bytes: length of the part that is no longer needed.
        """
        num_bytes = used_bytes - ON_DISK_BYTES
        if num_bytes - self._freed_bytes < ON_DISK_BYTES:
            return
        self._freed_bytes = num_bytes
        with contextlib.suppress(OSError):
            free_beginning(self._path, num_bytes)

    def free_written(self) -> None:
        """As `free`, for everything written so far; does nothing if the file is missing."""
        with contextlib.suppress(OSError):
            self.free(self._path.stat().st_size)


def free_beginning(path: Path, num_bytes: int) -> None:
    """Make the first bytes of a file a hole.

    Raises:
        OSError: the file system has no holes (for example, not Linux), or refuses.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(path))
    with path.open("r+b") as file:
        flags = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE)
        if fallocate(file.fileno(), flags, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
