"""What a link to one peer carries, as measured, how fast its frames leave, and their memory. Pure.

TCP decides how much is on the way and how fast it leaves (`kernel.py`), but no faster than the link
can carry it (`Pace`). A gateway hands it frames as fast as it takes them, up to `window_bytes`.
That limit is one of memory, and far beyond what a link holds. `window.py` has the one that leaves
others their part.

All times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low

from protos.frame import HEADER_BYTES
from sites.gateway.config import GatewayConfig, PeerLink

_WINDOW_MIN_BYTES = 32 << 20
_WINDOW_BDP = 4
"""The window in bandwidth-delay products: a router's queue can hold as much as the link, and a
connection that repairs a loss has another round trip on the way."""
_FEW_FRAMES = 4
_IDLE_ROUND_TRIPS = 8
"""The idle round trip is the shortest of this many latest ones that found the link idle."""

WARM_ROUND_TRIPS = 8
"""After a pause, connections start slowly for so many round trips: ten packets, doubled in each,
are 2 MB in the last of them."""

_HEADROOM = 1.25
"""As BBR has it, where it looks whether a link has become faster."""
_FASTER = 1.1
"""A link that carries so much more than it is believed to is a faster one."""
_ENOUGH_S = 0.25
"""What is measured in less time may be a busy processor's doing."""


def window_bytes(config: GatewayConfig, link: PeerLink) -> int:
    """Return how many bytes to a peer may be unacknowledged at most."""
    if config.window_bytes is not None:
        return config.window_bytes
    frames_bytes = _FEW_FRAMES * (config.chunk_bytes + HEADER_BYTES)
    return max(int(_WINDOW_BDP * link.bytes_per_s * link.rtt_s), _WINDOW_MIN_BYTES, frames_bytes)


class IdleRoundTrip:
    """The round trip of a link on which nothing else is on the way, from greetings."""

    def __init__(self, rtt_s: float) -> None:
        """Begin with the described round trip."""
        self._rtts_s = deque([rtt_s], maxlen=_IDLE_ROUND_TRIPS)
        self._is_measured = False

    @property
    def shortest_s(self) -> float:
        """The shortest one: it has waited in no queue."""
        return min(self._rtts_s)

    @property
    def median_s(self) -> float | None:
        """The median of the latest greetings that found the link idle; None before the first.

        The median of two is the shorter one: the other may have had to connect, which takes two or
        three round trips.
        """
        return median_low(self._rtts_s) if self._is_measured else None

    def note(self, rtt_s: float, *, is_idle: bool) -> None:
        """A greeting was answered. One that waited in a queue can only be too long."""
        if is_idle and not self._is_measured:
            # Replaced at once: whoever asks for the round trip meanwhile holds no lock.
            self._rtts_s = deque([rtt_s], maxlen=_IDLE_ROUND_TRIPS)
            self._is_measured = True
        elif is_idle or rtt_s < self.shortest_s:
            self._rtts_s.append(rtt_s)


class LimitedRate:
    """Adds up what a link carried while it was the limit, and not a sender with nothing to send.

    A frame that left a round trip before the acknowledgement of the one before it was at the link
    when that one was through. From then until its own acknowledgement, the link had something to
    carry all the time. So what passes between two such acknowledgements is what the link carries.
    After a pause the first round trips do not count: connections start slowly, and plans know that.
    """

    def __init__(self) -> None:
        self.limited_bytes = 0
        self.limited_s = 0.0
        self._warm_s = 0.0
        self._acknowledged_s = 0.0
        """The latest."""

    def begin(self, now_s: float, rtt_s: float) -> None:
        """A frame leaves, and nothing else is on the way."""
        self._warm_s = now_s + WARM_ROUND_TRIPS * rtt_s

    def arrive(self, size_bytes: int, left_s: float, now_s: float, rtt_s: float) -> None:
        """A frame was acknowledged."""
        before_s, self._acknowledged_s = self._acknowledged_s, now_s
        if before_s >= max(self._warm_s, left_s + rtt_s):
            self.limited_bytes += size_bytes
            self.limited_s += now_s - before_s


class Pace:
    """How fast frames may leave: somewhat faster than their link is believed to carry them.

    TCP knows a link's rate once it has been full for some round trips. Before that, and whenever it
    begins anew, BBR sends 2.9 times as fast as its window suggests (Linux, bbr_high_gain). A short
    burst is over before BBR knows better. What routers cannot queue of it is lost, and to send that
    again takes longer than the burst.

    A link is believed to carry what is described, or the most that was measured. While it turns
    out to be faster there is no limit, so that TCP finds out how fast.

    Of a link that a run has only a share of, frames leave as fast as the share allows, and never
    faster.

    Where several gateways send over one link side by side, each begins with its part.
    """

    def __init__(
        self, bytes_per_s: float, *, is_shared: bool = False, num_senders: int = 1
    ) -> None:
        """Begin with the described rate, of which this gateway has one of `num_senders` parts."""
        self._is_shared = is_shared
        bytes_per_s /= num_senders
        self.bytes_per_s = bytes_per_s if is_shared else _HEADROOM * bytes_per_s
        """What all connections together may send; infinite: no limit."""
        self._believed_bytes_per_s = bytes_per_s
        self._limited_bytes, self._limited_s = 0, 0.0
        self._sent_bytes, self._busy_s = 0, 0.0

    @property
    def is_measured(self) -> bool:
        """Whether the belief is more than a description."""
        return self._limited_s > 0

    @property
    def believed_bytes_per_s(self) -> float:
        """What the link is believed to carry; infinite while it turns out to be faster."""
        is_known = math.isfinite(self.bytes_per_s)
        return self._believed_bytes_per_s if is_known else math.inf

    def follow(self, limited_bytes: int, limited_s: float, sent_bytes: int, busy_s: float) -> bool:
        """Take a link's sums up to now; return whether the pace changes.

        Args:
            limited_bytes: as `LimitedRate` has them.
            limited_s: the same.
            sent_bytes: all that was acknowledged.
            busy_s: time in which something was on the way. Frames that waited for a lost packet are
                acknowledged at once, so a link never carries more than its mean.
        """
        spent_s = limited_s - self._limited_s
        if spent_s < _ENOUGH_S or self._is_shared:
            return False
        measured = min(
            (limited_bytes - self._limited_bytes) / spent_s,
            (sent_bytes - self._sent_bytes) / (busy_s - self._busy_s),
        )
        self._limited_bytes, self._limited_s = limited_bytes, limited_s
        self._sent_bytes, self._busy_s = sent_bytes, busy_s
        is_faster = measured > _FASTER * self._believed_bytes_per_s
        self._believed_bytes_per_s = max(self._believed_bytes_per_s, measured)
        before = self.bytes_per_s
        self.bytes_per_s = math.inf if is_faster else _HEADROOM * self._believed_bytes_per_s
        return self.bytes_per_s != before
