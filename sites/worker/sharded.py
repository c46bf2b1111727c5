"""Parameters of which each rank of a site holds a shard: what torch's fully_shard makes of them.

Half a second goes by while torch imports DTensor, so only scripts that have one do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeGuard

import torch
import torch.distributed as dist

from sites.worker.routes import Cuts, cuts_of, part_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedFlat:
    """A sharded tensor's elements in a row, or some of them, and what this rank holds of these."""

    def __init__(self, label: str, held: torch.Tensor, cuts: Cuts, rank: int) -> None:
        """Describe a tensor.

        Args:
            label: tells it from others: its name, shape and dtype, and which elements these are.
            held: shape (n,), this rank's elements: a view.
            cuts: which elements each rank holds.
            rank: this rank.
        """
        self.label = label
        self.held = held
        self.cuts = cuts
        self._rank = rank

    @classmethod
    def of(cls, name: str, tensor: DTensor) -> Self:
        """Describe a whole tensor, of which `check_sharding` has found nothing to say."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        num_rows = tensor.shape[0]
        row_numel = tensor.numel() // num_rows if num_rows else 0
        held = tensor.to_local().detach().view(-1)
        label = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        return cls(label, held, cuts_of(num_rows, row_numel, world_size), rank)

    def numel(self) -> int:
        """Return how many elements all ranks hold together."""
        return self.cuts[-1]

    def __getitem__(self, part: slice, /) -> Self:
        """Return a view of the elements [part.start, part.stop)."""
        cuts = part_of(self.cuts, part.start, part.stop)
        first = max(part.start - self.cuts[self._rank], 0)
        count = cuts[self._rank + 1] - cuts[self._rank]
        label = f"{self.label} from {part.start}"
        return type(self)(label, self.held[first : first + count], cuts, self._rank)


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements")


def check_sharding(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter that is not sharded by rows over all ranks of the site, in their order.

    Raises:
        TypeError: and what to do.
    """
    from torch.distributed.tensor import Shard

    wanted = (
        f"site.synchronize: parameter {name}: want it sharded by fully_shard along dimension 0 "
        f"over a one-dimensional mesh of all {dist.get_world_size()} ranks of the site"
    )
    if not is_sharded(parameter):
        raise TypeError(f"{wanted}; it is not sharded: call fully_shard on a module that has it")
    if parameter.device_mesh.ndim != 1 or parameter.device_mesh.size() != dist.get_world_size():
        raise TypeError(f"{wanted}; its mesh has shape {tuple(parameter.device_mesh.shape)}")
    if parameter.device_mesh.get_local_rank() != dist.get_rank():
        raise TypeError(f"{wanted}; its mesh has the ranks in another order")
    placement = parameter.placements[0]
    if type(placement) is not Shard or placement.dim != 0 or parameter.dim() == 0:
        raise TypeError(f"{wanted}; its placement is {placement}")


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements: of a sharded tensor a fresh copy, by a collective of its ranks."""
    whole = tensor.detach()
    return whole.full_tensor() if is_sharded(whole) else whole


def write_whole(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Make `tensor`, or this rank's shard of it, what `whole` says."""
    target = tensor.detach()
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        own = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(own.to_local())
    elif target.data_ptr() != whole.data_ptr():
        target.copy_(whole)
