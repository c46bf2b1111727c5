"""How many TCP connections a link has: what fills it at first, then what its losses ask for.

A job that names a number has exactly that many. Otherwise a link begins with what fills it
(`topology/trees/channels.py`), and `ChannelGrowth` adds some where packets are lost by chance. It
also has the pace (`rate.py`) and the window (`window.py`) follow what the kernel counts.

With random loss, congestion control and not the link limits a connection. CUBIC's window is on
average 1.054 (RTT / loss)^0.75 packets, and at least Reno's 1.2 / sqrt(loss) (RFC 9438, section
5.2), however wide the link is. Each of several connections carries that much. BBR does not take a
lost packet for a full queue, and needs no help. If a queue overflowed, more connections would only
overflow it again.

A connection that sends nothing loses half its window in each time-out, down to ten packets (RFC
2861; Linux, tcp_cwnd_restart). Once it sends again, it doubles the window in each round trip. BBR
keeps it.

If a kernel setting would help more, the log says so once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time

from isthmus.sites.gateway.config import PeerLink
from isthmus.sites.gateway.links.calls import Target
from isthmus.sites.gateway.links.congestion.kernel import (
    begin_bbr_anew,
    is_bbr,
    segments_of,
    send_buffer_bytes,
    set_up,
    starts_slowly_after_idle,
)
from isthmus.sites.gateway.links.congestion.rate import Pace
from isthmus.sites.gateway.links.congestion.window import LinkWindow, Path
from isthmus.sites.gateway.links.send_queue import LinkTotals, Outbox
from isthmus.sites.gateway.links.streams import Streams
from isthmus.topology.spec.tcp_constants import (
    FIRST_WINDOW_PACKETS,
    RTO_MIN_S,
    SEGMENT_BYTES,
    cubic_window,
)
from isthmus.topology.trees.channels import first_channels

_log = logging.getLogger(__name__)

CHANNELS_MAX = 64
"""Upper limit on connections of one link, whatever its topology allows."""
_LOOK_S = 0.05
"""Interval between two samples of the kernel's counters."""
_PAUSES_MIN = 5
"""Minimum number of pauses from which their average length is estimated."""
_WORTH_S = 0.05
"""A pause that costs at least this much is mentioned in the log."""


def channels_for(loss: float, bytes_per_s: float, rtt_s: float, most: int) -> int:
    """Return how many connections fill a link that loses a share `loss` > 0 of its packets."""
    packets = bytes_per_s * rtt_s / SEGMENT_BYTES
    return max(1, min(math.ceil(packets / cubic_window(rtt_s, loss)), most))


def idle_cost_s(idle_s: float, bytes_per_s: float, rtt_s: float, num_connections: int) -> float:
    """Return the time lost to slow start after a pause of `idle_s`."""
    full_bytes = bytes_per_s * rtt_s
    halvings = min(int(idle_s / (rtt_s + RTO_MIN_S)), 64)
    window_bytes = full_bytes / 2**halvings
    window_bytes = max(
        window_bytes, min(num_connections * FIRST_WINDOW_PACKETS * SEGMENT_BYTES, full_bytes)
    )
    cost_s = 0.0
    while 0 < window_bytes < full_bytes:
        cost_s += rtt_s - window_bytes / bytes_per_s
        window_bytes *= 2
    return cost_s


