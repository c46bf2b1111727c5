"""Compares emulated links with their configuration: `python -m tests.tools.emulation_check`.

A scene is one emulation with a receiver at each site (link_meter.py). Senders and echoes are
separate processes, so that a second full link takes no processor time from the measured one.

TCP is measured once it is warm: when two consecutive intervals carried the same. Slow start and its
losses on a long path delay that by many round trips.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from isthmus.orchestrator.documents import load_topology_file
from isthmus.orchestrator.emulator.backend import Backend, EmulatorError
from isthmus.orchestrator.emulator.emulator_config import (
    NetnsConfig,
    RelayConfig,
    RelayEndpoint,
    shapes_of,
)
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.orchestrator.evidence.view import formats
from isthmus.protos.own_processes import leashed
from isthmus.topology.spec.tcp_constants import PAYLOAD_SHARE
from isthmus.topology.spec.world import Topology

METER = Path(__file__).with_name("link_meter.py")

RTT_S, RTT_SHARE = 0.001, 0.02
"""Allowed error of a round trip: seconds, or a share of it, whichever is more."""
RATE_SHARE = 0.03
LOSS_SHARE = 0.1
GRID_RTTS_S = (0.001, 0.02, 0.08, 0.15)
GRID_BITS_PER_S = (50e6, 200e6, 500e6, 1000e6)
QUICK = ((0.02, 200e6), (0.08, 50e6))
CROSS_TALK = (0.02, 200e6)
LOSS_LINK = (0.02, 100e6)
LOSSES = (0.001, 0.01)
NUM_DATAGRAMS = 100_000
QUICK_DATAGRAMS = 20_000
MIN_LOST = 30
"""Lost packets needed to measure a share within 10 %."""
ECHOES = 21
WARM_S = 25.0
"""Time after which TCP is measured, warm or not."""
SAME_SHARE = 0.02
"""Relative difference below which two intervals carried the same."""
PIECE_RTTS = 6
MIN_PIECE_S = 0.5
COLD_PIECES = 4
"""Intervals skipped for slow start and the losses at its end, which may look steady."""
DATAGRAMS_PER_S = 16_000.0
START_S = 30.0
_ANSWER_S = 120.0
_SETTLE_S = 0.5
"""Time for the last datagrams to be read, beyond the link's own delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One link of a scene, and the figures to measure on it."""

    source: str
    target: str
    rate: bool = True
    loss: bool = False
    beside: tuple[str, str] | None = None
    """A second link that is kept full while this one is measured; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One emulation, and the pairs to measure on it."""

    links: tuple[LinkShape, ...]
    pairs: tuple[Pair, ...]

    def link(self, source: str, target: str) -> LinkShape:
        """Return a directed link."""
        return next(each for each in self.links if (each.source, each.target) == (source, target))

    def rtt_s(self, pair: Pair) -> float:
        """Return the configured round trip."""
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
    """One figure of a link: expected value, measured value, and allowed difference."""

    link: str
    setting: str
    what: str
    """`RTT`, `1 connection`, `4 connections`, `loss`; with `, other link full` beside load."""
    unit: str
    """`s`, `bytes/s` or `share`."""
    expected: float
    """Value by the configuration; for a rate, that of the payload."""
    measured: float
    allowed: float
    """Allowed difference in the same unit; infinite: the figure is not judged."""
    cpu: float | None = None
    """Share of one processor that the emulator used meanwhile; None: not measured."""

    @property
    def deviation(self) -> float:
        """Signed difference relative to the expected value."""
        return self.measured / self.expected - 1 if self.expected else self.measured

    @property
    def is_good(self) -> bool:
        """Whether the difference is allowed."""
        return abs(self.measured - self.expected) <= self.allowed


def allowed_rtt_s(rtt_s: float, jitter_s: float) -> float:
    """Return the allowed error of a median round trip."""
    return max(RTT_S, RTT_SHARE * rtt_s) + jitter_s


