"""A directed link that sends one flow after another. Pure.

A flow is some chunks of one bucket on one tree. The link takes waiting flows in the order of their
keys, (step, bucket, segment), as a gateway's queue does, at its full rate. A flow's first granule,
as many chunks as are side by side on the link, arrives one granule's time and half a round trip
after it began; the next site passes it on from then on, for chunks are reduced one by one
(topology/simulator/servers.py says when this is exact).

TCP starts slowly, and after a pause longer than its time-out, RTT + 0.2 s, with a part of the
window that it had (topology/cost/slow_start.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from topology.cost.slow_start import RTO_MIN_S, num_halvings, unused_s, window_after, windows
from topology.simulator.engine import Engine

Key = tuple[int, int, int]
"""Step, bucket, segment."""
Deliver = Callable[[int, int, int, float], None]
"""Called when the first granule has arrived: with the site that has it, bucket, segment, and the
time at which the last granule will have arrived."""


@dataclass(slots=True)
class Flow:
    """Bytes that go over a link together; of the same ones to several sites, one is enough."""

    key: Key
    """Lower ones go first."""
    num_bytes: float
    """On the wire."""
    granule_bytes: float
    last_s: float
    """When the last of it is there to be sent; the first is when it is given to the link."""
    deliver: Deliver


class FifoLink:
    """One direction between two sites."""

    def __init__(
        self,
        engine: Engine,
        target: int,
        bytes_per_s: float,
        rtt_s: float,
        first_window_bytes: float | None = None,
        granules: float = 1.0,
    ) -> None:
        """Make a link that was idle for ever.

        Args:
            engine: the clock.
            target: the site that it leads to.
            bytes_per_s: its rate.
            rtt_s: half of it is the delay.
            first_window_bytes: of all connections together; None: there is no slow start.
            granules: of a flow, that are side by side on this link.
        """
        self.bytes_per_s = bytes_per_s
        self.delay_s = rtt_s / 2
        self.busy_s = 0.0
        self.sent_bytes = 0.0
        self._engine = engine
        self._target = target
        self._rtt_s = rtt_s
        self._first_window_bytes = first_window_bytes
        self._granules = granules
        self._waiting: list[tuple[Key, int, Flow]] = []
        self._num_sent = 0
        self._free_s = float("-inf")
        """When what it sends now has left, or when it last sent something."""
        self._is_cut = False
        self._will_look = False
        """Something waits, and an action looks at it once the link is free."""
        self._window_bytes = first_window_bytes
        """With which the latest burst began."""
        self._ramp_bytes = self._ramp()
        """After so many, the window fills the link."""
        self._grown_bytes = 0.0
        """Sent since then."""

    def send(self, flow: Flow) -> None:
        """Take a flow whose first granule is there."""
        heapq.heappush(self._waiting, (flow.key, self._num_sent, flow))
        self._num_sent += 1
        if self._is_cut or self._will_look:
            return
        if self._engine.now_s >= self._free_s:
            self._begin()
        else:
            self._look_later()

    def change(
        self,
        *,
        bytes_per_s: float | None = None,
        delay_s: float | None = None,
        is_cut: bool | None = None,
    ) -> None:
        """Be another link from the next flow on; what is None stays. What is on its way arrives."""
        self.bytes_per_s = self.bytes_per_s if bytes_per_s is None else bytes_per_s
        if delay_s is not None:
            self.delay_s, self._rtt_s = delay_s, 2 * delay_s
        self._ramp_bytes = self._ramp()
        self._is_cut = self._is_cut if is_cut is None else is_cut
        if self._waiting and not self._is_cut and not self._will_look:
            self._look_later()

    def _begin(self) -> None:
        now_s, flow = self._engine.now_s, heapq.heappop(self._waiting)[2]
        self._shrink(now_s - self._free_s)
        granule_bytes = min(flow.num_bytes, self._granules * flow.granule_bytes)
        work_s, granule_s = self._time_s(flow.num_bytes), self._time_s(granule_bytes)
        self._grown_bytes += flow.num_bytes
        self._free_s = now_s + work_s
        self.busy_s += work_s
        self.sent_bytes += flow.num_bytes
        last_s = max(self._free_s, flow.last_s + granule_bytes / self.bytes_per_s)
        _, bucket, segment = flow.key
        arrives_s, last_s = now_s + granule_s + self.delay_s, last_s + self.delay_s
        self._engine.at(arrives_s, flow.deliver, self._target, bucket, segment, last_s)

    def _look_later(self) -> None:
        self._will_look = True
        self._engine.at(max(self._engine.now_s, self._free_s), self._look)

    def _look(self) -> None:
        self._will_look = False
        if self._is_cut:
            return
        self._begin()
        if self._waiting:
            self._look_later()

    def _time_s(self, num_bytes: float) -> float:
        """Return how long the next bytes take, waiting for the window included."""
        plain_s = num_bytes / self.bytes_per_s
        if self._grown_bytes >= self._ramp_bytes:
            return plain_s
        grown_bytes = self._grown_bytes
        return plain_s + self._unused_s(grown_bytes + num_bytes) - self._unused_s(grown_bytes)

    def _shrink(self, idle_s: float) -> None:
        """Begin anew after a pause with what it left of the window; at first with the first one."""
        if self._first_window_bytes is None or idle_s <= self._rtt_s + RTO_MIN_S:
            return
        assert self._window_bytes is not None, "as there is a first one"
        window_bytes = self._first_window_bytes
        if math.isfinite(idle_s):
            link = (self.bytes_per_s, self._rtt_s)
            opened_bytes = window_after(self._grown_bytes, *link, self._window_bytes)
            left_bytes = math.ldexp(opened_bytes, -num_halvings(idle_s, self._rtt_s))
            window_bytes = max(window_bytes, left_bytes)
        self._window_bytes, self._grown_bytes = window_bytes, 0.0
        self._ramp_bytes = self._ramp()

    def _ramp(self) -> float:
        """Return after how many bytes the window fills the link."""
        if self._window_bytes is None:
            return 0.0
        return sum(windows(self.bytes_per_s, self._rtt_s, self._window_bytes))

    def _unused_s(self, num_bytes: float) -> float:
        """Return how long the link waited for its window while it sent the first `num_bytes`."""
        if self._window_bytes is None:
            return 0.0
        return unused_s(num_bytes, self.bytes_per_s, self._rtt_s, self._window_bytes)
