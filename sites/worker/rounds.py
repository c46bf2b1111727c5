"""What the exchange knows of a round, and of each bucket on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sites.worker.link import Reduced
from sites.worker.transfer import Pending, Slot
from topology.model.step_parts import Crossing, RoundTimes


@dataclass(slots=True)
class Bucket:
    """One bucket on its way."""

    number: int
    """What the gateway knows it by."""
    slot: Slot
    pieces: Sequence[torch.Tensor]
    layout: int
    exact: bool
    pending: Pending
    future: torch.futures.Future[torch.Tensor]
    raw_bytes: int
    """float32 bytes of this rank's shard, without padding."""
    submitted_s: float
    """When backward had computed it."""
    start_s: float = 0.0
    """When the gateway was told of it."""
    reduced_s: float = 0.0
    finished_s: float = 0.0
    """When its result was in place; on CUDA, when that was enqueued."""
    reduced: Reduced | None = None
    done: bool = False


@dataclass(slots=True)
class Round:
    """One synchronisation of all sites: a sequence of buckets with one weight."""

    number: int
    tokens: float
    """Of this rank."""
    total: torch.Tensor
    pending: Pending
    first_bucket: int
    """The number of its first bucket."""
    num_slots: int | None
    """Buckets under way, at most; None: a backward pass goes on meanwhile, and all may be."""
    site_weight: float = 0.0
    """Tokens of this site."""
    weight: float = 0.0
    """Tokens of all sites."""
    buckets: list[Bucket] = field(default_factory=list)
    num_posted: int = 0
    """Of the buckets, from the first on, that the posting thread was given."""
    num_finished: int = 0
    last_submit_s: float = 0.0
    """When the last bucket was computed that backward goes on to hide; else the first."""
    end_s: float = 0.0

    def note_computed(self, index: int, at_s: float) -> None:
        """From when nothing more than communication is left, as far as this bucket tells."""
        if self.num_slots is None or index == 0:
            self.last_submit_s = at_s

    def find(self, reduced: Reduced) -> Bucket | None:
        """Return the bucket that a result is of; None: of none of this round."""
        index = reduced.bucket - self.first_bucket
        if reduced.round != self.number or not 0 <= index < len(self.buckets):
            return None
        return self.buckets[index]

    @property
    def raw_bytes(self) -> int:
        """float32 bytes that this rank handed over."""
        return sum(each.raw_bytes for each in self.buckets)

    @property
    def wire_bytes(self) -> int:
        """What the gateway sent for this rank's shards."""
        return sum(each.reduced.wire_bytes for each in self.buckets if each.reduced)

    @property
    def encode_s(self) -> float:
        """CPU time of the gateway."""
        return sum(each.reduced.encode_s for each in self.buckets if each.reduced)

    @property
    def decode_s(self) -> float:
        """Likewise, for decoding and summing."""
        return sum(each.reduced.decode_s for each in self.buckets if each.reduced)

    @property
    def times(self) -> RoundTimes:
        """When what happened."""
        crossings = tuple(
            Crossing(each.start_s, each.reduced_s, each.reduced.wait_s)
            for each in self.buckets
            if each.reduced
        )
        return RoundTimes(self.last_submit_s, self.end_s, crossings)
