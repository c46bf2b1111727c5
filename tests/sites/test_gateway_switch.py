"""Gateways that switch plans while they run.

New links, refusals, and links that nobody needs any more.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.protos.failure import Failure
from isthmus.sites.gateway.agent_port import Resume, Settle, read_commands
from isthmus.sites.gateway.config import GatewayConfig, GatewayId, PeerLink
from isthmus.sites.gateway.links import peer_watch
from isthmus.sites.gateway.links.congestion.rate import window_bytes
from isthmus.sites.gateway.links.peer_links import Link, PeerLinks
from isthmus.sites.gateway.links.peer_watch import PeerWatch
from isthmus.sites.gateway.links.send_queue import Outbox
from isthmus.sites.gateway.links.transport import Peer
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from isthmus.topology.spec.run_spec import CodedPlan
from tests.fakes.gateway_sites import (
    SITES,
    Member,
    frame_ahead,
    gateway_config,
    gateways,
    join,
    leave,
    reduce_once,
)
from tests.fakes.waiting import wait_for

STARS = [ReductionPlan(3, (star(3, hub),), "") for hub in range(3)]
WEIGHTS = [1.0, 2.0, 3.0]


def configs_of(
    folder: Path,
    plan: ReductionPlan,
    **changes: Any,  # noqa: ANN401 - fields of the configuration
) -> list[GatewayConfig]:
    """Return gateways that each have links to all others, whatever their plan."""
    found = []
    for site in range(3):
        links = tuple(
            PeerLink(site=name, bytes_per_s=1e9, rtt_s=0.001)
            for other, name in enumerate(SITES[:3])
            if other != site
        )
        found.append(gateway_config(folder, plan, site, links=links, **changes))
    return found


def coded(plan: ReductionPlan, codec: str = "fp32") -> CodedPlan:
    return CodedPlan(plan, (codec,) * max(1, len(plan.trees)))


def settle(members: list[Member], reduction: CodedPlan, *, epoch: int) -> list[Mapping[str, Any]]:
    """Ask all gateways to settle for other trees, and return their answers."""
    for member in members:
        member.gateway.settle(Settle(epoch=epoch, stops=False, reduction=reduction))
    return [member.wait("settled", epoch=epoch) for member in members]


def cancel(members: list[Member], epoch: int) -> None:
    for member in members:
        member.gateway.cancel(epoch)


def resume(members: list[Member], reduction: CodedPlan, *, epoch: int, from_round: int) -> None:
    command = Resume(epoch=Epoch(epoch, SITES[:3], reduction, from_round))
    for member in members:
        member.gateway.resume(command)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_rounds_go_over_to_trees_whose_links_were_not_there(tmp_path: Path) -> None:
    with gateways(configs_of(tmp_path, STARS[0])) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        for member in members:
            member.wait("connected")
        assert [len(member.gateway._links.all) for member in members] == [2, 1, 1]
        for round_ in (0, 1):
            reduce_once(ranks, round_, 5000, WEIGHTS, seed=round_)

        given_up = settle(members, coded(STARS[1]), epoch=1)
        assert {(each["why"], each["round"]) for each in given_up} == {("", 1)}
        cancel(members, 1)
        reduce_once(ranks, 2, 5000, WEIGHTS, seed=2)
        other = coded(STARS[1], "bf16")
        kept = settle(members, other, epoch=2)
        assert {(each["why"], each["round"]) for each in kept} == {("", 2)}
        resume(members, other, epoch=2, from_round=3)
        for round_ in (3, 4, 5):
            reduce_once(ranks, round_, 5000, WEIGHTS, seed=round_)
        for member in members:
            assert member.wait("resumed")["epoch"] == 2
        assert [len(member.gateway._links.all) for member in members] == [2, 2, 2]
        assert members[2].gateway._links.totals(SITES[1])[0].sent_frames > 0
        leave(members, ranks)
        assert [member.end() for member in members] == [None] * 3


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_plan_that_cannot_be_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nowhere = stack.enter_context(socket.socket())
        nowhere.bind(("127.0.0.1", 0))  # and does not listen

        def dial(member: Member, peer: Peer) -> Peer:
            if {member.config.site, peer.site} == set(SITES[1:3]):
                return replace(peer, port=nowhere.getsockname()[1])
            return peer

        configs = configs_of(tmp_path, STARS[0], peer_lost_s=1.0, codec="bf16")
        members = stack.enter_context(gateways(configs, dial))
        ranks = [join(stack, member) for member in members]
        for member in members:
            member.wait("connected")
        reduce_once(ranks, 0, 500, WEIGHTS, seed=0)

        unreached = settle(members, coded(STARS[1], "bf16"), epoch=1)
        assert [bool(each["why"]) for each in unreached] == [False, True, True]
        assert "has not answered" in unreached[1]["why"]
        cancel(members, 1)
        circle = replace(STARS[0].trees[0], parent={1: 2, 2: 1})
        wrong = settle(members, coded(ReductionPlan(3, (circle,), "")), epoch=2)
        assert {each["why"] for each in wrong} == {"plan.trees.0: site 1 never gets to the root"}
        members[1].gateway._local.encoding.take(0)
        other = settle(members, coded(STARS[0], "int8"), epoch=3)
        assert [bool(each["why"]) for each in other] == [False, True, False]
        assert "ranks of site" in other[1]["why"]
        assert [each["codecs_fixed"] for each in other] == [False, True, False]
        cancel(members, 3)

        for round_ in (1, 2):
            reduce_once(ranks, round_, 500, WEIGHTS, seed=round_)
        leave(members, ranks)
        assert [member.end() for member in members] == [None] * 3


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_change_does_not_count_on_a_link_that_another_is_still_opening(tmp_path: Path) -> None:
    with ExitStack() as stack:
        mute = stack.enter_context(socket.socket())
        mute.bind(("127.0.0.1", 0))
        mute.listen()  # takes connections, and never answers

        def dial(member: Member, peer: Peer) -> Peer:
            if {member.config.site, peer.site} == set(SITES[1:3]):
                return replace(peer, port=mute.getsockname()[1])
            return peer

        members = stack.enter_context(
            gateways(configs_of(tmp_path, STARS[0], peer_lost_s=1.5), dial)
        )
        for member in members:
            member.wait("connected")
        for epoch in (1, 2):
            members[1].gateway.settle(Settle(epoch=epoch, stops=False, reduction=coded(STARS[1])))
        answers = [members[1].wait("settled", epoch=epoch) for epoch in (1, 2)]
        assert all("has not answered" in each["why"] for each in answers), answers
        assert members[1].gateway._links.all.keys() == {(0, 0)}


def test_a_link_that_no_plan_needs_may_be_lost(tmp_path: Path) -> None:
    seen: list[Mapping[GatewayId, Link]] = []
    failures: list[Failure] = []
    needed = {1, 2}
    links = PeerLinks(
        configs_of(tmp_path, STARS[0])[0],
        on_change=seen.append,
        on_failure=failures.append,
        on_progress=lambda: None,
        needs=needed.__contains__,
    )
    links.meet(Peer(site, 0, "127.0.0.1", 9) for site in SITES[1:3])
    assert links.add([1]).keys() == {(1, 0)}
    assert links.add([1, 2]).keys() == {(2, 0)}
    lost = Failure(code="PEER_LOST", message="it is gone")
    links.all[1, 0]._on_failure(lost)
    assert failures == [lost]
    needed.discard(2)
    links.all[2, 0]._on_failure(lost)
    assert failures == [lost]
    assert seen[-1].keys() == {(1, 0)}
    assert links.add([2]).keys() == {(2, 0)}, "a later plan may want it again"
    links.close()


def test_a_link_that_is_lost_holds_nobody_up_who_sends_to_one_that_has_left(tmp_path: Path) -> None:
    """The executor, which is asked what it needs, hands chunks over under its own lock."""
    sent: list[int] = []
    suspected: list[int] = []

    def needs(_: int) -> bool:
        def send() -> None:
            sent.append(links.all[1, 0].send(frame_ahead(0), 8))

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        sending.join(5.0)
        return sent == [0]

    failures: list[Failure] = []
    links = PeerLinks(
        configs_of(tmp_path, STARS[0])[0],
        on_change=lambda _: None,
        on_failure=failures.append,
        on_progress=lambda: None,
        needs=needs,
        on_opinion=lambda site, _: suspected.append(site),
    )
    links.meet(Peer(site, 0, "127.0.0.1", 9) for site in SITES[1:3])
    links.add([1, 2])
    links.all[1, 0].peer_left()
    lost = Failure(code="PEER_LOST", message="it is gone")
    links.all[2, 0]._on_failure(lost)
    assert failures == [lost], "what is sent waits for who asks what is needed"
    assert suspected == [1]
    links.close()


def test_a_peer_makes_a_link_again_that_another_plan_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had dropped its own, and is silent since.

    A plan that both begin to need must not end the run.
    """
    clock = [100.0]
    monkeypatch.setattr(peer_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    links = PeerLinks(
        configs_of(tmp_path, STARS[0], peer_lost_s=2.0)[0],
        on_change=lambda _: None,
        on_failure=lambda failure: pytest.fail(str(failure)),
        on_progress=lambda: None,
        needs=lambda _: True,
    )
    links.meet(Peer(site, 0, "127.0.0.1", 9) for site in SITES[1:3])
    links.add([1])
    link = links.all[1, 0]
    link.reached()
    look = link._watch._unreached
    clock[0] += 2.1
    assert not look()
    assert links.add([1]) == {}
    for _ in range(4):
        clock[0] += 0.5
        assert not look()
    clock[0] += 0.1
    assert not look()
    assert "has sent nothing by itself for 2.1 s" in look()
    links.close()


def test_pauses_of_the_whole_machine_are_not_one_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(peer_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    config = configs_of(tmp_path, STARS[0], peer_lost_s=2.0)[0]
    peer = Peer(SITES[1], 0, "127.0.0.1", 9)
    watch = PeerWatch(
        config, peer, Outbox(window_bytes(config, config.links[0]), config.links[0].rtt_s)
    )
    for _ in range(3):
        watch.reached()
        clock[0] += 2.1  # both stand still, and this side is the first to go on
        assert not watch._unreached()
    clock[0] += 0.4
    assert "for 2.5 s" in watch._unreached()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_peer_that_has_lost_its_own_link_is_noticed_by_who_waits_for_it(tmp_path: Path) -> None:
    """One way: it answers whoever asks, and what it has to send never leaves it."""
    with gateways(configs_of(tmp_path, STARS[0], peer_lost_s=1.2)) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        for member in members:
            member.wait("connected")
        reduce_once(ranks, 0, 50, WEIGHTS, seed=0)
        assert not any(each["why"] for each in settle(members, coded(STARS[1]), epoch=1))
        resume(members, coded(STARS[1]), epoch=1, from_round=1)
        reduce_once(ranks, 1, 50, WEIGHTS, seed=1)
        # By a greeting over its own link: the first ones may come before there is one here.
        watch = members[2].gateway._links.all[1, 0]._watch
        wait_for(lambda: watch._reached is not None)
        members[1].gateway._links.drop([(2, 0)])  # as one does that no plan needs
        (rank,) = ranks[2]
        rank.share(0, 50)
        rank.reduce(2, 0, 50, 1.0)
        suspect = members[2].wait("suspect")
        assert (suspect["site"], suspect["is_gone"]) == (SITES[1], False)
        assert "has sent nothing by itself" in suspect["why"], suspect


def test_lines_of_the_agent(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text(
        '{"op": "settle", "epoch": 2, "stops": false, "reduction": {"codecs": ["fp32"], "plan": '
        '{"num_sites": 2, "trees": [{"root": 0, "parent": {"1": 0}, "weight": 1}], "why": ""}}}\n'
        '{"op": "settle", "epoch": 3, "stops": true}\n'
    )
    with path.open("rb", buffering=0) as stream:
        planned, lost = read_commands(stream)
    plan = ReductionPlan(2, (star(2, 0),), "")
    assert planned == Settle(epoch=2, stops=False, reduction=CodedPlan(plan, ("fp32",)))
    assert lost == Settle(epoch=3, stops=True)
