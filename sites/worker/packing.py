"""Cuts flat tensors, one after another, into buckets. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, Self, TypeVar


class Flat(Protocol):
    """Elements in a row: a tensor of one dimension, or one that ranks hold shards of."""

    def numel(self) -> int:
        """Return how many there are."""

    def __getitem__(self, part: slice, /) -> Self:
        """Return a view of those in `part`, whose ends are given."""


FlatT = TypeVar("FlatT", bound=Flat)


class Packer(Generic[FlatT]):
    """Fills buckets with views of what comes, in the order in which it comes."""

    def __init__(self, bucket_numel: int) -> None:
        """Start with an empty bucket of `bucket_numel` elements."""
        self._bucket_numel = bucket_numel
        self._room = bucket_numel
        self._bucket: list[FlatT] = []

    def add(self, flat: FlatT) -> Iterator[list[FlatT]]:
        """Put all of `flat` in; yield each bucket as it is full."""
        start, numel = 0, flat.numel()
        while start < numel:
            stop = min(numel, start + self._room)
            self._bucket.append(flat[start:stop])
            self._room -= stop - start
            start = stop
            if self._room == 0:
                yield self.take()

    def take(self) -> list[FlatT]:
        """Return what the bucket holds, and start another one."""
        bucket, self._bucket, self._room = self._bucket, [], self._bucket_numel
        return bucket
