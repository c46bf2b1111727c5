"""A connection whose other end is gone without a word is noticed at both its ends, whatever it is.

Both gRPC's library and a gateway's calls ask by pings, so a proxy that swallows them will do.
Of packets that are lost the kernel takes care, too.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import hpack
import pytest

from isthmus.orchestrator.coordinator.service import server_options as coordinator_options
from isthmus.orchestrator.emulator.emulator_child import running_emulator
from isthmus.protos.control.v1.control_pb2 import AgentMessage, Heartbeat
from isthmus.protos.control.v1.control_pb2_grpc import (
    CoordinatorStub,
    add_CoordinatorServicer_to_server,
)
from isthmus.protos.security import LoopbackSecurity
from isthmus.sites.agent.session import channel_options as agent_options
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.frame_calls import FrameCall, dial
from isthmus.sites.gateway.links.frame_listener import FrameListener
from isthmus.sites.gateway.links.http2 import Kind
from isthmus.sites.gateway.links.keep_alive import Patience
from isthmus.sites.gateway.links.peer_server import ExchangeServer
from isthmus.sites.gateway.links.status import CallError
from isthmus.sites.gateway.links.transport import (
    PUSH_METHOD,
    patience,
)
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Detection
from tests.fakes.emulator_configs import netns_config
from tests.fakes.gateway_sites import (
    gateway_config,
    gateways,
    join,
    leave,
    reduce_once,
    through_proxies,
)
from tests.fakes.http2_frames import (
    ANSWER,
    INITIAL_WINDOW_SIZE,
    frame,
    header,
    number,
    settings,
)
from tests.fakes.raw_calls import RawPeer
from tests.fakes.sockets import open_socket
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.waiting import until, wait_for

DETECT_S = 3.0
SLACK_S = 2.0
"""The machine may be busy. gRPC's own patience is a minute."""

SECURITY = LoopbackSecurity("s" * 64)
SHORT = Patience(connect_s=5.0, idle_s=0.2, lost_s=0.4)


class Streams:
    """Reads one stream, and notes when it broke."""

    def __init__(self) -> None:
        self.began, self.broke = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - calls that nobody makes
        return None

    async def Session(self, request_iterator: object, context: Any) -> None:  # noqa: ANN401, N802
        """Read to the end."""
        try:
            while await context.read() is not grpc.aio.EOF:
                self.began.set()
        finally:
            self.broke.set()


TIMEOUTS = Timeouts.derive(Detection(detect_within_s=DETECT_S, start_within_s=60.0))


def exchange_config(folder: Path) -> GatewayConfig:
    return gateway_config(
        folder,
        ReductionPlan(2, (star(2, 0),), ""),
        0,
        keepalive_time_s=TIMEOUTS.keepalive_time_s,
        keepalive_timeout_s=TIMEOUTS.keepalive_timeout_s,
    )


