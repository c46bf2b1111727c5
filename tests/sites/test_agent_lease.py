"""The agent's lease: ends after silence, begins anew after the agent itself stood still."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.protos.control.v1.control_pb2 import (
    AgentMessage,
    CoordinatorMessage,
    HeartbeatAck,
    Welcome,
)
from isthmus.sites.agent import session as session_module
from isthmus.sites.agent.agent import Agent, join_within_s
from isthmus.sites.agent.session import Outbox, Session, SessionLostError

LEASE_S = 5.0
HEARTBEAT_S = 1.0
RTT_S = 0.1
_now = asyncio.sleep


class World:
    """A session whose clock only moves when it waits; a coordinator that answers, or does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.standstills: list[tuple[float, float]] = []
        """From when on, and for how long, everything here stands still."""
        self.silent_from_s = 1000.0
        self.answered: list[float] = []
        monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(asyncio, "sleep", self._sleep)
        call = SimpleNamespace(read=self._read, write=self._write, cancel=lambda: None)
        welcome = Welcome(lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
        self._unread: asyncio.Queue[CoordinatorMessage] = asyncio.Queue()
        self.session = Session(call, welcome, SimpleNamespace())  # type: ignore[arg-type]

    async def serve(self) -> float:
        """Serve until the lease is over; return when that was."""
        with pytest.raises(SessionLostError, match="the coordinator was silent for 5 s"):
            async with asyncio.timeout(30):
                await self.session.serve(lambda _: None)
        return self.now_s

    async def _sleep(self, wait_s: float) -> None:
        for _ in range(10):  # what was said is sent, answered and read meanwhile
            await _now(0)
        until_s = self.now_s + wait_s
        while self.standstills and self.standstills[0][0] <= until_s:
            from_s, for_s = self.standstills.pop(0)
            until_s = max(until_s, from_s + for_s)
        self.now_s = until_s

    async def _write(self, message: AgentMessage) -> None:
        if self.now_s < self.silent_from_s:
            self.answered.append(self.now_s)
            ack = HeartbeatAck(sequence=message.heartbeat.sequence)
            self._unread.put_nowait(CoordinatorMessage(heartbeat_ack=ack))

    async def _read(self) -> Any:  # noqa: ANN401 - as gRPC's
        return await self._unread.get()


def play(monkeypatch: pytest.MonkeyPatch, **facts: object) -> tuple[World, float]:
    """Serve one session in a world with these facts; return it, and when the lease was over."""

    async def story() -> tuple[World, float]:
        world = World(monkeypatch)
        for name, value in facts.items():
            setattr(world, name, value)
        return world, await world.serve()

    return asyncio.run(story())


def test_a_lease_ends_after_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    world, ended_s = play(monkeypatch, silent_from_s=110.5)
    assert ended_s == world.answered[-1] + LEASE_S, "from when the last answered one was sent"


@pytest.mark.parametrize("for_s", [1.5 * LEASE_S, 3600.0])
def test_who_stood_still_has_its_lease_anew(for_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    stood_still = [(103.5, for_s), (110.0 + for_s, for_s)]
    world, ended_s = play(monkeypatch, standstills=stood_still, silent_from_s=130.0 + 2 * for_s)
    assert ended_s == world.answered[-1] + LEASE_S
    assert ended_s > 130.0 + 2 * for_s


def test_who_stands_still_again_and_again_misses_a_coordinator_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stood_still = [(103.5 + 4.5 * turn, 4.0) for turn in range(100)]
    _, ended_s = play(monkeypatch, standstills=stood_still, silent_from_s=103.2)
    assert ended_s <= 107.5 + LEASE_S + 4.0


def test_an_agent_waits_as_long_without_a_run_as_with_one() -> None:
    """A site that is about to come back has no run, and is needed all the same."""
    welcome = Welcome(lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, coordinator_within_s=3600.0)
    outbox = Outbox()
    agent: Any = Agent(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    agent._session = SimpleNamespace(welcome=welcome, outbox=outbox)
    assert agent._patience_s() == 3600.0
    agent._run = SimpleNamespace(coordinator_s=7.0)
    assert agent._patience_s() == 7.0
    outbox.put(AgentMessage())
    agent._run = None
    assert agent._patience_s() == 7.0, "the run's end is not told yet"
    outbox.acknowledge(1)
    assert agent._patience_s() == 3600.0


@pytest.mark.parametrize("lease_s", [2.0, 15.0, 55.0, 300.0])
def test_an_agent_that_was_started_again_outlasts_the_lease_of_the_one_before(
    lease_s: float,
) -> None:
    assert join_within_s(lease_s) >= max(60.0, lease_s + 10.0)
