"""Copies a bucket from the ranks into shared memory, and back: on the host, and on CUDA.

Inside a site, a bucket that every rank has is reduce-scattered and all-gathered. One of which each
rank holds a part already is brought into place, and back, by all-to-alls: routes.py. Where these
parts are the shards, nothing moves.

On the host, the reduce-scatter's output is the shared memory itself.

On CUDA, copies run on side streams, ordered by events, and the compute stream is never
synchronised. Downwards, NCCL's reduce-scatter waits for the compute stream. A side stream waits for
the reduce-scatter, encodes the shard if it is to be encoded, and copies to page-locked shared
memory. Only the posting thread waits for that copy. Upwards, the copy, the all-gather and the write
into the bucket are enqueued on another side stream. The future is completed under that stream, so
that it records an event there, for which DDP makes the compute stream wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from isthmus.sites.local.rank_messages import Form
from isthmus.sites.worker.exchange.collectives import Collectives, Ranks, wait
from isthmus.sites.worker.exchange.holdings import Block
from isthmus.sites.worker.exchange.routes import Route
from isthmus.sites.worker.exchange.shard_encoder import Encoded

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
        if route is not None:
            return cls(numel, route.held_numel if route.there else 0, route.shard_numel)
        return cls(numel, *padded_shape(numel, world_size))

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
    route, only what this rank holds of it; `shard` itself, padding included, where that does not
    move."""
    shard: torch.Tensor
    """float32[s] on the device: what this rank reduces over sites."""
    region: torch.Tensor
    """float32[s] of shared memory. On the host `shard` is the same memory: no copy."""
    computed: torch.cuda.Event | None = None
    """On CUDA: this round's values are in `padded`."""

    route: Route | None = None
    """How elements get here, in a bucket of which each rank holds a shard already."""
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
        """The sizes of buckets that this slot has room for."""
        return Sizes(self.numel, self.padded.numel(), self.region.numel())

    def cut(self, sizes: Sizes, route: Route | None) -> Slot:
        """Return views of these buffers, which are large enough, for a bucket."""
        numel, padded_numel, shard_numel = sizes
        shard = self.shard[:shard_numel]
        moves = route is None or route.there is not None
        return Slot(
            numel,
            self.padded[:padded_numel] if moves else shard,
            shard,
            self.region[:shard_numel],
            route=route,
            region_id=self.region_id,
        )

    def note(self, encoded: Encoded) -> None:
        """Note what is in the region, once the stream has come to the end of the encoding."""
        self.form = Form.ENCODED if bool(encoded.is_fit) else Form.UNFIT
        self.encoded_bytes = encoded.num_bytes if self.form is Form.ENCODED else 0


class Transfer:
    """Moves buckets of one device, here the host; nothing blocks the thread that computes."""

    device = torch.device("cpu")

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def make_slot(self, sizes: Sizes, region: torch.Tensor) -> Slot:
        """Make the buffers for a bucket around its shared memory.

        With one rank the bucket is its own shard, and is scaled straight into the region.
        """
        alone = self._collectives.world_size == 1
        padded = (
            region if alone else torch.zeros(sizes.padded_numel, dtype=torch.float32, device="cpu")
        )
        return Slot(sizes.numel, padded, shard=region, region=region)

    def drop_slot(self, slot: Slot) -> None:
        """Undo what `make_slot` did, before the shared memory goes."""

    def make_future(self) -> torch.futures.Future[torch.Tensor]:
        """Make the future of a result on this device."""
        return torch.futures.Future()

    def launch(self, slot: Slot) -> Pending:
        """Start what brings `slot.padded` to the ranks' shards. From the autograd thread."""
        return start_in(self._collectives, slot)

    def launch_sum(self, number: float, ranks: Ranks | None = None) -> tuple[torch.Tensor, Pending]:
        """Start the sum of a float64 over these ranks of the site, else all.

        From the autograd thread.
        """
        total = torch.full((1,), number, dtype=torch.float64, device="cpu")
        return total, self._collectives.all_reduce(total, ranks)

    def sum_words(self, words: Sequence[int]) -> Callable[[], list[int]]:
        """Add up int64 numbers over all ranks of the site; what is returned tells the sums.

        From the autograd thread.
        """
        total = torch.tensor(words, dtype=torch.int64, device="cpu")
        wait(self._collectives.all_reduce(total))
        return lambda: [*total.tolist()]

    def collect(self, slot: Slot, pending: Pending) -> float | None:
        """Wait until the region holds the shard, encoded where it can be. From the posting thread.

        Returns:
            For how many seconds the bucket had been computed by then; None where that was done when
            it was launched.
        """
        wait(pending)
        end_in(slot)
        if slot.encode is not None:
            encoded = slot.encode(slot.shard)
            slot.note(encoded)
            if slot.form is Form.ENCODED:
                encoded.write(slot.region)
        return None

    def read_sum(self, total: torch.Tensor, pending: Pending) -> float:
        """Wait for a number's sum and return it. From the posting thread."""
        wait(pending)
        return float(total.item())

    def deliver(
        self, slot: Slot, pieces: Sequence[torch.Tensor], complete: Callable[[], None]
    ) -> None:
        """Bring the region's result into `pieces`, then complete. From the finishing thread."""
        bring_back(self._collectives, slot)
        read_pieces(slot.padded, pieces)
        complete()


