"""The grid of a bucket: its chunks, and the rank at each site that owns a chunk.

Pure. A bucket is cut at every multiple of the chunk size, and at every site's shard boundaries. So
a chunk belongs to exactly one rank at each site, and every site computes the same grid from the
same three figures. Only some of a site's ranks may share a bucket, such as those of one pipeline
stage.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isthmus.sites.local.sharing import Sharing


@dataclass(frozen=True, slots=True)
class Grid:
    """The chunks of one bucket. Create it with `grid`, which caches the latest ones."""

    numel: int
    """float32 elements of the bucket."""
    starts: npt.NDArray[np.int64]
    """Cut points, shape (chunks + 1,); the last one is `numel`."""
    shard_numel: tuple[int, ...]
    """Elements of a full shard, by site."""
    sharing: Sharing

    @property
    def num_chunks(self) -> int:
        """Number of chunks; 0 for an empty bucket."""
        return len(self.starts) - 1

    def span(self, chunk: int) -> tuple[int, int]:
        """Return a chunk's first element and its number of elements."""
        start = int(self.starts[chunk])
        return start, int(self.starts[chunk + 1]) - start

    def turn(self, bucket: int, chunk: int) -> int:
        """Return a chunk's turn, which selects its tree; `bucket` is the bucket's number.

        Turns continue from bucket to bucket: restarting would favour the first trees.
        """
        return bucket * self.num_chunks + chunk

    def owner(self, site: int, chunk: int) -> int:
        """Return the rank, inside `site`, whose shard holds a chunk."""
        place = int(self.starts[chunk]) // self.shard_numel[site]
        ranks = self.sharing[site]
        return place if isinstance(ranks, int) else ranks[place]

    def ranks(self, site: int) -> Sequence[int]:
        """Return the ranks of `site` that share the bucket."""
        ranks = self.sharing[site]
        return range(ranks) if isinstance(ranks, int) else ranks

    def shard(self, site: int, rank: int) -> tuple[int, int]:
        """Return a rank's first element and its number of elements, without padding.

        Raises:
            ValueError: the rank does not share the bucket.
        """
        return shard_of(self.numel, self.shard_numel[site], self.ranks(site).index(rank))

    def chunks(self, site: int, rank: int) -> range:
        """Return the chunks of a rank's shard: consecutive, none for an empty shard."""
        start, count = self.shard(site, rank)
        first, last = np.searchsorted(self.starts, (start, start + count))
        return range(int(first), int(last))


def shard_numel(numel: int, ranks: int) -> int:
    """Return the elements of a full shard; at least 1, also for an empty bucket."""
    return max(1, -(-numel // ranks))


def shard_of(numel: int, size: int, rank: int) -> tuple[int, int]:
    """Return a rank's first element and number of elements; a full shard has `size`."""
    start = min(rank * size, numel)
    return start, min((rank + 1) * size, numel) - start


@functools.lru_cache(maxsize=4096)
def grid(numel: int, chunk_numel: int, sharing: Sharing) -> Grid:
    """Return the (cached) grid of a bucket of `numel` elements shared by the ranks in `sharing`."""
    assert numel >= 0
    assert chunk_numel >= 1
    counts = tuple(each if isinstance(each, int) else len(each) for each in sharing)
    assert min(counts) >= 1
    sizes = tuple(shard_numel(numel, ranks) for ranks in counts)
    cuts = [np.arange(0, numel, size, dtype=np.int64) for size in {chunk_numel, *sizes}]
    starts = np.unique(np.concatenate([*cuts, np.array([numel], dtype=np.int64)]))
    starts.flags.writeable = False
    return Grid(numel, starts, sizes, sharing)
