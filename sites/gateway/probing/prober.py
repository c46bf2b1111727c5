"""The sending side of a link measurement: round trips, losses and bandwidth of one direction.

`Prober` sends, and reads the clock and the kernel's counters. `LinkFigures` is pure: it computes a
link's figures from timed echoes and counted segments.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from isthmus.protos import metrics
from isthmus.protos.errors import PeerLostError, RemoteProtocolError
from isthmus.protos.exchange.v1 import probe_pb2
from isthmus.sites.gateway.config import GatewayConfig, PeerLink
from isthmus.sites.gateway.links.calls import Call, Target, ask, deadline, parsed
from isthmus.sites.gateway.links.congestion.kernel import Segments, segments_of
from isthmus.sites.gateway.links.status import CallError
from isthmus.sites.gateway.links.transport import HELLO_METHOD, details, refusal_of, say_hello
from isthmus.sites.gateway.probing.probe_server import (
    ECHO_METHOD,
    FINISH_METHOD,
    FLOOD_METHOD,
    PIECE_BYTES_MAX,
    TURN_METHOD,
    turn_s,
)
from isthmus.topology.spec.job import Probe

_ECHOES_MIN: Final = 20
_ECHOES_S: Final = 4.0
"""Time limit for echoes, once there are _ECHOES_MIN."""
_WARM_ECHOES: Final = 3
_PIECE_S: Final = 0.25
_PIECES_A_WINDOW: Final = 4
_PIECE_RTTS: Final = 6
"""A flow is measured in intervals of _PIECE_S, or a part of a short window, but at least this many
round trips."""
_COLD_PIECES: Final = 4
"""Intervals skipped for slow start and the losses at its end."""
_WARM_S: Final = 15.0
"""After this time a flow is measured, steady or not."""
_PACED_SHARE: Final = 0.25
"""Share of the bandwidth used to count losses. It fills no queue, so every loss is random."""
_DRAIN_S: Final = 10.0
_FLOOD_PIECE_S: Final = 0.005
"""Duration of one message of a Flood at the described rate."""
_PIECE_BYTES_MIN: Final = 16 << 10
_AGAIN_S: Final = 0.1

Ask = Callable[[], Awaitable[probe_pb2.TurnResponse]]
"""Asks the peer for received bytes during a turn; raises the error that ends the turn."""
_TRIANGLE_90 = 2 - 0.8**0.5
"""The 90th percentile of an echo's delay above its median, in units of jitter, if each direction's
delay is uniform in -1 to 1 jitter: P(sum > x) = (2 - x)²/8 = 0.1.

The 99th percentile would not do: at 0.5 % loss one echo in a hundred is resent by TCP, which is not
jitter."""


@dataclass(kw_only=True, slots=True)
class LinkFigures:
    """What was measured of one direction of a link."""

    rtt_s: Sequence[float]
    """The round trip of each echo."""
    bytes_per_s: dict[int, float] = field(default_factory=dict)
    """Payload rate by number of connections."""
    segments: Segments = field(default_factory=Segments)
    """The kernel's counts of a flow that never fills the link."""

    def values(self) -> dict[str, float]:
        """Return the record's values (protos/metrics.py); unknown figures are left out."""
        median_s, late_s = percentile(self.rtt_s, 0.5), percentile(self.rtt_s, 0.99)
        values = {
            metrics.RTT_S_P50: median_s,
            metrics.RTT_S_P99: late_s,
            metrics.JITTER_S: (percentile(self.rtt_s, 0.9) - median_s) / _TRIANGLE_90,
        }
        for connections, rate in self.bytes_per_s.items():
            values[f"{metrics.BYTES_PER_S}_{connections}"] = rate
        if self.segments.sent > 0:
            values[metrics.SEGMENTS] = self.segments.sent
            values[metrics.LOST_SEGMENTS] = self.segments.sent_again
        return values


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile `share` (0 to 1): the smallest value not exceeded by that share."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def rate_between(received_bytes: tuple[int, int], now_s: tuple[float, float]) -> float:
    """Return the bytes per second between two answers of the peer.

    Raises:
        RemoteProtocolError: its clock or its count does not run forwards.
    """
    over_s, num_bytes = now_s[1] - now_s[0], received_bytes[1] - received_bytes[0]
    if not (math.isfinite(over_s) and over_s > 0 and num_bytes >= 0):
        raise RemoteProtocolError(
            f"a peer that counts a flow says {num_bytes} bytes in {over_s:g} s: want time to pass, "
            "and bytes to come"
        )
    return num_bytes / over_s


