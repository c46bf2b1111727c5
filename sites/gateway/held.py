"""How many bytes of peers' frames lie here before they can be summed. Pure.

A peer may be ahead: of the local ranks, which have not posted a bucket yet; of this gateway, which has
not sent its own part, for another link is slower; or of a third site, whose part comes first in the
sum. What it sends then is kept, up to a bound for each peer, so that one that is far ahead takes nothing
from the others. Beyond it, frames are not acknowledged, which holds the peer's window back.

One frame is let in beyond the bound: one that comes before everything kept of its peer. All sites work
through chunks in the same order, so the earliest one that is unfinished anywhere is never kept out,
and nobody waits for ever.
"""

from __future__ import annotations

from collections import defaultdict

FRAME_BYTES = 1 << 10
"""What keeping a frame takes beside its payload, a bucket of its own included: frames without a payload
have to be bounded too."""
ChunkOrder = tuple[int, int, int]
"""Round, bucket, chunk."""
Sender = tuple[int, int]
"""Site index and node of a gateway."""


class Held:
    """What is kept, by peer and chunk."""

    def __init__(self, most_bytes: int, num_senders: int) -> None:
        """Begin with nothing.

        Args:
            most_bytes: of all peers together.
            num_senders: among which that is divided.
        """
        self._most_bytes = most_bytes // max(1, num_senders)
        self._by_sender: dict[Sender, dict[ChunkOrder, int]] = defaultdict(dict)
        self._bytes: dict[Sender, int] = defaultdict(int)

    @property
    def num_bytes(self) -> int:
        """What is kept of all peers."""
        return sum(self._bytes.values())

    def has_room(self, sender: Sender, order: ChunkOrder, size_bytes: int) -> bool:
        """Return whether a frame may be taken over."""
        if self._bytes[sender] + size_bytes <= self._most_bytes:
            return True
        return order < min(self._by_sender[sender], default=(order[0] + 1, 0, 0))

    def keep(self, sender: Sender, order: ChunkOrder, size_bytes: int) -> None:
        """Count a frame that was taken over."""
        kept = self._by_sender[sender]
        kept[order] = kept.get(order, 0) + size_bytes
        self._bytes[sender] += size_bytes

    def release(self, order: ChunkOrder) -> bool:
        """Forget a chunk's frames, of all peers: they are summed. Return whether there were any."""
        were_any = False
        for sender, kept in self._by_sender.items():
            size_bytes = kept.pop(order, 0)
            self._bytes[sender] -= size_bytes
            were_any = were_any or size_bytes > 0
        return were_any
