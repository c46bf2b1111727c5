"""How many own chunks may be without a result, so that nothing which was sent waits for room. Pure.

A gateway sends its part of a chunk only while each gateway that gets it has room promised for it:
credit, which the chunk takes when it is admitted and gives back when its result is here. So a peer
takes over whatever comes, at once, and bounded memory holds up nothing but the admission of own
chunks.

Nobody waits for ever. Chunks have one order at all sites, (round, bucket, chunk), in which ranks
post and gateways admit them; a rank waits for no bucket but earlier ones before it posts the next.
Let m be the earliest chunk that is unfinished anywhere. All before it are finished everywhere, so m
will be posted by all ranks; where it is, it is the first that waits and no credit is taken, for all
that has been admitted is finished. So m is admitted at every site. What peers need for it is then
made, leaves (links are always emptied, for every frame is acknowledged as soon as it comes,
whatever its place among the others), and is summed and passed on when the last part is there. So m
gets finished, and then the next one. None of this depends on how large credit, windows, buckets and
chunks are, in which order frames arrive, or how often connections break.

What a peer q holds of a gateway g is bounded by twice the credit c of the two. In a tree, a part of
g lies there only until q has summed the chunk; before that it is unfinished at g: c at most. And a
result of g lies there while the chunk is unfinished at q, which has credit of g for it: c again. In
a gather, what lies there is unfinished at g, or finished: then g has the part of q, which has
credit of g for it as long as the chunk is unfinished at q: c each.

How many bytes of peers' frames lie here before they can be summed. Pure.

A peer may be ahead: of the local ranks, which have not posted a bucket yet; of this gateway, which
has not sent its own part, for another link is slower; or of a third site, whose part comes first in
the sum. What it sends then is kept. It never sends more than there is room for (`credit.py`), so a
frame never waits here; one for which there is none ends the run, for whoever sent it has lost
count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from protos.errors import RemoteProtocolError
from sites.gateway.config import GatewayConfig

_LEAST_CHUNKS = 4
"""To any peer, under way side by side."""
_STRAY_CHUNKS = 256
"""To a gateway whose ranks' shards of a long bucket do not meet those of this one's. Shards are
rounded up to whole elements, so that of others they may: by fewer elements than a site has
ranks."""


class Credit:
    """What own chunks without a result take at each peer."""

    def __init__(self, most_bytes: Mapping[Sender, int]) -> None:
        """Begin with none.

        Args:
            most_bytes: of each peer.
        """
        self._most_bytes = most_bytes
        self._taken_bytes: Counter[Sender] = Counter()
        self._chunks: dict[ChunkOrder, tuple[tuple[Sender, ...], int]] = {}

    @property
    def num_bytes(self) -> int:
        """What is taken, of all peers."""
        return self._taken_bytes.total()

    def has_room(self, peers: Iterable[Sender], size_bytes: int) -> bool:
        """Return whether a chunk may be admitted whose frames go to these."""
        return all(self._taken_bytes[peer] + size_bytes <= self._most_bytes[peer] for peer in peers)

    def take(self, order: ChunkOrder, peers: tuple[Sender, ...], size_bytes: int) -> None:
        """A chunk is admitted; its frames take so much at most."""
        self._chunks[order] = peers, size_bytes
        for peer in peers:
            self._taken_bytes[peer] += size_bytes

    def give_back(self, order: ChunkOrder) -> None:
        """A chunk's result is here. Once more changes nothing."""
        peers, size_bytes = self._chunks.pop(order, ((), 0))
        for peer in peers:
            self._taken_bytes[peer] -= size_bytes


def credit_of_peers(config: GatewayConfig) -> dict[Sender, int]:
    """Return the credit of each gateway of the other sites, in bytes; both of a pair find the same.

    Whatever the plan: twice the credit of all that exchange more than a few elements with one
    gateway is `held_bytes` at most, or what it takes to keep the links busy.
    """
    own = config.site_index, config.node
    nodes = config.nodes_per_site
    least = max(_LEAST_CHUNKS * (config.chunk_bytes + FRAME_BYTES), config.pipeline_bytes)
    stray = _STRAY_CHUNKS * FRAME_BYTES + _LEAST_CHUNKS * 4 * max(config.ranks_per_site)
    own_share = config.held_bytes // (2 * max(1, _num_partners(nodes, own)))
    found = {}
    for site, num_nodes in enumerate(nodes):
        for node in range(num_nodes) if site != own[0] else ():
            peer = site, node
            if node not in _partners(nodes, own, site):
                found[peer] = stray
                continue
            share = config.held_bytes // (2 * _num_partners(nodes, peer))
            found[peer] = max(min(share, own_share), least)
    return found


def _num_partners(nodes: tuple[int, ...], gateway: Sender) -> int:
    return sum(len(_partners(nodes, gateway, site)) for site in range(len(nodes)))


def _partners(nodes: tuple[int, ...], gateway: Sender, site: int) -> range:
    """Return another site's nodes that hold the same elements of a long bucket; none of its own."""
    if site == gateway[0]:
        return range(0)
    own, node = nodes[gateway[0]], gateway[1]
    return range(node * nodes[site] // own, -(-(node + 1) * nodes[site] // own))


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
