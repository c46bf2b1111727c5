"""How many bytes of peers' frames lie here before they can be summed. Pure.

A peer may be ahead: of the local ranks, which have not posted a bucket yet; of this gateway, which
has not sent its own part, for another link is slower; or of a third site, whose part comes first in
the sum. What it sends then is kept. It never sends more than there is room for (`credit.py`), so a
frame never waits here; one for which there is none ends the run, for whoever sent it has lost
count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from protos.errors import RemoteProtocolError

FRAME_BYTES = 1 << 10
"""What keeping a frame takes beside its payload, a bucket of its own included: frames without a
payload have to be bounded too."""
ChunkOrder = tuple[int, int, int]
"""Round, bucket, chunk."""
Sender = tuple[int, int]
"""Site index and node of a gateway."""


class Held:
    """What is kept, by chunk and peer."""

    def __init__(self, most_bytes: Mapping[Sender, int]) -> None:
        """Begin with nothing.

        Args:
            most_bytes: of each peer.
        """
        self._most_bytes = most_bytes
        self._chunks: dict[ChunkOrder, dict[Sender, int]] = defaultdict(dict)
        self._bytes: Counter[Sender] = Counter()

    @property
    def num_bytes(self) -> int:
        """What is kept of all peers."""
        return self._bytes.total()

    def has(self, sender: Sender, order: ChunkOrder) -> bool:
        """Return whether a peer's frame of a chunk is kept."""
        return order in self._chunks and sender in self._chunks[order]

    def keep(self, sender: Sender, order: ChunkOrder, size_bytes: int) -> None:
        """Count a frame that is taken over.

        Raises:
            RemoteProtocolError: a peer with enough sense of its credit would not have sent it.
        """
        if self._bytes[sender] + size_bytes > self._most_bytes[sender]:
            raise RemoteProtocolError(
                f"round {order[0]} bucket {order[1]} chunk {order[2]}: a frame beyond the "
                f"{self._most_bytes[sender]} bytes that may lie here until they can be summed"
            )
        self._chunks[order][sender] = size_bytes
        self._bytes[sender] += size_bytes

    def release(self, order: ChunkOrder) -> None:
        """Forget a chunk's frames, of all peers: they are summed."""
        for sender, size_bytes in self._chunks.pop(order, {}).items():
            self._bytes[sender] -= size_bytes
