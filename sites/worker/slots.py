"""The buffers of buckets, and the memory that they share with the gateway: grown, and used again."""

from __future__ import annotations

import os

import torch

from sites.worker.link import Link
from sites.worker.region import create_region
from sites.worker.routes import Route
from sites.worker.transfer import Sizes, Slot, Transfer


class Slots:
    """Those of one rank, by index, which is also the region's id at the gateway."""

    def __init__(self, link: Link, transfer: Transfer, world_size: int) -> None:
        """Hold nothing yet.

        Args:
            link: hears of regions.
            transfer: makes the buffers.
            world_size: ranks of the site.
        """
        self._link = link
        self._transfer = transfer
        self._world_size = world_size
        self._slots: dict[int, Slot] = {}

    def get(self, index: int, numel: int, route: Route | None) -> Slot:
        """Return buffers for a bucket of `numel` elements, whose earlier users are done with them."""
        wanted = Sizes.of(numel, route, self._world_size)
        slot = self._slots.get(index)
        if slot is None:
            slot = self._slots[index] = self._make(index, wanted)
        elif not slot.sizes.hold(wanted):
            self._transfer.drop_slot(slot)
            slot = self._slots[index] = self._make(index, slot.sizes.joined(wanted))
        return slot.cut(wanted, route)

    def _make(self, index: int, sizes: Sizes) -> Slot:
        array, descriptor = create_region(sizes.shard_numel)
        try:
            self._link.add_region(index, sizes.shard_numel, descriptor)
        finally:
            os.close(descriptor)
        return self._transfer.make_slot(sizes, torch.from_numpy(array))
