"""Several gateways over real gRPC with ranks over real sockets: sums, and what holds them up."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from isthmus.topology.trees.shapes import ring_paths
from tests.fakes.gateway_rank import DEADLINE_S, GatewayRank
from tests.fakes.gateway_sites import (
    GATHER_2,
    gateway_config,
    gateways,
    join,
    leave,
    reduce_once,
    through_proxies,
)
from tests.fakes.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

GATHER_3 = ReductionPlan(3, (), "")
PLANS = {
    "alone": ReductionPlan(1, (), ""),
    "gather-2": GATHER_2,
    "star-3": ReductionPlan(3, (star(3, 2),), ""),
    "chain-4": ReductionPlan(4, (Tree(1, {0: 1, 2: 1, 3: 2}),), ""),
    "ring-4": ReductionPlan(4, ring_paths(range(4)), ""),
    "one-way-round-3": ReductionPlan(3, (Tree(0, {1: 2, 2: 0}, down={1: 0, 2: 1}),), ""),
}
RANKS = (2, 3, 1, 2)


@pytest.mark.parametrize(
    ("codecs", "name"),
    [
        # Every plan with a codec of its own for each tree.
        pytest.param(
            *(codecs, name),
            marks=[pytest.mark.exhaustive] if len(codecs) == 1 and name != "star-3" else [],
            id="-".join((*codecs, name)),
        )
        for codecs in (("fp32",), ("bf16-split",), ("fp32", "bf16-split", "split"))
        for name in PLANS
    ],
)
def test_sites_agree_bit_for_bit(name: str, codecs: tuple[str, ...], tmp_path: Path) -> None:
    plan = PLANS[name]
    of_trees = tuple(codecs[tree % len(codecs)] for tree in range(max(1, len(plan.trees))))
    ranks_per_gateway = RANKS[: plan.num_sites]
    configs = [
        gateway_config(tmp_path, plan, site, codecs=of_trees, ranks_per_gateway=ranks_per_gateway)
        for site in range(plan.num_sites)
    ]
    weights = [3.0, 0.0, 5.0, 2.0][: plan.num_sites]
    hops = {hop for tree in range(len(of_trees)) for hop in plan.hops(tree)}
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        for member in members:
            member.wait("connected")
        for round_, numel in enumerate((50_000, 1, 7, 12_345)):
            _, replies = reduce_once(ranks, round_, numel, weights, seed=round_)
            assert {reply["weight"] for reply in replies} == {sum(weights)}
            for reply in replies:
                assert 0 <= reply["times"]["wait_s"] <= reply["times"]["inter_s"]
        leave(members, ranks)
        for member in members:
            assert member.end() is None
            site = member.config.site_index
            sent_to = {target for source, target in hops if source == site}
            for link in member.config.links:
                if member.config.sites.index(link.site) not in sent_to:
                    continue
                labels = {"source": member.config.site, "target": link.site, "gateway": "0"}
                last = [
                    message["values"]
                    for message in member.messages
                    if message["op"] == "metric" and labels.items() <= message["labels"].items()
                ]
                values = last[-1]
                assert values["sent_frames"] > 0
                assert values["raw_bytes"] > 0
                assert values["throughput_bytes_per_s"] > 0
                assert 0 < values["rtt_s"] < DEADLINE_S


def test_sites_with_unequal_gateways(tmp_path: Path) -> None:
    """2 gateways of 2 ranks and 3 of 1 rank.

    Chunks go straight to the gateway that owns them.
    """
    shape = {"gateways_per_site": (2, 3), "ranks_per_gateway": (2, 1)}
    configs = [
        gateway_config(tmp_path, GATHER_2, site, gateway, **shape)
        for site, count in enumerate(shape["gateways_per_site"])
        for gateway in range(count)
    ]
    with gateways(configs) as members, ExitStack() as stack:
        ranks: list[list[GatewayRank]] = [[], []]
        for member in members:
            ranks[member.config.site_index] += join(stack, member)
        for round_, numel in enumerate((10_000, 6, 2)):
            reduce_once(ranks, round_, numel, [1.0, 2.0], seed=round_)
        for each in ranks:
            for rank in each:
                rank.leave()


def test_a_gateway_without_a_share_may_be_a_round_behind(tmp_path: Path) -> None:
    """Nobody waits for it in a round of one element, so a peer can begin the next before it."""
    configs = [
        gateway_config(tmp_path, GATHER_2, site, gateway, gateways_per_site=(2, 1))
        for site, gateway in ((0, 0), (0, 1), (1, 0))
    ]
    with gateways(configs) as members, ExitStack() as stack:
        first, late, peer = (join(stack, member)[0] for member in members)
        for rank in (first, late, peer):
            rank.share(0, 10)[:] = 1.0
        for rank in (first, peer):
            rank.reduce(0, 0, 1, 1.0)
        for rank in (first, peer):
            assert rank.receive()["op"] == "reduced"
        for rank in (peer, first):
            rank.reduce(1, 0, 10, 1.0)
        wait_for(lambda: members[1].gateway._executor.held_bytes > 0)
        late.reduce(0, 0, 1, 1.0)
        assert late.receive()["op"] == "reduced"
        late.reduce(1, 0, 10, 1.0)
        for rank in (first, late, peer):
            assert rank.receive()["op"] == "reduced"
            rank.leave()


def test_a_rank_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    """It has more results than its socket holds, as one that is stopped may."""
    num_buckets = 600
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        deaf, other = (join(stack, member)[0] for member in members)
        for rank in (deaf, other):
            rank.share(0, 1)[:] = 1.0
            for bucket in range(num_buckets):
                rank.reduce(0, bucket, 1, 1.0, region=0)
        [link] = members[1].gateway._links.all.values()
        assert link.drain(time.monotonic() + 5.0), "its gateway does not take frames over"
        for rank in (other, deaf):
            told = {rank.receive()["bucket"] for _ in range(num_buckets)}
            assert told == {*range(num_buckets)}
            assert rank.regions[0].tolist() == [1.0]
        leave(members, [[deaf], [other]])
        for member in members:
            assert member.end() is None


def test_a_rank_that_does_not_read_hears_why_its_gateway_ends(tmp_path: Path) -> None:
    num_buckets = 600
    with gateways([gateway_config(tmp_path, PLANS["alone"], 0)]) as members, ExitStack() as stack:
        rank = join(stack, members[0])[0]
        rank.share(0, 1)[:] = 1.0
        for bucket in range(num_buckets):
            rank.reduce(0, bucket, 1, 1.0, region=0)
        [connection] = members[0].gateway._local._connections.values()
        wait_for(lambda: len(connection._unsent) > 0)
        rank.send(op="dance")
        assert members[0].gateway.wait_ended(DEADLINE_S)
        told = [each["op"] for each in iter(rank.receive, {})]
        # Buckets that were under way may still come after it.
        assert told.count("failed") == 1
        assert set(told) == {"reduced", "failed"}


def test_ranks_that_leave_early_have_joined(tmp_path: Path) -> None:
    config = gateway_config(tmp_path, PLANS["alone"], 0, ranks_per_gateway=(2,))
    with gateways([config]) as members:
        for rank in range(2):
            with GatewayRank(config.socket_path, rank) as here:
                assert here.receive()["op"] == "welcome"
                here.leave()
            wait_for(lambda: not members[0].gateway._local._connections)
        members[0].wait("joined", ranks=[0, 1])


def test_broken_connections_are_mended_and_frames_resent(tmp_path: Path) -> None:
    """Every connection is cut in the middle of a bucket, again and again: the sums are right."""
    configs = [
        gateway_config(tmp_path, GATHER_2, site, chunk_bytes=1 << 16, window_bytes=1 << 18)
        for site in range(2)
    ]
    with ExitStack() as proxies:
        dial, made = through_proxies(proxies, cut_after_bytes=700_000)
        with gateways(configs, dial) as members, ExitStack() as stack:
            ranks = [join(stack, member) for member in members]
            for round_ in range(4):
                reduce_once(ranks, round_, 1 << 19, [1.0, 2.0], seed=round_)
            for each in ranks:
                each[0].leave()
        assert sum(proxy.num_cuts for proxy in made) >= 4


@pytest.mark.parametrize("plan", [GATHER_2, GATHER_3], ids=["two", "three"])
def test_frames_far_ahead_are_held_back_and_nothing_is_lost(
    tmp_path: Path, plan: ReductionPlan
) -> None:
    """One site is ready long after the others: what they send meanwhile is bounded.

    Half of what may lie anywhere, for the other half is for results and what a third site is behind
    with. With three sites, two have posted the bucket and wait for the third's part of each chunk.
    """
    most_bytes = 100_000 * (plan.num_sites - 1)
    configs = [
        gateway_config(tmp_path, plan, site, window_bytes=50_000, held_bytes=most_bytes)
        for site in range(plan.num_sites)
    ]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member)[0] for member in members]
        numel = 1 << 17
        for rank in ranks:
            rank.share(0, numel)[:] = 1
        for rank in ranks[:-1]:
            rank.reduce(0, 0, numel, 1.0)
        links = [link for member in members[:-1] for link in member.gateway._links.all.values()]
        wait_for(lambda: min(link.totals().sent_bytes for link in links) >= 32_000)
        for member in members:
            assert member.gateway._executor.held_bytes <= most_bytes
        ranks[-1].reduce(0, 0, numel, 1.0)
        for rank in ranks:
            assert rank.receive()["op"] == "reduced"
        for member in members:
            assert member.gateway._executor.held_bytes == 0
        assert ranks[0].regions[0].tobytes() == ranks[1].regions[0].tobytes()
        for rank in ranks:
            rank.leave()
