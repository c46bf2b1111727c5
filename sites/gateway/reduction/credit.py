"""Limits the bytes that a gateway sends before it has the results, by credit per peer. Pure.

A gateway sends its part of a chunk only while every receiver, and the gateway that will send the
result, has memory reserved for it. This reservation is credit. A chunk takes credit when it is
admitted, and returns it when its result arrives. So a peer accepts every frame at once, and bounded
memory delays only the admission of own chunks. `Credit` counts bytes reserved at peers; `Held`
counts peers' bytes kept here.

docs/invariants.md proves that every chunk is finished with any credit, whatever is late.

**A peer q holds at most 2c bytes of frames of a gateway g, where c is the credit of the pair.**

- In a tree, q holds a part of g only until q has summed the chunk. Until then the chunk is
  unfinished at g: at most c. q holds a result of g while the chunk is unfinished at q, which has
  taken credit at g for it: c again.
- In a gather, a chunk whose frame q holds may be unfinished at g: at most c. Or it is finished at
  g, so g has q's part, for which q has taken credit at g while the chunk is unfinished at q: c
  again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from isthmus.protos.errors import RemoteProtocolError
from isthmus.sites.gateway.config import GatewayConfig, GatewayId

FRAME_OVERHEAD_BYTES = 1 << 10
"""Memory of a kept frame beside its payload, in the worst case with its own bucket. It also bounds
frames without a payload."""
ChunkOrder = tuple[int, int, int]
"""Round, bucket, chunk."""
_LEAST_CHUNKS = 4
"""Minimum credit per peer, in chunks, so that several can be in flight."""
_STRAY_CHUNKS = 256
"""Credit in chunks for a gateway whose ranks' shards do not overlap those of this gateway's ranks
in a long bucket. Shards are rounded up to whole elements, so in other buckets they may overlap by a
few elements."""


class Credit:
    """Bytes that own chunks without a result have reserved at each peer."""

    def __init__(self, most_bytes: Mapping[GatewayId, int]) -> None:
        self._most_bytes = most_bytes
        self._taken_bytes: Counter[GatewayId] = Counter()
        self._chunks: dict[ChunkOrder, tuple[tuple[GatewayId, ...], int]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes reserved at all peers together."""
        return self._taken_bytes.total()

    def has_room(self, peers: Iterable[GatewayId], size_bytes: int) -> bool:
        """Return whether a chunk may be admitted whose frames go to these peers."""
        return all(self._taken_bytes[peer] + size_bytes <= self._most_bytes[peer] for peer in peers)

    def take(self, order: ChunkOrder, peers: tuple[GatewayId, ...], size_bytes: int) -> None:
        """Reserve room for an admitted chunk, whose frames take at most `size_bytes`."""
        self._chunks[order] = peers, size_bytes
        for peer in peers:
            self._taken_bytes[peer] += size_bytes

    def give_back(self, order: ChunkOrder) -> None:
        """Release a chunk's reservation: its result has arrived. Idempotent."""
        peers, size_bytes = self._chunks.pop(order, ((), 0))
        for peer in peers:
            self._taken_bytes[peer] -= size_bytes


def credit_of_peers(config: GatewayConfig) -> dict[GatewayId, int]:
    """Return the credit of each gateway of the other sites in bytes; equal on both sides.

    With any plan, twice the credit of all peers with which a gateway exchanges more than a few
    elements is at most `held_bytes`, or the amount that keeps the links busy.
    """
    own = config.site_index, config.gateway
    counts = config.gateways_per_site
    least = max(_LEAST_CHUNKS * (config.chunk_bytes + FRAME_OVERHEAD_BYTES), config.pipeline_bytes)
    stray = _STRAY_CHUNKS * FRAME_OVERHEAD_BYTES + _LEAST_CHUNKS * 4 * max(config.ranks_per_site)
    own_share = config.held_bytes // (2 * max(1, _num_partners(counts, own)))
    credit = {}
    for site, num_gateways in enumerate(counts):
        for gateway in range(num_gateways) if site != own[0] else ():
            peer = site, gateway
            if gateway not in _partners(counts, own, site):
                credit[peer] = stray
                continue
            share = config.held_bytes // (2 * _num_partners(counts, peer))
            credit[peer] = max(min(share, own_share), least)
    return credit


def _num_partners(counts: tuple[int, ...], gateway: GatewayId) -> int:
    return sum(len(_partners(counts, gateway, site)) for site in range(len(counts)))


def _partners(counts: tuple[int, ...], gateway: GatewayId, site: int) -> range:
    """Return the gateways of a site whose shards of a long bucket overlap this gateway's.

    Empty for the own site. `counts` are the numbers of gateways by site.
    """
    if site == gateway[0]:
        return range(0)
    own, index = counts[gateway[0]], gateway[1]
    return range(index * counts[site] // own, -(-(index + 1) * counts[site] // own))


class Held:
    """Counts peers' frames that are kept here until they can be summed, by chunk and peer.

    A peer's frames are kept if it is ahead of the local ranks, which have not posted the bucket; of
    this gateway, whose own part waits for a slower link; or of a third site, whose part is missing.
    A peer never sends more than its credit, so no frame is ever refused for lack of room. A frame
    beyond the credit ends the run, for its sender has lost count.
    """

    def __init__(self, most_bytes: Mapping[GatewayId, int]) -> None:
        """`most_bytes` limits the bytes kept per peer; peers without an entry have no limit."""
        self._most_bytes = most_bytes
        self._chunks: dict[ChunkOrder, dict[GatewayId, int]] = defaultdict(dict)
        self._bytes: Counter[GatewayId] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes kept of all peers together."""
        return self._bytes.total()

    def has(self, sender: GatewayId, order: ChunkOrder) -> bool:
        """Return whether a peer's frame of a chunk is kept."""
        return order in self._chunks and sender in self._chunks[order]

    def keep(self, sender: GatewayId, order: ChunkOrder, size_bytes: int) -> None:
        """Count a frame that is kept.

        Raises:
            RemoteProtocolError: the frame exceeds the peer's credit.
        """
        if self._bytes[sender] + size_bytes > self._most_bytes.get(sender, math.inf):
            raise RemoteProtocolError(
                f"round {order[0]} bucket {order[1]} chunk {order[2]}: a frame beyond the "
                f"{self._most_bytes[sender]} bytes that may lie here until they can be summed"
            )
        self._chunks[order][sender] = size_bytes
        self._bytes[sender] += size_bytes

    def release(self, order: ChunkOrder) -> None:
        """Release a chunk's frames of all peers: they are summed."""
        for sender, size_bytes in self._chunks.pop(order, {}).items():
            self._bytes[sender] -= size_bytes