def grid(*, is_quick: bool, has_loss: bool) -> list[Scene]:
    """Return the built-in settings: every round trip with every rate, cross-talk, and loss."""
    every = itertools.product(GRID_RTTS_S, GRID_BITS_PER_S)
    scenes = [
        Scene(links=_both("a", "b", *each), pairs=(Pair(source="a", target="b"),))
        for each in (QUICK if is_quick else every)
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


def scene_of(topology: Topology, *, has_loss: bool) -> Scene:
    """Return the scene of a topology: each link that has a reverse link."""
    links = shapes_of(topology)
    pairs = tuple(
        Pair(source=each.source, target=each.target, loss=has_loss and each.loss > 0)
        for each in links
        if topology.link(each.target, each.source)
    )
    return Scene(links=links, pairs=pairs)


def _both(
    one: str, other: str, rtt_s: float, bits_per_s: float, loss: float = 0
) -> tuple[LinkShape, ...]:
    """Return links in both directions. Only the first one loses packets, so echoes come back."""
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


@dataclass(frozen=True, slots=True)
class Effort:
    """Durations of the measurements."""

    window_s: float
    """Seconds for which a rate is measured; at least twelve round trips."""
    datagrams: int


FULL_EFFORT = Effort(window_s=3.0, datagrams=NUM_DATAGRAMS)
QUICK_EFFORT = Effort(window_s=1.5, datagrams=QUICK_DATAGRAMS)


class Meter:
    """A running process of link_meter.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin
        assert process.stdout
        self._stdin, self._stdout = process.stdin, process.stdout

    async def heard(self) -> dict[str, Any]:
        """Return the next object that it prints.

        Raises:
            EmulatorError: the process has ended, or failed.
        """
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                line = await self._stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it does not answer"}
        if "error" in answer:
            raise EmulatorError(f"a link could not be measured: {answer['error']}")
        return answer

    async def count(self) -> dict[str, Any]:
        """Return a receiver's current counts."""
        self._stdin.write(b"\n")
        return await self.heard()


Namespaces = tuple[str, str] | None
"""The files of a user and a network namespace."""


@contextlib.asynccontextmanager
async def _running_meter(namespaces: Namespaces, *words: object) -> AsyncIterator[Meter]:
    """Run a meter while the block runs, inside namespaces if given."""
    process = await asyncio.create_subprocess_exec(
        *leashed([sys.executable, str(METER), *map(str, words)], namespaces),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Meter(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@dataclass(frozen=True, slots=True)
class Receiver:
    """A site's receiving meter, and its address without the relay."""

    meter: Meter
    namespaces: Namespaces
    """Namespaces of the site; None: those of this process."""
    host: str
    port: int
    datagram_port: int


@contextlib.asynccontextmanager
async def _receiving(host: str, namespaces: Namespaces) -> AsyncIterator[Receiver]:
    async with _running_meter(namespaces, "serve", host) as meter:
        ports = await meter.heard()
        yield Receiver(meter, namespaces, host, ports["port"], ports["datagram_port"])


class Bench:
    """A running scene.

    Args:
        scene: The links and the pairs to measure.
        receivers: Receiver by site.
        emulator: The emulator. With the relay, sites reach each other through its ports.
    """

    def __init__(self, scene: Scene, receivers: Mapping[str, Receiver], emulator: Backend) -> None:
        self._scene = scene
        self._receivers = receivers
        self._emulator_pid = emulator.pid
        self._dialled = {(each.source, each.target): each for each in emulator.up.endpoints}
        self._payload = PAYLOAD_SHARE if emulator.up.sites else 1.0

    async def measure(self, effort: Effort) -> AsyncIterator[Figure]:
        """Measure, and yield the figures one by one."""
        for pair in self._scene.pairs:
            async with contextlib.AsyncExitStack() as stack:
                if pair.beside is not None:
                    await stack.enter_async_context(self._full(*pair.beside, 4))
                yield await self._rtt(pair)
                for num_connections in (1, 4) if pair.rate else ():
                    yield await self._rate(pair, num_connections, effort)
                if pair.loss:
                    yield await self._loss(pair, effort)

    def _meter(
        self, source: str, target: str, operation: str, *words: object
    ) -> contextlib.AbstractAsyncContextManager[Meter]:
        """Return a meter at `source` that reaches the receiver of `target`."""
        receiver = self._receivers[target]
        place = self._dialled.get((source, target), receiver)
        port = receiver.datagram_port if operation == "datagrams" else place.port
        return _running_meter(
            self._receivers[source].namespaces, operation, place.host, port, *words
        )

    async def _rtt(self, pair: Pair) -> Figure:
        async with self._meter(pair.source, pair.target, "echo", ECHOES) as meter:
            times_s = (await meter.heard())["times_s"]
        rtt_s = self._scene.rtt_s(pair)
        there, back = (pair.source, pair.target), (pair.target, pair.source)
        jitter_s = max(self._scene.link(*each).jitter_s for each in (there, back))
        allowed = allowed_rtt_s(rtt_s, jitter_s)
        return self._figure(pair, "RTT", "s", rtt_s, statistics.median(times_s), allowed)

    async def _rate(self, pair: Pair, num_connections: int, effort: Effort) -> Figure:
        window_s = max(effort.window_s, 2 * PIECE_RTTS * self._scene.rtt_s(pair))
        async with self._full(pair.source, pair.target, num_connections):
            used_s = self._cpu_s()
            rate, over_s = await self._received(pair.target, window_s)
            used_s = self._cpu_s() - used_s
        link = self._scene.link(pair.source, pair.target)
        expected = link.bytes_per_s * self._payload
        # The effect of losses on congestion control is not the emulator's.
        allowed = math.inf if link.loss else RATE_SHARE * expected
        what = f"{num_connections} connection" + ("s" if num_connections > 1 else "")
        return self._figure(pair, what, "bytes/s", expected, rate, allowed, used_s / over_s)

    async def _loss(self, pair: Pair, effort: Effort) -> Figure:
        link, target = self._scene.link(pair.source, pair.target), self._receivers[pair.target]
        before = await target.meter.count()
        words = (effort.datagrams, min(DATAGRAMS_PER_S, link.bytes_per_s / 4 / 128))
        async with self._meter(pair.source, pair.target, "datagrams", *words) as meter:
            sent = (await meter.heard())["sent"]
            await asyncio.sleep(self._scene.rtt_s(pair) + _SETTLE_S)
        after = await target.meter.count()
        lost = sent - (after["datagrams"] - before["datagrams"])
        allowed = LOSS_SHARE * link.loss if link.loss * sent >= MIN_LOST else math.inf
        return self._figure(pair, "loss", "share", link.loss, lost / sent, allowed)

    @contextlib.asynccontextmanager
    async def _full(self, source: str, target: str, num_connections: int) -> AsyncIterator[None]:
        """Keep a link full while the block runs: warm at its start, and drained after it."""
        rtt_s = self._scene.rtt_s(Pair(source=source, target=target))
        piece_s = max(MIN_PIECE_S, PIECE_RTTS * rtt_s)
        async with self._meter(source, target, "send", num_connections) as meter:
            await meter.heard()
            await asyncio.sleep(COLD_PIECES * piece_s)
            await self._until(target, piece_s, _is_steady)
            yield
        await self._until(target, rtt_s + 0.05, lambda rate, _: rate == 0)

    async def _until(
        self, target: str, piece_s: float, is_over: Callable[[float, float], bool]
    ) -> None:
        """Wait until the receive rate at a site satisfies `is_over`, or for too long.

        `is_over` takes the bytes per second of an interval, and of the previous one.
        """
        deadline_s = asyncio.get_running_loop().time() + WARM_S
        last = -1.0
        while asyncio.get_running_loop().time() < deadline_s:
            rate, _ = await self._received(target, piece_s)
            if is_over(rate, last):
                return
            last = rate

    async def _received(self, target: str, over_s: float) -> tuple[float, float]:
        """Return a site's received bytes per second, and the interval, by its own clock."""
        meter = self._receivers[target].meter
        before = await meter.count()
        await asyncio.sleep(over_s)
        after = await meter.count()
        took_s = after["now_s"] - before["now_s"]
        return (after["bytes"] - before["bytes"]) / took_s, took_s

    def _cpu_s(self) -> float:
        try:
            return sum(psutil.Process(self._emulator_pid).cpu_times()[:2])
        except psutil.NoSuchProcess:
            raise EmulatorError("the emulator has ended") from None

    def _figure(
        self,
        pair: Pair,
        what: str,
        unit: str,
        expected: float,
        measured: float,
        allowed: float,
        cpu: float | None = None,
    ) -> Figure:
        rate = formats.rate(self._scene.link(pair.source, pair.target).bytes_per_s)
        return Figure(
            link=f"{pair.source} -> {pair.target}",
            setting=f"{rate}, {formats.duration(self._scene.rtt_s(pair))}",
            what=what + (", other link full" if pair.beside else ""),
            unit=unit,
            expected=expected,
            measured=measured,
            allowed=allowed,
            cpu=cpu,
        )


def _is_steady(rate: float, last: float) -> bool:
    return rate > 0 and abs(rate - last) <= SAME_SHARE * rate


@contextlib.asynccontextmanager
async def opened(scene: Scene, *, is_netns: bool) -> AsyncIterator[Bench]:
    """Run a scene's emulator and receivers while the block runs.

    Raises:
        EmulatorError: one of them does not start.
    """
    deadline_s = asyncio.get_running_loop().time() + START_S
    receivers: dict[str, Receiver] = {}
    async with contextlib.AsyncExitStack() as stack:

        async def receive_at(site: str, host: str, namespaces: Namespaces) -> None:
            receivers[site] = await stack.enter_async_context(_receiving(host, namespaces))

        if is_netns:
            packets = NetnsConfig(sites=scene.sites, links=scene.links)
            emulator = await Backend.start(packets, deadline_s)
            stack.push_async_callback(emulator.close)
            for place in emulator.up.sites:
                await receive_at(place.site, place.address, (place.user, place.net))
        else:
            for site in scene.sites:
                await receive_at(site, "127.0.0.1", None)
            pairs = {(link.source, link.target) for link in scene.links}
            endpoints = tuple(
                RelayEndpoint(
                    source=source,
                    target=target,
                    gateway=0,
                    host=receivers[target].host,
                    port=receivers[target].port,
                )
                for source, target in sorted(pairs)
                if (target, source) in pairs
            )
            relayed = RelayConfig(links=scene.links, endpoints=endpoints)
            emulator = await Backend.start(relayed, deadline_s)
            stack.push_async_callback(emulator.close)
        yield Bench(scene, receivers, emulator)


def main(arguments: list[str]) -> int:
    """Print a line for each figure; return 1 if one is off by too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", nargs="?", type=Path, help="measure its links, not a grid")
    parser.add_argument("--emulator", choices=["relay", "netns"], default="relay")
    parser.add_argument("--quick", action="store_true", help="few settings")
    options = parser.parse_args(arguments)
    is_netns = options.emulator == "netns"  # the relay has no packets that could be counted
    if options.topology is None:
        scenes = grid(is_quick=options.quick, has_loss=is_netns)
    else:
        scenes = [scene_of(load_topology_file(options.topology, ()), has_loss=is_netns)]
    effort = QUICK_EFFORT if options.quick else FULL_EFFORT
    return asyncio.run(_print_all(scenes, effort, is_netns=is_netns))


async def _print_all(scenes: Iterable[Scene], effort: Effort, *, is_netns: bool) -> int:
    num_failed = 0
    for scene in scenes:
        async with opened(scene, is_netns=is_netns) as bench:
            async for figure in bench.measure(effort):
                num_failed += not figure.is_good
                verdict = "ok" if figure.is_good else "TOO FAR"
                print(
                    f"{figure.setting:20} {figure.what:32} expected {figure.expected:.6g} "
                    f"measured {figure.measured:.6g} {figure.unit} {figure.deviation:+.1%} "
                    f"{verdict}",
                    flush=True,
                )
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
