"""How well an emulated link does what it was configured to.

Which settings, and what is good enough.

A probe in a process of its own: started, told and heard by the check.

Measures emulated links: an emulator, a probe at each site, and figures of what came through.

TCP is measured once it is warm: from when two pieces of time in a row carried the same, which a
slow start and its losses on a long path delay by many round trips.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from orchestrator.emulator.backend import NETNS, RELAY, Backend, EmulatorError, parse_ready
from orchestrator.emulator.emulator_config import (
    NetnsConfig,
    RelayConfig,
    RelayEndpoint,
    parse_listening,
    shapes_of,
)
from orchestrator.emulator.link_shape import LinkShape
from orchestrator.evidence.view import formats as shown
from topology.world import Topology

RTT_S, RTT_SHARE = 0.001, 0.02
"""A round trip may be off by this, or by this share of it, whichever is more."""
RATE_SHARE = 0.03
LOSS_SHARE = 0.1
PACKET_PAYLOAD = 1448 / 1500
"""What of an IP packet of 1500 bytes is left for TCP's payload, with its timestamps."""
GRID_RTTS_S = (0.001, 0.02, 0.08, 0.15)
GRID_BITS_PER_S = (50e6, 200e6, 500e6, 1000e6)
QUICK = ((0.02, 200e6), (0.08, 50e6))
CROSS_TALK = (0.02, 200e6)
LOSS_LINK = (0.02, 100e6)
LOSSES = (0.001, 0.01)
NUM_DATAGRAMS = 100_000
QUICK_DATAGRAMS = 20_000
MIN_LOST = 30
"""Fewer lost packets than this say nothing about a share within 10 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One link of a scene, and what is measured on it."""

    source: str
    target: str
    rate: bool = True
    loss: bool = False
    beside: tuple[str, str] | None = None
    """A second link, that is full while this one is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One emulation, and what is measured on it."""

    links: tuple[LinkShape, ...]
    pairs: tuple[Pair, ...]

    def link(self, source: str, target: str) -> LinkShape:
        """Return a directed link."""
        return next(each for each in self.links if (each.source, each.target) == (source, target))

    def rtt_s(self, pair: Pair) -> float:
        """Return the configured time there and back."""
        there = self.link(pair.source, pair.target).delay_s
        return there + self.link(pair.target, pair.source).delay_s

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites, in the order in which links name them."""
        return tuple(
            dict.fromkeys(site for link in self.links for site in (link.source, link.target))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a link: configured, measured, and how far apart they may be."""

    link: str
    setting: str
    what: str
    """`RTT`, `1 connection`, `4 connections`, `loss`; with `, other link full` beside load."""
    unit: str
    """`s`, `bytes/s` or `share`."""
    expected: float
    """What the configuration allows: of a rate, the payload's share of it."""
    measured: float
    allowed: float
    """Difference, in the same unit; infinite where it says nothing about the link."""
    cpu: float | None = None
    """Of one processor, that the emulator used meanwhile."""

    @property
    def deviation(self) -> float:
        """Relative to what was expected; signed."""
        return self.measured / self.expected - 1 if self.expected else self.measured

    @property
    def is_good(self) -> bool:
        """Whether it is close enough."""
        return abs(self.measured - self.expected) <= self.allowed

    @property
    def of_allowed(self) -> float:
        """How much of the allowed difference is used up: above 1 it is too much."""
        return abs(self.measured - self.expected) / self.allowed


def allowed_rtt_s(rtt_s: float, jitter_s: float) -> float:
    """Return how far a median round trip may be off."""
    return max(RTT_S, RTT_SHARE * rtt_s) + jitter_s


def worst(figures: Iterable[Figure]) -> Figure | None:
    """Return the figure that uses up most of what it is allowed."""
    return max(figures, key=lambda figure: figure.of_allowed, default=None)


def grid(*, is_quick: bool, has_loss: bool) -> list[Scene]:
    """Return the built-in settings: every round trip with every rate, cross-talk, and loss."""
    settings = (
        list(QUICK)
        if is_quick
        else [(rtt_s, rate) for rtt_s in GRID_RTTS_S for rate in GRID_BITS_PER_S]
    )
    scenes = [
        Scene(links=_both("a", "b", *each), pairs=(Pair(source="a", target="b"),))
        for each in settings
    ]
    beside = Pair(source="a", target="b", beside=("a", "c"))
    crossing = (*_both("a", "b", *CROSS_TALK), *_both("a", "c", *CROSS_TALK))
    scenes.append(Scene(links=crossing, pairs=(beside,)))
    if has_loss:
        losses = LOSSES[1:] if is_quick else LOSSES
        scenes += [
            Scene(
                links=_both("a", "b", *LOSS_LINK, loss=loss),
                pairs=(Pair(source="a", target="b", rate=False, loss=True),),
            )
            for loss in losses
        ]
    return scenes


