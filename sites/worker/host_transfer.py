"""Gradients in host memory: the reduce-scatter's output is the shared memory itself."""

from collections.abc import Callable, Sequence

import torch

from sites.local.rank_messages import Form
from sites.worker.collectives import Collectives, wait
from sites.worker.transfer import Pending, Sizes, Slot, read_pieces
from sites.worker.ways import bring_back, end_in, start_in


class HostTransfer:
    """A `Transfer` for CPU tensors."""

    device = torch.device("cpu")

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def make_slot(self, sizes: Sizes, region: torch.Tensor) -> Slot:
        """With one rank the bucket is its own shard, and is scaled straight into the region."""
        alone = self._collectives.world_size == 1
        padded = region if alone else torch.zeros(sizes.padded_numel)
        return Slot(sizes.numel, padded, shard=region, region=region)

    def drop_slot(self, slot: Slot) -> None:
        """Nothing is held beside the tensors."""

    def make_future(self) -> torch.futures.Future[torch.Tensor]:
        """A future without a device."""
        return torch.futures.Future()

    def launch(self, slot: Slot) -> Pending:
        """Reduce-scatter into shared memory, or send shards in."""
        return start_in(self._collectives, slot)

    def launch_sum(self, number: float) -> tuple[torch.Tensor, Pending]:
        """All-reduce one float64."""
        total = torch.full((1,), number, dtype=torch.float64)
        return total, self._collectives.all_reduce(total)

    def collect(self, slot: Slot, pending: Pending) -> float | None:
        """Wait, and see that the shard is in place; its codes replace it, if it has some.

        Computed it was before.
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
        """Wait; the sum is in place then."""
        wait(pending)
        return float(total.item())

    def deliver(
        self, slot: Slot, pieces: Sequence[torch.Tensor], complete: Callable[[], None]
    ) -> None:
        """Bring back, cut the padding off, convert to the pieces' dtypes."""
        bring_back(self._collectives, slot)
        read_pieces(slot.padded, pieces)
        complete()
