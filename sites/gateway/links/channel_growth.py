"""How many connections a link has: what fills it at first, then what its losses ask for.

A job that names a number has exactly that. Where a setting of the kernel would help more than
anything done here, the log says so, once.
"""

from __future__ import annotations

import logging

from sites.gateway.config import PeerLink
from sites.gateway.links.channels import (
    CHANNELS_MAX,
    channels_for,
    idle_cost_s,
    is_bbr,
    is_held_back,
    loss_of,
)
from sites.gateway.links.connections import (
    Segments,
    addresses_of,
    free_local,
    segments_to,
    send_buffer_bytes,
    starts_slowly_after_idle,
)
from sites.gateway.links.greeting import Peer
from sites.gateway.links.outbox import Outbox
from sites.gateway.links.streams import Streams
from topology.traffic.channels import first_channels

_log = logging.getLogger(__name__)

_EVERY_S = 1.0
_PAUSES_MIN = 5
_LOCAL_RTT_S = 0.001
"""A link said to be longer is emulated where both ends are on one host: such connections stay as
they are."""
_WORTH_S = 0.05
"""What a pause costs, before the log mentions it."""


class ChannelGrowth:
    """Of one link. `begin`, then `run` on a thread."""

    def __init__(
        self, wanted: int | None, link: PeerLink, peer: Peer, outbox: Outbox, streams: Streams
    ) -> None:
        """Open nothing.

        Args:
            wanted: connections, as the job says; None: as many as it takes.
            link: the configured figures.
            peer: where the connections lead.
            outbox: tells what was sent, and how long there was nothing to send.
            streams: what grows.
        """
        self._wanted = wanted
        self._link = link
        self._peer = peer
        self._outbox = outbox
        self._streams = streams
        self._most = min(link.max_flows, CHANNELS_MAX)
        self._has_advised_bbr = self._has_advised_idle = False

    def begin(self) -> None:
        """Open the first connections."""
        link = self._link
        self._streams.grow(
            first_channels(
                self._wanted, self._most, link.bytes_per_s, link.rtt_s, send_buffer_bytes()
            )
        )

    def run(self) -> None:
        """Follow the losses that the kernel counts, until the link is over."""
        before, totals = Segments(), self._outbox.totals()
        while not self._outbox.closed.wait(_EVERY_S) and not self._outbox.is_over:
            try:
                addresses = addresses_of(self._peer.host, self._peer.port)
            except OSError as error:  # the connections that there are do without the name
                _log.debug("%s: %s", self._peer, error)
                continue
            if self._link.rtt_s < _LOCAL_RTT_S and free_local(addresses):
                continue  # what is sent again there was not lost, but acknowledged late
            now = segments_to(addresses)
            self._advise_idle(now.congestion_control)
            loss = loss_of(before, now)
            if loss is None and now.sent >= before.sent:
                continue  # too little to tell: it adds up
            totals, since = self._outbox.totals(), totals
            before = now
            busy_s = totals.busy_s - since.busy_s
            if loss and busy_s > 0:
                rate = (totals.sent_bytes - since.sent_bytes) / busy_s
                self._follow(loss, rate, now.congestion_control)

    def _follow(self, loss: float, rate: float, congestion_control: str) -> None:
        """Open more connections, if lost packets hold those back that there are."""
        link = self._link
        if not is_held_back(loss, congestion_control, rate, link.bytes_per_s):
            return
        if self._wanted is None:
            wanted = channels_for(loss, link.bytes_per_s, link.rtt_s, self._most)
            if wanted > self._streams.num_streams:
                _log.info("%s: %d connections, for losses of %.3g", self._peer, wanted, loss)
                self._streams.grow(wanted)
        if self._has_advised_bbr:
            return
        self._has_advised_bbr = True
        _log.warning(
            "hint: %.2g %% of the packets to site %s are lost, and %s takes that for "
            "congestion: with BBR (sysctl net.ipv4.tcp_congestion_control=bbr, at every "
            "site) a connection would carry far more than %.3g MB/s",
            100 * loss,
            self._peer.site,
            congestion_control,
            rate / 1e6,
        )

    def _advise_idle(self, congestion_control: str) -> None:
        """Say what pauses between steps cost, where the kernel could keep connections warm."""
        if self._has_advised_idle or not congestion_control or is_bbr(congestion_control):
            return
        link, totals = self._link, self._outbox.totals()
        if totals.num_pauses < _PAUSES_MIN:
            return
        idle_s = totals.paused_s / totals.num_pauses
        cost_s = idle_cost_s(idle_s, link.bytes_per_s, link.rtt_s, self._streams.num_streams)
        if cost_s < _WORTH_S or not starts_slowly_after_idle():
            return
        self._has_advised_idle = True
        _log.warning(
            "hint: between steps, after %.2g s on average, TCP starts slowly again to site %s, "
            "which costs about %.2g s each time; sysctl net.ipv4.tcp_slow_start_after_idle=0, at "
            "every site, keeps connections warm",
            idle_s,
            self._peer.site,
            cost_s,
        )