def scenes_of(topology: Topology, *, has_loss: bool) -> list[Scene]:
    """Return what to measure of a topology: each link that has one back."""
    links = shapes_of(topology)
    return [
        Scene(
            links=links,
            pairs=tuple(
                Pair(source=each.source, target=each.target, loss=has_loss and each.loss > 0)
                for each in links
                if topology.link(each.target, each.source)
            ),
        )
    ]


def _both(
    one: str, other: str, rtt_s: float, bits_per_s: float, loss: float = 0
) -> tuple[LinkShape, ...]:
    """Return a link each way. Only the first one loses packets: echoes come back."""
    return tuple(
        LinkShape(
            source=source,
            target=target,
            bytes_per_s=bits_per_s / 8,
            delay_s=rtt_s / 2,
            loss=loss if source == one else 0.0,
        )
        for source, target in ((one, other), (other, one))
    )


ANSWER_S = 120.0


class ProbeProcess:
    """One end of what is measured."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.host = ""
        self.port = 0
        self.datagram_port = 0

    async def serve(self, host: str) -> None:
        """Listen at an address of the place where it runs."""
        answer = await self.ask(op="serve", host=host)
        self.host, self.port, self.datagram_port = host, answer["port"], answer["datagram_port"]

    async def ask(self, **message: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON values
        """Tell it something and return its answer.

        Raises:
            EmulatorError: it has ended, or could not.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except (TimeoutError, ConnectionError):
            line = b""
        answer = json.loads(line) if line else {"error": "it does not answer"}
        if "error" in answer:
            raise EmulatorError(f"a probe could not {message['op']}: {answer['error']}")
        assert isinstance(answer, dict)
        return answer


@contextlib.asynccontextmanager
async def running_probe(enter: tuple[str, ...]) -> AsyncIterator[ProbeProcess]:
    """Run a probe while the block does.

    Args:
        enter: Words for sites.leash that lead it into a site; empty: it stays here.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sites.leash", str(os.getpid()), *enter, "--"),
        *(sys.executable, "-m", "orchestrator.emulator.link_meter"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield ProbeProcess(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


START_S = 30.0
ECHOES = 21
SAME_SHARE = 0.02
"""Two pieces of time carried the same."""
WARM_S = 25.0
"""After this it is measured, warm or not."""
PIECE_RTTS = 6
MIN_PIECE_S = 0.5
COLD_PIECES = 4
"""For slow start and what it loses at its end, which may look steady for a while."""
DATAGRAMS_PER_S = 16_000.0
_SETTLE_S = 0.5
"""For the last datagrams to be read, beyond the link's own delay."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured."""

    window_s: float
    datagrams: int

    def estimate_s(self, scenes: list[Scene]) -> float:
        """Return about how long it will take."""
        total_s = 0.0
        for scene in scenes:
            total_s += 1.0
            for pair in scene.pairs:
                rtt_s = scene.rtt_s(pair)
                total_s += (ECHOES + 2) * rtt_s
                if pair.rate:
                    total_s += 2 * ((COLD_PIECES + 3) * _piece_s(rtt_s) + self._window_s(rtt_s))
                if pair.loss:
                    total_s += self.datagrams / DATAGRAMS_PER_S + rtt_s + _SETTLE_S
        return total_s

    def _window_s(self, rtt_s: float) -> float:
        return max(self.window_s, 2 * PIECE_RTTS * rtt_s)


