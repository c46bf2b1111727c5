"""The frames of one link, shared by those who queue them and the streams that carry them.

A send queue with a lock and a clock around it. Nobody waits here for a frame: streams ask for the
next, and if there is none that may leave, they are told once when one is pushed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from protos.frame import ChunkKey, Frame, pack
from sites.gateway.links.send_queue import LinkTotals, Outgoing, SendQueue, outgoing
from sites.gateway.links.window import Window

_CHECK_S = 1.0
"""How often a wait looks around, in case that a notification was missed."""


class Outbox:
    """All methods may be called from any thread."""

    def __init__(self, window: Window) -> None:
        self.closed = threading.Event()
        """This side has ended the link."""
        self.has_left = False
        """The peer needs nothing more, or is lost."""
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = _nobody
        self._is_waited_for = False
        """The latest stream that asked for a frame got none."""
        self._emptied = threading.Condition(self._lock)
        self._queue = SendQueue(window)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent."""
        return self.closed.is_set() or self.has_left

    @property
    def window_bytes(self) -> int:
        """Unacknowledged bytes that may be on the way."""
        return self._queue.window.num_bytes

    @property
    def paced_bytes_per_s(self) -> float | None:
        """How fast packets of one connection may leave; None: nothing holds them back."""
        return self._queue.window.paced_bytes_per_s

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
        assert type(data) is bytes, "gRPC's sender hangs on anything else"
        with self._lock:
            if self.has_left:
                return 0
            is_waited_for = self._is_waited_for
            if is_waited_for:
                self._queue.note_idle(time.monotonic())
            # Where others wait already, it is for the window or the pace.
            is_first = not self._queue.unsent_bytes
            self._queue.push(outgoing(frame.key, data, raw_bytes))
        if is_waited_for and is_first:
            self._wake()
        return len(data)

    def listen(self, wake: Callable[[], None]) -> None:
        """Have streams that `take` gave nothing told, from any thread, when something may come."""
        self._wake = wake

    def take(self, stream: int) -> Outgoing | None:
        """Return what a stream may send now; None: nothing may leave, or the link has ended.

        Then it waits for `wake`, or for the pace, or for what makes room in the window: an
        acknowledgement.
        """
        with self._lock:
            if self.is_over:
                return None
            item = self._queue.take(stream, time.monotonic())
            self._is_waited_for = item is None
            return item

    def delay_s(self) -> float:
        """Return for how long the pace lets nothing leave; none if not above 0."""
        return self._queue.window.delay_s(time.monotonic())

    def acknowledge(self, key: ChunkKey) -> None:
        """A frame was taken over by the peer."""
        with self._lock:
            self._queue.acknowledge(key, time.monotonic())
            if self._queue.is_empty:
                self._emptied.notify_all()

    def requeue(self, stream: int) -> int:
        """A stream broke: what it has not had acknowledged is sent again.

        Return how many frames.
        """
        with self._lock:
            again = self._queue.requeue(stream, time.monotonic())
        if again:
            self._wake()
        return again

    def wait_empty(self, deadline_s: float) -> bool:
        """Wait until everything is acknowledged; return whether it was by then (monotonic)."""
        with self._lock:
            while not self._queue.is_empty and not self.closed.is_set():
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._emptied.wait(min(remaining_s, _CHECK_S))
            return True

    def note_round_trip(self, rtt_s: float, *, is_idle: bool) -> None:
        """A greeting was answered; `is_idle`: nothing was on the way when it left."""
        with self._lock:
            self._queue.window.note_round_trip(rtt_s, is_idle=is_idle and self._queue.is_empty)

    def widen(self, num_streams: int) -> None:
        """So many streams carry frames side by side."""
        with self._lock:
            self._queue.window.num_streams = num_streams

    def leave(self) -> None:
        """The peer needs nothing more, or is lost: what is left is dropped."""
        with self._lock:
            self.has_left = True
            self._queue.clear(time.monotonic())
            self._emptied.notify_all()

    def close(self) -> None:
        """Let all go who wait. Frames that were not acknowledged are dropped."""
        with self._lock:
            self.closed.set()
            self._queue.clear(time.monotonic())
            self._emptied.notify_all()

    def totals(self) -> LinkTotals:
        """Return what the link has carried so far."""
        with self._lock:
            return self._queue.totals(time.monotonic())


def _nobody() -> None:
    """No stream listens yet."""
