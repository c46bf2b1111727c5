"""Tensors in memory that the gateway shares: their averages are formed where they lie.

What a rank averages has to get into shared memory and back, two passes over it. A tensor that was
made there needs neither. (NCCL calls that registered buffers.)
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sites.worker.link import Link
from sites.worker.region import create_region

FIRST_REGION: Final = 1 << 20
"""Regions of buckets are numbered from 0 on."""


class Place(NamedTuple):
    """Where a bucket lies in shared memory."""

    region: int
    """Its id at the gateway."""
    offset: int
    """Elements before it."""
    values: torch.Tensor
    """float32[n]: the bucket itself."""


class _Allocation(NamedTuple):
    region: int
    memory: weakref.ref[npt.NDArray[np.float32]]
    """The array below the tensor: alive for as long as any view of it."""


class SharedTensors:
    """Those of one rank. For the training thread."""

    def __init__(self, link: Link) -> None:
        """Hold nothing yet; `link` hears of regions."""
        self._link = link
        self._allocations: dict[int, _Allocation] = {}
        """By the address where they begin."""

    def empty(self, numel: int) -> torch.Tensor:
        """Return float32[numel] of shared memory, zeros at first.

        The memory goes after the last view of it, when `forget` is called.

        Raises:
            OSError: there is no such memory.
            IsthmusError: the gateway has gone.
        """
        self.forget()
        in_use = {each.region for each in self._allocations.values()}
        region = next(each for each in itertools.count(FIRST_REGION) if each not in in_use)
        array = self._share(region, numel)
        tensor = torch.from_numpy(array)
        self._allocations[tensor.data_ptr()] = _Allocation(region, weakref.ref(array))
        return tensor

    def find(self, pieces: Sequence[torch.Tensor]) -> Place | None:
        """Return where a bucket's pieces lie one after another, if they do, in one such tensor.

        Args:
            pieces: shape (n,) each, one at least.
        """
        first = pieces[0]
        start = first.untyped_storage().data_ptr()
        allocation = self._allocations.get(start)
        if allocation is None or allocation.memory() is None:
            return None
        end = first.storage_offset()
        for each in pieces:
            if (
                each.untyped_storage().data_ptr() != start
                or each.dtype != torch.float32
                or each.storage_offset() != end
                or not each.is_contiguous()
                or each.is_neg()
            ):
                return None
            end += each.numel()
        offset = int(first.storage_offset())
        return Place(allocation.region, offset, first.as_strided((end - offset,), (1,)))

    def forget(self) -> None:
        """Let go of tensors that have gone: the gateway gets next to nothing for their memory."""
        for address, allocation in [*self._allocations.items()]:
            if allocation.memory() is None:
                del self._allocations[address]
                self._share(allocation.region, 1)

    def _share(self, region: int, numel: int) -> npt.NDArray[np.float32]:
        """Make float32[numel] that the gateway knows as `region`, instead of what that was."""
        array, descriptor = create_region(numel)
        try:
            self._link.add_region(region, numel, descriptor)
        finally:
            os.close(descriptor)
        return array
