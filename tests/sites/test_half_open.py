"""A connection whose other end is gone without a word is noticed at both its ends, whatever it is.

gRPC's library asks by pings, so a proxy that swallows them will do. Of connections for frames the
kernel takes care: there, packets have to be lost.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.coordinator.service import server_options as coordinator_options
from orchestrator.emulator.emulator_child import running_emulator
from protos.control.v1.control_pb2 import AgentMessage, Heartbeat
from protos.control.v1.control_pb2_grpc import CoordinatorStub, add_CoordinatorServicer_to_server
from sites.agent.session import channel_options as agent_options
from sites.gateway.config import GatewayConfig
from sites.gateway.links.frame_calls import CallError, FrameCall
from sites.gateway.links.transport import client_options, patience, server_options
from tests.fakes.emulator_configs import netns_config
from tests.fakes.gateway_sites import gateway_config
from tests.fakes.sockets import open_socket
from tests.fakes.tcp_proxy import TcpProxy
from topology.faults.script import Change
from topology.timeouts import Timeouts
from topology.trees.trees import ReductionPlan, star
from topology.world import Detection

DETECT_S = 3.0
SLACK_S = 2.0
"""The machine may be busy. gRPC's own patience is a minute."""


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


def options_of(kind: str, folder: Path) -> tuple[Any, Any]:
    """Return the arguments of a kind's channels and of its servers."""
    if kind == "control":
        return agent_options(TIMEOUTS), coordinator_options(TIMEOUTS)
    config = exchange_config(folder)
    return client_options(config), server_options(config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["control", "exchange"])
def test_silence_without_an_error_is_noticed_within_two_thirds(tmp_path: Path, kind: str) -> None:
    of_channel, of_server = options_of(kind, tmp_path)

    async def story() -> None:
        streams = Streams()
        server = grpc.aio.server(options=of_server)
        add_CoordinatorServicer_to_server(streams, server)  # type: ignore[arg-type]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with TcpProxy(port) as proxy:
            address = f"127.0.0.1:{proxy.port}"
            async with grpc.aio.insecure_channel(address, options=of_channel) as channel:
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

    asyncio.run(asyncio.wait_for(story(), 30))


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