class CudaTransfer(Transfer):
    """Moves buckets of one CUDA device; nothing blocks its compute stream either."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        super().__init__(collectives)
        self.device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def make_slot(self, sizes: Sizes, region: torch.Tensor) -> Slot:
        """Allocate on the device, and page-lock the region so that copies are asynchronous."""
        shard = torch.zeros(sizes.shard_numel, dtype=torch.float32, device=self.device)
        alone = self._collectives.world_size == 1
        padded = (
            shard
            if alone
            else torch.zeros(sizes.padded_numel, dtype=torch.float32, device=self.device)
        )
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(region.data_ptr(), region.nbytes, 0))
        return Slot(sizes.numel, padded, shard, region)

    def drop_slot(self, slot: Slot) -> None:
        """Unlock the region's pages, once no copy uses them."""
        self._down.synchronize()
        self._up.synchronize()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostUnregister(slot.region.data_ptr()))

    def make_future(self) -> torch.futures.Future[torch.Tensor]:
        """A future that records an event on the stream under which it is completed."""
        return torch.futures.Future(devices=[self.device])

    def launch(self, slot: Slot) -> Pending:
        """Enqueue the reduce-scatter, or the sending; with one rank, the scaling is waited for."""
        slot.computed = _timer()
        slot.computed.record(torch.cuda.current_stream(self.device))
        return start_in(self._collectives, slot) or slot.computed

    def launch_sum(self, number: float, ranks: Ranks | None = None) -> tuple[torch.Tensor, Pending]:
        """All-reduce one float64, made by a kernel: a copy from the host would synchronise."""
        total = torch.full((1,), number, dtype=torch.float64, device=self.device)
        work = self._collectives.all_reduce(total, ranks)
        return total, work or torch.cuda.current_stream(self.device).record_event()

    def sum_words(self, words: Sequence[int]) -> Callable[[], list[int]]:
        """The same on the side stream, which waits for results only; to hear them, one waits."""
        with torch.cuda.stream(self._up):
            own = torch.tensor(words, dtype=torch.int64, device="cpu").pin_memory()
            total = own.to(self.device, non_blocking=True)
            wait(self._collectives.all_reduce(total))

        def read() -> list[int]:
            with torch.cuda.stream(self._up):
                return [*total.tolist()]

        return read

    def collect(self, slot: Slot, pending: Pending) -> float:
        """Copy the shard down, or its codes; NCCL's watchdog is the deadline of this wait."""
        copied = _timer()
        with torch.cuda.stream(self._down):
            wait(pending)
            end_in(slot)
            encoded = None if slot.encode is None else slot.encode(slot.shard)
            if encoded is None:
                slot.region.copy_(slot.shard, non_blocking=True)
            else:
                encoded.write(slot.region)
            copied.record(self._down)
        copied.synchronize()
        if encoded is not None:
            slot.note(encoded)
            if slot.form is Form.UNFIT:
                with torch.cuda.stream(self._down):
                    slot.region.copy_(slot.shard)
        assert slot.computed is not None, "launch comes first"
        return float(slot.computed.elapsed_time(copied)) / 1000.0

    def read_sum(self, total: torch.Tensor, pending: Pending) -> float:
        """Read the scalar on the side stream."""
        with torch.cuda.stream(self._down):
            wait(pending)
            return float(total.item())

    def deliver(
        self, slot: Slot, pieces: Sequence[torch.Tensor], complete: Callable[[], None]
    ) -> None:
        """Enqueue everything on the side stream and complete under it."""
        with torch.cuda.stream(self._up):
            slot.shard.copy_(slot.region, non_blocking=True)
            bring_back(self._collectives, slot)
            read_pieces(slot.padded, pieces)
            complete()


