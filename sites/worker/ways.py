"""How a bucket gets from the ranks that have it to those that hand it over, and back.

A bucket that every rank has is reduce-scattered and all-gathered; one of which each rank holds a
part already is brought into place by all-to-alls. What is enqueued here is on the current stream.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from sites.worker.collectives import Collectives, wait
from sites.worker.transfer import Slot


def start_in(collectives: Collectives, slot: Slot) -> dist.Work | None:
    """Start what brings `slot.padded` towards the ranks' `slot.shard`."""
    if slot.route is None:
        return collectives.reduce_scatter(slot.shard, slot.padded)
    leaving = torch.cat(
        [slot.padded[start:stop] for start, stop in slot.route.outgoing] or [slot.padded[:0]]
    )
    slot.arriving = leaving.new_empty(sum(slot.route.received))
    return collectives.send_in(slot.arriving, leaving, slot.route.received, slot.route.sent)


def end_in(slot: Slot) -> None:
    """Put what has come into `slot.shard`, unless it lies there already."""
    if slot.route is None:
        return
    assert slot.arriving is not None, "start_in comes first"
    place = 0
    for start, stop in slot.route.incoming:
        slot.shard[start:stop].copy_(slot.arriving[place : place + stop - start])
        place += stop - start
    slot.shard[place:].zero_()  # padding
    slot.arriving = None


def bring_back(collectives: Collectives, slot: Slot) -> None:
    """Bring the ranks' `slot.shard` into `slot.padded`, and wait for that."""
    if slot.route is None:
        wait(collectives.all_gather(slot.padded, slot.shard))
        return
    leaving = torch.cat(
        [slot.shard[start:stop] for start, stop in slot.route.incoming] or [slot.shard[:0]]
    )
    arriving = leaving.new_empty(sum(slot.route.sent))
    wait(collectives.send_back(arriving, leaving, slot.route.sent, slot.route.received))
    place = 0
    for start, stop in slot.route.outgoing:
        slot.padded[start:stop].copy_(arriving[place : place + stop - start])
        place += stop - start