def is_steady(last: float, rate: float, share: float = 0.03) -> bool:
    """Return whether two intervals carried the same rate, within `share`."""
    return rate > 0 and abs(rate - last) <= share * rate


class Prober:
    """Measures what this gateway sends to one peer, on the event loop; cancelled to end it.

    `greet` first; `finish` when all is measured.
    """

    def __init__(self, config: GatewayConfig, probe: Probe, link: PeerLink, peer: Target) -> None:
        self.peer = peer
        self._config = config
        self._probe = probe
        self._link = link
        self._session = ""
        self._turn_s = turn_s(probe, link.rtt_s)

    async def greet(self) -> None:
        """Greet the peer until it answers.

        Raises:
            IsthmusError: the peer refused, or did not answer within `peer_lost_s`.
        """
        lost_s = self._config.peer_lost_s
        deadline_s = time.monotonic() + lost_s
        while not self._session:
            try:
                async with (
                    deadline(lost_s / 3),
                    self.peer.dial(self._config, "", HELLO_METHOD) as call,
                ):
                    self._session = (await say_hello(call, self._config)).session
            except CallError as error:
                refusal = refusal_of(error, self.peer)
                if refusal is not None:
                    raise refusal from error
                if time.monotonic() > deadline_s:
                    raise self._lost(error) from error
                await asyncio.sleep(_AGAIN_S)

    async def measure(
        self, wait_s: float, and_then: contextlib.AbstractAsyncContextManager[None]
    ) -> LinkFigures:
        """Take the peer's turn and measure; both ends measure nothing else meanwhile.

        Wait up to `wait_s` for the turn. `and_then` is entered once it is granted.

        Raises:
            PeerLostError: the peer went away, or did not give its turn in time.
        """
        try:
            async with self._turn(wait_s) as count, and_then, self._dial(ECHO_METHOD) as echoing:
                figures = LinkFigures(rtt_s=await self._echoes(echoing))
                usual_s = percentile(figures.rtt_s, 0.5)
                for connections in self._probe.connections:
                    figures.bytes_per_s[connections] = await self._rate(count, connections)
                    await self._drain(echoing, usual_s)
                await self._count_losses(count, figures)
                return figures
        except CallError as error:
            raise self._lost(error) from error

    async def finish(self) -> None:
        """Tell the peer that this gateway needs no more turns.

        Raises:
            PeerLostError: the peer does not answer.
        """
        try:
            async with deadline(self._config.peer_lost_s), self._dial(FINISH_METHOD) as call:
                await ask(call, probe_pb2.FinishRequest(), probe_pb2.FinishResponse, is_last=True)
        except CallError as error:
            raise self._lost(error) from error

    async def _echoes(self, call: Call) -> list[float]:
        """Measure round trips on an otherwise idle connection."""
        for _ in range(_WARM_ECHOES):
            await self._echo(call)
        began_s, times_s = time.monotonic(), list[float]()
        while len(times_s) < self._probe.echoes:
            if len(times_s) >= _ECHOES_MIN and time.monotonic() - began_s > _ECHOES_S:
                break
            times_s.append(await self._echo(call))
        return times_s

    async def _echo(self, call: Call) -> float:
        began_s = time.perf_counter()
        async with deadline(self._config.peer_lost_s):
            await ask(call, probe_pb2.EchoRequest(), probe_pb2.EchoResponse)
        return time.perf_counter() - began_s

    async def _rate(self, count: Ask, connections: int) -> float:
        """Return the payload bytes per second that arrive once the flow is steady."""
        piece_s = max(
            min(_PIECE_S, self._probe.window_s / _PIECES_A_WINDOW), _PIECE_RTTS * self._link.rtt_s
        )
        async with self._flooding(connections, None):
            await asyncio.sleep(_COLD_PIECES * piece_s)
            deadline_s = time.monotonic() + _WARM_S
            last = -1.0
            while time.monotonic() < deadline_s:
                rate = await self._received(count, piece_s)
                if is_steady(last, rate):
                    break
                last = rate
            return await self._received(count, max(self._probe.window_s, 2 * piece_s))

    async def _received(self, count: Ask, over_s: float) -> float:
        before = await count()
        await asyncio.sleep(over_s)
        after = await count()
        return rate_between(
            (before.received_bytes, after.received_bytes), (before.now_s, after.now_s)
        )

    async def _count_losses(self, count: Ask, figures: LinkFigures) -> None:
        """Count retransmissions while the link is far from full."""
        rate = _PACED_SHARE * max(figures.bytes_per_s.values())
        async with self._flooding(1, rate) as open_now:
            over_s = max(self._probe.window_s, 2 * _PIECE_RTTS * self._link.rtt_s)
            await self._received(count, over_s)
            figures.segments = segments_of(open_now)

    @contextlib.asynccontextmanager
    async def _flooding(
        self, connections: int, paced_bytes_per_s: float | None
    ) -> AsyncIterator[Sequence[socket.socket]]:
        """Flood the link, or send at a set pace, on new connections while the block runs.

        The block gets the connections that are open, of which there may be more later.
        """
        open_now = list[socket.socket]()
        floods = [
            asyncio.create_task(self._flood(paced_bytes_per_s, open_now))
            for _ in range(connections)
        ]
        try:
            yield open_now
            for flood in floods:
                if flood.done():  # refused or broken: the count says nothing about the link
                    flood.result()
        finally:
            for flood in floods:
                flood.cancel()
            await asyncio.gather(*floods, return_exceptions=True)

    async def _flood(self, paced_bytes_per_s: float | None, open_now: list[socket.socket]) -> None:
        """Send messages until the task is cancelled."""
        rate = paced_bytes_per_s or self._link.bytes_per_s
        piece = bytes(min(PIECE_BYTES_MAX, max(_PIECE_BYTES_MIN, int(rate * _FLOOD_PIECE_S))))
        async with self._dial(FLOOD_METHOD) as call:
            open_now.append(call.socket)
            began_s, sent_bytes = time.monotonic(), 0
            while True:
                await call.write(piece)
                sent_bytes += len(piece)
                if paced_bytes_per_s is not None:
                    due_s = began_s + sent_bytes / paced_bytes_per_s
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def _drain(self, call: Call, usual_s: float) -> None:
        """Wait until echoes are as quick as before, so queues are empty again."""
        deadline_s = time.monotonic() + _DRAIN_S
        while await self._echo(call) > 1.3 * usual_s + 0.005 and time.monotonic() < deadline_s:
            pass

    @contextlib.asynccontextmanager
    async def _turn(self, wait_s: float) -> AsyncIterator[Ask]:
        """Take the peer's turn for the block, which gets what asks for the received bytes."""
        async with self._dial(TURN_METHOD) as call:

            async def answer(within_s: float) -> probe_pb2.TurnResponse:
                async with deadline(within_s):
                    message = await call.read()
                if message is None:
                    site = self.peer.site
                    raise PeerLostError(f"site {site} ended a measurement early", site)
                return parsed(message, probe_pb2.TurnResponse)

            async def count() -> probe_pb2.TurnResponse:
                await call.write(probe_pb2.TurnRequest().SerializeToString())
                return await answer(self._turn_s)

            await answer(wait_s)  # the turn has begun
            yield count

    @contextlib.asynccontextmanager
    async def _dial(self, method: str) -> AsyncIterator[Call]:
        """Make a call, with patience: on a lossy link a connection's first packet may be lost."""
        deadline_s = time.monotonic() + self._turn_s
        while True:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    call = await stack.enter_async_context(
                        self.peer.dial(self._config, self._session, method)
                    )
                except CallError:
                    if time.monotonic() > deadline_s:
                        raise
                else:
                    yield call
                    return
            await asyncio.sleep(_AGAIN_S)

    def _lost(self, error: CallError) -> PeerLostError:
        return PeerLostError(f"{self.peer}: {details(error)}", self.peer.site)
