"""Which own chunks are sent when.

Real executors over links that take little, to peers that keep little.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from typing import cast

import numpy as np
import pytest

from protos.frame import HEADER_BYTES, Frame, pack
from sites.gateway.links.peer_links import Link
from sites.gateway.reduction.bucket import Post
from sites.gateway.reduction.credit import FRAME_BYTES
from tests.fakes.exchanges import Exchanges
from topology.trees.trees import ReductionPlan, star

CHUNK_BYTES = 1 << 10
BUCKET_CHUNKS = 4
NUM_BUCKETS = 32
PLANS = {
    "gather": ReductionPlan(2, (), ""),
    "trees": ReductionPlan(2, (star(2, 0), star(2, 1)), ""),
}


class NarrowLink:
    """Frames that wait, in order, and one connection with a window of four frames."""

    window_bytes = 4 * (CHUNK_BYTES + HEADER_BYTES)
    ahead_bytes = 2 * window_bytes
    num_channels = 1
    rtt_s = 0.001
    bytes_per_s = 1e9

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.unsent: list[tuple[tuple[int, int, int, int], bytes]] = []
        self.under_way: deque[bytes] = deque()

    @property
    def unsent_bytes(self) -> int:
        return sum(len(data) for _, data in self.unsent)

    def send(self, frame: Frame, raw_bytes: int) -> int:
        assert raw_bytes == CHUNK_BYTES
        key, data = frame.key, pack(frame)
        heapq.heappush(self.unsent, ((key.round, key.bucket, key.chunk, key.kind), data))
        return len(data)

    def step(self, sites: Exchanges) -> bool:
        """Let a frame leave, or the peer take one over; return whether either could be."""
        if self.unsent and sum(map(len, self.under_way)) < self.window_bytes:
            self.under_way.append(heapq.heappop(self.unsent)[1])
            sites.exchanges[self.source].pump()
            sites.pools[self.source].run()
            return True
        if not self.under_way:
            return False
        sites.deliver(self.source, self.target, self.under_way.popleft())
        return True


def post(sites: Exchanges, site: int, rank: int, bucket: int) -> None:
    numel = BUCKET_CHUNKS * CHUNK_BYTES // 4
    values = np.full(numel // 2, 1 + site, dtype=np.float32)
    sites.post(
        site,
        rank,
        Post(round=0, bucket=bucket, numel=numel, layout=7, weight=1.0, exact=False, values=values),
    )


def two_sites(plan: ReductionPlan) -> tuple[Exchanges, list[NarrowLink]]:
    """Return sites of two ranks each, that keep four frames of a peer, and both links."""
    held_bytes = 4 * (FRAME_BYTES + CHUNK_BYTES)
    sites = Exchanges(plan, "fp32", (2, 2), chunk_bytes=CHUNK_BYTES, held_bytes=held_bytes)
    links = [NarrowLink(0, 1), NarrowLink(1, 0)]
    for link in links:
        own = cast("Mapping[tuple[int, int], Link]", {(link.target, 0): link})
        sites.exchanges[link.source].connect(own)
    return sites, links


def carry(sites: Exchanges, links: list[NarrowLink]) -> None:
    """Move frames until none can be moved."""
    while any(link.step(sites) for link in links):
        assert not sites.failures


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_different_ranks_may_be_late_at_different_sites(plan: ReductionPlan) -> None:
    """No site fills the other with what that cannot sum yet, and then has no room for the rest."""
    sites, links = two_sites(plan)
    for is_late in (False, True):
        for bucket in range(NUM_BUCKETS):
            for site in range(2):
                post(sites, site, site ^ is_late, bucket)
            carry(sites, links)
    assert len(sites.reduced) == 2 * 2 * NUM_BUCKETS


def test_buckets_are_sent_in_order_once_all_ranks_have_posted_them() -> None:
    sites, links = two_sites(PLANS["gather"])
    for bucket in (0, 1):
        post(sites, 0, 1, bucket)
    assert not links[0].unsent
    post(sites, 0, 0, 0)
    assert [order[:3] for order, _ in sorted(links[0].unsent)] == [(0, 0, c) for c in range(4)]