class Bench:
    """One scene that is up."""

    def __init__(self, scene: Scene, backend: Backend, probes: dict[str, ProbeProcess]) -> None:
        self._scene = scene
        self._emulator = psutil.Process(backend.pid)
        self._probes = probes
        self._ports: dict[tuple[str, str], tuple[str, int]] = {}
        self.payload = 1.0
        """What a link's rate allows for payload."""

    def dial(self, source: str, target: str) -> tuple[str, int]:
        """Return where a site reaches another's probe."""
        probe = self._probes[target]
        return self._ports.get((source, target), (probe.host, probe.port))

    async def measure(self, effort: Effort) -> AsyncIterator[Figure]:
        """Yield one figure after the other."""
        for pair in self._scene.pairs:
            async with self._load(pair):
                yield await self._rtt(pair)
                if pair.rate:
                    for connections in (1, 4):
                        yield await self._rate(pair, connections, effort)
                if pair.loss:
                    yield await self._loss(pair, effort)

    @contextlib.asynccontextmanager
    async def _load(self, pair: Pair) -> AsyncIterator[None]:
        """Fill the other link, if there is one to be filled, while the block runs."""
        if pair.beside is None:
            yield
            return
        source, target = pair.beside
        rtt_s = self._scene.rtt_s(Pair(source=source, target=target))
        async with self._sent(source, target, 4):
            await self._warm(target, _piece_s(rtt_s))
            yield

    async def _rtt(self, pair: Pair) -> Figure:
        # The site's own probe may be sending on another link: echoes have a probe of their own.
        host, port = self.dial(pair.source, pair.target)
        answer = await self._probes[pair.source].ask(op="echo", host=host, port=port, count=ECHOES)
        rtt_s = self._scene.rtt_s(pair)
        jitter_s = max(
            self._scene.link(pair.source, pair.target).jitter_s,
            self._scene.link(pair.target, pair.source).jitter_s,
        )
        return self._figure(
            pair,
            what="RTT",
            unit="s",
            expected=rtt_s,
            measured=statistics.median(answer["times_s"]),
            allowed=allowed_rtt_s(rtt_s, jitter_s),
        )

    async def _rate(self, pair: Pair, connections: int, effort: Effort) -> Figure:
        rtt_s = self._scene.rtt_s(pair)
        link = self._scene.link(pair.source, pair.target)
        async with self._sent(pair.source, pair.target, connections):
            await self._warm(pair.target, _piece_s(rtt_s))
            used_s = self._cpu_s()
            rate, over_s = await self._received(pair.target, effort._window_s(rtt_s))
            used_s = self._cpu_s() - used_s
        expected = link.bytes_per_s * self.payload
        # What congestion control makes of losses is no matter of the emulator's.
        allowed = float("inf") if link.loss else RATE_SHARE * expected
        what = f"{connections} connection" + ("s" if connections > 1 else "")
        return self._figure(
            pair,
            what=what,
            unit="bytes/s",
            expected=expected,
            measured=rate,
            allowed=allowed,
            cpu=used_s / over_s,
        )

    def _cpu_s(self) -> float:
        try:
            return sum(self._emulator.cpu_times()[:2])
        except psutil.NoSuchProcess:
            raise EmulatorError("the emulator has ended") from None

    async def _loss(self, pair: Pair, effort: Effort) -> Figure:
        link = self._scene.link(pair.source, pair.target)
        probe, target = self._probes[pair.source], self._probes[pair.target]
        before = await target.ask(op="count")
        sent = await probe.ask(
            op="datagrams",
            host=target.host,
            port=target.datagram_port,
            count=effort.datagrams,
            per_s=min(DATAGRAMS_PER_S, link.bytes_per_s / 4 / 128),
        )
        await asyncio.sleep(self._scene.rtt_s(pair) + _SETTLE_S)
        after = await target.ask(op="count")
        lost = sent["sent"] - (after["datagrams"] - before["datagrams"])
        is_enough = link.loss * sent["sent"] >= MIN_LOST
        return self._figure(
            pair,
            what="loss",
            unit="share",
            expected=link.loss,
            measured=lost / sent["sent"],
            allowed=LOSS_SHARE * link.loss if is_enough else float("inf"),
        )

    @contextlib.asynccontextmanager
    async def _sent(self, source: str, target: str, connections: int) -> AsyncIterator[None]:
        """Send as much as will go while the block runs."""
        host, port = self.dial(source, target)
        sender = self._probes[f"{source} to {target}"]
        await sender.ask(op="send", host=host, port=port, connections=connections)
        try:
            yield
        finally:
            await sender.ask(op="stop")
            await self._drained(source, target)

    async def _warm(self, target: str, piece_s: float) -> None:
        """Return when two pieces of time in a row have carried the same, or it took too long."""
        deadline_s = asyncio.get_running_loop().time() + WARM_S
        last = -1.0
        await asyncio.sleep(COLD_PIECES * piece_s)
        while asyncio.get_running_loop().time() < deadline_s:
            rate, _ = await self._received(target, piece_s)
            if rate > 0 and abs(rate - last) <= SAME_SHARE * rate:
                return
            last = rate

    async def _drained(self, source: str, target: str) -> None:
        """Return when nothing crosses a link any more; what is measured next finds it empty."""
        rtt_s = self._scene.rtt_s(Pair(source=source, target=target))
        deadline_s = asyncio.get_running_loop().time() + WARM_S
        while asyncio.get_running_loop().time() < deadline_s:
            rate, _ = await self._received(target, rtt_s + 0.05)
            if rate == 0:
                return

    async def _received(self, target: str, over_s: float) -> tuple[float, float]:
        """Return bytes a second that come in at a site, and over which time, by its own clock."""
        probe = self._probes[target]
        before = await probe.ask(op="count")
        await asyncio.sleep(over_s)
        after = await probe.ask(op="count")
        took_s = after["now_s"] - before["now_s"]
        return (after["bytes"] - before["bytes"]) / took_s, took_s

    def _figure(self, pair: Pair, what: str, **values: Any) -> Figure:  # noqa: ANN401
        link = self._scene.link(pair.source, pair.target)
        setting = f"{shown.rate(link.bytes_per_s)}, {shown.duration(self._scene.rtt_s(pair))}"
        beside = ", other link full" if pair.beside else ""
        name = f"{pair.source} -> {pair.target}"
        return Figure(link=name, setting=setting, what=what + beside, **values)


