"""Sharded tensors as torch has them: what this rank holds of a DTensor, and all of it.

torch takes half a second to import DTensor, so this module does only for a script that has one.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, TypeGuard

import torch

from isthmus.sites.worker.exchange.holdings import Dealt, Holding

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
                f"site.attach: parameter {name} is placed as {placement} along mesh axis "
                f"{axis}: want Shard or Replicate"
            )
    holding = Holding.of(tensor.shape, axes)
    local = tensor.to_local()
    if holding.numel != local.numel():
        raise TypeError(
            f"site.attach: parameter {name}, placed as {tensor.placements}, has "
            f"{local.numel()} elements on this rank, and {holding.numel} by its placements"
        )
    return holding


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements, detached: a view."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def laid_out_as(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return what is laid out as another tensor, of these elements of this rank: a view.

    They may be of another dtype, and lie on another device.
    """
    if not is_sharded(tensor):
        return local.view(tensor.shape)
    return with_local(tensor, local.view(tensor.to_local().shape))


def with_local(tensor: DTensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor laid out as another one, of this rank's part as it is.

    `DTensor.from_local` would move it to the mesh's device.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    spec = copy.copy(tensor._spec)
    spec.tensor_meta = TensorMeta(tensor.shape, tensor.stride(), local.dtype)
    sharded: torch.Tensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return sharded


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements: of a sharded tensor a fresh copy, by a collective of its ranks."""
    whole = tensor.detach()
    if not is_sharded(whole):
        return whole
    local, device = whole.to_local(), whole.device_mesh.device_type
    if local.device.type == device:
        return whole.full_tensor()
    # Its process group does not reach it there.
    return whole_of(with_local(whole, local.to(device)))


def write_whole(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Make `tensor`, or this rank's shard of it, what `whole` says, which may be on the host."""
    target = local_of(tensor)
    if is_sharded(tensor):
        own = whole
        for dim, spans in enumerate(holding_of("", tensor).held):
            parts = [own.narrow(dim, start, stop - start) for start, stop in spans]
            own = torch.cat(parts, dim) if len(parts) > 1 else (*parts, own.narrow(dim, 0, 0))[0]
        target.copy_(own)
    elif target.data_ptr() != whole.data_ptr():
        target.copy_(whole)


def check_is_box(name: str, tensor: torch.Tensor) -> None:
    """Refuse a sharded tensor of which a checkpoint would not have what this rank holds.

    torch.distributed.checkpoint takes what a rank holds for one range of indices a dimension.

    Raises:
        TypeError: it is not.
    """
    if not is_sharded(tensor):
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    holding = holding_of(name, tensor)
    sizes, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    box = tuple(((start, start + size),) for start, size in zip(starts, sizes, strict=True))
    if holding.numel and holding.held != box:
        raise TypeError(
            f"site.checkpoint: parameter {name}, placed as {tensor.placements}, cannot be saved: "
            f"this rank holds {holding.held} of its dimensions, and torch takes that for {box}"
        )