class ChannelGrowth:
    """Opens and configures the TCP connections of one link. `begin`, then `run`."""

    def __init__(
        self,
        wanted: int | None,
        link: PeerLink,
        peer: Target,
        outbox: Outbox,
        streams: Streams,
        num_senders: int = 1,
    ) -> None:
        """`wanted` is the number of connections that the job fixes; None: adaptive.

        `num_senders` gateways share the link in this direction.
        """
        self._wanted = wanted
        self._link = link
        self._peer = peer
        self._outbox = outbox
        self._streams = streams
        self._pace = Pace(link.bytes_per_s, is_shared=link.is_shared, num_senders=num_senders)
        self._window = LinkWindow(outbox.window_bytes, link.rtt_s)
        self._most = min(link.max_flows, CHANNELS_MAX)
        self._connections: tuple[socket.socket, ...] = ()
        """The connections at the latest sample."""
        self._told_bytes_per_s = math.nan
        """Pacing rate per connection that was last set."""
        self._has_advised_bbr = self._has_advised_idle = False

    def begin(self) -> None:
        """Open the first connections."""
        self._grow_for(self._link.bytes_per_s)

    def _grow_for(self, bytes_per_s: float) -> None:
        """Open as many connections as fill a link of that rate."""
        rtt_s, buffer_bytes = self._link.rtt_s, send_buffer_bytes()
        self._streams.grow(
            first_channels(self._wanted, self._most, bytes_per_s, rtt_s, buffer_bytes)
        )

    def set_up(self, connection: socket.socket) -> None:
        """Configure a new connection: congestion control, and its share of the pace."""
        set_up((connection,), self._link, self._share_bytes_per_s())

    def _tell_pace(self) -> None:
        """Set each connection's share of the pace, if it has changed."""
        share_bytes_per_s = self._share_bytes_per_s()
        if share_bytes_per_s != self._told_bytes_per_s:
            self._told_bytes_per_s = share_bytes_per_s
            set_up(self._streams.connections, self._link, share_bytes_per_s)

    def _share_bytes_per_s(self) -> float:
        """Return the pace per connection that carries frames."""
        return self._pace.bytes_per_s / min(self._streams.num_streams, self._outbox.num_in_flight)

    async def run(self) -> None:
        """Adapt the link to the kernel's counters until it ends."""
        while not self._outbox.is_over:
            await asyncio.sleep(_LOOK_S)
            self._look()

    def _look(self) -> None:
        connections = self._streams.connections
        if connections != self._connections or self._outbox.is_empty:
            # Traffic of connections that are new in this sample is not recent traffic.
            self._connections = connections
            self._pace.rest()
            self._window.losses.rest()
        else:
            self._follow_path(connections)

    def _follow_path(self, connections: tuple[socket.socket, ...]) -> None:
        """Set window and pace: the link is full, and competing flows get their part."""
        sample = segments_of(connections)
        if sample.is_local or not sample.rtt_s:
            return  # the kernel sees nothing of an emulated link on this host
        now_s, totals = time.monotonic(), self._outbox.totals()
        is_other_pace = sample.delivered > 0 and self._pace.follow(
            sample.delivered, sample.segment_bytes, now_s, sample.rtt_s
        )
        longer_s = max(0.0, sample.rtt_s - sample.shortest_rtt_s)
        back_s = min(longer_s, self._outbox.waited_back_s(longer_s))
        window_bytes = self._window.follow(
            Path(
                rtt_s=sample.rtt_s - back_s,
                shortest_rtt_s=sample.shortest_rtt_s,
                sent_again=sample.sent_again,
                carried=self._pace.carried,
                sent=sample.sent,
                back_s=back_s,
            ),
            self._pace.believed_bytes_per_s,
            now_s,
            is_measured=self._pace.is_measured,
        )
        if not self._link.is_shared:  # with a share, there is nothing to probe for
            self._streams.limit(window_bytes, self._window.look_s)
        if is_other_pace:
            self._grow_for(self._pace.most_bytes_per_s)
        self._follow_losses(sample.congestion_control, now_s)
        self._tell_pace()
        self._advise_idle(sample.congestion_control, totals)
        if is_other_pace and self._pace.is_searching:
            # By itself BBR sends a quarter faster in one of eight round trips: that takes seconds.
            begin_bbr_anew(connections, totals.idle_rtt_s or self._link.rtt_s)

    def _follow_losses(self, congestion_control: str, now_s: float) -> None:
        """Open more connections if random loss limits the existing ones."""
        pace, losses = self._pace, self._window.losses
        if is_bbr(congestion_control) or not pace.is_slow or not losses.is_lossy(now_s):
            return
        loss = losses.share
        if not loss:
            return
        if self._wanted is None:
            rtt_s = self._link.rtt_s
            wanted = channels_for(loss, pace.most_bytes_per_s, rtt_s, self._most)
            if wanted > self._streams.num_streams:
                _log.info("%s: %d connections, for losses of %.3g", self._peer, wanted, loss)
                self._streams.grow(wanted)
        if self._has_advised_bbr:
            return
        self._has_advised_bbr = True
        _log.warning(
            "hint: %.2g %% of the packets to site %s are lost, and %s takes that for "
            "congestion: with BBR (modprobe tcp_bbr, and add bbr to sysctl "
            "net.ipv4.tcp_allowed_congestion_control, at every site) a connection would carry far "
            "more than %.3g MB/s",
            100 * loss,
            self._peer.site,
            congestion_control,
            pace.carried * pace.most_bytes_per_s / 1e6,
        )

    def _advise_idle(self, congestion_control: str, totals: LinkTotals) -> None:
        """Log the cost of pauses between steps if a kernel setting would avoid it."""
        if self._has_advised_idle or not congestion_control or is_bbr(congestion_control):
            return
        link = self._link
        if totals.num_pauses < _PAUSES_MIN:
            return
        idle_s = totals.paused_s / totals.num_pauses
        cost_s = idle_cost_s(idle_s, link.bytes_per_s, link.rtt_s, self._streams.num_streams)
        if cost_s < _WORTH_S:
            return
        self._has_advised_idle = True
        if not starts_slowly_after_idle():
            return
        _log.warning(
            "hint: between steps, after %.2g s on average, TCP starts slowly again to site %s, "
            "which costs about %.2g s each time; sysctl net.ipv4.tcp_slow_start_after_idle=0, at "
            "every site, keeps connections warm",
            idle_s,
            self._peer.site,
            cost_s,
        )
