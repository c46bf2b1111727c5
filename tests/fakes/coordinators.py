"""A real coordinator's server in this process; agents that speak its contract and start nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from isthmus.orchestrator.coordinator.control import Control
from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.coordinator.service import CoordinatorService, listen, make_server
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2, control_pb2_grpc
from isthmus.protos.control.v1.control_pb2 import AgentMessage, CoordinatorMessage
from isthmus.protos.security import control_security
from isthmus.protos.versions import CONTROL_PROTOCOL_MAX, CONTROL_PROTOCOL_MIN
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.hashing import topology_hash
from tests.fakes.folds import check_live_runs
from tests.fakes.worlds import JOB, topology_text

DEADLINE_S = 20.0


@dataclass
class FakeAgent:
    """One site's side of a session. Every wait has a deadline."""

    site: str
    call: grpc.aio.StreamStreamCall[AgentMessage, CoordinatorMessage]
    run_id: str = ""
    generation: int = 0
    welcome: control_pb2.Welcome = field(default_factory=control_pb2.Welcome)
    # gRPC takes one write of a call at a time; heartbeats go out beside the test's own messages.
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def say(self, **kind: object) -> None:
        """Send a message; run and generation are filled in where the kind has them."""
        ((name, content),) = kind.items()
        if name not in {"heartbeat", "hello"}:
            content.run_id = content.run_id or self.run_id  # type: ignore[attr-defined]
            content.generation = content.generation or self.generation  # type: ignore[attr-defined]
        async with asyncio.timeout(DEADLINE_S), self._writing:
            await self.call.write(AgentMessage(**{name: content}))  # type: ignore[arg-type]

    async def hear(self, kind: str) -> CoordinatorMessage:
        """Return the next message, which has to be of that kind; answers to heartbeats are not."""
        async with asyncio.timeout(DEADLINE_S):
            message = await self.call.read()
            while kind != "heartbeat_ack" and _is_answer(message):
                message = await self.call.read()
        assert isinstance(message, CoordinatorMessage), f"the session has ended, not {kind}"
        assert message.WhichOneof("kind") == kind, message
        if kind == "prepare":
            self.run_id, self.generation = message.prepare.run_id, message.prepare.generation
        return message

    async def end_of_session(self) -> tuple[grpc.StatusCode, str]:
        """Return how the coordinator ended the session."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.call.code(), await self.call.details() or ""

    async def prepare(self, port: int = 9000) -> None:
        """Answer Prepare with one gateway."""
        await self.hear("prepare")
        endpoint = control_pb2.GatewayEndpoint(
            site=self.site, gateway=0, host="127.0.0.1", port=port
        )
        await self.say(prepared=control_pb2.SitePrepared(endpoints=[endpoint]))

    async def run(self) -> control_pb2.Start:
        """Answer Start; the site is running."""
        start = (await self.hear("start")).start
        await self.say(running=control_pb2.SiteRunning())
        return start

    async def step(self) -> None:
        """Say that the site has taken its first step."""
        step = control_pb2.Metric(kind=metrics.FIRST_AVERAGE)
        await self.say(metrics=control_pb2.MetricBatch(metrics=[step]))

    async def end(self, *failures: control_pb2.Failure, succeeded: bool = False) -> None:
        """Say that nothing is left."""
        await self.say(ended=control_pb2.SiteEnded(succeeded=succeeded, failures=failures))


def _is_answer(message: object) -> bool:
    kind = message.WhichOneof("kind") if isinstance(message, CoordinatorMessage) else ""
    return kind in ("heartbeat_ack", None)


@asynccontextmanager
async def beating() -> AsyncIterator[Callable[[FakeAgent], None]]:
    """Give a function that lets an agent say all the time that it lives."""
    going: list[asyncio.Task[None]] = []

    async def beat(agent: FakeAgent) -> None:
        for sequence in range(1000):
            await agent.say(heartbeat=control_pb2.Heartbeat(sequence=sequence))
            await asyncio.sleep(0.1)

    try:
        yield lambda agent: going.append(asyncio.create_task(beat(agent)))
    finally:
        for each in going:
            each.cancel()
        await asyncio.gather(*going, return_exceptions=True)


@dataclass
class Bench:
    """A coordinator that listens, and a client's stub for it."""

    control: Control
    service: CoordinatorService
    address: str
    channel: grpc.aio.Channel
    topology: str
    runs: Path

    @property
    def stub(self) -> control_pb2_grpc.CoordinatorAsyncStub:
        """The contract's calls; give each a timeout."""
        return control_pb2_grpc.CoordinatorStub(self.channel)  # type: ignore[return-value]

    def hello(self, **fields: object) -> control_pb2.Hello:
        """Return what a proper agent says first."""
        proper: dict[str, object] = {
            "protocol_min": CONTROL_PROTOCOL_MIN,
            "protocol_max": CONTROL_PROTOCOL_MAX,
            "build": "test",
            "topology_hash": topology_hash(load_topology(self.topology, "topology.yaml")),
            "incarnation": f"{fields['site']}-1",
            "host": f"host-{fields['site']}",
        }
        return control_pb2.Hello(**{**proper, **fields})  # type: ignore[arg-type]

    async def dial(self, site: str, /, **fields: object) -> FakeAgent:
        """Open a session and say Hello, no more."""
        agent = FakeAgent(site, self.stub.Session(timeout=60))
        await agent.say(hello=self.hello(**{"site": site, **fields}))
        return agent

    async def join(self, *sites: str) -> list[FakeAgent]:
        """Return agents that have been welcomed."""
        agents = [await self.dial(site) for site in sites]
        for agent in agents:
            agent.welcome = (await agent.hear("welcome")).welcome
        return agents

    async def submit(
        self,
        run_id: str = "run-1",
        job: str = JOB,
        priority: int = 0,
        passed_env: Mapping[str, str] | None = None,
    ) -> str:
        """Submit a run of the coordinator's own topology."""
        request = control_pb2.SubmitRequest(
            run_id=run_id,
            job=control_pb2.Document(source="job.yaml", text=job),
            topology=control_pb2.Document(source="topology.yaml", text=self.topology),
            priority=priority,
            passed_env=passed_env or {},
        )
        return (await self.stub.Submit(request, timeout=DEADLINE_S)).run_id

    async def get(self, run_id: str = "") -> control_pb2.Run:
        """Return a run."""
        request = control_pb2.GetRunRequest(run_id=run_id)
        return await self.stub.GetRun(request, timeout=DEADLINE_S)

    async def until(self, is_so: Callable[[control_pb2.Run], bool]) -> control_pb2.Run:
        """Watch the latest run until it is so."""
        request = control_pb2.GetRunRequest()
        last = control_pb2.Run()
        async for last in self.stub.WatchRun(request, timeout=DEADLINE_S):
            if is_so(last):
                return last
        raise AssertionError(f"the run ended before: {last}")

    async def ended(self) -> control_pb2.Run:
        """Watch the latest run to its end."""
        watching = self.stub.WatchRun(control_pb2.GetRunRequest(), timeout=DEADLINE_S)
        return [run async for run in watching][-1]


