"""A gateway that stood still gives its peers time anew, and still tells of those that are gone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from isthmus.protos.errors import PeerLostError
from isthmus.protos.exchange.v1.exchange_pb2 import HelloResponse
from isthmus.protos.versions import EXCHANGE_PROTOCOL_MAX
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links import peer_watch
from isthmus.sites.gateway.links.congestion.rate import window_bytes
from isthmus.sites.gateway.links.peer_watch import PeerWatch
from isthmus.sites.gateway.links.send_queue import Outbox
from isthmus.sites.gateway.links.status import CallError, Status
from isthmus.sites.silence import Silence, Standstills
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.gateway_process import GatewayProcess
from tests.fakes.gateway_rank import DEADLINE_S, GatewayRank
from tests.fakes.gateway_sites import SITES, gateway_config, reduce_once
from tests.fakes.waiting import wait_for

PLAN = ReductionPlan(2, (), "")
D_S = 2.0
"""`peer_lost_s` of the worlds with a clock of their own."""
RTT_S = 0.08
FOREVER_S = 1000.0


class Silent:
    """A peer whose connections are made at once; what comes of them is the world's matter."""

    site, gateway = SITES[1], 0

    def __str__(self) -> str:
        return "site birch (gateway 0)"

    def dial(self, *_: object) -> Any:  # noqa: ANN401 - of no type that matters
        return nullcontext()

    async def refuses_connections(self) -> bool:
        return False


class World:
    """A watch whose clock only moves when it waits, and a peer that answers or does not."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.deaf_s = (FOREVER_S, FOREVER_S)
        """From when until when the peer itself stands still."""
        self.ends_s = 200.0
        self.standstills: list[tuple[float, float]] = []
        """From when on, and for how long, everything here stands still."""
        self.on_answer: Callable[[], None] = lambda: None
        self.answered_s: list[float] = []
        self._timeout_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(peer_watch, "time", clock)
        monkeypatch.setattr(peer_watch, "asyncio", SimpleNamespace(sleep=self._sleep))
        monkeypatch.setattr(peer_watch, "deadline", self._within)
        monkeypatch.setattr(peer_watch, "say_hello", self._hello)
        config = gateway_config(folder, PLAN, 0, peer_lost_s=D_S, keepalive_time_s=D_S / 3)
        self.outbox = Outbox(window_bytes(config, config.links[0]), config.links[0].rtt_s)
        self.suspected = ""
        """Why, once the peer is; then the link is over."""
        self.suspected_s = 0.0
        self.watch = PeerWatch(config, Silent(), self.outbox, on_suspect=self._suspect)

    def run(self) -> None:
        """Watch until the link is over."""
        self.watch.heard()
        asyncio.run(self.watch.run())

    def greet(self, within_s: float) -> None:
        """Greet the peer."""
        asyncio.run(self.watch.greet(within_s))

    def _suspect(self, is_gone: bool, why: str) -> None:
        assert not is_gone
        self.suspected, self.suspected_s, self.ends_s = why, self.now_s, self.now_s

    def _pass(self, wait_s: float) -> None:
        """Let time pass; what stands still meanwhile goes on later."""
        until_s = self.now_s + wait_s
        while self.standstills and self.standstills[0][0] <= until_s:
            from_s, for_s = self.standstills.pop(0)
            until_s = max(until_s, from_s + for_s)
        self.now_s = until_s

    async def _sleep(self, wait_s: float) -> None:
        self._pass(wait_s)
        if self.now_s >= self.ends_s:
            self.outbox.close()

    def _within(self, timeout_s: float) -> nullcontext[None]:
        self._timeout_s = timeout_s
        return nullcontext()

    async def _hello(self, _call: object, _config: GatewayConfig) -> HelloResponse:
        began_s = self.now_s
        answered_s = began_s + RTT_S
        if self.deaf_s[0] <= answered_s:  # its kernel takes it, and has it answered later
            answered_s = max(answered_s, self.deaf_s[1])
        self._pass(min(self._timeout_s, answered_s - began_s))
        if self.now_s < answered_s or self.now_s >= began_s + self._timeout_s:
            raise CallError(Status.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self.answered_s.append(self.now_s)
        self.on_answer()
        return HelloResponse(session="session", protocol=EXCHANGE_PROTOCOL_MAX)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


HELLOS_S = [100.4, 100.88, 101.36]
"""When the first greetings leave: each D/5 after the answer to the one before."""


@pytest.mark.parametrize("for_s", [1.5 * D_S, 30.0, 3600.0])
@pytest.mark.parametrize("in_flight", [True, False])
def test_a_peer_that_stood_still_as_long_is_not_lost(
    for_s: float, in_flight: bool, world: World
) -> None:
    from_s = HELLOS_S[1] + (RTT_S / 2 if in_flight else -0.1)
    woken_s = from_s + for_s
    world.standstills = [(from_s, for_s)]
    world.deaf_s, world.ends_s = (from_s, woken_s + 0.8 * D_S), woken_s + 3 * D_S
    world.run()
    assert not world.suspected
    assert world.answered_s[-1] > woken_s + 2 * D_S, "it goes on"
    assert any(woken_s < each <= woken_s + D_S for each in world.answered_s)


def test_a_peer_that_is_gone_is_told_in_time(world: World) -> None:
    world.deaf_s = (0.0, FOREVER_S)
    world.run()
    assert "has not answered for 2" in world.suspected
    assert D_S <= world.suspected_s - 100.0 <= 1.03 * D_S


@pytest.mark.parametrize("again", [1, 50])
def test_a_peer_that_is_gone_is_told_after_standing_still(again: int, world: World) -> None:
    world.deaf_s = (0.0, FOREVER_S)
    world.standstills = [(100.5 + 3.5 * turn, 3.0) for turn in range(again)]
    world.run()
    assert "has not answered for" in world.suspected
    assert world.suspected_s <= 100.5 + 3.0 + 1.03 * D_S + (3.0 if again > 1 else 0.0)


@pytest.mark.parametrize("within_s", [D_S, 2 / 3 * D_S])
def test_a_first_greeting_is_given_time_anew(within_s: float, world: World) -> None:
    world.standstills = [(100.02, 1.5 * D_S)]
    world.deaf_s = (0.0, 100.02 + 1.5 * D_S + 0.5 * within_s)
    world.greet(within_s)
    assert world.watch.session
    assert len(world.answered_s) == 1


def test_a_first_greeting_of_nobody_ends_in_time(world: World) -> None:
    world.deaf_s = (0.0, FOREVER_S)
    world.standstills = [(100.02, 1.5 * D_S), (104.0, 1.5 * D_S)]
    with pytest.raises(PeerLostError):
        world.greet(D_S)
    assert world.now_s <= 107.0 + D_S / 3


def test_a_peer_that_asks_again_a_little_later_has_not_lost_its_link(world: World) -> None:
    from_s, for_s = HELLOS_S[1] + 0.1, 1.5 * D_S
    world.standstills = [(from_s, for_s)]
    world.ends_s = from_s + for_s + 3 * D_S
    woken_s = from_s + for_s

    def asks() -> None:
        if world.now_s < from_s or world.now_s > woken_s + 0.9 * D_S:
            world.watch.reached()

    world.on_answer = asks
    world.watch.reached()
    world.run()
    assert not world.suspected


def test_a_peer_that_lost_its_link_while_all_stood_still_is_told(world: World) -> None:
    from_s, for_s = HELLOS_S[1] + 0.1, 1.5 * D_S
    world.standstills = [(from_s, for_s)]
    world.watch.reached()
    world.run()
    assert "has sent nothing by itself" in world.suspected
    woken_s = from_s + for_s
    assert D_S < world.suspected_s - woken_s <= D_S + 3 * (D_S / 5 + RTT_S)


def test_a_round_trip_in_which_all_stood_still_is_none(world: World) -> None:
    world.standstills = [(HELLOS_S[1] + RTT_S / 2, 0.6)]  # an answer is there, and late
    world.ends_s = 104.0
    world.run()
    assert world.outbox.totals().idle_rtt_s == pytest.approx(RTT_S)


def test_silence_begins_anew_once_until_something_is_heard() -> None:
    silence = Silence(0.0)
    silence.begin_anew(10.0)
    assert silence.lasts_s(11.0) == 1.0
    silence.begin_anew(20.0)
    assert silence.lasts_s(21.0) == 11.0
    silence.hear(22.0)
    silence.begin_anew(30.0)
    assert silence.lasts_s(31.0) == 1.0
    silence.hear(29.0)
    assert silence.lasts_s(31.0) == 1.0, "what was said before it went on"


def test_late_looks_are_no_standstill() -> None:
    looks = Standstills(0.0, lease_s=2.0)
    assert looks.look(1.3, longest_s=1.0) == 0.0
    assert looks.look(2.0, longest_s=1.0) == 0.0
    assert looks.look(4.0, longest_s=1.0) == 1.0
    assert looks.look(5.0, longest_s=1.0) == 0.0


def wait_until_dialled(gateway: GatewayProcess) -> None:
    """Return when a gateway waits for a peer's first answer."""
    process = psutil.Process(gateway.process.pid)
    wait_for(lambda: any(each.status == "ESTABLISHED" for each in process.net_connections("tcp")))


