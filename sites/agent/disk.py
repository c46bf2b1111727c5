"""Gives disk space back of files that another process goes on writing.

What was written is replaced by a hole: sizes and places stay, and reading it gives zeros. So the writer, who
need not append and cannot be asked to begin another file, notices nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
"""Flags of fallocate(2)."""


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
