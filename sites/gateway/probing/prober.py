"""The sending side of a link measurement: round trips, losses and bandwidth of one direction.

`Prober` sends, and reads the clock and the kernel's counters. `LinkFigures` is pure: it computes a
link's figures from timed echoes and counted segments.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Final

import grpc

from isthmus.protos import metrics
from isthmus.protos.errors import PeerLostError, RemoteProtocolError
from isthmus.protos.exchange.v1 import probe_pb2, probe_pb2_grpc
from isthmus.sites.gateway.config import GatewayConfig, PeerLink
from isthmus.sites.gateway.links.congestion.kernel import Segments, segments_of
from isthmus.sites.gateway.links.frame_calls import CallError, FrameCall
from isthmus.sites.gateway.links.transport import (
    SESSION_KEY,
    Peer,
    details,
    refusal_of,
    say_hello,
)
from isthmus.sites.gateway.links.wire_loop import WireLoop
from isthmus.sites.gateway.probing.probe_server import FLOOD_METHOD, PIECE_BYTES_MAX, turn_s
from isthmus.topology.spec.job import Probe

_log = logging.getLogger(__name__)

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
_END_S: Final = 2.0

Ask = Callable[[], probe_pb2.TurnResponse]
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
    """Measures what this gateway sends to one peer.

    `greet` first; `finish` when all is measured.
    """

    def __init__(
        self,
        config: GatewayConfig,
        probe: Probe,
        link: PeerLink,
        peer: Peer,
        ended: threading.Event,
    ) -> None:
        """`ended` is set when the gateway ends; all waits stop then."""
        self.peer = peer
        self._config = config
        self._probe = probe
        self._link = link
        self._ended = ended
        self._session = ""
        self._turn_s = turn_s(probe, link.rtt_s)

    def greet(self) -> None:
        """Greet the peer until it answers.

        Raises:
            IsthmusError: the peer refused, or did not answer within `peer_lost_s`.
        """
        deadline_s = time.monotonic() + self._config.peer_lost_s
        while True:
            try:
                with self.peer.channel(self._config) as channel:
                    session = say_hello(channel, self._config, self._config.peer_lost_s / 3).session
            except grpc.RpcError as error:
                refusal = refusal_of(error, self.peer)
                if refusal is not None:
                    raise refusal from error
                if time.monotonic() > deadline_s or self._ended.wait(_AGAIN_S):
                    raise self._lost(error) from error
            else:
                self._session = session
                return

    def measure(
        self, wait_s: float, and_then: contextlib.AbstractContextManager[None]
    ) -> LinkFigures:
        """Take the peer's turn and measure; both ends measure nothing else meanwhile.

        Wait up to `wait_s` for the turn. `and_then` is entered once it is granted.

        Raises:
            PeerLostError: the peer went away, or did not give its turn in time.
        """
        try:
            with (
                self.peer.channel(self._config) as channel,
                self._turn(channel, wait_s) as ask,
                and_then,
            ):
                stub = probe_pb2_grpc.ProbeStub(channel)
                figures = LinkFigures(rtt_s=self._echoes(stub))
                usual_s = percentile(figures.rtt_s, 0.5)
                for connections in self._probe.connections:
                    figures.bytes_per_s[connections] = self._rate(ask, connections, None)
                    self._drain(stub, usual_s)
                self._losses(ask, figures)
                return figures
        except grpc.RpcError as error:
            raise self._lost(error) from error

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((SESSION_KEY, self._session),)

    def finish(self) -> None:
        """Tell the peer that this gateway needs no more turns.

        Raises:
            PeerLostError: the peer does not answer.
        """
        try:
            with self.peer.channel(self._config) as channel:
                probe_pb2_grpc.ProbeStub(channel).Finish(
                    probe_pb2.FinishRequest(),
                    metadata=self._metadata,
                    timeout=self._config.peer_lost_s,
                    wait_for_ready=True,
                )
        except grpc.RpcError as error:
            raise self._lost(error) from error

    def _echoes(self, stub: probe_pb2_grpc.ProbeStub) -> list[float]:
        """Measure round trips on an otherwise idle connection."""
        for _ in range(_WARM_ECHOES):
            self._echo(stub)
        began_s, times_s = time.monotonic(), list[float]()
        while len(times_s) < self._probe.echoes:
            if len(times_s) >= _ECHOES_MIN and time.monotonic() - began_s > _ECHOES_S:
                break
            times_s.append(self._echo(stub))
        return times_s

    def _echo(self, stub: probe_pb2_grpc.ProbeStub) -> float:
        began_s = time.perf_counter()
        stub.Echo(
            probe_pb2.EchoRequest(),
            metadata=self._metadata,
            timeout=self._config.peer_lost_s,
            wait_for_ready=True,
        )
        return time.perf_counter() - began_s

    def _rate(self, ask: Ask, connections: int, paced_bytes_per_s: float | None) -> float:
        """Return the payload bytes per second that arrive once the flow is steady."""
        piece_s = max(
            min(_PIECE_S, self._probe.window_s / _PIECES_A_WINDOW), _PIECE_RTTS * self._link.rtt_s
        )
        with self._flooding(connections, paced_bytes_per_s):
            self._sleep(_COLD_PIECES * piece_s)
            deadline_s = time.monotonic() + _WARM_S
            last = -1.0
            while time.monotonic() < deadline_s:
                rate = self._received(ask, piece_s)
                if is_steady(last, rate):
                    break
                last = rate
            return self._received(ask, max(self._probe.window_s, 2 * piece_s))

    def _received(self, ask: Ask, over_s: float) -> float:
        before = ask()
        self._sleep(over_s)
        after = ask()
        return rate_between(
            (before.received_bytes, after.received_bytes), (before.now_s, after.now_s)
        )

    def _losses(self, ask: Ask, figures: LinkFigures) -> None:
        """Count retransmissions while the link is far from full."""
        rate = _PACED_SHARE * max(figures.bytes_per_s.values())
        with self._flooding(1, rate) as open_now:
            self._received(ask, max(self._probe.window_s, 2 * _PIECE_RTTS * self._link.rtt_s))
            figures.segments = segments_of(open_now())

    @contextlib.contextmanager
    def _flooding(
        self, connections: int, paced_bytes_per_s: float | None
    ) -> Iterator[Callable[[], list[socket.socket]]]:
        """Flood the link, or send at a set pace, on new connections while the block runs.

        The block gets a function that returns the open connections.
        """
        wire, open_now = WireLoop.acquire(), list[socket.socket]()
        floods = [wire.run(self._flood(paced_bytes_per_s, open_now)) for _ in range(connections)]
        try:
            yield open_now.copy
            for flood in floods:
                if flood.done():  # refused or broken: the count says nothing about the link
                    flood.result()
        finally:
            for flood in floods:
                flood.cancel()
            wait(floods, _END_S)
            WireLoop.release()

    async def _flood(self, paced_bytes_per_s: float | None, open_now: list[socket.socket]) -> None:
        """Send messages until the task is cancelled, or the gateway ends."""
        rate = paced_bytes_per_s or self._link.bytes_per_s
        piece = bytes(min(PIECE_BYTES_MAX, max(_PIECE_BYTES_MIN, int(rate * _FLOOD_PIECE_S))))
        async with self._call() as call:
            open_now.append(call.socket)
            began_s, sent_bytes = time.monotonic(), 0
            while not self._ended.is_set():
                await call.write(piece)
                sent_bytes += len(piece)
                if paced_bytes_per_s is not None:
                    due_s = began_s + sent_bytes / paced_bytes_per_s
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    @contextlib.asynccontextmanager
    async def _call(self) -> AsyncIterator[FrameCall]:
        """Call Flood, with patience: on a lossy link a connection's first packet may be lost."""
        deadline_s = time.monotonic() + self._turn_s
        while True:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    call = await stack.enter_async_context(
                        self.peer.dial(self._config, self._session, FLOOD_METHOD)
                    )
                except CallError:
                    if time.monotonic() > deadline_s:
                        raise
                else:
                    yield call
                    return
            await asyncio.sleep(_AGAIN_S)

    def _drain(self, stub: probe_pb2_grpc.ProbeStub, usual_s: float) -> None:
        """Wait until echoes are as quick as before, so queues are empty again."""
        deadline_s = time.monotonic() + _DRAIN_S
        while self._echo(stub) > 1.3 * usual_s + 0.005 and time.monotonic() < deadline_s:
            pass

    def _sleep(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise PeerLostError("the gateway was stopped", self.peer.site)

    @contextlib.contextmanager
    def _turn(self, channel: grpc.Channel, wait_s: float) -> Iterator[Ask]:
        requests: queue.SimpleQueue[probe_pb2.TurnRequest | None] = queue.SimpleQueue()
        stub = probe_pb2_grpc.ProbeStub(channel)
        self._echo(stub)  # connects: from then on keepalive watches the peer
        call = stub.Turn(
            iter(requests.get, None), metadata=self._metadata, timeout=wait_s + self._turn_s
        )

        def answer() -> probe_pb2.TurnResponse:
            response = next(call, None)
            if response is None:
                site = self.peer.site
                raise PeerLostError(f"site {site} ended a measurement early", site)
            return response

        def ask() -> probe_pb2.TurnResponse:
            requests.put(probe_pb2.TurnRequest())
            return answer()

        try:
            answer()  # the turn has begun
            yield ask
        finally:
            requests.put(None)
            call.cancel()

    def _lost(self, error: grpc.RpcError) -> PeerLostError:
        return PeerLostError(f"{self.peer}: {details(error)}", self.peer.site)
