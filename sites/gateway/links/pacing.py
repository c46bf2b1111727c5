"""Has the kernel spread packets over time, on links that hold but a few frames.

A frame is written to its connection at once, and TCP sends as much of it at once as its window
permits: all of it, once the connection is warm. Where a router holds no more than what is on the
way, the queue of a narrow or short link overflows at each frame, and what was lost is waited for.
BBR does no better: it looks for the link's rate for as long as senders have pauses, at nearly three
times the rate that it knows (Linux, tcp_bbr.c: rounds that were limited by the application do not
end BBR_STARTUP), and frames that leave at a link's pace have pauses between them.

Links that hold more gain little by it, and it costs gateways wake-ups: docs/benchmarks.md.
"""

from __future__ import annotations

import logging
import math
import time

from sites.gateway.links.connections import addresses_of, pace
from sites.gateway.links.greeting import Peer
from sites.gateway.links.outbox import Outbox

_log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""Half of what a search for the link's rate waits for more (`startup.py`): it must not be held
back by what is set here."""
_AGAIN_S = 1.0
"""Connections that broke are new ones."""
_CHANGE = 0.02
_LITTLE_BYTES = 256 << 10


def holds_little(bytes_per_s: float, rtt_s: float) -> bool:
    """Return whether a link is one of those: described with what it carries, and its round trip."""
    return bytes_per_s * rtt_s <= _LITTLE_BYTES


class Pacing:
    """Of one link. `run` on a thread."""

    def __init__(self, peer: Peer, outbox: Outbox) -> None:
        """Do nothing yet.

        Args:
            peer: where the connections lead.
            outbox: tells how fast packets may leave.
        """
        self._peer = peer
        self._outbox = outbox

    def run(self) -> None:
        """Follow what the link carries, until it is over."""
        paced, paced_s = math.nan, -math.inf
        while not self._outbox.closed.wait(_LOOK_S) and not self._outbox.is_over:
            if self._outbox.is_empty:
                continue
            rate, now_s = self._outbox.paced_bytes_per_s, time.monotonic()
            wanted = math.inf if rate is None else rate
            if now_s < paced_s + _AGAIN_S and math.isclose(wanted, paced, rel_tol=_CHANGE):
                continue
            try:
                pace(addresses_of(self._peer.host, self._peer.port), rate)
            except OSError as error:  # the connections that there are do without the name
                _log.debug("%s: %s", self._peer, error)
                continue
            paced, paced_s = wanted, now_s
