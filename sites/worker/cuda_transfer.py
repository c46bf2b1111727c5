"""Gradients in device memory: copies on side streams, ordered by events.

The compute stream is never synchronised. Downwards: NCCL's reduce-scatter waits for the compute
stream, a side stream waits for the reduce-scatter and copies to page-locked shared memory, and only
the posting thread waits for that copy. Where the shard is encoded, that is enqueued before the
copy. Upwards: the copy, the all-gather and the write into the bucket are enqueued on another side
stream; the future is completed under it, so that it records an event there, for which DDP makes the
compute stream wait.
"""

from collections.abc import Callable, Sequence

import torch

from sites.local.rank_messages import Form
from sites.worker.collectives import Collectives, wait
from sites.worker.transfer import Pending, Sizes, Slot, read_pieces
from sites.worker.ways import bring_back, end_in, start_in


class CudaTransfer:
    """A `Transfer` for tensors of one CUDA device."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self.device = device
        self._collectives = collectives
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def make_slot(self, sizes: Sizes, region: torch.Tensor) -> Slot:
        """Allocate on the device, and page-lock the region so that copies are asynchronous."""
        padded = torch.zeros(sizes.padded_numel, device=self.device)
        alone = self._collectives.world_size == 1
        shard = padded if alone else torch.zeros(sizes.shard_numel, device=self.device)
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

    def launch_sum(self, number: float) -> tuple[torch.Tensor, Pending]:
        """All-reduce one float64, made by a kernel: a copy from the host would synchronise."""
        total = torch.full((1,), number, dtype=torch.float64, device=self.device)
        work = self._collectives.all_reduce(total)
        return total, work or torch.cuda.current_stream(self.device).record_event()

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
