"""Measures emulated links: an emulator, a probe at each site, and figures of what came through.

TCP is measured once it is warm: from when two pieces of time in a row carried the same, which a
slow start and its losses on a long path delay by many round trips.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from orchestrator.emulator.backend import NETNS, RELAY, Backend, EmulatorError, parse_ready
from orchestrator.emulator.config import RelayConfig, RelayEndpoint, parse_listening
from orchestrator.emulator.fidelity import (
    LOSS_SHARE,
    MIN_LOST,
    PACKET_PAYLOAD,
    RATE_SHARE,
    Figure,
    Pair,
    Scene,
    allowed_rtt_s,
)
from orchestrator.emulator.netns_config import NetnsConfig
from orchestrator.emulator.probe_process import ProbeProcess, running_probe
from orchestrator.evidence.view import figures as shown

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