@pytest.mark.slow
async def test_silence_without_an_error_is_noticed_within_two_thirds() -> None:
    streams = Streams()
    server = grpc.aio.server(options=coordinator_options(TIMEOUTS))
    add_CoordinatorServicer_to_server(streams, server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with TcpProxy(port) as proxy:
        address = f"127.0.0.1:{proxy.port}"
        async with grpc.aio.insecure_channel(address, options=agent_options(TIMEOUTS)) as channel:
            stub: Any = CoordinatorStub(channel)
            call = stub.Session()
            await call.write(AgentMessage(heartbeat=Heartbeat(sequence=1)))
            await streams.began.wait()
            proxy.swallow()
            begun_s = time.monotonic()
            # What waits for an answer is what gRPC would otherwise be patient with.
            await call.write(AgentMessage(heartbeat=Heartbeat(sequence=2)))
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            assert time.monotonic() - begun_s < 2 / 3 * DETECT_S + SLACK_S
            await streams.broke.wait()
            assert time.monotonic() - begun_s < 2 / 3 * DETECT_S + SLACK_S
    await server.stop(0)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("needs_root_netns")
@pytest.mark.parametrize("writes", [False, True], ids=["nothing to say", "something to say"])
def test_packets_that_are_lost_without_an_error_are_noticed_within_two_thirds(
    tmp_path: Path, writes: bool
) -> None:
    with ExitStack() as stack:
        emulator = stack.enter_context(running_emulator(netns_config()))
        listener = stack.enter_context(open_socket(emulator.sites["us"].net))
        listener.bind((emulator.sites["us"].address, 0))
        listener.listen()
        near = stack.enter_context(open_socket(emulator.sites["eu"].net))
        near.settimeout(DETECT_S)
        near.connect(listener.getsockname())
        ends = [near, stack.enter_context(listener.accept()[0])]

        async def story() -> list[float]:
            calls = [FrameCall(end, is_client=end is near) for end in ends]
            calls[0].begin(((":method", "POST"), (":path", "/x")))
            calls[1].begin()
            await calls[1].wait_header()
            calls[1].answer()
            await calls[0].wait_header()
            await asyncio.to_thread(
                emulator.apply,
                [
                    Change(kind="cut", source=source, target=target)
                    for source, target in (("eu", "us"), ("us", "eu"))
                ],
            )
            begun_s = time.monotonic()

            async def broken(call: FrameCall) -> float:
                if writes:
                    await call.write(b"x")
                with pytest.raises(CallError, match="timed out"):
                    await call.read()
                return time.monotonic() - begun_s

            return list(await asyncio.gather(*map(broken, calls)))

        for end in ends:
            end.setblocking(False)
            patience(exchange_config(tmp_path)).set_up(end)
        took_s = asyncio.run(asyncio.wait_for(story(), 30))
    assert max(took_s) < 2 / 3 * DETECT_S + SLACK_S, took_s


# ------------------------------------------------------------------------ frames, through a proxy


def said_of(method: str) -> bytes:
    """Return what a client of ours says for a method, in its header."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    encoder.encode(())  # which says so
    return encoder.encode([(":path", method)])


def configs_of(folder: Path, **changes: Any) -> list[GatewayConfig]:  # noqa: ANN401 - any field
    return [
        gateway_config(
            folder,
            ReductionPlan(2, (), ""),
            site,
            peer_lost_s=DETECT_S,
            keepalive_time_s=TIMEOUTS.keepalive_time_s,
            keepalive_timeout_s=TIMEOUTS.keepalive_timeout_s,
            **changes,
        )
        for site in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds",
    [
        0,
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(5, marks=pytest.mark.exhaustive),
    ],
    ids=["before any round", "after one", "later"],
)
def test_a_half_open_connection_holds_up_a_round_for_two_thirds_at_most(
    tmp_path: Path, rounds: int
) -> None:
    """The proxy answers for who is gone, and takes what is sent."""
    with ExitStack() as stack:
        dial, proxies = through_proxies(stack)
        members = stack.enter_context(gateways(configs_of(tmp_path), dial))
        ranks = [join(stack, member) for member in members]
        for number in range(rounds):
            reduce_once(ranks, number, 50_000, [1.0, 3.0], seed=number)
        (link,) = members[0].gateway._links.all.values()
        wait_for(lambda: len(link._streams.connections) == 2, "frames may cross")
        proxies[0].half_open(said_of(PUSH_METHOD))
        begun_s = time.monotonic()
        reduce_once(ranks, rounds, 50_000, [1.0, 3.0], seed=rounds)
        assert time.monotonic() - begun_s < 2 / 3 * DETECT_S + SLACK_S
        assert not [
            each for member in members for each in member.messages if each["op"] == "suspect"
        ]
        reduce_once(ranks, rounds + 1, 50_000, [1.0, 3.0], seed=rounds)
        leave(members, ranks)


@pytest.mark.slow
def test_a_peer_that_answers_and_takes_no_frame_is_named(tmp_path: Path) -> None:
    """Somebody between lets calls through, and no frames: from the first round on it is told."""
    with ExitStack() as stack:
        dial, proxies = through_proxies(stack)
        members = stack.enter_context(gateways(configs_of(tmp_path), dial))
        ranks = [join(stack, member) for member in members]
        proxies[0].half_open(said_of(PUSH_METHOD), later_ones=True)
        reducing = threading.Thread(
            target=reduce_once, args=(ranks, 0, 5000, [1.0, 3.0]), kwargs={"seed": 0}
        )
        begun_s = time.monotonic()
        reducing.start()
        try:
            suspect = members[0].wait("suspect")
            # ... as soon as its watch looks.
            assert time.monotonic() - begun_s < DETECT_S + DETECT_S / 5 + SLACK_S
            assert (suspect["site"], suspect["is_gone"]) == ("birch", False)
            assert "has taken no frame for" in suspect["why"]
        finally:
            proxies[0].reset()
            proxies[0].half_open(b"nobody says this")
            reducing.join(30)
        assert members[0].wait("reached")["site"] == "birch"
        leave(members, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "reads",
    [pytest.param(True, marks=pytest.mark.exhaustive), False],
    ids=["reads", "reads nothing"],
)
def test_a_peer_that_never_acknowledges_on_a_connection_gets_the_frame_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """It is there, and answers each question; it may read what comes, or not."""
    push, num_calls = ExchangeServer._push, 0

    async def lazy(self: ExchangeServer, call: FrameCall) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 4:  # the first two of each side
            await push(self, call)
        elif reads:
            while await call.read() is not None:
                pass
        else:
            await call.over.wait()

    monkeypatch.setattr(ExchangeServer, "_push", lazy)
    with ExitStack() as stack:
        members = stack.enter_context(gateways(configs_of(tmp_path)))
        ranks = [join(stack, member) for member in members]
        begun_s = time.monotonic()
        reduce_once(ranks, 0, 50_000, [1.0, 3.0], seed=0)
        assert time.monotonic() - begun_s < DETECT_S + SLACK_S
        leave(members, ranks)


@pytest.mark.slow
async def test_both_ends_of_an_idle_connection_notice_that_the_other_is_gone() -> None:
    """Though nobody has anything to say, and a proxy answers TCP's own questions."""

    broke: list[str] = []

    async def serve(call: FrameCall) -> None:
        try:
            await call.read()
        except CallError as error:
            broke.append(str(error))
            raise

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listener = FrameListener(listening, {PUSH_METHOD: serve}, SECURITY, SHORT, 4)
    listener.begin()
    with TcpProxy(listening.getsockname()[1]) as proxy:
        async with dial(("127.0.0.1", proxy.port), PUSH_METHOD, (), SECURITY, "x", SHORT) as call:
            await call.wait_header()
            await asyncio.sleep(3 * SHORT.lost_s)  # pings are answered
            assert not call.over.is_set()
            proxy.half_open()
            begun_s = time.monotonic()
            with pytest.raises(CallError) as caught:
                await call.read()
            assert time.monotonic() - begun_s < SHORT.lost_s + SLACK_S
            await until(lambda: bool(broke), "the server notices")
    # The proxy tells the other end once one has noticed.
    assert any("has been silent for" in each for each in (str(caught.value), *broke))
    await listener.close()


@pytest.mark.slow
async def test_a_slow_connection_is_not_broken() -> None:
    """A message takes several times as long as silence may last, with no answer meanwhile."""
    message_bytes = 4 << 20

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    for end in (near, far):
        end.setblocking(False)
    peer, call = RawPeer(far), FrameCall(near, is_client=True)
    call.begin(((":method", "POST"), (":path", "/x")))
    call.keep_alive(SHORT, SECURITY)
    wide = number((1 << 31) - 1 - 65_535)
    await peer.send(
        settings((INITIAL_WINDOW_SIZE, (1 << 31) - 1)),
        frame(Kind.WINDOW_UPDATE, wide),
        header(ANSWER),
    )
    await call.wait_header()
    begun_s = time.monotonic()
    writing = asyncio.create_task(call.write(bytes(message_bytes)))
    read = 0
    while read < message_bytes - (1 << 20):  # the rest may lie in buffers, and be waited for
        read += len(await peer.receive(100_000))
        await asyncio.sleep(SHORT.lost_s / 10)
        assert not call.over.is_set()
    assert time.monotonic() - begun_s > 2 * SHORT.lost_s
    writing.cancel()
    call.cancel()
    far.close()
