"""An agent's session over real connections that break: nothing is lost, nothing is told twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from isthmus.protos.control.v1 import control_pb2 as pb
from isthmus.protos.security import control_security
from isthmus.sites.agent.coordinator_channel import CoordinatorChannel
from isthmus.sites.agent.known_coordinator import KnownCoordinator
from isthmus.sites.agent.session import Dialler, Session, SessionLostError, channel_options
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.timeouts import Timeouts
from tests.fakes.coordinators import Bench, coordinating
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.waiting import until
from tests.fakes.worlds import topology_text

pytestmark = pytest.mark.slow


class Carried:
    """An agent's session through a proxy, and what the coordinator said in it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.heard: list[pb.CoordinatorMessage] = []
        self.run_id, self.generation = "", 0

    def hear(self, message: pb.CoordinatorMessage) -> None:
        self.heard.append(message)
        if message.HasField("prepare"):
            self.run_id, self.generation = message.prepare.run_id, message.prepare.generation

    async def wait(self, kind: str) -> None:
        await until(lambda: kind in [each.WhichOneof("kind") for each in self.heard], lambda: kind)

    def digest(self, step: int) -> None:
        digest = pb.Digest(
            run_id=self.run_id, generation=self.generation, step=step, rank=0, combined=step
        )
        self.session.outbox.put_digest(digest)


@asynccontextmanager
async def carried(bench: Bench, port: int, folder: Path) -> AsyncIterator[Carried]:
    """Serve the session of an agent of site `a`."""
    timeouts = Timeouts.derive(load_topology(bench.topology, "t").failure)
    options = channel_options(timeouts)
    channel = CoordinatorChannel(control_security(), f"127.0.0.1:{port}", options)
    try:
        known = KnownCoordinator(folder, "a")
        dialler = Dialler(channel, bench.hello(site="a"), known, timeouts, lambda: None)
        call, welcome = await dialler.dial(time.monotonic() + 10)
        made = Carried(Session(call, welcome, dialler))
        serving = asyncio.create_task(made.session.serve(made.hear))
        try:
            yield made
        finally:
            made.session.outbox.end()
            with pytest.raises(SessionLostError):
                await serving
    finally:
        await channel.close()


async def test_connections_are_reset_again_and_again_and_nothing_is_lost(tmp_path: Path) -> None:
    steps = 400

    async with coordinating(tmp_path, topology_text()) as bench:
        port = int(bench.address.rpartition(":")[2])
        with TcpProxy(port) as proxy:
            async with carried(bench, proxy.port, tmp_path) as a:
                (b,) = await bench.join("b")
                await bench.submit()
                await b.prepare()
                await a.wait("prepare")
                named: Any = {"run_id": a.run_id, "generation": a.generation}
                outbox = a.session.outbox
                endpoint = pb.GatewayEndpoint(site="a", gateway=0, host="127.0.0.1", port=9)
                prepared = pb.SitePrepared(**named, endpoints=[endpoint])
                outbox.put(pb.AgentMessage(prepared=prepared))
                await b.run()
                await a.wait("start")
                outbox.put(pb.AgentMessage(running=pb.SiteRunning(**named)))
                await bench.until(lambda run: run.state == pb.RUN_STATE_ACTIVE)
                longest_s = 0.0
                for step in range(1, steps + 1):
                    a.digest(step)
                    await b.say(digest=pb.Digest(step=step, rank=0, combined=step))
                    if step % 50 == 0:
                        begun_s = time.monotonic()
                        proxy.reset()
                        await until(lambda: not outbox.numbered, lambda: "acknowledgements")
                        longest_s = max(longest_s, time.monotonic() - begun_s)
                    else:
                        await asyncio.sleep(0.002)
                assert longest_s < 1.0 + bench.control.timeouts.heartbeat_s
                outbox.put(pb.AgentMessage(ended=pb.SiteEnded(**named, succeeded=True)))
                await b.end(succeeded=True)
                ended = await bench.ended()
                assert ended.state == pb.RUN_STATE_SUCCEEDED, ended.reason
                assert ended.totals["verified_steps"] == steps
                kinds = [each.kind for each in bench.control.runs.events_of("run-1", 0)]
                assert kinds.count("session.broken") == kinds.count("session.resumed") == 8
                assert "site.lost" not in kinds


async def test_silence_shorter_than_the_lease_ends_nothing(tmp_path: Path) -> None:
    topology = topology_text(detect_within="2s", start_within="20s")
    async with coordinating(tmp_path, topology) as bench:
        port = int(bench.address.rpartition(":")[2])
        with TcpProxy(port) as proxy:
            async with carried(bench, proxy.port, tmp_path) as a:
                session = a.session.welcome.session
                proxy.swallow()
                await asyncio.sleep(1.5)
                proxy.reset()
                await bench.join("b")
                await bench.submit()
                await a.wait("prepare")
                assert a.session.welcome.session == session


async def test_a_coordinator_that_is_far_away_is_reached_by_the_first_attempt(
    tmp_path: Path,
) -> None:
    """Also with a short `detect_within`, whose pauses between attempts are shorter than this."""

    topology = topology_text(detect_within="2s", start_within="20s")
    async with coordinating(tmp_path, topology) as bench:
        port = int(bench.address.rpartition(":")[2])
        with TcpProxy(port, accept_after_s=0.5) as far:
            async with carried(bench, far.port, tmp_path):
                assert far.num_accepted == 1
