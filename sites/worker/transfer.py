"""How a bucket gets into shared memory and back: one way for the host, one for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from sites.local.rank_messages import Form
from sites.worker.encoding import Encoded
from sites.worker.routes import Route

Pending = dist.Work | torch.cuda.Event | None
"""What to wait for; waiting holds up the current CUDA stream, or on the host the thread."""


class Sizes(NamedTuple):
    """Elements of a bucket, of what is kept of it on the device, and of what is handed over."""

    numel: int
    padded_numel: int
    shard_numel: int

    @classmethod
    def of(cls, numel: int, route: Route | None, world_size: int) -> Sizes:
        """Return the sizes of a bucket of `numel` elements over P ranks."""
        padded_numel, shard_numel = padded_shape(numel, world_size)
        return cls(numel, padded_numel if route is None else route.held_numel, shard_numel)

    def hold(self, other: Sizes) -> bool:
        """Whether buffers of these sizes are large enough for a bucket of others."""
        return self == self.joined(other)

    def joined(self, other: Sizes) -> Sizes:
        """Return the larger ones."""
        return Sizes(*map(max, self, other))


@dataclass(slots=True)
class Slot:
    """The buffers of one bucket, kept from round to round."""

    numel: int
    """Elements of the bucket."""
    padded: torch.Tensor
    """float32[P s] on the rank's device: the scaled bucket, later all sites' mean. Where there is a
    route, only what this rank holds of it."""
    shard: torch.Tensor
    """float32[s] on the device: what this rank reduces over sites."""
    region: torch.Tensor
    """float32[s] of shared memory. On the host `shard` is the same memory: no copy."""
    computed: torch.cuda.Event | None = None
    """On CUDA: this round's values are in `padded`."""

    route: Route | None = None
    """Of a bucket whose elements the ranks hold shards of already."""
    arriving: torch.Tensor | None = None
    """float32 on the device: what other ranks send of this rank's shard."""
    encode: Callable[[torch.Tensor], Encoded] | None = None
    """Makes of `shard` what is to be in the region instead."""
    form: Form = Form.VALUES
    """What is in the region, once it is collected."""
    encoded_bytes: int = 0
    region_id: int = 0
    """What the gateway knows the region by."""
    offset: int = 0
    """Elements of the gateway's region before `region`."""

    @property
    def sizes(self) -> Sizes:
        """What it has room for."""
        return Sizes(self.numel, self.padded.numel(), self.region.numel())

    def cut(self, sizes: Sizes, route: Route | None) -> Slot:
        """Return views of these buffers, which are large enough, for a bucket."""
        numel, padded_numel, shard_numel = sizes
        return Slot(
            numel,
            self.padded[:padded_numel],
            self.shard[:shard_numel],
            self.region[:shard_numel],
            route=route,
            region_id=self.region_id,
        )

    def note(self, encoded: Encoded) -> None:
        """Note what is in the region, once the stream has come to the end of the encoding."""
        self.form = Form.ENCODED if bool(encoded.is_fit) else Form.UNFIT
        self.encoded_bytes = encoded.num_bytes if self.form is Form.ENCODED else 0


class Transfer(Protocol):
    """Moves one bucket; nothing here blocks the stream or the thread that computes."""

    device: torch.device

    def make_slot(self, sizes: Sizes, region: torch.Tensor) -> Slot:
        """Make the buffers for a bucket around its shared memory."""

    def drop_slot(self, slot: Slot) -> None:
        """Undo what `make_slot` did, before the shared memory goes."""

    def make_future(self) -> torch.futures.Future[torch.Tensor]:
        """Make the future of a result on this device."""

    def launch(self, slot: Slot) -> Pending:
        """Start what brings `slot.padded` to the ranks' shards. From the autograd thread."""

    def launch_sum(self, number: float) -> tuple[torch.Tensor, Pending]:
        """Start the sum of a scalar over the site's ranks. From the autograd thread."""

    def collect(self, slot: Slot, pending: Pending) -> float | None:
        """Wait until the region holds the shard, encoded where it can be. From the posting thread.

        Returns:
            For how many seconds the bucket had been computed by then; None where that was done when
            it was launched.
        """

    def read_sum(self, total: torch.Tensor, pending: Pending) -> float:
        """Wait for a scalar's sum and return it. From the posting thread."""

    def deliver(
        self, slot: Slot, pieces: Sequence[torch.Tensor], complete: Callable[[], None]
    ) -> None:
        """Bring the region's result into `pieces`, then complete. From the last thread."""


def write_pieces(
    pieces: Sequence[torch.Tensor], tokens: float | torch.Tensor, padded: torch.Tensor
) -> None:
    """Write tokens * pieces as float32, one after another, and zeros behind.

    Args:
        pieces: floating point, shape (n,) each, on any device. Not modified, unless they lie in
            `padded`.
        tokens: not negative. A tensor of one element, on the device of `padded`, does for what no
            NaN is hidden in by 0.
        padded: float32, shape (N,), N at least the sum of all n. Overwritten.
    """
    start = 0
    for each in pieces:
        scaled = padded[start : start + each.numel()]
        start += each.numel()
        if not isinstance(tokens, torch.Tensor) and tokens == 0:
            scaled.zero_()  # Not a product: a loss over no tokens is often NaN.
        elif each.dtype == torch.float32 and each.device == padded.device:
            if each.data_ptr() != scaled.data_ptr() or tokens != 1:
                torch.mul(each, tokens, out=scaled)
        else:
            scaled.copy_(each)
            scaled.mul_(tokens)
    padded[start:].zero_()


def read_pieces(padded: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Write what lies in `padded`, one after another, into `pieces`, in their dtypes."""
    start = 0
    for each in pieces:
        each.copy_(padded[start : start + each.numel()])
        start += each.numel()


def padded_shape(numel: int, world_size: int) -> tuple[int, int]:
    """Return (P s, s) for a bucket of `numel` elements over P ranks."""
    shard = -(-numel // world_size)
    return shard * world_size, shard
