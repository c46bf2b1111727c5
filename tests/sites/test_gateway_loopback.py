"""Several gateways over real gRPC with ranks over real sockets: sums, refusals, losses."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from protos.frame import ChunkKey, Frame, Kind, pack
from sites.gateway.failure import Failure
from sites.gateway.greeting import Peer
from tests.fakes.gateway_rank import DEADLINE_S, GatewayRank
from tests.fakes.gateway_sites import Member, gateway_config, gateways, reduce_once
from tests.fakes.tcp_proxy import TcpProxy
from topology.tree_shapes import ring_paths
from topology.trees import ReductionPlan, Tree, star

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

GATHER_2 = ReductionPlan(2, (), "")
GATHER_3 = ReductionPlan(3, (), "")
PLANS = {
    "alone": ReductionPlan(1, (), ""),
    "gather-2": GATHER_2,
    "star-3": ReductionPlan(3, (star(3, 2),), ""),
    "chain-4": ReductionPlan(4, (Tree(1, {0: 1, 2: 1, 3: 2}),), ""),
    "ring-4": ReductionPlan(4, ring_paths(range(4)), ""),
}
RANKS = (2, 3, 1, 2)


def join(stack: ExitStack, member: Member) -> list[GatewayRank]:
    """Join all ranks of a gateway's node."""
    config = member.config
    per_node = config.ranks_per_node[config.site_index]
    ranks = []
    for rank in range(config.node * per_node, (config.node + 1) * per_node):
        joined = stack.enter_context(GatewayRank(config.socket_path, rank))
        assert joined.receive()["op"] == "welcome"
        ranks.append(joined)
    assert member.wait("joined")["ranks"] == [rank.rank for rank in ranks]
    return ranks


def wait_for(fact: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not fact():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "codecs", [("fp32",), ("bf16-split",), ("fp32", "bf16-split", "split")], ids="-".join
)
def test_sites_agree_bit_for_bit(name: str, codecs: tuple[str, ...], tmp_path: Path) -> None:
    plan = PLANS[name]
    of_trees = tuple(codecs[tree % len(codecs)] for tree in range(max(1, len(plan.trees))))
    ranks_per_node = RANKS[: plan.num_sites]
    configs = [
        gateway_config(tmp_path, plan, site, codecs=of_trees, ranks_per_node=ranks_per_node)
        for site in range(plan.num_sites)
    ]
    weights = [3.0, 0.0, 5.0, 2.0][: plan.num_sites]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        for member in members:
            member.wait("connected")
        for round_, numel in enumerate((50_000, 1, 7, 12_345)):
            _, replies = reduce_once(ranks, round_, numel, weights, seed=round_)
            assert {reply["weight"] for reply in replies} == {sum(weights)}
            for reply in replies:
                assert 0 <= reply["times"]["wait_s"] <= reply["times"]["inter_s"]
        for each in ranks:
            for rank in each:
                rank.leave()
        for member in members:
            member.gateway.stop()
        for member in members:
            assert member.end() is None
            for link in member.config.links:
                labels = {"source": member.config.site, "target": link.site, "node": "0"}
                last = [m for m in member.messages if m["op"] == "metric" and m["labels"] == labels]
                values = last[-1]["values"]
                assert values["sent_frames"] > 0
                assert values["raw_bytes"] > 0
                assert values["throughput_bytes_per_s"] > 0
                assert 0 < values["rtt_s"] < DEADLINE_S


