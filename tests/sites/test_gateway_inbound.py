"""A gateway that cannot be dialled: it dials for both directions, and all else goes as ever."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from isthmus.protos.exchange.v1 import state_pb2, state_pb2_grpc
from isthmus.protos.exchange.v1.exchange_pb2_grpc import ExchangeStub
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.inbound_proxy import InboundProxy
from isthmus.sites.gateway.links.transport import SESSION_KEY, Peer
from isthmus.sites.local.entry_folder import INDEX, entry_folder
from isthmus.sites.local.rank_messages import StateProgress
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from isthmus.topology.spec.world import GATEWAY_PORTS
from tests.fakes.certified import certify, speak_tls
from tests.fakes.gateway_rank import DEADLINE_S
from tests.fakes.gateway_sites import (
    GATHER_2,
    Member,
    gateway_config,
    gateways,
    join,
    leave,
    reduce_once,
)
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def configs_of(
    folder: Path, plan: ReductionPlan, shut: set[int], **changes: object
) -> list[GatewayConfig]:
    """Return a configuration for each site; those in `shut` cannot be dialled."""
    configs = []
    for site in range(plan.num_sites):
        config = gateway_config(folder, plan, site, listens=site not in shut, **changes)  # type: ignore[arg-type]
        links = tuple(
            replace(each, dials_in=config.sites.index(each.site) in shut) for each in config.links
        )
        configs.append(replace(config, links=links))
    return configs


@pytest.mark.parametrize("shut", [{0}, {1}])
def test_tensors_cross_both_ways(tmp_path: Path, shut: set[int]) -> None:
    configs = configs_of(tmp_path, GATHER_2, shut)
    with gateways(configs) as members, ExitStack() as stack:
        for site in shut:
            assert members[site].wait("listening")["port"] == 0
        ranks = [join(stack, member) for member in members]
        for round_ in range(20):
            reduce_once(ranks, round_, 50_000, [1.0, 3.0], seed=round_)
        leave(members, ranks)
        assert [member.end() for member in members] == [None, None]


def test_a_star_whose_leaves_are_behind_nat_over_mutual_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak_tls(monkeypatch, certify(tmp_path / "certs", "ash", "birch", "cedar"))
    plan = ReductionPlan(3, (star(3, 1),), "")
    configs = configs_of(tmp_path, plan, {0, 2}, gateways_per_site=(1, 1, 1))
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        for round_ in range(5):
            reduce_once(ranks, round_, 50_000, [1.0, 3.0, 2.0], seed=round_)
        leave(members, ranks)
        assert [member.end() for member in members] == [None] * 3


def test_broken_connections_are_dialled_again(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0})
    with ExitStack() as stack:
        proxies: list[TcpProxy] = []

        def dial(member: Member, peer: Peer) -> Peer:
            if not peer.port:
                return peer
            proxies.append(stack.enter_context(TcpProxy(peer.port, num_ports=GATEWAY_PORTS)))
            return replace(peer, port=proxies[0].port)

        members = stack.enter_context(gateways(configs, dial))
        ranks = [join(stack, member) for member in members]
        for round_ in range(12):
            reduce_once(ranks, round_, 50_000, [1.0, 3.0], seed=round_)
            if round_ % 3 == 2:
                proxies[0].reset()
        leave(members, ranks)
        assert [member.end() for member in members] == [None, None]


def test_silence_is_suspected_and_the_end_of_it_told(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0}, peer_lost_s=1.5, keepalive_time_s=0.5)
    with ExitStack() as stack:
        proxies: list[TcpProxy] = []

        def dial(member: Member, peer: Peer) -> Peer:
            if not peer.port:
                return peer
            proxies.append(stack.enter_context(TcpProxy(peer.port, num_ports=GATEWAY_PORTS)))
            return replace(peer, port=proxies[0].port)

        members = stack.enter_context(gateways(configs, dial))
        ranks = [join(stack, member) for member in members]
        reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=0)
        proxies[0].swallow()
        for member in members:
            assert member.wait("suspect")["is_gone"] is False
        proxies[0].reset()
        for member in members:
            member.wait("reached")
        reduce_once(ranks, 1, 5000, [1.0, 3.0], seed=1)
        leave(members, ranks)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_told_at_once_either_way(tmp_path: Path, failing: int) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0})
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=0)
        members[failing].gateway.stop()
        told = members[1 - failing].wait("suspect", is_gone=True)
        assert told["site"] == configs[failing].site


def test_a_site_that_cannot_be_dialled_gives_its_state(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0})
    configs = [
        replace(each, state_folder=str(tmp_path / f"node{at}")) for at, each in enumerate(configs)
    ]
    with gateways(configs) as members:
        members[1].wait("connected")
        inbound_proxy = members[1].gateway._server.inbound_proxy((0, 0))
        with inbound_proxy.channel(configs[1]) as channel:
            stub = state_pb2_grpc.StateStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Index(state_pb2.IndexRequest(epoch=3), timeout=DEADLINE_S)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            members[0].gateway.state_progress(0, StateProgress(epoch=3, done_bytes=5))
            answer = stub.Index(state_pb2.IndexRequest(epoch=3), timeout=DEADLINE_S)
            assert (answer.done_bytes, answer.index) == (5, b"")
            folder = entry_folder(tmp_path / "node0", 3)
            folder.mkdir(parents=True)
            (folder / INDEX).write_bytes(b"index")
            answer = stub.Index(state_pb2.IndexRequest(epoch=3), timeout=DEADLINE_S)
            assert answer.index == b"index"


def test_a_state_that_cannot_be_read_costs_a_site_behind_a_tunnel_only_that(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0})
    configs[0] = replace(configs[0], state_folder=str(tmp_path))
    (entry_folder(tmp_path, 3) / INDEX).mkdir(parents=True)
    with gateways(configs) as members:
        members[1].wait("connected")
        inbound_proxy = members[1].gateway._server.inbound_proxy((0, 0))
        assert ask_for_index(inbound_proxy, configs[1], 3) is grpc.StatusCode.UNKNOWN
        assert ask_for_index(inbound_proxy, configs[1], 4) is grpc.StatusCode.NOT_FOUND


def test_an_answer_for_which_nobody_waits_any_more_ends_no_tunnel(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0})
    configs[0] = replace(configs[0], state_folder=str(tmp_path))
    index = entry_folder(tmp_path, 3) / INDEX
    index.parent.mkdir(parents=True)
    os.mkfifo(index)  # it is read when there is something in it
    with gateways(configs) as members:
        members[1].wait("connected")
        server = members[1].gateway._server
        inbound_proxy = server.inbound_proxy((0, 0))
        asks = threading.Thread(target=ask_for_index, args=(inbound_proxy, configs[1], 3, 1.0))
        asks.start()
        with index.open("wb"):  # it is being read
            session = server._session_of((0, 0))
            with members[1].peer.channel(configs[0]) as channel:
                later = ExchangeStub(channel).ReverseTunnel(
                    iter(()), metadata=((SESSION_KEY, session),), timeout=DEADLINE_S
                )
                assert next(later).streams, "the first one has ended"
        # What was asked over the stream that has just ended is not answered.
        wait_for(
            lambda: ask_for_index(inbound_proxy, configs[1], 4, 1.0) is grpc.StatusCode.NOT_FOUND
        )
        asks.join(DEADLINE_S)


def ask_for_index(
    inbound_proxy: InboundProxy, config: GatewayConfig, epoch: int, timeout_s: float = DEADLINE_S
) -> grpc.StatusCode:
    """Ask a gateway behind a tunnel for a state that it has not; return what it answers."""
    stub = state_pb2_grpc.StateStub(inbound_proxy.channel(config))
    with pytest.raises(grpc.RpcError) as caught:
        stub.Index(state_pb2.IndexRequest(epoch=epoch), timeout=timeout_s)
    status: grpc.StatusCode = caught.value.code()
    return status
