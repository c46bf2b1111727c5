"""One direction of one connection: read here, cross the link, write there.

Raw non-blocking sockets and the event loop's readers, not streams or transports: bytes are
received once and sent once, without a task, a future or a buffer copy between.

Memory is bounded: a flow is not read while its link's queue is full, nor while its receiver does
not take what has already arrived; so it holds at most the queue and what is in flight.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from enum import Enum

from orchestrator.emulator.link import Transmitter

_SLACK_S = 0.0005
"""Half the granularity of epoll: what is due this soon goes now, which centres the error on 0."""
_MAX_SENDS = 64
"""Sends of one flow before others have their turn."""


class Mark(Enum):
    """What crosses the link besides bytes."""

    FIN = "fin"
    RESET = "reset"


class SharedLink:
    """One directed link at work: its transmitter, its counters, and who waits for room."""

    def __init__(self, transmitter: Transmitter) -> None:
        self.transmitter = transmitter
        self.shape = transmitter.shape
        self.delivered_bytes = 0
        """Handed to receivers since the start."""
        self.held_bytes = 0
        """Taken from senders and not yet handed over: queued, in flight, or not accepted."""
        self._waiting: deque[Flow] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, flow: Flow) -> None:
        """Let `flow` wait until the queue has room again."""
        self._waiting.append(flow)
        if self._timer is None:
            self._timer = flow.loop.call_at(self.transmitter.room_at_s(), self._release)

    def close(self) -> None:
        """Forget who waits."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _release(self) -> None:
        self._timer = None
        while self._waiting:
            self._waiting.popleft().release()


class Flow:
    """One direction of one connection.

    Args:
        link: What it crosses.
        source: Read here; owned by the connection.
        sink: Written here; owned by the connection.
        on_lost: Called with the socket that turned out to be broken.
        on_mark: Called when a FIN or a reset has reached the sink.
    """

    def __init__(
        self,
        link: SharedLink,
        source: socket.socket,
        sink: socket.socket,
        on_lost: Callable[[socket.socket], None],
        on_mark: Callable[[Flow, Mark], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._link = link
        self._source = source
        self._sink = sink
        self._on_lost = on_lost
        self._on_mark = on_mark
        self._items: deque[tuple[float, memoryview | Mark]] = deque()
        self._last_due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._started = False
        self._reading = False
        self._held = False
        self._blocked = False
        self._ended = False
        self.is_closed = False

    def start(self) -> None:
        """Begin to read; both sockets are connected."""
        self._started = True
        self._update_reading()

    def release(self) -> None:
        """Read again: the link has room."""
        self._held = False
        self._update_reading()

    def reset(self) -> None:
        """Let a reset follow what has been taken over; nothing more is read."""
        if not self.is_closed:
            self._ended = True
            self._update_reading()
            self._admit(Mark.RESET)

    def close(self) -> None:
        """Drop everything and let go of both sockets. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._update_reading()
        if self._timer is not None:
            self._timer.cancel()
        if self._blocked:
            self.loop.remove_writer(self._sink)
        for _, item in self._items:
            if not isinstance(item, Mark):
                self._link.held_bytes -= len(item)
        self._items.clear()

    def _update_reading(self) -> None:
        wanted = self._started and not (
            self._held or self._blocked or self._ended or self.is_closed
        )
        if wanted and not self._reading:
            self.loop.add_reader(self._source, self._read)
        elif self._reading and not wanted:
            self.loop.remove_reader(self._source)
        self._reading = wanted

    def _read(self) -> None:
        try:
            data = self._source.recv(self._link.shape.read_bytes)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._on_lost(self._source)
            return
        if data:
            self._link.held_bytes += len(data)
            self._admit(memoryview(data))
        else:
            self._ended = True
            self._update_reading()
            self._admit(Mark.FIN)

    def _admit(self, item: memoryview | Mark) -> None:
        now_s = self.loop.time()
        transmitter = self._link.transmitter
        num_bytes = 0 if isinstance(item, Mark) else len(item)
        self._last_due_s = transmitter.admit(num_bytes, now_s, self._last_due_s)
        self._items.append((self._last_due_s, item))
        if num_bytes and transmitter.is_full(now_s):
            self._held = True
            self._update_reading()
            self._link.hold(self)
        if self._timer is None and not self._blocked:
            self._deliver()

    def _deliver(self) -> None:
        """Hand over all that is due, then wait for the next, or for the receiver."""
        self._timer = None
        limit_s = self.loop.time() + _SLACK_S
        for _ in range(_MAX_SENDS):
            if self.is_closed or not self._items or self._items[0][0] > limit_s:
                break
            item = self._items[0][1]
            if isinstance(item, Mark):
                self._items.popleft()
                self._on_mark(self, item)
            elif not self._send(item):
                return
        if self._items and not self.is_closed:
            self._timer = self.loop.call_at(self._items[0][0] - _SLACK_S, self._deliver)

    def _send(self, item: memoryview) -> bool:
        """Send `item`, the first one; return whether the receiver took all of it."""
        try:
            num_sent = self._sink.send(item)
        except (BlockingIOError, InterruptedError):
            num_sent = 0
        except OSError:
            self._on_lost(self._sink)
            return False
        self._link.held_bytes -= num_sent
        self._link.delivered_bytes += num_sent
        if num_sent == len(item):
            self._items.popleft()
            return True
        self._items[0] = (self._items[0][0], item[num_sent:])
        self._blocked = True
        self._update_reading()
        self.loop.add_writer(self._sink, self._unblock)
        return False

    def _unblock(self) -> None:
        self.loop.remove_writer(self._sink)
        self._blocked = False
        self._update_reading()
        self._deliver()
