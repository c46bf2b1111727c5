"""What one gateway still has to send to another, and what it waits to have acknowledged.

Pure; the link puts its lock and its clock around it.
"""

from __future__ import annotations

import dataclasses
import heapq
from dataclasses import dataclass, field

from protos.frame import ChunkKey
from sites.gateway.links.limited_rate import LimitedRate
from sites.gateway.links.window import Departure, Window

PAUSE_S = 0.2
"""What TCP waits at least (Linux) before it takes a connection for idle."""


@dataclass(order=True, slots=True)
class Outgoing:
    """One frame on its way; ordered by round, bucket, chunk, kind."""

    order: tuple[int, int, int, int]
    key: ChunkKey = field(compare=False)
    data: bytes = field(compare=False)
    raw_bytes: int = field(compare=False)
    """float32 bytes of the chunk."""
    stream: int = field(default=-1, compare=False)
    """Which stream took it."""
    sent_s: float = field(default=0.0, compare=False)
    departure: Departure | None = field(default=None, compare=False)


def outgoing(key: ChunkKey, data: bytes, raw_bytes: int) -> Outgoing:
    """Return a frame that has not been sent."""
    return Outgoing((key.round, key.bucket, key.chunk, int(key.kind)), key, data, raw_bytes)


@dataclass(slots=True)
class LinkTotals:
    """What a link has carried: sums over the run, for protos/metrics.py."""

    sent_bytes: int = 0
    raw_bytes: int = 0
    sent_frames: int = 0
    busy_s: float = 0.0
    rtt_s: float = float("inf")
    """Smallest time from a frame's sending to its acknowledgement; infinite before the first."""
    num_pauses: int = 0
    """Times with nothing on the way that were longer than PAUSE_S."""
    paused_s: float = 0.0
    """All of them together."""
    limited_bytes: int = 0
    """What was carried while the link was the limit (sites/gateway/links/limited_rate.py)."""
    limited_s: float = 0.0
    """For how long it was."""
    idle_rtt_s: float | None = None
    """Round trip of the idle link: the median of the latest greetings; None before the first."""


class SendQueue:
    """Frames in order, under a window of unacknowledged bytes."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.unsent_bytes = 0
        self.unacknowledged_bytes = 0
        self._unsent: list[Outgoing] = []
        self._unacknowledged: dict[ChunkKey, Outgoing] = {}
        self._totals = LinkTotals()
        self._limited = LimitedRate()
        self._busy_since_s = 0.0
        self._idle_since_s: float | None = None
        """None: before the first frame, and while any is on the way."""
        self._is_held = False
        """The next frame had to wait."""

    def push(self, item: Outgoing) -> None:
        """Take a frame; its key was never pushed before."""
        heapq.heappush(self._unsent, item)
        self.unsent_bytes += len(item.data)

    def take(self, stream: int, now_s: float) -> Outgoing | None:
        """Return the next frame for a stream to send, or None while it must wait.

        One frame may always be on its way, however small the window.
        """
        size = len(self._unsent[0].data) if self._unsent else 0
        is_alone = not self._unacknowledged
        if self._must_wait(size, now_s):
            self._is_held = bool(self._unsent)
            return None
        if not self._unsent:
            self.window.run_dry(self.unacknowledged_bytes)
            return None
        item = heapq.heappop(self._unsent)
        item.stream, item.sent_s = stream, now_s
        item.departure = self.window.depart(size, now_s, is_alone=is_alone, was_held=self._is_held)
        self._is_held = False
        if is_alone:
            self._begin_busy(now_s)
            self._limited.begin(now_s, self.window.rtt_s)
        self._unacknowledged[item.key] = item
        self.unsent_bytes -= size
        self.unacknowledged_bytes += size
        return item

    def note_idle(self, now_s: float) -> None:
        """A stream has waited for a frame: the link has run dry, unless the window was full."""
        if not self._unsent and not self._must_wait(0, now_s):
            self.window.run_dry(self.unacknowledged_bytes)

    def _must_wait(self, size_bytes: int, now_s: float) -> bool:
        """Return whether a frame may not leave yet."""
        on_the_way = self.unacknowledged_bytes
        is_full = on_the_way > 0 and on_the_way + size_bytes > self.window.num_bytes
        return is_full or self.window.delay_s(now_s) > 0

    def acknowledge(self, key: ChunkKey, now_s: float) -> None:
        """Count a frame as delivered. An unknown or repeated key changes nothing."""
        item = self._unacknowledged.pop(key, None)
        if item is None:
            return
        self.unacknowledged_bytes -= len(item.data)
        assert item.departure is not None
        self.window.arrive(len(item.data), item.departure, now_s)
        self._limited.arrive(len(item.data), item.sent_s, now_s, self.window.rtt_s)
        totals = self._totals
        totals.sent_bytes += len(item.data)
        totals.raw_bytes += item.raw_bytes
        totals.sent_frames += 1
        totals.rtt_s = min(totals.rtt_s, now_s - item.sent_s)
        if not self._unacknowledged:
            self._end_busy(now_s)

    def requeue(self, stream: int, now_s: float) -> int:
        """A stream broke: what it has not had acknowledged is sent again. Return how many."""
        lost = [item for item in self._unacknowledged.values() if item.stream == stream]
        for item in lost:
            del self._unacknowledged[item.key]
            self.unacknowledged_bytes -= len(item.data)
            self.push(item)
        if lost and not self._unacknowledged:
            self._end_busy(now_s)
        return len(lost)

    def clear(self, now_s: float) -> None:
        """Forget every frame: the peer has what it needs, or will never have it."""
        if self._unacknowledged:
            self._end_busy(now_s)
        self._unsent.clear()
        self._unacknowledged.clear()
        self.unsent_bytes = self.unacknowledged_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether everything pushed has been acknowledged."""
        return not self._unsent and not self._unacknowledged

    def totals(self, now_s: float) -> LinkTotals:
        """Return a copy of the sums, up to now."""
        busy_s = now_s - self._busy_since_s if self._unacknowledged else 0.0
        return dataclasses.replace(
            self._totals,
            busy_s=self._totals.busy_s + busy_s,
            limited_bytes=self._limited.limited_bytes,
            limited_s=self._limited.limited_s,
            idle_rtt_s=self.window.idle_rtt_s,
        )

    def _begin_busy(self, now_s: float) -> None:
        if self._idle_since_s is not None:
            idle_s = now_s - self._idle_since_s
            if idle_s > PAUSE_S:
                self._totals.num_pauses += 1
                self._totals.paused_s += idle_s
            self._idle_since_s = None
        self._busy_since_s = now_s

    def _end_busy(self, now_s: float) -> None:
        self._totals.busy_s += now_s - self._busy_since_s
        self._idle_since_s = now_s
