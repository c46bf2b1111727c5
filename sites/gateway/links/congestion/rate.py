"""Measures the link to one peer, and decides how fast frames may leave. Pure.

- `IdleRoundTrip`: the round trip while nothing else is in flight;
- `WayBack`: queueing delay of acknowledgements;
- `LimitedRate`: the link's bandwidth, for the coordinator's planner;
- `Pace`: TCP's pacing rate, from the kernel's count of delivered segments.

TCP decides how much is in flight and how fast it leaves (`kernel.py`), up to the rate of `Pace`. A
gateway hands TCP frames up to a window. `window_bytes` is the widest window: a limit of memory, far
beyond a link's BDP. `window.py` has the narrower one, which leaves competing flows their part.

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
"""Widest window in bandwidth-delay products: a router's queue can hold one BDP, and a connection
that repairs a loss has another one in flight."""
_FEW_FRAMES = 4
_IDLE_ROUND_TRIPS = 8
"""The idle round trip is the shortest of this many latest ones measured on the idle link."""

WARM_ROUND_TRIPS = 8
"""Round trips of slow start after a pause: ten packets, doubled in each, are 2 MB in the last."""

_HEADROOM = 1.25
"""Pace as a multiple of the believed rate; BBR probes for more bandwidth with the same factor."""
_SLOW = 0.8
"""A link that carries less than this part of its best rate counts as slow."""
_FASTER = 1.1
"""A measurement this many times above the believed rate means that the link is faster."""
_SEARCH = 1.6
"""While searching, the believed rate is this multiple of the measured one, so that the pace, with
its headroom, is twice that."""
_DRIFT = 1e-4
"""Drift between two clocks, in seconds per second."""
_CLOCK_S = 0.5
"""An acknowledgement that seems to have waited this much longer than packets did not wait: a clock
stood still."""
_LATELY_S = 0.15
"""Age up to which an acknowledgement counts as recent."""
_ENOUGH_S = 0.25
"""Shortest time over which a rate is measured. Over less, a busy processor distorts it."""
_MEASUREMENTS = 4
"""Measurements that must agree before a link counts as slow. A single one may be due to a loss."""
_SEARCH_S = 5.0
"""A search without a measurement ends after this time: only short bursts are sent."""


def window_bytes(config: GatewayConfig, link: PeerLink) -> int:
    """Return the upper limit on unacknowledged bytes to a peer."""
    if config.window_bytes is not None:
        return config.window_bytes
    frames_bytes = _FEW_FRAMES * (config.chunk_bytes + HEADER_BYTES)
    return max(int(_WINDOW_BDP * link.bytes_per_s * link.rtt_s), _WINDOW_MIN_BYTES, frames_bytes)


class IdleRoundTrip:
    """The round trip of a link while idle, measured by greetings."""

    def __init__(self, rtt_s: float) -> None:
        """Begin with the described round trip."""
        self._rtts_s = deque([rtt_s], maxlen=_IDLE_ROUND_TRIPS)
        self._is_measured = False

    @property
    def shortest_s(self) -> float:
        """The shortest round trip, which waited in no queue."""
        return min(self._rtts_s)

    @property
    def median_s(self) -> float | None:
        """Median of the latest round trips on the idle link; None before the first.

        The median of two is the shorter one: the other may have had to connect, which takes two or
        three round trips.
        """
        return median_low(self._rtts_s) if self._is_measured else None

    def note(self, rtt_s: float, *, is_idle: bool) -> None:
        """Take a greeting's round trip; unless the link was idle, only a shorter one counts."""
        if is_idle and not self._is_measured:
            # Replaced as a whole: readers hold no lock.
            self._rtts_s = deque([rtt_s], maxlen=_IDLE_ROUND_TRIPS)
            self._is_measured = True
        elif is_idle or rtt_s < self.shortest_s:
            self._rtts_s.append(rtt_s)


