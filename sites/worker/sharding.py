"""Sharded tensors as torch has them: what this rank holds of a DTensor, and all of it.

torch takes half a second to import DTensor, so this module does only for a script that has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch

from sites.worker.holdings import Dealt, Holding

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements")


def holding_of(name: str, tensor: torch.Tensor) -> Holding:
    """Return what this rank holds of a tensor: of one that is no DTensor, all.

    Raises:
        TypeError: it is laid out in a way that is not known.
    """
    if not is_sharded(tensor):
        return Holding.of(tensor.shape, [])
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    axes = []
    for axis, placement in enumerate(tensor.placements):
        rank = 0 if place is None else int(place[axis])
        if isinstance(placement, _StridedShard):
            axes.append(Dealt(placement.dim, mesh.size(axis), rank, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            axes.append(Dealt(placement.dim, mesh.size(axis), rank))
        elif not isinstance(placement, Replicate):
            raise TypeError(
                f"site.synchronize: parameter {name} is placed as {placement} along mesh axis "
                f"{axis}: want Shard or Replicate"
            )
    holding = Holding.of(tensor.shape, axes)
    local = tensor.to_local()
    if holding.numel != local.numel():
        raise TypeError(
            f"site.synchronize: parameter {name}, placed as {tensor.placements}, has "
            f"{local.numel()} elements on this rank, and {holding.numel} by its placements"
        )
    return holding


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements, detached: a view."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


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
