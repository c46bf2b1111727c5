"""The buffers of buckets, and the memory shared with the gateway: grown, and used again."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from sites.worker.link import Link
from sites.worker.region import create_region
from sites.worker.routes import Route
from sites.worker.shared_tensors import SharedTensors
from sites.worker.transfer import Sizes, Slot, Transfer


class Slots:
    """Those of one rank, by index, which is also the region's id at the gateway."""

    def __init__(
        self, link: Link, transfer: Transfer, world_size: int, shared: SharedTensors | None
    ) -> None:
        """Hold nothing yet.

        Args:
            link: hears of regions.
            transfer: makes the buffers.
            world_size: ranks of the site.
            shared: tensors that need no buffers, where there may be some.
        """
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

    def _make(self, index: int, sizes: Sizes) -> Slot:
        array, descriptor = create_region(sizes.shard_numel)
        try:
            self._link.add_region(index, sizes.shard_numel, descriptor)
        finally:
            os.close(descriptor)
        slot = self._transfer.make_slot(sizes, torch.from_numpy(array))
        slot.region_id = index
        return slot
