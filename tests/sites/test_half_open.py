"""A connection whose other end is gone without a word is noticed at both ends of every channel."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.coordinator.service import server_options as coordinator_options
from protos.control.v1.control_pb2 import AgentMessage, Heartbeat
from protos.control.v1.control_pb2_grpc import CoordinatorStub, add_CoordinatorServicer_to_server
from sites.agent.session import channel_options as agent_options
from sites.gateway.links.transport import client_options, server_options
from tests.fakes.gateway_sites import gateway_config
from tests.fakes.tcp_proxy import TcpProxy
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


def options_of(kind: str, folder: Path) -> tuple[Any, Any]:
    """Return the arguments of a kind's channels and of its servers."""
    timeouts = Timeouts.derive(Detection(detect_within_s=DETECT_S, start_within_s=60.0))
    if kind == "control":
        return agent_options(timeouts), coordinator_options(timeouts)
    config = gateway_config(
        folder,
        ReductionPlan(2, (star(2, 0),), ""),
        0,
        keepalive_time_s=timeouts.keepalive_time_s,
        keepalive_timeout_s=timeouts.keepalive_timeout_s,
    )
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
