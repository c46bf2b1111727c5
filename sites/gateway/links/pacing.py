"""Has the kernel spread the packets of a frame over time: little faster than the link carries them.

A frame is written to its connection at once, and TCP sends as much of it at once as its window
permits: all of it, once the connection is warm. Where routers hold no more than what is on the way,
a narrow or short link's queue overflows at each frame, and what was lost is waited for. BBR does no
better: it looks for the link's rate for as long as senders have pauses, at nearly three times the
rate that it knows (Linux, tcp_bbr.c, BBR_STARTUP ends with rounds that were not app-limited), and
frames that leave at a link's pace have pauses between them.
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