@asynccontextmanager
async def coordinating(
    folder: Path,
    topology: str | None = None,
    service: type[CoordinatorService] = CoordinatorService,
) -> AsyncIterator[Bench]:
    """Run a coordinator in `folder` on a port of its own; all of it has ended after the block.

    What it knows by then of its runs has to be what its journal says.
    """
    text = topology_text() if topology is None else topology
    journal = Journal(folder)
    control = Control(
        load_topology(text, "topology.yaml"),
        journal,
        folder / "runs",
        security=control_security("coordinator"),
    )
    served = service(control)
    server = make_server(served, control.timeouts)
    address = listen(server, "127.0.0.1", 0)
    await server.start()
    ticking = asyncio.create_task(control.run())
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    try:
        async with control_security().aio_channel(address, options, "coordinator") as channel:
            yield Bench(control, served, address, channel, text, folder / "runs")
        check_live_runs(folder, control.runs.active())
    finally:
        await control.close()
        ticking.cancel()
        await server.stop(0)
        journal.close()


async def active(bench: Bench, *sites: str, job: str = JOB) -> list[FakeAgent]:
    """Let agents join, submit a run, and bring it as far as that all have taken a step."""
    agents = await bench.join(*sites)
    await bench.submit(job=job)
    for agent in agents:
        await agent.prepare()
    for agent in agents:
        await agent.run()
    await bench.until(lambda run: run.state == control_pb2.RUN_STATE_ACTIVE)
    for agent in agents:
        await agent.step()
    events = bench.stub.ReadEvents(control_pb2.ReadEventsRequest(follow=True), timeout=DEADLINE_S)
    async for event in events:
        if event.kind == "run.first_step":
            break
    events.cancel()
    return agents


async def status_of(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """Return how a call is refused, and with which words."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""
