"""What a rank holds of a tensor, in the one order that all sites share: row-major, of the whole.

Sites lay the same parameter out in different ways: by rows here, by columns there, in strides, as
copies. So over sites nothing is said of shards. A tensor's elements are numbered row by row, as if
it were whole, and each rank says which of these numbers it holds.

DTensor deals a tensor out one mesh axis after another: along each dimension, what is left of it is
cut as `torch.chunk` does. So what a rank holds is the product of one list of indices for each
dimension. Both the lists and the order of a rank's memory are ascending: what a rank holds of the
elements [a, b) lies in one piece in its memory, wherever it belongs in the whole.

Pure: no collective, and no torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
"""From an element to the one behind the last."""
Spans = tuple[Span, ...]
"""Ascending, none of them empty, and none that touches the next."""
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Dealt:
    """What one mesh axis does to a tensor dimension: deals it out to `ranks`, this being `rank`."""

    dim: int
    ranks: int
    rank: int
    pieces: int = 1
    """The dimension is cut into so many first, and each of these is dealt out: _StridedShard."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of a tensor: the product of these indices of each dimension."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    held: tuple[Spans, ...]
    """The indices that are held, by dimension."""

    @classmethod
    def of(cls, shape: Sequence[int], axes: Iterable[Dealt]) -> Holding:
        """Return what is held after the mesh axes that deal dimensions out, in the mesh's order."""
        held: list[Spans] = [_merged([(0, each)]) for each in shape]
        for axis in axes:
            pieces = [_dealt(held[axis.dim], axis.pieces, piece) for piece in range(axis.pieces)]
            own = [_dealt(each, axis.ranks, axis.rank) for each in pieces]
            held[axis.dim] = _merged(itertools.chain.from_iterable(own))
        return cls(tuple(shape), tuple(held))

    @property
    def numel(self) -> int:
        """How many elements the rank holds."""
        return math.prod(sum(stop - start for start, stop in each) for each in self.held)

    @property
    def runs(self) -> Runs:
        """Where the elements are in the whole."""
        return _runs_of(self)


@dataclass(frozen=True, slots=True)
class Runs:
    """Elements of a whole: ascending runs of `lengths` from `starts` on, shape (n,) each."""

    starts: Integers
    lengths: Integers
    places: Integers
    """Where each run begins in the memory of who holds them."""

    def within(self, start: int, stop: int) -> Runs:
        """Return those in [start, stop), counted from `start`. Places stay as they are."""
        ends = self.starts + self.lengths
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(self.starts, stop, side="left"))
        starts: Integers = np.maximum(self.starts[first:last], start)
        lengths: Integers = np.minimum(ends[first:last], stop) - starts
        places: Integers = self.places[first:last] + (starts - self.starts[first:last])
        return Runs(starts - start, lengths, places)

    @property
    def numel(self) -> int:
        """How many elements they are."""
        return int(self.lengths.sum())

    @property
    def memory(self) -> Span:
        """Where these elements lie in the memory of who holds them: in one piece."""
        if not len(self.places):
            return 0, 0
        return int(self.places[0]), int(self.places[-1] + self.lengths[-1])


@dataclass(frozen=True, slots=True)
class Block:
    """Runs of one length at equal distances."""

    start: int
    run: int
    """Elements of each."""
    stride: int
    """From the beginning of one to that of the next."""
    count: int

    @property
    def numel(self) -> int:
        """Elements of all runs."""
        return self.run * self.count

    def moved(self, by: int) -> Block:
        """Return the same runs, `by` elements further on."""
        return Block(self.start + by, self.run, self.stride, self.count)


def blocks_of(runs: Runs) -> list[Block]:
    """Return runs as few blocks, in their order."""
    blocks = []
    starts, lengths = runs.starts, runs.lengths
    first = 0
    while first < len(starts):
        stop, stride = first + 1, int(lengths[first])
        if stop < len(starts):
            stride = int(starts[stop] - starts[first])
            is_odd = (np.diff(starts[first:]) != stride) | (lengths[stop:] != lengths[first])
            odd = np.flatnonzero(is_odd)
            stop = int(first + 1 + odd[0]) if len(odd) else len(starts)
        count = stop - first
        blocks.append(Block(int(starts[first]), int(lengths[first]), stride, count))
        first = stop
    return blocks


def problem_of(holdings: Iterable[Holding]) -> str | None:
    """Return what is wrong with unlike holdings of one tensor; None: each element is in just one.

    Cost: linear in their runs.
    """
    runs = [each.runs for each in holdings]
    starts = np.concatenate([each.starts for each in runs])
    lengths = np.concatenate([each.lengths for each in runs])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + lengths)[order]
    shape = next(iter(holdings)).shape
    edges = np.concatenate([[0], ends]), np.concatenate([starts, [math.prod(shape)]])
    for end, start in zip(*(each.tolist() for each in edges), strict=True):
        if end > start:
            return f"element {start} is held by ranks of unlike shards"
        if end < start:
            return f"element {end} is held by no rank"
    return None


def _dealt(spans: Spans, parts: int, index: int) -> Spans:
    """Return the part of that index, as torch.chunk cuts: each of ceil(n / parts), but the last."""
    size = -(-sum(stop - start for start, stop in spans) // parts)
    return _cut(spans, index * size, (index + 1) * size)


def _cut(spans: Spans, first: int, last: int) -> Spans:
    """Return the elements from the place `first` among them to before `last`."""
    found, place = [], 0
    for start, stop in spans:
        low, high = max(first - place, 0), min(last - place, stop - start)
        if low < high:
            found.append((start + low, start + high))
        place += stop - start
    return tuple(found)


def _merged(spans: Iterable[Span]) -> Spans:
    merged: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return tuple(merged)


@functools.lru_cache(maxsize=1 << 14)
def _runs_of(holding: Holding) -> Runs:
    """Return the runs of a product of indices."""
    shape, held = holding.shape, holding.held
    full = [spans == ((0, size),) for spans, size in zip(held, shape, strict=True)]
    cut = max((dim for dim, is_full in enumerate(full) if not is_full), default=-1)
    if cut < 0:
        starts, lengths = np.zeros(1, np.int64), np.array([math.prod(shape)], np.int64)
    else:
        inner = math.prod(shape[cut + 1 :])
        spans = np.array(held[cut], np.int64).reshape(-1, 2) * inner
        starts, lengths = spans[:, 0], spans[:, 1] - spans[:, 0]
        for dim in reversed(range(cut)):
            indices = [np.arange(*span, dtype=np.int64) for span in held[dim]]
            outer = np.concatenate([np.zeros(0, np.int64), *indices])
            outer *= math.prod(shape[dim + 1 :])
            starts = (outer[:, None] + starts[None, :]).reshape(-1)
            lengths = np.tile(lengths, len(outer))
    is_there = lengths > 0
    starts, lengths = starts[is_there], lengths[is_there]
    return Runs(starts, lengths, np.cumsum(lengths) - lengths)
