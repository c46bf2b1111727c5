"""Which rank of a site sends which elements to which: from a sharded tensor's shards to a bucket's.

Pure.

fully_shard gives rank r of P the rows [r c, (r+1) c) of each parameter, c = ceil(rows / P), so
where a shard ends depends on the site's number of ranks, and so does what lies beside what in a
rank's memory. Over sites, a bucket is therefore what it would be without shards: whole parameters,
one after another, of which rank r hands over the elements [r s, (r+1) s), s = ceil(numel / P).
Inside a site, an all-to-all brings each element from the rank that holds it to the one that hands
it over, and another one brings it back: twice a shard's size, where the fabric is fast.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

Cuts = tuple[int, ...]
"""P + 1 places: rank r holds the elements [cuts[r], cuts[r + 1]) of something."""
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's view of a bucket's way in; the way back is its reverse."""

    numel: int
    """Elements of the bucket."""
    held_numel: int
    """Of these, what this rank holds."""
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
    """Return the route of a bucket that consists of `parts`, one after another.

    Args:
        parts: who holds what of each; at least one, all of the same number of ranks.
        rank: whose route.
    """
    world_size = len(parts[0]) - 1
    numel = sum(cuts[-1] for cuts in parts)
    shard_numel = -(-numel // world_size)
    outgoing = [
        _outgoing(parts, rank, (to * shard_numel, (to + 1) * shard_numel))
        for to in range(world_size)
    ]
    window = (rank * shard_numel, (rank + 1) * shard_numel)
    incoming = [_incoming(parts, source, window) for source in range(world_size)]
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


def _outgoing(parts: tuple[Cuts, ...], rank: int, window: Span) -> list[Span]:
    """Return where, in what `rank` holds, the bucket's elements in `window` lie."""
    spans = []
    part_start = held_start = 0
    for cuts in parts:
        first = part_start + cuts[rank]
        start, stop = max(first, window[0]), min(part_start + cuts[rank + 1], window[1])
        if start < stop:
            spans.append((held_start + start - first, held_start + stop - first))
        part_start += cuts[-1]
        held_start += cuts[rank + 1] - cuts[rank]
    return spans


def _incoming(parts: tuple[Cuts, ...], source: int, window: Span) -> list[Span]:
    """Return where, in the shard that is `window`, the elements that `source` holds belong."""
    spans = []
    part_start = 0
    for cuts in parts:
        start = max(part_start + cuts[source], window[0])
        stop = min(part_start + cuts[source + 1], window[1])
        if start < stop:
            spans.append((start - window[0], stop - window[0]))
        part_start += cuts[-1]
    return spans


def _numel(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)
