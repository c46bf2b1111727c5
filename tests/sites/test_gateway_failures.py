"""Several gateways over real gRPC: what ends a run, and what each site says of it."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from isthmus.sites.gateway.transfer.state_fetch import StateFetch
from isthmus.sites.local.rank_messages import Members
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from tests.fakes.gateway_sites import (
    GATHER_2,
    frame_ahead,
    gateway_config,
    gateways,
    join,
    reduce_once,
    through_proxies,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STAR_3 = ReductionPlan(3, (star(3, 2),), "")


def broken(*_: object) -> None:
    raise ZeroDivisionError("of nothing")


@pytest.mark.parametrize("at", [0, 1], ids=["who takes a frame", "who hears that it was taken"])
def test_a_bug_ends_the_run(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or frames would be sent again and again, or never acknowledged: all would wait for ever."""
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members:
        for member in members:
            member.wait("connected")
        link = members[1].gateway._links.all[0, 0]
        if at == 0:
            monkeypatch.setattr(members[0].gateway._executor, "receive", broken)
        else:
            monkeypatch.setattr(link._streams, "_acknowledge", broken)
        link.send(frame_ahead(0), 8)
        failed = members[at].end()
        assert failed is not None
        assert (failed["code"], failed["message"]) == ("INTERNAL", "ZeroDivisionError: of nothing")


def test_a_bug_while_the_state_is_fetched_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    monkeypatch.setattr(StateFetch, "run", broken)
    told = Members(epoch=1, from_round=0, sites=(), state=str(tmp_path / "entry"))
    with gateways(configs) as members:
        for member in members:
            member.wait("connected")
        gateway = members[0].gateway
        gateway._begin(gateway._take_state(told))
        failed = members[0].end()
        assert failed is not None
        assert (failed["code"], failed["message"]) == ("INTERNAL", "ZeroDivisionError: of nothing")


def test_a_silent_peer_is_suspected_until_it_is_heard_again(tmp_path: Path) -> None:
    """Nothing comes back from the peer, and nothing says why. The round waits, and goes on."""
    configs = [
        gateway_config(
            tmp_path, GATHER_2, site, peer_lost_s=1.5, keepalive_time_s=0.5,
            keepalive_timeout_s=0.5,
        )
        for site in range(2)
    ]  # fmt: skip
    with ExitStack() as proxies:
        dial, made = through_proxies(proxies)
        with gateways(configs, dial) as members, ExitStack() as stack:
            ranks = [join(stack, member) for member in members]
            reduce_once(ranks, 0, 5000, [1.0, 2.0], seed=0)
            start_s = time.monotonic()
            for proxy in made:
                proxy.swallow()
            for member, site in zip(members, ("birch", "ash"), strict=True):
                suspect = member.wait("suspect")
                assert (suspect["site"], suspect["is_gone"]) == (site, False)
            assert time.monotonic() - start_s < 6
            for proxy in made:
                proxy.reset()
            for member, site in zip(members, ("birch", "ash"), strict=True):
                assert member.wait("reached")["site"] == site
            reduce_once(ranks, 1, 5000, [1.0, 2.0], seed=1)


def test_a_rank_that_goes_away_ends_its_gateway_which_tells_the_others(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, STAR_3, site) for site in range(3)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member)[0] for member in members]
        start_s = time.monotonic()
        ranks[0].close()
        failed = members[0].end()
        assert failed is not None
        assert (failed["code"], failed["rank"], failed["is_collateral"]) == ("RANK_LOST", 0, True)
        suspect = members[2].wait("suspect")
        assert (suspect["site"], suspect["is_gone"]) == ("ash", True)
        assert "told by site ash: rank 0" in suspect["why"]
        assert not members[1].gateway.wait_ended(0)
        assert time.monotonic() - start_s < configs[0].peer_lost_s


def test_a_gateway_that_is_stopped_tells_its_peers(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        for member in members:
            join(stack, member)
            member.wait("connected")
        members[0].gateway.stop()
        assert members[0].end() is None
        suspect = members[1].wait("suspect")
        assert (suspect["site"], suspect["is_gone"]) == ("ash", True)


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
        suspect = members[1].wait("suspect")
        assert (suspect["site"], suspect["is_gone"]) == ("ash", True)
        assert "left before the run's end" in suspect["why"]


def test_a_rank_that_leaves_and_has_averaged_nothing_fails_the_run(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member)[0] for member in members]
        for member in members:
            member.wait("connected")
        ranks[0].leave(has_averaged=False)
        failed = members[0].end()
        assert failed is not None
        assert (failed["code"], failed["site"], failed["rank"]) == ("NEVER_ATTACHED", "ash", 0)
        assert not failed["is_collateral"]
        assert "rank 0 of site ash joined the run, and ended without" in failed["message"]


def test_a_rank_with_a_nan_is_named_with_its_tensor_where_the_run_is_to_stop(
    tmp_path: Path,
) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site, non_finite="stop") for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member)[0] for member in members]
        for member in members:
            member.wait("connected")
        labels = {"tensor": "w", "reason": "in step 3 the gradient of w held a NaN"}
        values = {"averaged": 0.0}
        ranks[1].send(op="metric", kind="non_finite", step=3, values=values, labels=labels)
        for member in members:
            failed = member.end()
            assert failed is not None
            assert (failed["code"], failed["site"], failed["rank"]) == ("NON_FINITE", "birch", 0)
            assert "rank 0: in step 3 the gradient of w held a NaN" in failed["message"]


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