def test_sites_with_unequal_nodes(tmp_path: Path) -> None:
    """2 nodes of 2 ranks and 3 nodes of 1 rank: chunks go straight to the gateway that owns them."""
    shape = {"nodes_per_site": (2, 3), "ranks_per_node": (2, 1)}
    configs = [
        gateway_config(tmp_path, GATHER_2, site, node, **shape)
        for site, nodes in enumerate(shape["nodes_per_site"])
        for node in range(nodes)
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


def test_a_node_without_a_share_may_be_a_round_behind(tmp_path: Path) -> None:
    """Nobody waits for it in a round of one element, so a peer can begin the next before it."""
    configs = [
        gateway_config(tmp_path, GATHER_2, site, node, nodes_per_site=(2, 1))
        for site, node in ((0, 0), (0, 1), (1, 0))
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
        wait_for(lambda: members[1].gateway._exchange._held.num_bytes > 0)
        late.reduce(0, 0, 1, 1.0)
        assert late.receive()["op"] == "reduced"
        late.reduce(1, 0, 10, 1.0)
        for rank in (first, late, peer):
            assert rank.receive()["op"] == "reduced"
            rank.leave()


def test_ranks_that_leave_early_have_joined(tmp_path: Path) -> None:
    config = gateway_config(tmp_path, PLANS["alone"], 0, ranks_per_node=(2,))
    with gateways([config]) as members:
        for rank in range(2):
            with GatewayRank(config.socket_path, rank) as here:
                assert here.receive()["op"] == "welcome"
                here.leave()
            wait_for(lambda: not members[0].gateway._local._connections)
        members[0].wait("joined", ranks=[0, 1])


def test_a_bug_in_taking_a_frame_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the peer would send the frame again and again, and both would wait for ever."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("of nothing")

    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members:
        for member in members:
            member.wait("connected")
        monkeypatch.setattr(members[0].gateway._exchange, "receive", broken)
        members[1].gateway._links.all[0, 0].send(frame_ahead(0), 8)
        failed = members[0].end()
        assert failed is not None
        assert (failed["code"], failed["message"]) == ("INTERNAL", "ZeroDivisionError: of nothing")


def test_a_bug_in_a_links_thread_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what its stream had taken would never be acknowledged, and nobody would know why."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("of nothing")

    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members:
        for member in members:
            member.wait("connected")
        link = members[1].gateway._links.all[0, 0]
        monkeypatch.setattr(link._streams, "_acknowledge", broken)
        link.send(frame_ahead(0), 8)
        failed = members[1].end()
        assert failed is not None
        assert (failed["code"], failed["message"]) == ("INTERNAL", "ZeroDivisionError: of nothing")


def test_exact_buckets_are_not_rounded(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site, codec="bf16") for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member)[0] for member in members]
        for weight, rank in zip((1.0, 0.0), ranks, strict=True):
            rank.share(0, 3)[:] = [65535 * weight, 0.1 * weight, 3 * weight]
            rank.reduce(0, 0, 3, weight, exact=True)
        for rank in ranks:
            assert rank.receive()["op"] == "reduced"
            assert rank.regions[0].tolist() == [65535.0, pytest.approx(0.1, abs=1e-8), 3.0]
            rank.leave()


def test_broken_connections_are_mended_and_frames_resent(tmp_path: Path) -> None:
    """Every connection is cut in the middle of a bucket, again and again: the sums are right."""
    configs = [
        gateway_config(tmp_path, GATHER_2, site, chunk_bytes=1 << 16, window_bytes=1 << 18)
        for site in range(2)
    ]
    with ExitStack() as proxies:
        made: list[TcpProxy] = []

        def through_proxy(member: Member, peer: Peer) -> Peer:
            made.append(proxies.enter_context(TcpProxy(peer.port, cut_after_bytes=700_000)))
            return replace(peer, port=made[-1].port)

        with gateways(configs, through_proxy) as members, ExitStack() as stack:
            ranks = [join(stack, member) for member in members]
            for round_ in range(4):
                reduce_once(ranks, round_, 1 << 19, [1.0, 2.0], seed=round_)
            for each in ranks:
                each[0].leave()
        assert sum(proxy.num_cuts for proxy in made) >= 4


def test_a_lost_peer_is_named(tmp_path: Path) -> None:
    """Nothing comes back from the peer any more, and nothing says why: silence ends the run."""
    configs = [
        gateway_config(
            tmp_path, GATHER_2, site, peer_lost_s=1.5, keepalive_time_s=0.5,
            keepalive_timeout_s=0.5,
        )
        for site in range(2)
    ]  # fmt: skip
    with ExitStack() as proxies:
        made: list[TcpProxy] = []

        def through_proxy(member: Member, peer: Peer) -> Peer:
            made.append(proxies.enter_context(TcpProxy(peer.port)))
            return replace(peer, port=made[-1].port)

        with gateways(configs, through_proxy) as members, ExitStack() as stack:
            ranks = [join(stack, member) for member in members]
            reduce_once(ranks, 0, 5000, [1.0, 2.0], seed=0)
            start_s = time.monotonic()
            for proxy in made:
                proxy.swallow()
            ranks[0][0].reduce(1, 0, 5000, 1.0)
            failed = members[0].end()
            assert failed is not None
            assert failed["code"] == "PEER_LOST"
            assert failed["site"] == "birch"
            assert time.monotonic() - start_s < 6
            told = ranks[0][0].receive()
            assert (told["op"], told["code"], told["site"]) == ("failed", "PEER_LOST", "birch")


def test_a_rank_that_goes_away_fails_all_sites_at_once(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, PLANS["star-3"], site) for site in range(3)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member)[0] for member in members]
        start_s = time.monotonic()
        ranks[0].close()
        failed = members[0].end()
        assert failed is not None
        assert (failed["code"], failed["rank"], failed["collateral"]) == ("RANK_LOST", 0, True)
        hub = members[2].end()
        assert hub is not None
        assert (hub["code"], hub["site"], hub["rank"]) == ("RANK_LOST", "ash", 0)
        assert hub["collateral"]
        assert "told by site ash" in hub["message"]
        leaf = members[1].end()
        assert leaf is not None
        assert (leaf["code"], leaf["site"], leaf["collateral"]) == ("RANK_LOST", "ash", True)
        assert ranks[1].receive()["op"] == "failed"
        assert time.monotonic() - start_s < configs[0].peer_lost_s