class WayBack:
    """Queueing delay of acknowledgements on their way back, without synchronised clocks.

    An acknowledgement carries the time at which it left. Its travel time is known up to the offset
    of the two clocks, which is the same for all. So the quickest one waited in no queue, and any
    excess over it is queueing delay.
    """

    def __init__(self) -> None:
        self._shortest_s = math.inf
        self._noted_s = 0.0
        self._lately: deque[tuple[float, float]] = deque()
        """The recent acknowledgements: (arrival time, travel time including the clock offset)."""

    def note(self, left_s: float, now_s: float) -> None:
        """Record an acknowledgement that left at `left_s` by the peer's clock."""
        took_s = now_s - left_s
        drifted_s = self._shortest_s + _DRIFT * (now_s - self._noted_s)
        self._shortest_s, self._noted_s = min(drifted_s, took_s), now_s
        while self._lately and self._lately[0][0] < now_s - _LATELY_S:
            self._lately.popleft()
        self._lately.append((now_s, took_s))

    def waited_s(self, now_s: float, longer_s: float) -> float:
        """Return the queueing delay of recent acknowledgements; 0 without any.

        Round trips are now longer than the shortest one by `longer_s`, which bounds the delay. A
        much larger estimate means that the peer's clock stood still (its machine was suspended or
        moved). Then the measurement restarts.
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
    """Measures a link's bandwidth from times in which the link, and not the sender, was the limit.

    If a frame left at least a round trip before its predecessor was acknowledged, the link had work
    all the time between the two acknowledgements. The bytes acknowledged in that time give the
    bandwidth. After a pause the first round trips do not count: connections start slowly, and plans
    know that.
    """

    def __init__(self) -> None:
        self.limited_bytes = 0
        self.limited_s = 0.0
        self._warm_s = 0.0
        self._acknowledged_s = 0.0
        """When the latest frame was acknowledged."""

    def begin(self, now_s: float, rtt_s: float) -> None:
        """A frame leaves while nothing else is in flight."""
        self._warm_s = now_s + WARM_ROUND_TRIPS * rtt_s

    def arrive(self, size_bytes: int, left_s: float, now_s: float, rtt_s: float) -> None:
        """A frame was acknowledged."""
        before_s, self._acknowledged_s = self._acknowledged_s, now_s
        if before_s >= max(self._warm_s, left_s + rtt_s):
            self.limited_bytes += size_bytes
            self.limited_s += now_s - before_s


class Pace:
    """Pacing rate of a link: somewhat above its believed bandwidth.

    TCP knows a link's rate once the link has been full for some round trips. Before that, and
    whenever it begins anew, BBR sends 2.9 times as fast as its window suggests (Linux,
    bbr_high_gain). A short burst is over before BBR knows better. What routers cannot queue of it
    is lost, and to send that again takes longer than the burst.

    The believed bandwidth is the described one, or the highest measured. If a link turns out to be
    faster, frames leave at twice the measured rate until the next measurement, and so on until it
    finds no more. Without a limit BBR would lose thousands of packets meanwhile.

    If the run has only a share of a link, frames never leave faster than the share.

    If several gateways send over one link, each begins with its part.
    """

    def __init__(
        self, bytes_per_s: float, *, is_shared: bool = False, num_senders: int = 1
    ) -> None:
        """Begin with the described rate, of which this gateway has one of `num_senders` parts."""
        self._is_shared = is_shared
        bytes_per_s /= num_senders
        self.bytes_per_s = bytes_per_s if is_shared else _HEADROOM * bytes_per_s
        """Pace of all connections together."""
        self.believed_bytes_per_s = bytes_per_s
        """Believed bandwidth of the link."""
        self.is_searching = False
        """Whether the latest measurement found the link faster than believed."""
        self._searching_since_s = 0.0
        self.most_bytes_per_s = bytes_per_s
        """The described bandwidth, or the highest measured."""
        self.carried = 1.0
        """Latest measurement divided by `most_bytes_per_s`."""
        self._lately: deque[float] = deque(maxlen=_MEASUREMENTS)
        """The last few values of `carried`."""
        self.is_measured = False
        """Whether any rate was measured; before, the believed rate is the described one."""
        self._delivered = 0
        """Segments delivered, at the latest sample."""
        self._looked_s: float | None = None
        """When the latest sample was taken; None: the link was idle."""
        self._warm_s = 0.0
        """From this time on, arrivals were sent after the pause, and may be measured."""
        self._carried_bytes, self._spent_s = 0, 0.0

    @property
    def is_slow(self) -> bool:
        """Whether the link has carried clearly less than its best rate for some time."""
        lately = self._lately
        return len(lately) == _MEASUREMENTS and sum(lately) < _SLOW * _MEASUREMENTS

    def rest(self) -> None:
        """Forget the latest sample: nothing is in flight, or other connections are counted."""
        self._looked_s = None

    def follow(self, delivered: int, segment_bytes: int, now_s: float, rtt_s: float) -> bool:
        """Take a sample of a link with frames in flight; return whether the pace changes.

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
        """Return the measured bytes per second; None: too early to tell. Arguments as `follow`."""
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
        """Update the believed rate and the pace from a measurement."""
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
