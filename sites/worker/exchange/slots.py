"""The memory of buckets: buffers that are used again, and tensors that are averaged where they lie.

What a rank averages has to get into memory that the gateway shares, and back: two passes over it.
`Slots` keeps a buffer and a shared region for each bucket from round to round. `SharedTensors` are
tensors that the script had made in shared memory (`site.empty`), which need neither pass. NCCL
calls such memory registered buffers.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from isthmus.sites.local.rank_messages import Region
from isthmus.sites.local.regions import FIRST_TENSOR_REGION, create_region
from isthmus.sites.worker.exchange.bucket_copy import Sizes, Slot, Transfer
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.routes import Route


def share(link: Link, region: int, numel: int) -> npt.NDArray[np.float32]:
    """Make float32[numel] that the gateway knows as `region`, instead of what that was.

    Raises:
        OSError: there is no such memory.
        IsthmusError: the gateway has gone.
    """
    array, descriptor = create_region(numel)
    try:
        link.send(Region(region=region, numel=numel), descriptor)
    finally:
        os.close(descriptor)
    return array


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
    """The shared tensors of one rank. For the training thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._allocations: dict[int, _Allocation] = {}
        """The allocations, by the address where they begin."""

    def empty(self, numel: int) -> torch.Tensor:
        """Return float32[numel] of shared memory, zeros at first.

        The memory goes after the last view of it, when `forget` is called.

        Raises:
            OSError: there is no such memory.
            IsthmusError: the gateway has gone.
        """
        self.forget()
        in_use = {each.region for each in self._allocations.values()}
        region = next(each for each in itertools.count(FIRST_TENSOR_REGION) if each not in in_use)
        array = share(self._link, region, numel)
        tensor = torch.from_numpy(array)
        self._allocations[tensor.data_ptr()] = _Allocation(region, weakref.ref(array))
        return tensor

    def find(self, pieces: Sequence[torch.Tensor]) -> Place | None:
        """Return where a bucket's pieces lie one after another, if they do, in one such tensor."""
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
                share(self._link, allocation.region, 1)


class Slots:
    """The buffers of one rank's buckets, by index: the region's id at the gateway, too."""

    def __init__(
        self, link: Link, transfer: Transfer, world_size: int, shared: SharedTensors | None
    ) -> None:
        self._link = link
        self._transfer = transfer
        self._world_size = world_size
        self._shared = shared
        self._slots: dict[int, Slot] = {}

    def get(
        self, index: int, numel: int, route: Route | None, pieces: Sequence[torch.Tensor]
    ) -> Slot:
        """Return buffers for a bucket of `numel` elements, whose earlier users are done with them.

        Where its pieces lie in shared memory already, these are the pieces themselves.
        """
        place = None if self._shared is None or route is not None else self._shared.find(pieces)
        if place is not None:
            values = place.values
            return Slot(numel, values, values, values, region_id=place.region, offset=place.offset)
        wanted = Sizes.of(numel, route, self._world_size)
        slot = self._slots.get(index)
        if slot is None:
            slot = self._slots[index] = self._make(index, wanted)
        elif not slot.sizes.hold(wanted):
            self._transfer.drop_slot(slot)
            slot = self._slots[index] = self._make(index, slot.sizes.joined(wanted))
        return slot.cut(wanted, route)

    def forget(self) -> None:
        """Let go of shared tensors that the script has none of any more."""
        if self._shared is not None:
            self._shared.forget()

    def close(self) -> None:
        """Unlock all buffers' memory, once no bucket is under way: its addresses may come again."""
        while self._slots:
            self._transfer.drop_slot(self._slots.popitem()[1])

    def _make(self, index: int, sizes: Sizes) -> Slot:
        region = torch.from_numpy(share(self._link, index, sizes.shard_numel))
        slot = self._transfer.make_slot(sizes, region)
        slot.region_id = index
        return slot