def test_a_gateway_that_is_stopped_tells_its_peers(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        for member in members:
            join(stack, member)
            member.wait("connected")
        members[0].gateway.stop()
        assert members[0].end() is None
        failed = members[1].end()
        assert failed is not None
        assert (failed["code"], failed["site"], failed["collateral"]) == ("PEER_LOST", "ash", True)


def test_a_site_that_finishes_first_is_not_a_loss(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        reduce_once(ranks, 0, 5000, [1.0, 2.0], seed=0)
        ranks[0][0].leave()
        members[0].gateway.stop()
        assert members[0].end() is None
        ranks[1][0].send(op="metric", kind="step", step=1, values={"loss": 1.0}, labels={})
        assert members[1].wait("metric", kind="step")["rank"] == 0
        assert not members[1].gateway.wait_ended(0)
        # Only when more is asked of it than it has given, it is missed.
        ranks[1][0].reduce(1, 0, 5000, 1.0)
        failed = members[1].end()
        assert failed is not None
        assert failed["code"] == "PEER_LOST"
        assert "left before the run's end" in failed["message"]


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"config_hash": "b" * 64}, "CONFIG_MISMATCH", "site ash has configuration aaaaaaaaaaaa"),
        ({"generation": 2}, "STALE_GENERATION", "site ash acts for run run-1 generation 1"),
        ({"run_id": "run-2"}, "STALE_GENERATION", "here it is run run-2"),
    ],
)
def test_foreign_gateways_are_refused(
    changes: dict[str, object], code: str, message: str, tmp_path: Path
) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    configs[1] = replace(configs[1], **changes)  # type: ignore[arg-type]
    with gateways(configs) as members:
        failed = members[0].end()
    assert failed is not None
    assert failed["code"] == code
    assert message in failed["message"]


def test_different_models_are_found_out(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member)[0] for member in members]
        for rank, numel in zip(ranks, (5000, 5001), strict=True):
            rank.share(0, numel)
            rank.reduce(0, 0, numel, 1.0)
        codes = set()
        for member in members:
            failed = member.end()
            assert failed is not None
            codes.add(failed["code"])
        assert codes == {"LAYOUT_MISMATCH"}


def test_a_bucket_that_one_site_does_not_have(tmp_path: Path) -> None:
    """Site ash has two buckets in round 0, site birch one: they would wait for ever."""
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member)[0] for member in members]
        for rank in ranks:
            for bucket in range(2):
                rank.share(bucket, 10)
            rank.reduce(0, 0, 10, 1.0)
        for rank in ranks:
            assert rank.receive()["op"] == "reduced"
        ranks[0].reduce(0, 1, 10, 1.0)
        ranks[1].reduce(1, 0, 10, 1.0)
        for member in members:
            failed = member.end()
            assert failed is not None
            assert failed["code"] == "LAYOUT_MISMATCH"


