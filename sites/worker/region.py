"""Shared memory between a rank and its gateway: a memfd, which has no name to leave behind."""

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

FLOAT_BYTES = 4

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Its size is fixed for ever: a shrunken file would kill the other process with SIGBUS."""


def create_region(numel: int) -> tuple[npt.NDArray[np.float32], int]:
    """Make float32[numel] of zeros that another process can map.

    Returns:
        The array, which keeps its mapping alive, and the descriptor, which the caller closes.
    """
    descriptor = os.memfd_create("isthmus-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, numel * FLOAT_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return map_region(descriptor, numel), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def map_region(descriptor: int, numel: int) -> npt.NDArray[np.float32]:
    """Map float32[numel] of a region; the array keeps the mapping, the descriptor may be closed."""
    mapping = mmap.mmap(descriptor, numel * FLOAT_BYTES)
    return np.frombuffer(mapping, dtype=np.float32)
