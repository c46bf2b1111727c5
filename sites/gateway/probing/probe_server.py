"""The receiving side of a link measurement: grants turns, answers echoes, counts bytes.

A peer's requests are bounded: one measurement at a time, with the duration, connections and bytes
that the run's own job explains.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import grpc
import grpc.aio

from isthmus.protos.errors import DeadlineExceededError, IsthmusError, RemoteProtocolError
from isthmus.protos.exchange.v1 import probe_pb2, probe_pb2_grpc
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.frame_calls import FrameCall
from isthmus.sites.gateway.links.peer_server import Context, abort
from isthmus.topology.spec.job import Probe

_log = logging.getLogger(__name__)

FLOOD_METHOD: Final = "/isthmus.exchange.v1.Probe/Flood"
PIECE_BYTES_MAX: Final = 1 << 20
"""Largest message of a Flood."""
_TURN_BYTES_MIN: Final = 256 << 20
_RATE_SLACK: Final = 4.0
"""Highest accepted rate as a multiple of the described one."""
_POLL_S: Final = 0.02

SiteOf = Callable[[Context], Awaitable[str]]
"""Returns the site of a call, or aborts it."""


def turn_s(probe: Probe, rtt_s: float) -> float:
    """Return how long one direction of a link may be measured."""
    return 30.0 + len(probe.connections) * (probe.window_s + 30.0 + 60 * rtt_s)


class ProbeServer(probe_pb2_grpc.ProbeServicer):
    """Serves one gateway's peers. `turn` is shared with the gateway's own measurements."""

    def __init__(
        self,
        config: GatewayConfig,
        probe: Probe,
        site_of: SiteOf,
        caller_site: Callable[[FrameCall], str],
        on_finished: Callable[[str], None],
    ) -> None:
        """`caller_site` returns the site of a call on the frames port, or raises.

        `on_finished` is called with each peer site that needs no more turns.
        """
        self.turn = threading.Lock()
        """Held while this gateway takes part in a measurement."""
        self._links = {link.site: link for link in config.links}
        self._probe = probe
        self._site_of = site_of
        self._caller_site = caller_site
        self._on_finished = on_finished
        self._measuring = ""
        """The peer site whose turn it is; empty: none."""
        self._received_bytes = 0
        self._num_floods = 0

    def register(self, server: grpc.aio.Server) -> None:
        """Add the methods to a server that has not been started."""
        probe_pb2_grpc.add_ProbeServicer_to_server(self, server)

    async def Turn(  # noqa: N802 - gRPC fixes the name
        self, request_iterator: AsyncIterator[probe_pb2.TurnRequest], context: Context
    ) -> AsyncIterator[probe_pb2.TurnResponse]:
        """Give the caller the turn, and report received bytes whenever it asks."""
        site = await self._site_of(context)
        while not self.turn.acquire(blocking=False):  # noqa: ASYNC110 - a thread may hold it, too
            await asyncio.sleep(_POLL_S)  # ends with the call, if the caller waits no longer
        try:
            self._measuring, self._received_bytes = site, 0
            yield self._counted()
            async with asyncio.timeout(turn_s(self._probe, self._links[site].rtt_s)):
                async for _ in request_iterator:
                    yield self._counted()
        except TimeoutError:
            await abort(context, DeadlineExceededError("the turn has taken too long"))
        finally:
            self._measuring = ""
            self.turn.release()

    async def Echo(  # noqa: N802 - gRPC fixes the name
        self, request: probe_pb2.EchoRequest, context: Context
    ) -> probe_pb2.EchoResponse:
        """Answer at once."""
        await self._site_of(context)
        return probe_pb2.EchoResponse()

    async def Finish(  # noqa: N802 - gRPC fixes the name
        self, request: probe_pb2.FinishRequest, context: Context
    ) -> probe_pb2.FinishResponse:
        """Note that a peer has measured all its links."""
        self._on_finished(await self._site_of(context))
        return probe_pb2.FinishResponse()

    async def flood(self, call: FrameCall) -> None:
        """Count incoming bytes, and drop them.

        Raises:
            IsthmusError: it is not the caller's turn, or the bytes exceed the limit.
        """
        site = self._caller_site(call)
        self._num_floods += 1
        try:
            # Twice as many, for floods that are still ending.
            if self._num_floods > 2 * max(self._probe.connections):
                raise RemoteProtocolError(f"more than {max(self._probe.connections)} connections")
            while (piece := await call.read()) is not None:
                self._take(site, len(piece))
        except IsthmusError as error:
            _log.warning("site %s: %s", site, error)
            raise
        finally:
            self._num_floods -= 1

    def _take(self, site: str, num_bytes: int) -> None:
        """Count a message of a flood.

        Raises:
            RemoteProtocolError: it is not the site's turn, or the bytes exceed the limit.
        """
        link = self._links[site]
        allowed_s = turn_s(self._probe, link.rtt_s)
        most_bytes = max(_TURN_BYTES_MIN, _RATE_SLACK * link.bytes_per_s * allowed_s)
        if num_bytes > PIECE_BYTES_MAX:
            raise RemoteProtocolError(f"a piece of {num_bytes} bytes: want {PIECE_BYTES_MAX}")
        if self._measuring != site:
            raise RemoteProtocolError(f"it is not the turn of site {site}")
        self._received_bytes += num_bytes
        if self._received_bytes > most_bytes:
            raise RemoteProtocolError(f"more than {most_bytes:.0f} bytes in one turn")

    def _counted(self) -> probe_pb2.TurnResponse:
        return probe_pb2.TurnResponse(received_bytes=self._received_bytes, now_s=time.monotonic())