def stand_still(processes: list[GatewayProcess], for_s: float) -> None:
    """Stop processes where they are, and let them go on after so long."""
    for each in processes:
        each.process.send_signal(signal.SIGSTOP)
    for each in processes:
        os.waitid(os.P_PID, each.process.pid, os.WSTOPPED | os.WNOWAIT)
    threading.Event().wait(for_s)
    for each in processes:
        each.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_gateways_that_all_stand_still_go_on(tmp_path: Path) -> None:
    """With a greeting under way, to which the other cannot answer; then whenever it may be."""
    detect_s = 0.5
    with ExitStack() as stack:
        gateways = [
            stack.enter_context(GatewayProcess(tmp_path / f"gateway{site}.log"))
            for site in range(2)
        ]
        configs = [
            gateway_config(
                tmp_path, PLAN, site, peer_lost_s=detect_s, keepalive_time_s=detect_s / 3
            )
            for site in range(2)
        ]
        for gateway, config in zip(gateways, configs, strict=True):
            gateway.configure(config)
            gateway.wait("listening")
        gateways[1].process.send_signal(signal.SIGSTOP)
        gateways[0].connect(gateways[1])
        gateways[1].connect(gateways[0])
        wait_until_dialled(gateways[0])
        stand_still(gateways, 1.5 * detect_s)
        for gateway in gateways:
            gateway.wait("connected")
        ranks = [[stack.enter_context(GatewayRank(each.socket_path, 0))] for each in configs]
        for (rank,) in ranks:
            assert rank.receive()["op"] == "welcome"
        reduce_once(ranks, 0, 1000, [2.0, 1.0], seed=0)
        stand_still(gateways, 1.5 * detect_s)
        reduce_once(ranks, 1, 1000, [2.0, 1.0], seed=1)
        gateways[1].process.kill()
        suspect = gateways[0].wait("suspect", DEADLINE_S, is_gone=True)
        assert suspect["site"] == SITES[1]
