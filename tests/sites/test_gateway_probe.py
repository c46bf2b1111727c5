"""Gateways that measure their links: real gRPC on loopback, and what they refuse."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from isthmus.protos import metrics
from isthmus.protos.exchange.v1 import probe_pb2, probe_pb2_grpc
from isthmus.sites.gateway.agent_port import Listening, Said
from isthmus.sites.gateway.config import GatewayConfig, PeerLink
from isthmus.sites.gateway.gateway import Gateway
from isthmus.sites.gateway.links.transport import SESSION_KEY, Peer
from isthmus.sites.gateway.probing.probe_server import FLOOD_METHOD, PIECE_BYTES_MAX
from isthmus.sites.gateway.probing.probing_gateway import ProbingGateway
from isthmus.sites.node.gateway_configs import probing_config
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.job import Probe
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.gateway_rank import DEADLINE_S, Heard
from tests.fakes.gateway_sites import SITES, gateway_config
from tests.fakes.library_calls import channel_to, hello_by_library, push_by_library

PROBE = Probe(connections=(2,), echoes=20, window_s=0.1)

pytestmark = pytest.mark.timeout(120)


class Member(Heard):
    """One gateway, and what it told its agent."""

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__()
        self.gateway = ProbingGateway(config, PROBE, lambda said: self.hear(to_json(said)))
        self.gateway.start()
        self.port = int(self.wait("listening")["port"])


def probe_config(folder: Path, num_sites: int, site: int, **changes: Any) -> GatewayConfig:  # noqa: ANN401
    links = tuple(
        PeerLink(site=SITES[other], bytes_per_s=1e8, rtt_s=0.0005)
        for other in range(num_sites)
        if other != site
    )
    plan = ReductionPlan(num_sites, (), "")
    fields: dict[str, Any] = {"links": links, "probe": PROBE, "peer_lost_s": 5.0, **changes}
    return gateway_config(folder, plan, site, **fields)


@contextmanager
def members(folder: Path, num_sites: int, **changes: Any) -> Iterator[list[Member]]:  # noqa: ANN401
    with ExitStack() as stack:
        found = []
        for site in range(num_sites):
            found.append(Member(probe_config(folder, num_sites, site, **changes)))
            stack.callback(found[-1].gateway.close)
        yield found


def connect(found: list[Member]) -> None:
    peers = [Peer(SITES[at], 0, "127.0.0.1", each.port) for at, each in enumerate(found)]
    for at, each in enumerate(found):
        each.gateway.connect(tuple(peers[:at] + peers[at + 1 :]))


@pytest.mark.slow
def test_every_gateway_measures_what_it_sends_to_each(tmp_path: Path) -> None:
    with members(tmp_path, 3) as found:
        connect(found)
        for at, each in enumerate(found):
            each.wait("probed")
            records = [message for message in each.messages if message["op"] == "metric"]
            assert [message["kind"] for message in records] == [metrics.PROBE] * 2
            others = [site for site in SITES[:3] if site != SITES[at]]
            assert [message["labels"] for message in records] == [
                {"source": SITES[at], "target": other} for other in others
            ]
            for message in records:
                values = message["values"]
                assert 0 < values[metrics.RTT_S_P50] <= values[metrics.RTT_S_P99]
                assert values["bytes_per_s_2"] > 0
                assert values[metrics.SEGMENTS] > 0
        for each in found:
            each.gateway.stop()
            assert each.gateway.failure is None


def test_a_peer_that_is_not_there_fails_the_gateway(tmp_path: Path) -> None:
    with members(tmp_path, 2, peer_lost_s=0.3) as found:
        found[1].gateway.close()
        found[0].gateway.connect((Peer(SITES[1], 0, "127.0.0.1", found[1].port),))
        assert found[0].gateway.wait_ended(DEADLINE_S)
        found[0].gateway.close()
        failed = found[0].wait("failed")
        assert (failed["code"], failed["site"]) == ("PEER_LOST", SITES[1])


def dialled(folder: Path, port: int) -> grpc.Channel:
    """Return a channel to a port of a gateway, as a peer of the same user has it."""
    return channel_to(port, probe_config(folder, 2, 0), SITES[1])


@contextmanager
def caller(
    folder: Path,
    member: Member,
    **changes: Any,  # noqa: ANN401 - any field
) -> Iterator[tuple[grpc.Channel, tuple[tuple[str, str], ...]]]:
    """Speak to the second site's gateway as the first one's."""
    with dialled(folder, member.port) as channel:
        session = hello_by_library(channel, probe_config(folder, 2, 0, **changes)).session
        yield channel, ((SESSION_KEY, session),)


def flood(folder: Path, port: int, metadata: Any, pieces: list[bytes]) -> grpc.StatusCode:  # noqa: ANN401
    """Return how a Flood to the gateway whose port this is ends."""
    with dialled(folder, port) as channel:
        try:
            assert not push_by_library(channel, FLOOD_METHOD, pieces, metadata)
        except grpc.RpcError as error:
            status: grpc.StatusCode = error.code()
            return status
        return grpc.StatusCode.OK


@pytest.mark.parametrize("metadata", [(), ((SESSION_KEY, "guessed"),)])
def test_strangers_are_refused(tmp_path: Path, metadata: tuple[tuple[str, str], ...]) -> None:
    with (
        members(tmp_path, 2) as found,
        dialled(tmp_path, found[1].port) as channel,
    ):
        stub = probe_pb2_grpc.ProbeStub(channel)
        with pytest.raises(grpc.RpcError) as echo:
            next(stub.Echo(iter([probe_pb2.EchoRequest()]), metadata=metadata, timeout=DEADLINE_S))
        with pytest.raises(grpc.RpcError) as finish:
            stub.Finish(probe_pb2.FinishRequest(), metadata=metadata, timeout=DEADLINE_S)
        with pytest.raises(grpc.RpcError) as turn:
            next(stub.Turn(iter(()), metadata=metadata, timeout=DEADLINE_S))
        codes = {each.value.code() for each in (echo, finish, turn)}
        ended = flood(tmp_path, found[1].port, metadata, [b"x"])
        assert codes == {ended} == {grpc.StatusCode.ABORTED}


def test_bytes_are_taken_in_the_callers_turn_only_and_bounded(tmp_path: Path) -> None:
    refused = grpc.StatusCode.INVALID_ARGUMENT
    with members(tmp_path, 2) as found, caller(tmp_path, found[1]) as (channel, metadata):

        def flooded(*pieces: bytes) -> grpc.StatusCode:
            return flood(tmp_path, found[1].port, metadata, list(pieces))

        assert flooded(b"x") is refused
        requests: queue.SimpleQueue[probe_pb2.TurnRequest | None] = queue.SimpleQueue()
        turn = probe_pb2_grpc.ProbeStub(channel).Turn(
            iter(requests.get, None), metadata=metadata, timeout=DEADLINE_S
        )
        assert next(turn).received_bytes == 0
        assert flooded(b"abc", b"d" * PIECE_BYTES_MAX) is grpc.StatusCode.OK
        requests.put(probe_pb2.TurnRequest())
        assert next(turn).received_bytes == 3 + PIECE_BYTES_MAX
        assert flooded(b"d" * (PIECE_BYTES_MAX + 1)) is refused
        requests.put(None)
        assert list(turn) == []
        assert flooded(b"x") is refused


def test_more_connections_than_the_job_names_are_refused(tmp_path: Path) -> None:
    held = threading.Event()
    with (
        members(tmp_path, 2) as found,
        caller(tmp_path, found[1]) as (channel, metadata),
        ExitStack() as stack,
    ):
        requests: queue.SimpleQueue[probe_pb2.TurnRequest | None] = queue.SimpleQueue()
        turn = probe_pb2_grpc.ProbeStub(channel).Turn(
            iter(requests.get, None), metadata=metadata, timeout=DEADLINE_S
        )
        next(turn)

        def piece_then_wait() -> Iterator[bytes]:
            yield b"x"
            held.wait(DEADLINE_S)

        calls = []
        for _ in range(2 * max(PROBE.connections)):
            frames = stack.enter_context(dialled(tmp_path, found[1].port))
            method: Any = frames.stream_stream(FLOOD_METHOD)
            calls.append(method(piece_then_wait(), metadata=metadata, timeout=DEADLINE_S))
        received = 0
        while received < len(calls):
            requests.put(probe_pb2.TurnRequest())
            received = next(turn).received_bytes
        ended = flood(tmp_path, found[1].port, metadata, [b"x"])
        assert ended is grpc.StatusCode.INVALID_ARGUMENT
        held.set()
        assert [list(call) for call in calls] == [[]] * len(calls)
        requests.put(None)
        list(turn)


def test_a_gateway_that_trains_serves_no_probe(tmp_path: Path) -> None:
    said: queue.SimpleQueue[Said] = queue.SimpleQueue()
    gateway = Gateway(probe_config(tmp_path, 2, 1, probe=None), said.put)
    gateway.start()
    try:
        listening = said.get(timeout=DEADLINE_S)
        assert isinstance(listening, Listening)
        port = listening.port
        with dialled(tmp_path, port) as channel:
            session = hello_by_library(channel, probe_config(tmp_path, 2, 0, probe=None)).session
            metadata = ((SESSION_KEY, session),)
            assert flood(tmp_path, port, metadata, [b"x"]) is grpc.StatusCode.UNIMPLEMENTED
    finally:
        gateway.stop()
        gateway.close()


def test_a_probe_measures_links_that_lead_both_ways_whatever_the_tree(tmp_path: Path) -> None:
    text = """
        version: 1
        name: t
        sites:
          - {name: ash, nodes: 3, accelerators_per_node: 1, accelerator: cpu}
          - {name: birch, like: ash}
          - {name: cedar, like: ash}
        links:
          - {between: [ash, birch], bandwidth: 1Gbit/s, rtt: 1ms}
          - {between: [cedar, birch], bandwidth: 1Gbit/s, rtt: 2ms}
          - {between: [ash, cedar], bandwidth: 1Gbit/s, rtt: 3ms, oneway: true}
    """
    config = gateway_config(tmp_path, ReductionPlan(3, (), ""), 0)
    changed = probing_config(config, PROBE, load_topology(text, "t"))
    assert [link.site for link in changed.links] == ["birch"]
    assert (changed.gateways_per_site, changed.probe) == ((1, 1, 1), PROBE)
    assert changed.window_bytes == 2 << 20
