"""Limits how many bytes a gateway sends before it has their results, by credit at each peer. Pure.

A gateway sends its part of a chunk only while each gateway that gets it, and the one that the
chunk's result comes from, has room promised for it. This promise is credit. A chunk takes it when
it is admitted, and gives it back when its result is here. So a peer takes over whatever comes, at
once, and bounded memory delays nothing but the admission of own chunks. `Credit` counts what is
taken at peers; `Held` counts what lies here.

docs/invariants.md proves that with any credit every chunk is finished, whatever is late.

**What a peer q holds of a gateway g is at most twice the credit c of the two.**

- In a tree, a part of g lies at q only until q has summed the chunk, and before that the chunk is
  unfinished at g: at most c. A result of g lies at q while the chunk is unfinished at q, which has
  credit of g for it, whether its own sum goes to g or elsewhere: c again.
- In a gather, the chunk of what lies at q is either unfinished at g: at most c. Or it is finished
  there, so g has the part of q, which has credit of g for it while the chunk is unfinished at q: c
  again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from isthmus.protos.errors import RemoteProtocolError
from isthmus.sites.gateway.config import GatewayConfig, GatewayId

FRAME_OVERHEAD_BYTES = 1 << 10
"""Memory that a kept frame takes beside its payload, with a bucket of its own. Frames without a
payload have to be bounded, too."""
ChunkOrder = tuple[int, int, int]
"""Round, bucket, chunk."""
_LEAST_CHUNKS = 4
"""Chunks that any peer is given credit for, so that they can be under way side by side."""
_STRAY_CHUNKS = 256
"""Credit of a gateway whose ranks' shards of a long bucket do not meet those of this one's ranks.

Shards are rounded up to whole elements. So in other buckets such shards may meet, by fewer elements
than a site has ranks."""


class Credit:
    """Room that own chunks without a result take at each peer."""

    def __init__(self, most_bytes: Mapping[GatewayId, int]) -> None:
        self._most_bytes = most_bytes
        self._taken_bytes: Counter[GatewayId] = Counter()
        self._chunks: dict[ChunkOrder, tuple[tuple[GatewayId, ...], int]] = {}

    @property
    def num_bytes(self) -> int:
        """What is taken at all peers together."""
        return self._taken_bytes.total()

    def has_room(self, peers: Iterable[GatewayId], size_bytes: int) -> bool:
        """Return whether a chunk may be admitted whose frames go to these peers."""
        return all(self._taken_bytes[peer] + size_bytes <= self._most_bytes[peer] for peer in peers)

    def take(self, order: ChunkOrder, peers: tuple[GatewayId, ...], size_bytes: int) -> None:
        """A chunk is admitted. A frame of it takes `size_bytes` at most."""
        self._chunks[order] = peers, size_bytes
        for peer in peers:
            self._taken_bytes[peer] += size_bytes

    def give_back(self, order: ChunkOrder) -> None:
        """A chunk's result is here. To say so again changes nothing."""
        peers, size_bytes = self._chunks.pop(order, ((), 0))
        for peer in peers:
            self._taken_bytes[peer] -= size_bytes


def credit_of_peers(config: GatewayConfig) -> dict[GatewayId, int]:
    """Return the credit of each gateway of the other sites, in bytes. Both of a pair find the same.

    Whatever the plan is: twice the credit of all peers with which a gateway exchanges more than a
    few elements is at most `held_bytes`, or what it takes to keep the links busy.
    """
    own = config.site_index, config.gateway
    counts = config.gateways_per_site
    least = max(_LEAST_CHUNKS * (config.chunk_bytes + FRAME_OVERHEAD_BYTES), config.pipeline_bytes)
    stray = _STRAY_CHUNKS * FRAME_OVERHEAD_BYTES + _LEAST_CHUNKS * 4 * max(config.ranks_per_site)
    own_share = config.held_bytes // (2 * max(1, _num_partners(counts, own)))
    found = {}
    for site, num_gateways in enumerate(counts):
        for gateway in range(num_gateways) if site != own[0] else ():
            peer = site, gateway
            if gateway not in _partners(counts, own, site):
                found[peer] = stray
                continue
            share = config.held_bytes // (2 * _num_partners(counts, peer))
            found[peer] = max(min(share, own_share), least)
    return found


def _num_partners(counts: tuple[int, ...], gateway: GatewayId) -> int:
    return sum(len(_partners(counts, gateway, site)) for site in range(len(counts)))


def _partners(counts: tuple[int, ...], gateway: GatewayId, site: int) -> range:
    """Return the gateways of a site that have elements of a long bucket in common with this one.

    None of its own site. `counts` are the gateways of each site.
    """
    if site == gateway[0]:
        return range(0)
    own, index = counts[gateway[0]], gateway[1]
    return range(index * counts[site] // own, -(-(index + 1) * counts[site] // own))


class Held:
    """Bytes of peers' frames that lie here until they can be summed, by chunk and peer.

    A peer may be ahead of the local ranks, which have not posted a bucket yet. It may be ahead of
    this gateway, which has not sent its own part because another link is slower. Or it is ahead of
    a third site, whose part is missing. What it sends then is kept. A peer never sends more than it
    has credit for, so a frame never waits here. A frame beyond that ends the run, for its sender
    has lost count.
    """

    def __init__(self, most_bytes: Mapping[GatewayId, int]) -> None:
        """`most_bytes` may be kept of each peer; of one that is not there, any number."""
        self._most_bytes = most_bytes
        self._chunks: dict[ChunkOrder, dict[GatewayId, int]] = defaultdict(dict)
        self._bytes: Counter[GatewayId] = Counter()

    @property
    def num_bytes(self) -> int:
        """What is kept of all peers together."""
        return self._bytes.total()

    def has(self, sender: GatewayId, order: ChunkOrder) -> bool:
        """Return whether a peer's frame of a chunk is kept."""
        return order in self._chunks and sender in self._chunks[order]

    def keep(self, sender: GatewayId, order: ChunkOrder, size_bytes: int) -> None:
        """Count a frame that is taken over.

        Raises:
            RemoteProtocolError: a peer with enough sense of its credit would not have sent it.
        """
        if self._bytes[sender] + size_bytes > self._most_bytes.get(sender, math.inf):
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
