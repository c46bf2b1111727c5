"""Which own chunks are encoded and sent next: in one order at all sites.

As far as links and peers have room. Whoever calls holds the executor's lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from sites.gateway.links.peer_links import Link
from sites.gateway.reduction.bucket import BucketRun, Chunk
from sites.gateway.reduction.chunk_reduction import Own
from sites.gateway.reduction.credit import Credit
from sites.gateway.reduction.pool import Priority


class Admission:
    """Own chunks that are not admitted yet, and what those that are take."""

    def __init__(self, credit: Credit, ranks_per_node: int) -> None:
        """Begin with none.

        Args:
            credit: what peers have room for.
            ranks_per_node: of this site.
        """
        self.credit = credit
        self._ranks_per_node = ranks_per_node
        self._waiting: list[tuple[Priority, BucketRun, Chunk, Own]] = []
        """A heap. Priorities are unique."""
        self._encoding_bytes = 0
        """Of float32, admitted and not handed to links yet."""

    def __bool__(self) -> bool:
        """Whether any chunk waits; may be asked without the lock by who adds none."""
        return bool(self._waiting)

    def add(self, run: BucketRun, chunk: Chunk, own: Own) -> None:
        """Let a chunk wait for its turn."""
        heapq.heappush(self._waiting, ((*run.key, chunk.index), run, chunk, own))

    def clear(self) -> None:
        """Nothing is admitted any more."""
        self._waiting.clear()

    def next(self, links: Iterable[Link]) -> tuple[BucketRun, Chunk, Own] | None:
        """Admit the earliest chunk that waits, and return it; None while it may not be sent."""
        if not self._waiting or not self._may_admit(links):
            return None
        order, run, chunk, own = heapq.heappop(self._waiting)
        self.credit.take(order, chunk.peers, chunk.most_bytes)
        self._encoding_bytes += chunk.raw_bytes
        return run, chunk, own

    def note_handled(self, chunk: Chunk) -> None:
        """What there is to send of an admitted chunk's own part is the links' now."""
        self._encoding_bytes -= chunk.raw_bytes

    def _may_admit(self, links: Iterable[Link]) -> bool:
        """Return whether the earliest chunk may be sent.

        Only of a bucket that all ranks of the node have posted: those of a late rank come before
        those of the others' later buckets, here as at all sites.
        """
        _, run, chunk, _ = self._waiting[0]
        return (
            len(run.shards) == self._ranks_per_node
            and self.credit.has_room(chunk.peers, chunk.most_bytes)
            and all(link.unsent_bytes + self._encoding_bytes < link.ahead_bytes for link in links)
        )
