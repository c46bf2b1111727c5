"""Shared memory between a rank and its gateway: a memfd, which has no name to leave behind.

Each region is float32[numel] and has a number. Buckets' own regions are numbered from 0 on, tensors
that a script asked for (`site.empty`) from FIRST_TENSOR_REGION on.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from isthmus.protos.errors import LocalProtocolError
from isthmus.protos.failure import text_of
from isthmus.sites.local.rank_messages import Region

FLOAT_BYTES: Final = 4
FIRST_TENSOR_REGION: Final = 1 << 20

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals that fix a region's size: a shrunken file would kill the other process with SIGBUS."""


def create_region(numel: int) -> tuple[npt.NDArray[np.float32], int]:
    """Create a region of float32[numel], zeroed, that another process can map.

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
    """Map a region as float32[numel]. The array owns the mapping; the descriptor may be closed."""
    if numel == 0:
        return np.empty(0, dtype=np.float32)
    return np.frombuffer(mmap.mmap(descriptor, numel * FLOAT_BYTES), dtype=np.float32)


def map_received(region: Region, descriptors: Sequence[int]) -> npt.NDArray[np.float32]:
    """Map a region that another process sent; the caller closes the descriptors.

    Raises:
        LocalProtocolError: not exactly one file of the stated size came.
    """
    name = f"region {region.region}"
    if len(descriptors) != 1:
        raise LocalProtocolError(f"{name}: {len(descriptors)} files, want one memfd")
    try:
        size_bytes = os.fstat(descriptors[0]).st_size
        if size_bytes < FLOAT_BYTES * region.numel:
            raise LocalProtocolError(f"{name}: {size_bytes} bytes for {region.numel} elements")
        return map_region(descriptors[0], region.numel)
    except (OSError, ValueError) as error:
        raise LocalProtocolError(f"{name}: {text_of(error)}") from error
