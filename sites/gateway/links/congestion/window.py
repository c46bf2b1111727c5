"""The window of bytes in flight to a peer, which leaves competing flows their part. Pure.

TCP decides how much is in flight, up to this window. Without a window BBR keeps two BDP (rate times
round trip) in flight, whatever is lost, while CUBIC slows down at each loss. So if the router's
queue holds at most one BDP, a competing CUBIC flow gets nothing.

Flows in one queue share the link in proportion to their bytes in flight. So there are two widths:

- with competing flows, somewhat less than one BDP: the others fill the queue, and get about as
  much. If we get less than half of the link, the window grows little by little;
- on a link without them, somewhat more, so that it is never idle.

Round trips tell which it is. Our own frames make packets wait a little. If packets wait longer,
others are in the queue, unless we are carried at nearly the link's rate.

Some flows ignore loss (BBR). Against them, and where packets are lost by chance, only memory limits
the window.

A round trip passes two queues. Only the one towards the peer counts here. The one on the way back
is full whenever the peer sends as much, which in an all-reduce is most of the time. Frames whose
acknowledgement waits there have passed the link, so without competing flows they do not count.

Bytes count until the peer's TCP acknowledges them. A full window is looked at every few
milliseconds (`wire/connection.py`), for the kernel wakes nobody when it has room again.

All times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.sites.gateway.links.congestion.losses import ChanceLosses

_SLACK = 0.15
"""Without competing flows, the window is wider than one BDP by this part of it, and by the bytes
that leave between two looks. Measured: a round takes 1.03 times its bound at 400 Mbit/s and 60 ms,
1.04 to 1.08 at 145 Mbit/s and 20 ms."""
_GRADUALLY = 0.25
"""Further excess from which packets of others are certainly in the queue. In between, the window
goes from one width to the other."""
_FOLLOWS = 0.03
"""Part of the distance to its target that the window covers in each sample. Its effect on the queue
is seen a round trip later. Without damping the window would oscillate: fill the queue, take it for
that of others, let it run empty."""
_FULL = 1.6
"""Multiple of the idle round trip from which the queue may be full and lose packets."""
_JITTER_S = 0.003
"""Variation of round trips without a queue; subtracted first."""
_VARIES = 1.2
"""If round trips vary by themselves, the shortest one is no good measure of an empty queue. So the
described round trip is used, up to this multiple of the shortest."""
_ALONE = 0.85
"""Part of the believed rate from which the link counts as free of competing flows."""
_FAIR = 0.45
"""Fair part of the believed rate with competing flows: half of the link, less headers and the
beginnings of rounds."""
_LEAVES = 0.6
"""With competing flows the window begins with this part of one BDP. CUBIC gives up three tenths of
its window at each overflow. Measured at 500 Mbit/s and 50 ms: beside it we get 0.95 of our half
with this, 1.31 with 0.7."""
_WIDENS = 0.07
"""Step per sample of the window with competing flows, as a part of one BDP, times the missing
share. Once they are gone, the window returns to its initial width by this part per sample."""
_STARVED = 0.4
_OFTEN = 0.4
_AVERAGED = 0.03
_LOSS_IGNORED_S = 30.0
"""Against flows that slow down at an overflow, we get more than _STARVED of the link. If we get
less, and a full queue loses packets in a share _OFTEN of the samples, some flow ignores loss, as
BBR does. That verdict holds this long. Each sample has the weight _AVERAGED, so it takes at least a
second."""
_LOOK_SHARE = 0.125
_LOOK_MIN_S = 0.001
_LOOK_BYTES = 32 << 10
"""A full window is looked at this often in a round trip, but not more often than that. On narrow
links it is looked at once so many bytes may have left."""
_RTT_MIN_S = 0.01
"""Shortest round trip that the window assumes: on shorter links the looks take as long."""


@dataclass(frozen=True, slots=True)
class Path:
    """A sample of the connections to a peer while frames are in flight."""

    rtt_s: float
    """Current round trip, less the queueing delay of acknowledgements."""
    shortest_rtt_s: float
    """Shortest round trip of the last minutes, which waited in no queue."""
    sent_again: int
    """Retransmitted segments up to now."""
    carried: float
    """Recent rate as a part of the highest known rate."""
    sent: int
    """Segments sent up to now, retransmissions included."""
    back_s: float
    """Queueing delay of acknowledgements."""


class LinkWindow:
    """The adaptive window of one link."""

    def __init__(self, most_bytes: int, rtt_s: float) -> None:
        """The window is never wider than `most_bytes`, a limit of memory.

        The link is described to have a round trip of `rtt_s`. The kernel may measure a shorter one:
        where a relay ends connections, it measures the way to the relay.
        """
        self._most_bytes = most_bytes
        self._rtt_s = rtt_s
        self.look_s = 0.0
        """Interval at which a full window is to be looked at, as of the latest sample."""
        self.losses = ChanceLosses()
        self._free = 1.0
        """1 on a link without competing flows, 0 with them; between the two while changing over."""
        self._width = 1.0
        """Window with competing flows, as a multiple of its initial width."""
        self._starved = 0.0
        """Averaged share of samples with too low a rate and losses of a full queue."""
        self._loss_ignored_until_s = -math.inf
        """Until this time, competing flows count as ignoring loss."""

    def follow(
        self,
        path: Path,
        bytes_per_s: float,
        now_s: float,
        *,
        is_measured: bool = True,
    ) -> int:
        """Take a sample; return the link's window in bytes.

        Args:
            path: the sample.
            bytes_per_s: the believed bandwidth.
            now_s: monotonic.
            is_measured: whether `bytes_per_s` was measured. Before that there is no limit.
        """
        idle_rtt_s = min(max(path.shortest_rtt_s, self._rtt_s), _VARIES * path.shortest_rtt_s)
        queue = (path.rtt_s - _JITTER_S) / idle_rtt_s
        held_bytes = bytes_per_s * max(path.shortest_rtt_s, self._rtt_s, _RTT_MIN_S)
        often_s = max(_LOOK_MIN_S, _LOOK_SHARE * path.shortest_rtt_s)
        self.look_s = max(often_s, _LOOK_BYTES / bytes_per_s)
        own = 1 + _SLACK + self.look_s / idle_rtt_s
        asked = min(1.0, max(0.0, 1 - (queue - own) / _GRADUALLY))
        self._follow_asked(1.0 if path.carried >= _ALONE else asked, path.carried)
        is_overflowing = self.losses.follow(
            path.sent,
            path.sent_again,
            now_s,
            is_full=queue > _FULL,
            knows_empty=path.shortest_rtt_s - _JITTER_S <= _VARIES * self._rtt_s,
        )
        self._find_flows_that_ignore_loss(is_overflowing and path.carried < _STARVED, now_s)
        is_open = (
            not is_measured or self.losses.is_lossy(now_s) or now_s < self._loss_ignored_until_s
        )
        # After a loss, later packets count as in flight until the retransmission has arrived.
        if is_open or held_bytes >= self._most_bytes:
            return self._most_bytes
        alone_bytes = (1 + _SLACK) * held_bytes + bytes_per_s * (path.back_s + self.look_s)
        beside_bytes = _LEAVES * self._width * held_bytes
        window_bytes = self._free * alone_bytes + (1 - self._free) * beside_bytes
        return min(self._most_bytes, int(window_bytes))

    def _follow_asked(self, asked: float, carried: float) -> None:
        self._free += _FOLLOWS * (asked - self._free)
        change = self._free * (1.0 - self._width) + (1 - self._free) * (_FAIR - carried)
        self._width = max(1.0, self._width + _WIDENS * change)

    def _find_flows_that_ignore_loss(self, is_starved: bool, now_s: float) -> None:
        self._starved += _AVERAGED * (is_starved - self._starved)
        if self._starved > _OFTEN:
            self._loss_ignored_until_s = now_s + _LOSS_IGNORED_S
