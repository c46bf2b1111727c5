"""Admits own chunks to encoding, in order, as fast as links take them and peers have room.

So encoded bytes do not pile up here, nor frames at peers. Callers hold the executor's lock.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Iterable, Mapping

from isthmus.protos.frame import ChunkKey, Frame, Kind, unpack
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.links.peer_links import Link
from isthmus.sites.gateway.reduction.bucket import Chunk, RoundHistory
from isthmus.sites.gateway.reduction.credit import Credit, credit_of_peers
from isthmus.sites.gateway.reduction.epochs import ChunkOrder
from isthmus.sites.gateway.reduction.reductions import Reductions

_log = logging.getLogger(__name__)


class Admission:
    """The own chunks that wait to be encoded, and what bounds those that do not."""

    def __init__(self, config: GatewayConfig, history: RoundHistory) -> None:
        self.room_bytes = credit_of_peers(config)
        """This gateway's frames that each peer keeps."""
        self.links: Mapping[GatewayId, Link] = {}
        self.credit = Credit(self.room_bytes)
        self.encoding_bytes = 0
        """float32 bytes of own parts admitted and not yet queued on links."""
        self._waiting: list[tuple[ChunkOrder, Chunk]] = []
        """Heap of chunks whose own part is not admitted. Their orders are unique."""
        self._history = history

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Queue the own parts of chunks."""
        for chunk in chunks:
            heapq.heappush(self._waiting, (chunk.order, chunk))

    def take(self) -> tuple[ChunkOrder, Chunk] | None:
        """Admit the earliest chunk that waits; None: links or peers have no room, or none waits.

        All ranks of the gateway must have posted its bucket, and the one before: the chunks of a
        late rank come before those of the others' later buckets, here as at all sites.
        """
        if not self._waiting:
            return None
        order, chunk = self._waiting[0]
        before = chunk.bucket.after
        if (
            not chunk.bucket.is_posted
            or (before is not None and not self._history.is_posted(before))
            or not self.credit.has_room(chunk.peers, chunk.most_bytes)
        ):
            return None
        for link in self.links.values():
            if link.unsent_bytes + self.encoding_bytes >= link.ahead_bytes:
                return None
        heapq.heappop(self._waiting)
        self.credit.take(order, chunk.peers, chunk.most_bytes)
        self.encoding_bytes += chunk.raw_bytes
        return order, chunk

    def stop(self, unhandled_bytes: int) -> None:
        """Forget what was admitted; so many float32 bytes of it have not been encoded."""
        self.encoding_bytes -= unhandled_bytes
        self.credit = Credit(self.room_bytes)

    def clear(self) -> None:
        """Admit nothing more."""
        self._waiting.clear()


class Handovers:
    """Finished chunks that are to be handed over to sites which lack them."""

    def __init__(self, config: GatewayConfig, reductions: Reductions) -> None:
        self._config = config
        self._reductions = reductions
        self._due: deque[tuple[ChunkOrder, int, tuple[object, ...]]] = deque()
        """(chunk, receiving site, frames)."""

    @property
    def is_idle(self) -> bool:
        """Whether none is due."""
        return not self._due

    def add(self, due: Iterable[tuple[ChunkOrder, int, tuple[object, ...]]]) -> None:
        """Queue handovers for their links: (chunk, receiving site, frames)."""
        self._due.extend(due)

    def clear(self) -> None:
        """Forget them: a new epoch says anew what is due."""
        self._due.clear()

    def send(self, links: Mapping[GatewayId, Link], epoch: int) -> None:
        """Send what links have room for now."""
        while self._due and self._give(*self._due[0], links, epoch):
            self._due.popleft()

    def _give(
        self,
        order: ChunkOrder,
        site: int,
        frames: tuple[object, ...],
        links: Mapping[GatewayId, Link],
        epoch: int,
    ) -> bool:
        """Hand a chunk over, unless the link has no room now; return whether it was sent."""
        for packed in frames:
            assert isinstance(packed, bytes | memoryview)
            frame = unpack(packed)
            cut = self._reductions.cut(frame.numel, frame.layout)
            gateway = cut.owner(site, order[2]) // self._config.ranks_per_gateway[site]
            link = links.get((site, gateway))
            if link is None:
                _log.warning("chunk %s is for site %d, and there is no link", order, site)
                return True
            if link.unsent_bytes >= link.ahead_bytes and frames[0] is packed:
                return False
            key = ChunkKey(*order, frame.key.site, Kind.HANDOVER)
            given = Frame(
                key,
                epoch,
                frame.codec,
                len(frames),
                frame.layout,
                frame.numel,
                frame.weight,
                packed,
            )
            link.send(given, 4 * cut.span(order[2])[1])
        return True
