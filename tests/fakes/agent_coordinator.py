"""A coordinator that agents can join: real gRPC on loopback, orders given by the test."""

# ruff: noqa: N802 - gRPC fixes the method names

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from isthmus.protos.control.v1 import control_pb2 as control
from isthmus.protos.control.v1.control_pb2_grpc import (
    CoordinatorServicer,
    add_CoordinatorServicer_to_server,
)

WAIT_S = 60.0
"""Generous: the machine may be busy. No test waits this long when all is well."""
Found = TypeVar("Found")


@dataclass
class AgentCoordinator(CoordinatorServicer):
    """What agents said, in order, and a way to answer."""

    lease_s: float = 15.0
    heartbeat_s: float = 0.2
    generation: int = 1
    refuses_with: tuple[grpc.StatusCode, str] | None = None
    refuses_logs: bool = False
    address: str = ""
    messages: list[control.AgentMessage] = field(default_factory=list)
    """Heartbeats left out."""
    num_heartbeats: int = 0
    num_sessions: int = 0
    lines: dict[tuple[str, int], control.LogLine] = field(default_factory=dict)
    """By source and sequence."""
    largest_batch_bytes: int = 0
    num_orders: int = 0
    received: int = 0
    """The last number that the agent's messages had."""
    _by_kind: dict[str, list[control.AgentMessage]] = field(default_factory=dict)
    _orders: asyncio.Queue[control.CoordinatorMessage | None] = field(default_factory=asyncio.Queue)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def say(self, **kind: object) -> None:
        """Send one message to the agent."""
        self._orders.put_nowait(control.CoordinatorMessage(**kind))  # type: ignore[arg-type]

    def forget(self) -> None:
        """Start over: what came so far is not found any more."""
        self.messages.clear()
        self._by_kind.clear()

    def hang_up(self) -> None:
        """End the agent's session."""
        self._orders.put_nowait(None)

    def leave(self) -> None:
        """End the agent's session, and welcome none any more."""
        self.refuses_with = (grpc.StatusCode.UNAVAILABLE, "nobody is here")
        self.hang_up()

    async def wait_for(self, what: str, find: Callable[[], Found | None]) -> Found:
        """Return what `find` finds, as soon as it does."""
        try:
            async with asyncio.timeout(WAIT_S), self._changed:
                while not (found := find()):
                    await self._changed.wait()
                return found
        except TimeoutError:
            text = "\n".join(str(each) for each in self.messages[-20:])
            raise AssertionError(f"{what} did not come; lines:\n{self.text()}\n{text}") from None

    async def wait_message(self, kind: str) -> control.AgentMessage:
        """Return the first message of a kind."""
        return await self.wait_for(kind, lambda: next(iter(self.all(kind)), None))

    def all(self, kind: str) -> list[control.AgentMessage]:
        """Return all messages of a kind."""
        return self._by_kind.get(kind, [])

    def text(self, source: str = "") -> str:
        """Return the shipped lines of a source, or of all."""
        return "\n".join(
            f"{name}: {line.text}"
            for (name, _), line in sorted(self.lines.items())
            if source in ("", name)
        )

    async def Session(  # type: ignore[override] # as orchestrator/coordinator/service.py says
        self,
        request_iterator: AsyncIterator[control.AgentMessage],
        context: grpc.aio.ServicerContext[control.AgentMessage, control.CoordinatorMessage],
    ) -> None:
        """Welcome an agent, then pass on orders until either side ends."""
        hello = await context.read()
        if self.refuses_with is not None:
            await context.abort(*self.refuses_with)
        await self._note(hello)
        self.num_sessions += 1
        await context.write(
            control.CoordinatorMessage(
                welcome=control.Welcome(
                    protocol=1,
                    generation=self.generation,
                    lease_s=self.lease_s,
                    heartbeat_s=self.heartbeat_s,
                    session="one",
                    received=self.received,
                )
            )
        )
        listening = asyncio.create_task(self._listen(context))
        try:
            while True:
                order = asyncio.create_task(self._orders.get())
                await asyncio.wait([order, listening], return_when=asyncio.FIRST_COMPLETED)
                if not order.done() or (message := order.result()) is None:
                    order.cancel()
                    return
                message.received = self.received
                if not message.HasField("heartbeat_ack"):
                    self.num_orders += 1
                    message.sequence = self.num_orders
                await context.write(message)
        finally:
            listening.cancel()

    async def ShipLogs(
        self, request: control.ShipLogsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> control.ShipLogsResponse:
        """Keep the lines."""
        if self.refuses_logs:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no logs now")
        self.largest_batch_bytes = max(self.largest_batch_bytes, request.ByteSize())
        async with self._changed:
            for line in request.lines:
                self.lines[line.source, line.sequence] = line
            self._changed.notify_all()
        return control.ShipLogsResponse()

    async def _listen(
        self, context: grpc.aio.ServicerContext[control.AgentMessage, control.CoordinatorMessage]
    ) -> None:
        while isinstance(message := await context.read(), control.AgentMessage):
            if message.HasField("heartbeat"):
                self.num_heartbeats += 1
                # Through the queue: one stream takes one write at a time.
                self.say(heartbeat_ack=control.HeartbeatAck(sequence=message.heartbeat.sequence))
            elif message.sequence > self.received:
                self.received = message.sequence
                await self._note(message)
                if message.HasField("done"):  # as if no other site needed anything of it
                    run = message.done
                    self.say(release=control.Release(run_id=run.run_id, generation=run.generation))

    async def _note(self, message: control.AgentMessage) -> None:
        async with self._changed:
            self.messages.append(message)
            self._by_kind.setdefault(message.WhichOneof("kind") or "", []).append(message)
            self._changed.notify_all()


@asynccontextmanager
async def agent_coordinator(**fields: object) -> AsyncIterator[AgentCoordinator]:
    """Give a coordinator that listens on a free port of this machine."""
    kind: Any = AgentCoordinator  # the operators' calls stay unimplemented
    made: AgentCoordinator = kind(**fields)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_CoordinatorServicer_to_server(made, server)
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield made
    finally:
        await server.stop(None)
