"""What gateways refuse of each other and of their ranks, over real gRPC and real sockets."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.gateway_rank import GatewayRank
from tests.fakes.gateway_sites import (
    GATHER_2,
    gateway_config,
    gateways,
    join,
    reduce_once,
    through_proxies,
)

ALONE = ReductionPlan(1, (), "")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


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


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"{", "the line is not JSON"),
        (b"[]", "want an object with one of the ops join, region"),
        (b'{"op": "dance"}', "want an object with one of the ops"),
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
        (b"[" * 100_000, "the line is not JSON"),
    ],
)
def test_what_a_rank_may_not_say(message: bytes, expected: str, tmp_path: Path) -> None:
    with gateways([gateway_config(tmp_path, ALONE, 0)]) as members, ExitStack() as stack:
        rank = join(stack, members[0])[0]
        rank.share(1, 10)
        rank.send_raw(message)
        failed = members[0].end()
        assert failed is not None
        assert expected in failed["message"]
        assert "rank 0: " in failed["message"]
        assert rank.receive()["op"] == "failed"


def test_strangers_are_turned_away_and_nothing_else(tmp_path: Path) -> None:
    config = gateway_config(tmp_path, ALONE, 0)
    with gateways([config]) as members, ExitStack() as stack:
        for rank, generation in ((0, 9), (5, 1)):
            with GatewayRank(config.socket_path, rank, generation) as stranger:
                assert stranger.receive()["op"] == "failed"
        ranks = join(stack, members[0])
        with GatewayRank(config.socket_path, 0) as again:
            assert "joined before" in again.receive()["message"]
        reduce_once([ranks], 0, 100, [2.0], seed=0)
        ranks[0].leave()


def test_a_damaged_frame_is_fetched_again_and_a_damaged_link_given_up(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with ExitStack() as proxies:
        dial, _ = through_proxies(proxies, damage=b"\x77\x77\x77\x77\x77\x77")
        with gateways(configs, dial) as members, ExitStack() as stack:
            for member in members:
                rank = join(stack, member)[0]
                rank.share(0, 1000).view("u1")[:] = 0x77
                rank.reduce(0, 0, 1000, 1.0)
            failed = members[0].end()
            assert failed is not None
            assert failed["code"] == "CORRUPT_DATA"
            assert (
                "4 frames from site birch were damaged" in failed["message"]
                or failed["is_collateral"]
            )
