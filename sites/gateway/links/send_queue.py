"""Queues the frames from one gateway to another until they are acknowledged.

`SendQueue` is pure: frames in order, under a window of unacknowledged bytes. `Outbox` adds a lock
and a clock, for the threads that queue frames and the streams that carry them. No stream blocks
here: it asks for the next frame, and if none may leave, it is woken once when one is pushed.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from isthmus.protos import metrics
from isthmus.protos.frame import ChunkKey, Frame, Packed, pack
from isthmus.sites.gateway.links.congestion.rate import IdleRoundTrip, LimitedRate, WayBack

PAUSE_S = 0.2
"""Shortest pause after which TCP counts a connection as idle (Linux)."""
_CHECK_S = 1.0
"""Interval at which a wait checks again, in case a notification was missed."""


Name = tuple[ChunkKey, int]
"""A frame's key and epoch."""


@dataclass(order=True, slots=True)
class Outgoing:
    """One frame to be sent; ordered by round, bucket, chunk, kind."""

    order: tuple[int, int, int, int]
    key: ChunkKey = field(compare=False)
    epoch: int = field(compare=False)
    data: Packed = field(compare=False)
    raw_bytes: int = field(compare=False)
    """float32 bytes of the chunk."""

    @property
    def name(self) -> Name:
        """Key and epoch, which identify the frame on its link."""
        return self.key, self.epoch


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """A frame in flight: sent and not acknowledged."""

    item: Outgoing
    stream: int
    """The stream that took the frame."""
    left_s: float


def outgoing(key: ChunkKey, epoch: int, data: Packed, raw_bytes: int) -> Outgoing:
    """Return a frame that waits to be sent."""
    return Outgoing((key.round, key.bucket, key.chunk, int(key.kind)), key, epoch, data, raw_bytes)


@dataclass(slots=True)
class LinkTotals:
    """Totals of a link over the run, for protos/metrics.py."""

    sent_bytes: int = 0
    raw_bytes: int = 0
    sent_frames: int = 0
    longest_bytes: int = 0
    """Length of the longest frame."""
    busy_s: float = 0.0
    rtt_s: float = float("inf")
    """Smallest time from a frame's sending to its acknowledgement; infinite before the first."""
    num_pauses: int = 0
    """Number of pauses: times longer than PAUSE_S with nothing in flight."""
    paused_s: float = 0.0
    """Total length of these pauses."""
    limited_bytes: int = 0
    """Bytes carried while the link was the bottleneck (`LimitedRate`)."""
    limited_s: float = 0.0
    """Time during which the link was the bottleneck."""
    idle_rtt_s: float | None = None
    """Round trip of the idle link: median of the latest greetings; None before the first."""

    def after(self, past: LinkTotals) -> LinkTotals:
        """Return the totals of this link and of an earlier one to the same gateway."""
        return LinkTotals(
            sent_bytes=past.sent_bytes + self.sent_bytes,
            raw_bytes=past.raw_bytes + self.raw_bytes,
            sent_frames=past.sent_frames + self.sent_frames,
            longest_bytes=max(past.longest_bytes, self.longest_bytes),
            busy_s=past.busy_s + self.busy_s,
            rtt_s=min(past.rtt_s, self.rtt_s),
            num_pauses=past.num_pauses + self.num_pauses,
            paused_s=past.paused_s + self.paused_s,
            limited_bytes=past.limited_bytes + self.limited_bytes,
            limited_s=past.limited_s + self.limited_s,
            idle_rtt_s=self.idle_rtt_s,
        )


