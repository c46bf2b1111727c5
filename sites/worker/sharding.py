"""Sharded tensors: what each rank of a site holds of them, and how a bucket is made of shards.

fully_shard gives rank r of P the rows [r c, (r+1) c) of each parameter, c = ceil(rows / P). So
where a shard ends depends on the site's number of ranks, and so does what lies beside what in a
rank's memory. Over sites, a bucket is therefore what it would be without shards: whole parameters,
one after another, of which rank r hands over the elements [r s, (r+1) s), s = ceil(numel / P).
Inside a site, an all-to-all brings each element from the rank that holds it to the one that hands
it over, and another one brings it back: twice a shard's size, where the fabric is fast. `route`
says which rank sends what to which.

torch takes half a second to import DTensor, so this module does only for a script that has one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeGuard

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Cuts = tuple[int, ...]
"""P + 1 places: rank r holds the elements [cuts[r], cuts[r + 1]) of something."""
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's view of a bucket's way in; the way back is its reverse."""

    numel: int
    """Elements of the bucket."""
    held_numel: int
    """Elements of the bucket that this rank holds."""
    sent: tuple[int, ...]
    """Elements to each rank."""
    received: tuple[int, ...]
    """Elements from each rank: together, this rank's shard of the bucket."""
    outgoing: tuple[Span, ...]
    """Where in what this rank holds they lie, in the order of sending."""
    incoming: tuple[Span, ...]
    """Where in its shard of the bucket they belong, in the order of receiving."""


@functools.lru_cache(maxsize=4096)
def route(parts: tuple[Cuts, ...], rank: int) -> Route:
    """Return a rank's route of a bucket that consists of `parts`, one after another.

    There is one part at least, and all are of the same number of ranks.
    """
    world_size = len(parts[0]) - 1
    numel = sum(cuts[-1] for cuts in parts)
    shard_numel = -(-numel // world_size)
    windows = [(each * shard_numel, (each + 1) * shard_numel) for each in range(world_size)]
    outgoing = [[held for held, _ in _overlaps(parts, rank, window)] for window in windows]
    incoming = [
        [place for _, place in _overlaps(parts, source, windows[rank])]
        for source in range(world_size)
    ]
    return Route(
        numel=numel,
        held_numel=sum(cuts[rank + 1] - cuts[rank] for cuts in parts),
        sent=tuple(_numel(spans) for spans in outgoing),
        received=tuple(_numel(spans) for spans in incoming),
        outgoing=tuple(span for spans in outgoing for span in spans),
        incoming=tuple(span for spans in incoming for span in spans),
    )


def cuts_of(num_rows: int, row_numel: int, world_size: int) -> Cuts:
    """Return what each rank holds of a tensor that is sharded along its first dimension."""
    rows_per_rank = -(-num_rows // world_size)
    return tuple(min(rank * rows_per_rank, num_rows) * row_numel for rank in range(world_size + 1))


def part_of(cuts: Cuts, start: int, stop: int) -> Cuts:
    """Return what each rank holds of the elements [start, stop)."""
    return tuple(min(max(each, start), stop) - start for each in cuts)


def _overlaps(parts: tuple[Cuts, ...], holder: int, window: Span) -> Iterator[tuple[Span, Span]]:
    """Yield where the bucket's elements in `window` lie that a rank holds.

    Yields:
        Their place in what the rank holds, and their place in the window.
    """
    part_start = held_start = 0
    for cuts in parts:
        first = part_start + cuts[holder]
        start, stop = max(first, window[0]), min(part_start + cuts[holder + 1], window[1])
        if start < stop:
            held = held_start - first
            yield (start + held, stop + held), (start - window[0], stop - window[0])
        part_start += cuts[-1]
        held_start += cuts[holder + 1] - cuts[holder]


def _numel(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)


class ShardedFlat:
    """A sharded tensor's elements in a row, or some of them, and what this rank holds of these."""

    def __init__(self, label: str, held: torch.Tensor, cuts: Cuts, rank: int) -> None:
        """`held` is this rank's elements, shape (n,): a view. `cuts` says which each rank holds.

        `label` tells it from others: its name, shape and dtype, and which elements these are.
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
