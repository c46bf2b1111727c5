"""What is measured of the link to one peer, and how fast its frames may leave. Pure.

- `IdleRoundTrip`: the round trip while nothing else is on the way;
- `WayBack`: how long acknowledgements wait in queues;
- `LimitedRate`: what the link carries, for the coordinator, which plans trees by it;
- `Pace`: how fast TCP may send, by what the kernel says has arrived.

TCP decides how much is on the way and how fast it leaves (`kernel.py`), but no faster than `Pace`
says. A gateway hands TCP frames as fast as it takes them, up to a window. `window_bytes` is the
widest one. That is a limit of memory, far beyond what a link holds. `window.py` has the narrower
one, which leaves others their part.

All times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low

from isthmus.protos.frame import HEADER_BYTES
from isthmus.sites.gateway.config import GatewayConfig, PeerLink

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
_SLOW = 0.8
"""A link that carries less than this part of what it can carries clearly less."""
_FASTER = 1.1
"""A link that carries so many times what it is believed to carry is taken for a faster one."""
_SEARCH = 1.6
"""A faster link is believed to carry so many times what was measured, so that the pace, with its
headroom, is twice that."""
_DRIFT = 1e-4
"""Seconds that two clocks may drift apart in a second."""
_CLOCK_S = 0.5
"""An acknowledgement that seems to have waited so much longer than packets do did not: a clock
stood still."""
_LATELY_S = 0.15
"""Acknowledgements that came in so many seconds are the latest ones."""
_ENOUGH_S = 0.25
"""A rate is measured over so much time. In less, a busy processor could be what is measured."""
_MEASUREMENTS = 4
"""A link is found to be slow by so many of them. One may be that of a loss that is being mended."""
_SEARCH_S = 5.0
"""A search ends after so long, though nothing was measured: only short bursts are sent."""


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


class WayBack:
    """How long acknowledgements wait in queues on their way back, whatever the peer's clock says.

    An acknowledgement says when it left. How long it took is known from that, but for what the two
    clocks differ by. That is the same for all. So the quickest one waited in no queue, and what
    another took longer is what it waited.
    """

    def __init__(self) -> None:
        self._shortest_s = math.inf
        self._noted_s = 0.0
        self._lately: deque[tuple[float, float]] = deque()
        """When each of the latest acknowledgements came, and how long it took."""

    def note(self, left_s: float, now_s: float) -> None:
        """An acknowledgement came that left at `left_s` by the peer's clock."""
        took_s = now_s - left_s
        drifted_s = self._shortest_s + _DRIFT * (now_s - self._noted_s)
        self._shortest_s, self._noted_s = min(drifted_s, took_s), now_s
        while self._lately and self._lately[0][0] < now_s - _LATELY_S:
            self._lately.popleft()
        self._lately.append((now_s, took_s))

    def waited_s(self, now_s: float, longer_s: float) -> float:
        """Return how long the latest acknowledgements waited; 0 if none came lately.

        Round trips are now longer than the shortest one by `longer_s`. Nothing can have waited much
        longer than that on its way back. If something seems to have, the peer's clock stood still:
        its machine was suspended, or moved. Then the measuring begins anew.
        """
        took_s = [took_s for came_s, took_s in self._lately if came_s >= now_s - _LATELY_S]
        if not took_s:
            return 0.0
        waited_s = max(0.0, min(took_s) - self._shortest_s)
        if waited_s > longer_s + _CLOCK_S:
            self._shortest_s, self._noted_s = min(took_s), now_s
            return 0.0
        return waited_s


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

    TCP knows a link's rate once the link has been full for some round trips. Before that, and
    whenever it begins anew, BBR sends 2.9 times as fast as its window suggests (Linux,
    bbr_high_gain). A short burst is over before BBR knows better. What routers cannot queue of it
    is lost, and to send that again takes longer than the burst.

    A link is believed to carry what is described, or the most that was measured. Where a link turns
    out to be faster than that, frames leave at twice the measured rate until the next measurement,
    and so on until it finds no more. Without a limit BBR would lose thousands of packets meanwhile.

    Where a run has only a share of a link, frames never leave faster than the share.

    Where several gateways send over one link side by side, each begins with its part.
    """

    def __init__(
        self, bytes_per_s: float, *, is_shared: bool = False, num_senders: int = 1
    ) -> None:
        """Begin with the described rate, of which this gateway has one of `num_senders` parts."""
        self._is_shared = is_shared
        bytes_per_s /= num_senders
        self.bytes_per_s = bytes_per_s if is_shared else _HEADROOM * bytes_per_s
        """What all connections together may send."""
        self.believed_bytes_per_s = bytes_per_s
        """What the link is believed to carry."""
        self.is_searching = False
        """Whether the link turned out to be faster in the latest measurement."""
        self._searching_since_s = 0.0
        self.most_bytes_per_s = bytes_per_s
        """What is described, or the most that was measured."""
        self.carried = 1.0
        """What the link carried in the latest measurement, as a part of `most_bytes_per_s`."""
        self._lately: deque[float] = deque(maxlen=_MEASUREMENTS)
        """The same of the latest ones."""
        self.is_measured = False
        """Whether anything was measured; else the belief is the description."""
        self._delivered = 0
        """Segments delivered, at the latest look."""
        self._looked_s: float | None = None
        """When the latest look was; None: the link was at rest."""
        self._warm_s = 0.0
        """What arrives from then on left after the rest."""
        self._carried_bytes, self._spent_s = 0, 0.0

    @property
    def is_slow(self) -> bool:
        """Whether the link has carried clearly less than it can for some time."""
        lately = self._lately
        return len(lately) == _MEASUREMENTS and sum(lately) < _SLOW * _MEASUREMENTS

    def rest(self) -> None:
        """Nothing is on the way, or what is counted is not what was counted before."""
        self._looked_s = None

    def follow(self, delivered: int, segment_bytes: int, now_s: float, rtt_s: float) -> bool:
        """Look at a link with frames on the way; return whether the pace changes.

        Args:
            delivered: segments that have arrived at the peer up to now, in whatever order.
            segment_bytes: bytes of data in each.
            now_s: monotonic.
            rtt_s: the round trip of packets that arrive now.
        """
        before = self.bytes_per_s
        if self.is_searching and now_s > self._searching_since_s + _SEARCH_S:
            self._believe(is_faster=False, now_s=now_s)
        measured = self._measured(delivered, segment_bytes, now_s, rtt_s)
        if measured is not None:
            self._learn(measured, now_s, rtt_s)
        return self.bytes_per_s != before

    def _measured(
        self, delivered: int, segment_bytes: int, now_s: float, rtt_s: float
    ) -> float | None:
        """Return what has arrived in a second, if there is enough to tell; as `follow`."""
        looked_s, self._looked_s = self._looked_s, now_s
        arrived, self._delivered = delivered - self._delivered, delivered
        if looked_s is None:
            self._warm_s = now_s + rtt_s
            return None
        if looked_s < self._warm_s or arrived < 0:
            return None  # too early to measure the link, or a connection has ended
        self._carried_bytes += arrived * segment_bytes
        self._spent_s += now_s - looked_s
        if self._spent_s < _ENOUGH_S:
            return None
        measured = self._carried_bytes / self._spent_s
        self._carried_bytes, self._spent_s = 0, 0.0
        return measured

    def _learn(self, measured: float, now_s: float, rtt_s: float) -> None:
        """Go by a measurement from now on."""
        self.is_measured = True
        self.carried = min(1.0, measured / self.most_bytes_per_s)
        self._lately.append(self.carried)
        if self._is_shared:
            return
        is_faster = measured > _FASTER * self.most_bytes_per_s
        self.most_bytes_per_s = max(self.most_bytes_per_s, measured)
        self._believe(is_faster=is_faster, now_s=now_s)
        if is_faster:
            self._warm_s = now_s + rtt_s

    def _believe(self, *, is_faster: bool, now_s: float) -> None:
        self.is_searching, self._searching_since_s = is_faster, now_s
        self.believed_bytes_per_s = self.most_bytes_per_s * (_SEARCH if is_faster else 1.0)
        self.bytes_per_s = _HEADROOM * self.believed_bytes_per_s
