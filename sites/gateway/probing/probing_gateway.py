"""A gateway that measures links, with the same process, server and connections as in training.

A gateway measures its outgoing links one after another. It takes part in one measurement at a time,
so a measurement holds its own turn and the peer's. The turn of the site that comes first in the
topology is taken first, which rules out deadlocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from isthmus.protos.errors import LocalProtocolError, PeerLostError
from isthmus.protos.failure import Failure
from isthmus.protos.frame import Frame
from isthmus.protos.metrics import PROBE
from isthmus.sites.gateway.agent_port import Connected, Listening, Probed
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.gateway import EndingGateway, Write
from isthmus.sites.gateway.links.peer_server import ExchangeServer
from isthmus.sites.gateway.links.transport import Peer
from isthmus.sites.gateway.probing.probe_server import ProbeServer, turn_s
from isthmus.sites.gateway.probing.prober import Prober
from isthmus.sites.local.rank_messages import Failed, Metric
from isthmus.topology.spec.job import Probe

_POLL_S: Final = 0.1


class ProbingGateway(EndingGateway):
    """Measures a site's links; takes the place of a `Gateway`, with the same methods."""

    def __init__(self, config: GatewayConfig, probe: Probe, write: Write) -> None:
        super().__init__(config, write)
        self._probe = probe
        self._unfinished = {link.site for link in config.links}
        self._probers: list[Prober] = []
        self._server = ExchangeServer(config, self)
        self._served = ProbeServer(config, probe, self._server.site_of, self._peer_finished)
        self._server.methods.update(self._served.methods)

    def start(self) -> None:
        """Listen for peers, and report the address."""
        told = self._server.start()
        super().start()
        self._write(Listening(host=told.host, port=told.port))

    def connect(self, peers: tuple[Peer, ...]) -> None:
        """Begin to greet all peers, measure, and wait until all others have measured too.

        Raises:
            LocalProtocolError: a gateway is missing from `peers`, or this was called before.
        """
        if self._probers:
            raise LocalProtocolError("stdin: connect came twice")
        by_site = {peer.site: peer for peer in peers if peer.gateway == 0}
        for link in self._config.links:
            if link.site not in by_site:
                raise LocalProtocolError(f"stdin: connect: no address of site {link.site}")
            peer = by_site[link.site]
            self._probers.append(Prober(self._config, self._probe, link, peer))
        self._begin(self._run())

    def close(self) -> None:
        """Tell the agent of a failure, and end all work. Idempotent."""
        self._ended.set()
        if self.failure is not None:
            self._write(Failed(failure=self.failure))
        self._end_work()
        self._server.close()
        self._release()

    # ---------------------------------------------------------------- what others report

    def receive(self, sender: GatewayId, frame: Frame) -> None:
        """Refuse a peer's frame: nothing is summed here.

        Raises:
            LocalProtocolError: always.
        """
        raise LocalProtocolError("a frame came to a gateway that only measures links")

    def greeted(self, sender: GatewayId) -> None:
        """Ignore heartbeats: probes have deadlines of their own."""

    def peer_left(self, sender: GatewayId) -> None:
        """Note that a peer has left and needs no more turns."""
        self._peer_finished(self._config.sites[sender[0]])

    def peer_ended(self, sender: GatewayId, why: str) -> None:
        """Fail: a peer ends before its links are measured."""
        site = self._config.sites[sender[0]]
        self.fail(Failure(code="PEER_LOST", message=why, site=site, is_collateral=True))

    def _peer_finished(self, site: str) -> None:
        self._unfinished.discard(site)

    # ---------------------------------------------------------------- measuring

    async def _run(self) -> None:
        for prober in self._probers:
            await prober.greet()
        self._write(Connected())
        for prober in self._probers:
            await self._measure(prober)
        for prober in self._probers:
            await prober.finish()
        await self._wait_for_peers()

    async def _measure(self, prober: Prober) -> None:
        site = prober.peer.site
        turns: list[contextlib.AbstractAsyncContextManager[None]]
        turns = [self._served.turn, contextlib.nullcontext()]
        if self._config.site_index > self._config.sites.index(site):
            turns.reverse()  # the peer's turn comes first
        async with turns[0]:
            figures = await prober.measure(self._longest_s(), turns[1])
        self._write(
            Metric(
                kind=PROBE,
                values=figures.values(),
                labels={"source": self._config.site, "target": site},
            )
        )

    async def _wait_for_peers(self) -> None:
        """Stay until no peer needs this gateway any more, then report to the agent.

        Raises:
            PeerLostError: a peer takes longer than all measurements together can take.
        """
        deadline_s = time.monotonic() + self._longest_s()
        while self._unfinished:
            if time.monotonic() > deadline_s:
                site = min(self._unfinished)
                raise PeerLostError(f"site {site} has not finished its measurements", site)
            await asyncio.sleep(_POLL_S)
        self._write(Probed())

    def _longest_s(self) -> float:
        """Return the longest time that all measurements can take, one after another."""
        longest = max((turn_s(self._probe, link.rtt_s) for link in self._config.links), default=0)
        return longest * len(self._config.sites) ** 2
