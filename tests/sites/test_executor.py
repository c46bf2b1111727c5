"""When own chunks are sent, and rounds that wait for the outcome of a proposed plan.

Real executors: over links that take little, to peers that keep little.
"""

from __future__ import annotations

import gc
import heapq
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from isthmus.protos.errors import DeadlineExceededError, PeerLostError
from isthmus.protos.frame import HEADER_BYTES, Frame, Kind, Packed, pack
from isthmus.sites.codecs.codec import Floats
from isthmus.sites.gateway.links.peer_links import Link
from isthmus.sites.gateway.reduction import executor
from isthmus.sites.gateway.reduction.credit import FRAME_OVERHEAD_BYTES
from isthmus.sites.gateway.reduction.executor import Begun
from isthmus.sites.local.rank_messages import Reduce
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, followed, star
from tests.fakes.exchanges import Exchanges, request_of

DEADLINE_S = 20.0
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
        self.unsent: list[tuple[tuple[int, int, int, int], Packed]] = []
        self.under_way: deque[Packed] = deque()

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
    sites.post(site, rank, request_of(numel, bucket=bucket), values)


def two_sites(plan: ReductionPlan) -> tuple[Exchanges, list[NarrowLink]]:
    """Return sites of two ranks each, that keep four frames of a peer, and both links."""
    held_bytes = 4 * (FRAME_OVERHEAD_BYTES + CHUNK_BYTES)
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


def test_a_bucket_and_its_frames_go_with_its_last_result() -> None:
    sites, links = two_sites(PLANS["trees"])
    gc.collect()
    gc.disable()
    try:
        for site in range(2):
            post(sites, site, 0, 0)
        [bucket] = sites.exchanges[0]._exchanges.open_buckets()
        gone = [weakref.ref(chunk.machine) for chunk in bucket.chunks.values()]
        gone_bucket = weakref.ref(bucket)
        del bucket
        for site in range(2):
            post(sites, site, 1, 0)
        carry(sites, links)
        assert len(sites.reduced) == 4
        assert gone_bucket() is None, "a cycle holds it"
        assert [machine() for machine in gone] == [None] * len(gone)
    finally:
        gc.enable()


def a_post(round_: int) -> tuple[int, Reduce, Floats]:
    return 0, request_of(8, round=round_), np.ones(8, dtype=np.float32)


def test_a_rank_waits_at_the_first_round_until_the_outcome_is_known() -> None:
    plan = ReductionPlan(2, (star(2, 0),), "")
    exchange = Exchanges(plan, "fp32", (1, 1)).exchanges[0]
    exchange.post(*a_post(0))
    assert exchange.settle(1, stops=False).round == 0
    posting = threading.Thread(target=exchange.post, args=a_post(1), daemon=True)
    posting.start()
    posting.join(0.05)
    assert posting.is_alive(), "it has to wait"
    assert exchange.round == 0
    exchange.resume(1, 1, plan, ("fp32",))
    posting.join(DEADLINE_S)
    assert not posting.is_alive()
    assert exchange.round == 1


def test_nobody_waits_for_an_outcome_for_ever() -> None:
    plan = ReductionPlan(2, (star(2, 0),), "")
    exchange = Exchanges(plan, "fp32", (1, 1), rank_wait_s=0.01).exchanges[0]
    exchange.settle(1, stops=False)
    with pytest.raises(DeadlineExceededError, match="round 1 has waited"):
        exchange.post(*a_post(1))
    exchange.close()
    patient = Exchanges(plan, "fp32", (1, 1)).exchanges[0]
    patient.settle(1, stops=False)
    patient.close()
    with pytest.raises(PeerLostError, match="stopping"):
        patient.post(*a_post(1))