def _timer() -> torch.cuda.Event:
    """An event that notes when the device reached it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def start_in(collectives: Collectives, slot: Slot) -> dist.Work | None:
    """Start what brings `slot.padded` towards the ranks' `slot.shard`."""
    if slot.route is None:
        return collectives.reduce_scatter(slot.shard, slot.padded)
    ranks, way = slot.route.ranks, slot.route.there
    if way is None:
        return None
    leaving = torch.cat([slot.padded[start:stop] for start, stop in way.spans] or _nothing(slot))
    slot.arriving = leaving.new_empty(sum(way.received))
    return collectives.all_to_all(
        slot.arriving, leaving, way.received, way.sent, ranks=ranks, is_back=False
    )


def end_in(slot: Slot) -> None:
    """Put what has come into `slot.shard`, unless it lies there already."""
    if slot.route is None or slot.route.there is None:
        return
    assert slot.arriving is not None, "start_in comes first"
    adds = slot.route.adds
    if adds:
        slot.shard.zero_()
    place = 0
    for block in slot.route.there.blocks:
        source = slot.arriving[place : place + block.numel].view(block.count, block.run)
        target = _view(slot.shard, block)
        target.add_(source) if adds else target.copy_(source)
        place += block.numel
    if not adds:
        slot.shard[place:].zero_()  # padding
    slot.arriving = None


def bring_back(collectives: Collectives, slot: Slot) -> None:
    """Bring the ranks' `slot.shard` into `slot.padded`, and wait for that."""
    if slot.route is None:
        wait(collectives.all_gather(slot.padded, slot.shard))
        return
    ranks, way = slot.route.ranks, slot.route.back
    if way is None:
        return
    leaving = torch.cat(
        [_view(slot.shard, block).reshape(-1) for block in way.blocks] or _nothing(slot)
    )
    arriving = leaving.new_empty(sum(way.sent))
    wait(
        collectives.all_to_all(arriving, leaving, way.sent, way.received, ranks=ranks, is_back=True)
    )
    place = 0
    for start, stop in way.spans:
        slot.padded[start:stop].copy_(arriving[place : place + stop - start])
        place += stop - start


def _view(shard: torch.Tensor, block: Block) -> torch.Tensor:
    """Return a block of a shard, shape (count, run)."""
    first = shard.storage_offset() + block.start
    return shard.as_strided((block.count, block.run), (block.stride, 1), first)


def _nothing(slot: Slot) -> list[torch.Tensor]:
    return [slot.padded[:0]]


def write_pieces(
    pieces: Sequence[torch.Tensor],
    tokens: float | torch.Tensor | Sequence[float],
    padded: torch.Tensor,
) -> None:
    """Write tokens * pieces as float32, one after another, and zeros behind.

    Args:
        pieces: floating point, of any shape and strides, on any device; their elements are taken
            in row-major order. Not modified, unless they lie in `padded`.
        tokens: not negative: for all pieces, or for each its own. A tensor of one element, on the
            device of `padded`, does for what no NaN is hidden in by 0.
        padded: float32, shape (N,), N at least the number of their elements.
            Overwritten.
    """
    weights = tokens if isinstance(tokens, Sequence) else [tokens] * len(pieces)
    start = 0
    for each, weight in zip(pieces, weights, strict=True):
        scaled = padded[start : start + each.numel()].view(each.shape)
        start += each.numel()
        if not isinstance(weight, torch.Tensor) and weight == 0:
            scaled.zero_()  # Not a product: a loss over no tokens is often NaN.
        elif each.dtype == torch.float32 and each.device == padded.device:
            if each.data_ptr() != scaled.data_ptr() or weight != 1:
                torch.mul(each, weight, out=scaled)
        else:
            scaled.copy_(each)
            scaled.mul_(weight)
    padded[start:].zero_()


def read_pieces(padded: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Write what lies in `padded`, one after another, into `pieces`, in their dtypes."""
    start = 0
    for each in pieces:
        each.copy_(padded[start : start + each.numel()].view(each.shape))
        start += each.numel()


def padded_shape(numel: int, world_size: int) -> tuple[int, int]:
    """Return (P s, s) for a bucket of `numel` elements over P ranks."""
    shard = -(-numel // world_size)
    return shard * world_size, shard