@contextlib.asynccontextmanager
async def opened(scene: Scene, module: str) -> AsyncIterator[Bench]:
    """Bring a scene up: emulator and probes; all gone after the block.

    Raises:
        EmulatorError: one of them does not come up.
    """
    deadline_s = asyncio.get_running_loop().time() + START_S
    async with contextlib.AsyncExitStack() as stack:
        probes: dict[str, ProbeProcess] = {}
        if module == NETNS:
            config = NetnsConfig(sites=scene.sites, links=scene.links).to_json()
            backend, line = await Backend.start(NETNS, config, deadline_s)
            stack.push_async_callback(backend.close)
            for place in parse_ready(line):
                enter = ("--enter", place.user, place.net)
                await _start_probes(stack, scene, probes, place.site, place.address, enter)
            bench = Bench(scene, backend, probes)
            bench.payload = PACKET_PAYLOAD
        else:
            for site in scene.sites:
                await _start_probes(stack, scene, probes, site, "127.0.0.1", ())
            relay = RelayConfig(links=scene.links, endpoints=_dialled(scene, probes))
            backend, line = await Backend.start(RELAY, relay.to_json(), deadline_s)
            stack.push_async_callback(backend.close)
            bench = Bench(scene, backend, probes)
            for each in parse_listening(line):
                bench._ports[each.source, each.target] = (each.host, each.port)
        yield bench


async def _start_probes(
    stack: contextlib.AsyncExitStack,
    scene: Scene,
    probes: dict[str, ProbeProcess],
    site: str,
    host: str,
    enter: tuple[str, ...],
) -> None:
    """Start a site's probe, which others reach, and one for each link on which it sends."""
    probes[site] = await stack.enter_async_context(running_probe(enter))
    await probes[site].serve(host)
    for target in _targets(scene, site):
        probes[f"{site} to {target}"] = await stack.enter_async_context(running_probe(enter))


def _targets(scene: Scene, site: str) -> Iterator[str]:
    """Yield where a site sends to."""
    wanted = [(pair.source, pair.target) for pair in scene.pairs if pair.rate]
    wanted += [pair.beside for pair in scene.pairs if pair.beside is not None]
    yield from dict.fromkeys(target for source, target in wanted if source == site)


def _dialled(scene: Scene, probes: dict[str, ProbeProcess]) -> tuple[RelayEndpoint, ...]:
    pairs = {(link.source, link.target) for link in scene.links}
    return tuple(
        RelayEndpoint(
            source=source, target=target, node=0, host=probes[target].host, port=probes[target].port
        )
        for source, target in sorted(pairs)
        if (target, source) in pairs
    )


def _piece_s(rtt_s: float) -> float:
    return max(MIN_PIECE_S, PIECE_RTTS * rtt_s)