def test_who_stood_still_meanwhile_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ReductionPlan(2, (star(2, 0),), "")
    exchange = Exchanges(plan, "fp32", (1, 1), peer_lost_s=10.0).exchanges[0]
    exchange.settle(1, stops=False)
    now_s, num_waits = 100.0, 0

    def wait(wait_s: float) -> None:
        nonlocal now_s, num_waits
        num_waits += 1
        now_s += wait_s if num_waits > 1 else 3600.0
        if num_waits > 25:
            exchange.cancel(1)

    clock = SimpleNamespace(monotonic=lambda: now_s, thread_time=lambda: 0.0)
    monkeypatch.setattr(executor, "time", clock)
    monkeypatch.setattr(exchange._condition, "wait", wait)
    exchange.post(*a_post(1))
    assert num_waits == 26
    exchange.close()


def test_links_are_needed_for_as_long_as_a_plan_is() -> None:
    before, after = (ReductionPlan(3, (star(3, hub),), "") for hub in (1, 2))
    exchange = Exchanges(before, "fp32", (1, 1, 1)).exchanges[0]
    plans = exchange
    assert [plans.needs(site) for site in (1, 2)] == [True, False]
    exchange.post(*a_post(0))
    plans.settle(1, stops=False)
    plans.resume(1, 1, after, ("fp32",))
    assert plans.needs(2)
    for round_, needed in ((1, [True, True]), (2, [False, True])):
        exchange.post(*a_post(round_))
        assert [plans.needs(site) for site in (1, 2)] == needed, round_


def test_a_site_that_others_wait_for_gives_up_before_their_ranks_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s, thread_time=lambda: 0.0)
    monkeypatch.setattr(executor, "time", clock)
    every = ReductionPlan(3, (star(3, 0),), "")
    members = ReductionPlan(3, (Tree(0, {1: 0}),), "", only=(0, 1))
    exchange = Exchanges(members, "fp32", (1, 1, 1), peer_lost_s=10.0).exchanges[2]
    exchange.resume(1, 5, followed(members, {2: (0, 1)}), ("fp32",))
    assert exchange.post(*a_post(5)) == Begun(1, 0)
    assert exchange.post(*a_post(6)) is None
    now_s += 11.0
    assert exchange.post(*a_post(9)) == Begun(1, 0), "nobody has let it in"
    exchange.resume(2, 20, every, ("fp32",))
    now_s += 79.0
    exchange.post(*a_post(10))
    now_s += 2.0
    with pytest.raises(PeerLostError, match="the others have waited for 80 s"):
        exchange.post(*a_post(11))
    exchange.close()


class LargeResidual(np.ndarray[tuple[int, ...], np.dtype[np.float32]]):
    """Copying it takes as long as somebody else needs for a frame."""

    def copy(self, order: str = "C") -> Floats:  # type: ignore[override] # of numpy's, this is enough
        del order
        sites, told = self.sites
        other = threading.Thread(target=lambda: told.append(sites.exchanges[0].needs(1)))
        other.start()
        other.join(DEADLINE_S / 4)
        return np.array(self)

    sites: tuple[Exchanges, list[bool]]


def test_nobody_waits_while_residuals_are_copied() -> None:
    sites, _ = two_sites(PLANS["gather"])
    one = sites.exchanges[0]
    residual = np.ones(CHUNK_BYTES // 4, dtype=np.float32).view(LargeResidual)
    told: list[bool] = []
    residual.sites = sites, told
    key = 0, 7, BUCKET_CHUNKS * CHUNK_BYTES // 4, 0, Kind.CONTRIBUTION
    one.restore({key: residual})
    copied = one.residuals_of(0)
    assert told == [True], "who asked waited until all was copied"
    assert copied[key].tolist() == [1.0] * len(residual)
    assert not np.shares_memory(copied[key], residual)


def test_the_end_of_a_round_reaches_every_site_once() -> None:
    """Along the links of the plan's trees: leaves have none with each other."""
    sites = Exchanges(ReductionPlan(4, (star(4, 1),), ""), "fp32", [1] * 4)
    assert sites.exchanges[0].end_round(3)
    assert not sites.exchanges[0].end_round(3)
    while sites.wire:
        sent = sites.wire.pop(0)
        sites.deliver(sent.source, sent.target, sent.data)
    assert sorted(sites.ended) == [(1, 3), (2, 3), (3, 3)]
    assert not sites.exchanges[2].end_round(2), "it is past"
    assert not sites.failures
