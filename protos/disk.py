"""Gives disk space back of files that other processes go on writing.

What was written is replaced by a hole: sizes and places stay, and reading it gives zeros. So the
writers, who need not append and cannot be asked to begin another file, notice nothing. Agents do it
to what gateways and ranks write, a coordinator to what it and its children write.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from typing import Final

ON_DISK_BYTES = 16 << 20
"""Bytes of used-up data that stay on the disk; up to as many again may."""
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
"""Flags of fallocate(2)."""


class Beginning:
    """The part of one file that nobody needs any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._freed_bytes = 0

    def free(self, used_bytes: int) -> None:
        """Give back all but the last `ON_DISK_BYTES` of what is used up, in steps of as much.

        Where the file system cannot, the file stays whole.

        Args:
            used_bytes: from the beginning of the file.
        """
        num_bytes = used_bytes - ON_DISK_BYTES
        if num_bytes - self._freed_bytes < ON_DISK_BYTES:
            return
        self._freed_bytes = num_bytes
        with contextlib.suppress(OSError):
            free_beginning(self._path, num_bytes)

    def free_written(self) -> None:
        """As `free`, of all that is there by now; nothing if the file is not."""
        with contextlib.suppress(OSError):
            self.free(self._path.stat().st_size)


def free_beginning(path: Path, num_bytes: int) -> None:
    """Make the first bytes of a file a hole.

    Raises:
        OSError: its file system has no holes, as on other systems than Linux, or refuses.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(path))
    with path.open("r+b") as file:
        flags = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE)
        if fallocate(file.fileno(), flags, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