def link_values(totals: Sequence[LinkTotals]) -> dict[str, float]:
    """Return a metric's values (protos/metrics.py) for the links to a site's gateways."""
    sent_bytes = sum(each.sent_bytes for each in totals)
    busy_s = max(each.busy_s for each in totals)
    values: dict[str, float] = {
        metrics.SENT_BYTES: sent_bytes,
        metrics.RAW_BYTES: sum(each.raw_bytes for each in totals),
        metrics.SENT_FRAMES: sum(each.sent_frames for each in totals),
        metrics.BUSY_S: busy_s,
        metrics.LIMITED_BYTES: sum(each.limited_bytes for each in totals),
        metrics.LIMITED_S: max(each.limited_s for each in totals),
    }
    if busy_s > 0:
        values[metrics.THROUGHPUT_BYTES_PER_S] = sent_bytes / busy_s
    rtt_s = min(each.rtt_s for each in totals)
    if math.isfinite(rtt_s):
        values[metrics.RTT_S] = rtt_s
    idle_rtts_s = [each.idle_rtt_s for each in totals if each.idle_rtt_s is not None]
    if idle_rtts_s:
        values[metrics.IDLE_RTT_S] = min(idle_rtts_s)
    return values


class SendQueue:
    """Frames in order, under a window of unacknowledged bytes."""

    def __init__(self, window_bytes: int, rtt_s: float) -> None:
        """Limit unacknowledged bytes to a window; `rtt_s` is the described round trip."""
        self.window_bytes = window_bytes
        self.on_the_way_bytes = window_bytes
        """Limit on bytes that TCP has not acknowledged."""
        self.round_trip = IdleRoundTrip(rtt_s)
        self.unsent_bytes = 0
        self.unacknowledged_bytes = 0
        self._unsent: list[Outgoing] = []
        self._least_epoch = 0
        self.unacknowledged: dict[Name, OnTheWay] = {}
        self._padding: Iterator[Outgoing] = iter(())
        self._unacknowledged_padding: dict[Name, OnTheWay] = {}
        """Padding frames in flight; they count in no totals."""
        self._totals = LinkTotals()
        self._limited = LimitedRate()
        self._busy_since_s = 0.0
        self._idle_since_s: float | None = None
        """Since when nothing is in flight. None before the first frame, and while any is."""

    def push(self, item: Outgoing) -> None:
        """Queue a frame, whose name must be new. From then on no padding is sent."""
        self._padding = iter(())
        heapq.heappush(self._unsent, item)
        self.unsent_bytes += len(item.data)

    def take(self, stream: int, now_s: float) -> Outgoing | None:
        """Return the next frame for a stream; None if the window is full or no frame waits.

        One frame may always be in flight, however small the window.
        """
        if not self._unsent:
            return self._take_padding(stream, now_s)
        size = len(self._unsent[0].data)
        is_alone = not self.unacknowledged
        if self.unacknowledged_bytes and self.unacknowledged_bytes + size > self.window_bytes:
            return None
        item = heapq.heappop(self._unsent)
        if is_alone:
            self._begin_busy(now_s)
            self._limited.begin(now_s, self.round_trip.shortest_s)
        self.unacknowledged[item.name] = OnTheWay(item, stream, now_s)
        self.unsent_bytes -= size
        self.unacknowledged_bytes += size
        return item

    def warm_up(self, padding: Iterator[Outgoing]) -> None:
        """Send padding for as long as nothing is pushed."""
        self._padding = padding

    def _take_padding(self, stream: int, now_s: float) -> Outgoing | None:
        if self.unacknowledged_bytes >= self.window_bytes:
            return None
        item = next(self._padding, None)
        if item is not None:
            self._unacknowledged_padding[item.name] = OnTheWay(item, stream, now_s)
            self.unacknowledged_bytes += len(item.data)
        return item

    def acknowledge(self, name: Name, now_s: float) -> None:
        """Count a frame as delivered. An unknown or repeated name changes nothing."""
        padding = self._unacknowledged_padding.pop(name, None)
        if padding is not None:
            self.unacknowledged_bytes -= len(padding.item.data)
        in_flight = self.unacknowledged.pop(name, None)
        if in_flight is None:
            return
        size = len(in_flight.item.data)
        self.unacknowledged_bytes -= size
        self._limited.arrive(size, in_flight.left_s, now_s, self.round_trip.shortest_s)
        totals = self._totals
        totals.sent_bytes += size
        totals.raw_bytes += in_flight.item.raw_bytes
        totals.sent_frames += 1
        totals.longest_bytes = max(totals.longest_bytes, size)
        totals.rtt_s = min(totals.rtt_s, now_s - in_flight.left_s)
        if not self.unacknowledged:
            self._end_busy(now_s)

    def requeue(self, stream: int, now_s: float) -> int:
        """Queue the unacknowledged frames of a broken stream again; return how many."""
        for each in list(self._unacknowledged_padding.values()):
            if each.stream == stream:
                self.acknowledge(each.item.name, now_s)
        lost = [each.item for each in self.unacknowledged.values() if each.stream == stream]
        for item in lost:
            del self.unacknowledged[item.name]
            self.unacknowledged_bytes -= len(item.data)
            if item.epoch >= self._least_epoch:
                self.push(item)
        if lost and not self.unacknowledged:
            self._end_busy(now_s)
        return len(lost)

    def left_s(self, stream: int) -> float | None:
        """Return when the stream's oldest unacknowledged frame was sent; None: there is none."""
        on_the_way = (*self.unacknowledged.values(), *self._unacknowledged_padding.values())
        return min((each.left_s for each in on_the_way if each.stream == stream), default=None)

    def drop_before(self, epoch: int) -> None:
        """Drop queued frames of older epochs."""
        self._least_epoch = epoch
        self._unsent = [each for each in self._unsent if each.epoch >= epoch]
        heapq.heapify(self._unsent)
        self.unsent_bytes = sum(len(each.data) for each in self._unsent)

    def clear(self, now_s: float) -> None:
        """Drop every frame: the peer needs no more, or is lost."""
        if self.unacknowledged:
            self._end_busy(now_s)
        self._unsent.clear()
        self.unacknowledged.clear()
        self._padding = iter(())
        self._unacknowledged_padding.clear()
        self.unsent_bytes = self.unacknowledged_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether every frame is acknowledged, and no padding is in flight."""
        return not self._unsent and not self.unacknowledged_bytes

    @property
    def num_in_flight(self) -> int:
        """Frames that share the bytes on the way, by the longest frame so far."""
        return max(1, -(-self.on_the_way_bytes // max(1, self._totals.longest_bytes)))

    def totals(self, now_s: float) -> LinkTotals:
        """Return a copy of the sums, up to now."""
        busy_s = now_s - self._busy_since_s if self.unacknowledged else 0.0
        return dataclasses.replace(
            self._totals,
            busy_s=self._totals.busy_s + busy_s,
            limited_bytes=self._limited.limited_bytes,
            limited_s=self._limited.limited_s,
            idle_rtt_s=self.round_trip.median_s,
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


class Outbox:
    """A thread-safe `SendQueue` with a clock: the frames of one link."""

    def __init__(self, window_bytes: int, rtt_s: float) -> None:
        """Limit unacknowledged bytes to a window; `rtt_s` is the described round trip."""
        self.closed = threading.Event()
        """Set once this side has ended the link."""
        self.has_left = False
        """The peer needs no more frames, or is lost."""
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._is_waited_for = False
        """Whether the latest stream that asked for a frame got none."""
        self._emptied = threading.Condition(self._lock)
        self._queue = SendQueue(window_bytes, rtt_s)
        self._way_back = WayBack()
        self._stuck_since_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent."""
        return self.closed.is_set() or self.has_left

    @property
    def window_bytes(self) -> int:
        """The window: upper limit on unacknowledged bytes."""
        return self._queue.window_bytes

    @property
    def num_in_flight(self) -> int:
        """Frames that fit the window, by the longest frame so far."""
        return self._queue.num_in_flight

    @property
    def on_the_way_bytes(self) -> int:
        """Limit on bytes that TCP has not acknowledged, on all connections together."""
        return self._queue.on_the_way_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the window."""
        return self._queue.unsent_bytes

    @property
    def is_empty(self) -> bool:
        """Whether everything has been acknowledged."""
        return self._queue.is_empty

    def push(self, frame: Frame, raw_bytes: int) -> int:
        """Queue a frame and return its size in bytes; 0 if the peer has left, and it is dropped."""
        data = pack(frame)
        with self._lock:
            if self.has_left:
                return 0
            is_waited_for = self._is_waited_for
            # If frames wait already, they wait for the window, and not for a stream.
            is_first = not self._queue.unsent_bytes
            self._queue.push(outgoing(frame.key, frame.epoch, data, raw_bytes))
        if is_waited_for and is_first:
            self._wake()
        return len(data)

    def warm_up(self, padding: Iterator[Outgoing]) -> None:
        """Send padding until a frame is pushed; the caller wakes the streams."""
        with self._lock:
            if not self.has_left:
                self._queue.warm_up(padding)

    def listen(self, wake: Callable[[], None]) -> None:
        """Set the callback (any thread) for when there may be a frame for waiting streams."""
        self._wake = wake

    def take(self, stream: int) -> Outgoing | None:
        """Return the next frame for a stream; None: no frame may leave, or the link has ended.

        Then the stream waits for `wake`, or for an acknowledgement, which makes room in the window.
        """
        with self._lock:
            if self.is_over:
                return None
            item = self._queue.take(stream, time.monotonic())
            self._is_waited_for = item is None
            return item

    def acknowledge(self, key: ChunkKey, epoch: int, left_s: float) -> None:
        """Count a frame that the peer acknowledged at `left_s` by its own clock."""
        with self._lock:
            now_s = time.monotonic()
            self._way_back.note(left_s, now_s)
            self._queue.acknowledge((key, epoch), now_s)
            self._stuck_since_s = None
            if self._queue.is_empty:
                self._emptied.notify_all()

    def drop_before(self, epoch: int) -> None:
        """Drop queued frames of older epochs."""
        with self._lock:
            self._queue.drop_before(epoch)
            if self._queue.is_empty:
                self._stuck_since_s = None
                self._emptied.notify_all()

    def left_s(self, stream: int) -> float | None:
        """Return when the stream's oldest unacknowledged frame was sent; None: there is none."""
        with self._lock:
            return self._queue.left_s(stream)

    def note_stuck(self, since_s: float) -> None:
        """Note that a connection was given up: no frame got across since `since_s`."""
        with self._lock:
            if self._stuck_since_s is None:
                self._stuck_since_s = since_s

    @property
    def stuck_s(self) -> float:
        """Seconds without any acknowledgement since connections were given up; 0: not stuck."""
        since_s = self._stuck_since_s  # other threads write it
        return 0.0 if since_s is None else time.monotonic() - since_s

    def requeue(self, stream: int) -> int:
        """Queue the unacknowledged frames of a broken stream again; return how many."""
        with self._lock:
            again = self._queue.requeue(stream, time.monotonic())
            if self._queue.is_empty:
                self._stuck_since_s = None
        if again:
            self._wake()
        return again

    def wait_empty(self, deadline_s: float) -> bool:
        """Wait until everything is acknowledged; return whether it was by then (monotonic)."""
        with self._lock:
            self._queue.warm_up(iter(()))
            while not self._queue.is_empty and not self.closed.is_set():
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._emptied.wait(min(remaining_s, _CHECK_S))
            return True

    def note_round_trip(self, rtt_s: float, *, is_idle: bool) -> None:
        """Note a greeting's round trip; `is_idle`: nothing was in flight when it left."""
        with self._lock:
            self._queue.round_trip.note(rtt_s, is_idle=is_idle and self._queue.is_empty)

    def leave(self) -> None:
        """Drop all frames: the peer needs no more, or is lost."""
        with self._lock:
            self.has_left = True
            self._queue.clear(time.monotonic())
            self._emptied.notify_all()

    def close(self) -> None:
        """End all waits, and drop unacknowledged frames."""
        with self._lock:
            self.closed.set()
            self._queue.clear(time.monotonic())
            self._emptied.notify_all()

    def limit(self, on_the_way_bytes: int) -> None:
        """Change how many bytes may be on the way that TCP has not acknowledged."""
        with self._lock:
            self._queue.on_the_way_bytes = on_the_way_bytes

    def waited_back_s(self, longer_s: float) -> float:
        """Return the queueing delay of acknowledgements.

        Args:
            longer_s: how much longer round trips are now than the shortest one.
        """
        with self._lock:
            return self._way_back.waited_s(time.monotonic(), longer_s)

    def totals(self) -> LinkTotals:
        """Return the link's totals so far."""
        with self._lock:
            return self._queue.totals(time.monotonic())