@pytest.mark.parametrize("plan", [GATHER_2, GATHER_3], ids=["two", "three"])
def test_frames_far_ahead_are_held_back_and_nothing_is_lost(
    tmp_path: Path, plan: ReductionPlan
) -> None:
    """One site is ready long after the others: what they send meanwhile is bounded.

    Half of what may lie anywhere, for the other half is for results and what a third site is behind with.
    With three sites, two have posted the bucket and wait for the third's part of each chunk.
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
            assert member.gateway._exchange._held.num_bytes <= most_bytes
        ranks[-1].reduce(0, 0, numel, 1.0)
        for rank in ranks:
            assert rank.receive()["op"] == "reduced"
        for member in members:
            assert member.gateway._exchange._held.num_bytes == 0
        assert ranks[0].regions[0].tobytes() == ranks[1].regions[0].tobytes()
        for rank in ranks:
            rank.leave()


def test_no_tokens_anywhere(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        for member in members:
            rank = join(stack, member)[0]
            rank.share(0, 10)
            rank.reduce(0, 0, 10, 0.0)
        failed = members[0].end()
        assert failed is not None
        assert failed["code"] == "NO_TOKENS"


def test_a_gradient_that_is_not_finite_stops_the_run_if_so_configured(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site, non_finite="stop") for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member)[0] for member in members]
        for member in members:
            member.wait("connected")
        for rank, value in zip(ranks, (1.0, float("nan")), strict=True):
            rank.share(0, 10)[:] = value
            rank.reduce(0, 0, 10, 1.0)
        for member in members:
            failed = member.end()
            assert failed is not None
            assert (failed["code"], failed["site"], failed["rank"]) == ("NON_FINITE", "birch", 0)
            assert (
                "rank 0: round 0 bucket 0: element 0 of 10 of its part is nan" in failed["message"]
            )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"{", "not a JSON message"),
        (b"[]", "must be a JSON object"),
        (b'{"op": "dance"}', "unknown op 'dance'"),
        (b'{"op": "region", "region": 0, "numel": 10}', "0 files, want one memfd"),
        (b'{"op": "join", "rank": 0, "generation": 1}', "a rank joins once"),
        (
            b'{"op": "reduce", "round": 0, "bucket": 0, "region": 9, "offset": 0, "numel": 4,'
            b' "layout": 1, "weight": 1, "exact": false}',
            "no region 9 was sent",
        ),
        (
            b'{"op": "reduce", "round": 0, "bucket": 0, "region": 1, "offset": 7, "numel": 4,'
            b' "layout": 1, "weight": 1, "exact": false}',
            "elements 7 to 11 of a region of 10",
        ),
        (
            b'{"op": "reduce", "round": 0, "bucket": 0, "region": 1, "offset": 0, "numel": %d,'
            b' "layout": 1, "weight": 1, "exact": false}' % (1 << 62),
            f"elements 0 to {1 << 62} of a region of 10",
        ),
        (b"[" * 100_000, "not a JSON message"),
        (
            b'{"op": "reduce", "round": -1, "bucket": 0, "region": 1, "offset": 0, "numel": 4,'
            b' "layout": 1, "weight": 1, "exact": false}',
            "reduce.round: want 0 to",
        ),
    ],
)
def test_what_a_rank_may_not_say(message: bytes, expected: str, tmp_path: Path) -> None:
    with gateways([gateway_config(tmp_path, PLANS["alone"], 0)]) as members, ExitStack() as stack:
        rank = join(stack, members[0])[0]
        rank.share(1, 10)
        rank.send_raw(message)
        failed = members[0].end()
        assert failed is not None
        assert expected in failed["message"]
        assert "rank 0: " in failed["message"]
        assert rank.receive()["op"] == "failed"


def test_strangers_are_turned_away_and_nothing_else(tmp_path: Path) -> None:
    config = gateway_config(tmp_path, PLANS["alone"], 0)
    with gateways([config]) as members, ExitStack() as stack:
        for rank, generation in ((0, 9), (5, 1)):
            with GatewayRank(config.socket_path, rank, generation) as stranger:
                assert stranger.receive()["op"] == "failed"
        ranks = join(stack, members[0])
        with GatewayRank(config.socket_path, 0) as again:
            assert "joined before" in again.receive()["message"]
        reduce_once([ranks], 0, 100, [2.0], seed=0)
        ranks[0].leave()


def frame_ahead(round_: int, bucket: int = 0, generation: int = 1) -> Frame:
    key = ChunkKey(round_, bucket, 0, 1, Kind.CONTRIBUTION)
    return Frame(key, generation, 1, 0, 77, 2, 1.0, bytes(8))


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (frame_ahead(2), "PROTOCOL_VIOLATION"),
        (frame_ahead(0, generation=9), "STALE_GENERATION"),
    ],
)
def test_frames_that_cannot_be_are_refused(frame: Frame, code: str, tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members:
        for member in members:
            member.wait("connected")
        members[1].gateway._links.all[0, 0].send(frame, 8)
        failed = members[0].end()
        assert failed is not None
        assert (failed["code"], failed["site"]) == (code, "birch")


def test_a_damaged_frame_is_fetched_again_and_a_damaged_link_given_up(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with ExitStack() as proxies:

        def through_proxy(member: Member, peer: Peer) -> Peer:
            proxy = proxies.enter_context(TcpProxy(peer.port, damage=b"\x77\x77\x77\x77\x77\x77"))
            return replace(peer, port=proxy.port)

        with gateways(configs, through_proxy) as members, ExitStack() as stack:
            for member in members:
                rank = join(stack, member)[0]
                rank.share(0, 1000).view("u1")[:] = 0x77
                rank.reduce(0, 0, 1000, 1.0)
            failed = members[0].end()
            assert failed is not None
            assert failed["code"] == "CORRUPT_DATA"
            assert (
                "4 frames from site birch were damaged" in failed["message"] or failed["collateral"]
            )


def test_failures_say_who_must_act() -> None:
    failure = Failure.of(ValueError("a\nb"), "ash")
    assert (failure.code, failure.message, failure.site) == ("INTERNAL", "ValueError: a b", "ash")
    assert type(pack(frame_ahead(0))) is bytes
