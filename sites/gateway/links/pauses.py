"""Uses a link's pauses, so that BBR makes none of its own.

Where BBR has seen no shorter round trip for ten seconds, it sends no more than four packets in
each, for a fifth of a second and one round trip more, to let queues of its own run dry and measure
again (Linux, tcp_bbr.c, PROBE_RTT; draft-ietf-ccwg-bbr, section 5.3.4). In the last parts of a
backward pass all sites wait for that. A link that has just had everything acknowledged has no queue
of its own, and steps leave such moments; but Linux takes them for what they are only if the ten
seconds end in one.
"""

from __future__ import annotations

import logging
import time

from sites.gateway.links.connections import addresses_of, begin_bbr_anew
from sites.gateway.links.greeting import Peer
from sites.gateway.links.outbox import Outbox

_log = logging.getLogger(__name__)

_EVERY_S = 2.0
"""Several times in BBR's ten seconds, and in the five of its third version."""
_LOOK_S = 0.1


class Pauses:
    """Of one link. `run` on a thread."""

    def __init__(self, peer: Peer, outbox: Outbox, rtt_s: float) -> None:
        """Do nothing yet.

        Args:
            peer: where the connections lead.
            outbox: tells whether anything is on the way.
            rtt_s: the configured round trip, until one is measured.
        """
        self._peer = peer
        self._outbox = outbox
        self._rtt_s = rtt_s

    def run(self) -> None:
        """Have BBR begin anew in pauses, until the link is over."""
        used_s = time.monotonic()
        while not self._outbox.closed.wait(max(_LOOK_S, used_s + _EVERY_S - time.monotonic())):
            if self._outbox.is_over:
                return
            if self._outbox.is_empty:
                used_s = time.monotonic()
                self._use()

    def _use(self) -> None:
        try:
            addresses = addresses_of(self._peer.host, self._peer.port)
        except OSError as error:  # the connections that there are do without the name
            _log.debug("%s: %s", self._peer, error)
            return
        if not self._outbox.is_empty:  # a resolver can take longer than a pause
            return
        begin_bbr_anew(addresses, self._outbox.totals().idle_rtt_s or self._rtt_s)
