"""The receiving side of a link measurement: grants turns, answers echoes, counts bytes.

A peer's requests are bounded: one measurement at a time, with the duration, connections and bytes
that the run's own job explains.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from isthmus.protos.errors import DeadlineExceededError, IsthmusError, RemoteProtocolError
from isthmus.protos.exchange.v1 import probe_pb2
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.calls import Serve, ServedCall, answering
from isthmus.topology.spec.job import Probe

_log = logging.getLogger(__name__)

_SERVICE: Final = "isthmus.exchange.v1.Probe"
TURN_METHOD: Final = f"/{_SERVICE}/Turn"
ECHO_METHOD: Final = f"/{_SERVICE}/Echo"
FINISH_METHOD: Final = f"/{_SERVICE}/Finish"
FLOOD_METHOD: Final = f"/{_SERVICE}/Flood"
PIECE_BYTES_MAX: Final = 1 << 20
"""Largest message of a Flood."""
_TURN_BYTES_MIN: Final = 256 << 20
_RATE_SLACK: Final = 4.0
"""Highest accepted rate as a multiple of the described one."""
_POLL_S: Final = 0.02


def turn_s(probe: Probe, rtt_s: float) -> float:
    """Return how long one direction of a link may be measured."""
    return 30.0 + len(probe.connections) * (probe.window_s + 30.0 + 60 * rtt_s)


class ProbeServer:
    """Serves one gateway's peers. `turn` is shared with the gateway's own measurements."""

    def __init__(
        self,
        config: GatewayConfig,
        probe: Probe,
        site_of: Callable[[ServedCall], str],
        on_finished: Callable[[str], None],
    ) -> None:
        """`site_of` returns the site of a call, or raises IsthmusError.

        `on_finished` is called with each peer site that needs no more turns.
        """
        self.turn = asyncio.Lock()
        """Held while this gateway takes part in a measurement."""
        self.methods: Mapping[str, Serve] = {
            TURN_METHOD: self._turn,
            ECHO_METHOD: answering(self._echo, probe_pb2.EchoRequest),
            FINISH_METHOD: answering(self._finish, probe_pb2.FinishRequest),
            FLOOD_METHOD: self._flood,
        }
        """Handlers by path."""
        self._links = {link.site: link for link in config.links}
        self._probe = probe
        self._site_of = site_of
        self._on_finished = on_finished
        self._measuring = ""
        """The peer site whose turn it is; empty: none."""
        self._received_bytes = 0
        self._num_floods = 0

    async def _turn(self, call: ServedCall) -> None:
        """Give the caller the turn, and report received bytes whenever it asks.

        Raises:
            DeadlineExceededError: it has kept the turn for too long.
        """
        site = self._site_of(call)
        while self.turn.locked():
            if call.over.is_set():
                return  # the caller waits no longer
            await asyncio.sleep(_POLL_S)
        await self.turn.acquire()
        try:
            self._measuring, self._received_bytes = site, 0
            await call.write(self._counted())
            async with asyncio.timeout(turn_s(self._probe, self._links[site].rtt_s)):
                while await call.read() is not None:
                    await call.write(self._counted())
        except TimeoutError:
            raise DeadlineExceededError("the turn has taken too long") from None
        finally:
            self._measuring = ""
            self.turn.release()

    async def _echo(self, _: probe_pb2.EchoRequest, call: ServedCall) -> probe_pb2.EchoResponse:
        """Answer at once."""
        self._site_of(call)
        return probe_pb2.EchoResponse()

    async def _finish(
        self, _: probe_pb2.FinishRequest, call: ServedCall
    ) -> probe_pb2.FinishResponse:
        """Note that a peer has measured all its links."""
        self._on_finished(self._site_of(call))
        return probe_pb2.FinishResponse()

    async def _flood(self, call: ServedCall) -> None:
        """Count incoming bytes, and drop them.

        Raises:
            IsthmusError: it is not the caller's turn, or the bytes exceed the limit.
        """
        site = self._site_of(call)
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

    def _counted(self) -> bytes:
        counted = probe_pb2.TurnResponse(
            received_bytes=self._received_bytes, now_s=time.monotonic()
        )
        return counted.SerializeToString()
