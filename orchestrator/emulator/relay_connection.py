"""The relay's links and connections.

A `SharedLink` is the state of a directed link, shared by all connections that cross it. A
`Listener` accepts connections, and a `Flow` carries one direction of a connection.

Raw non-blocking sockets and the event loop's readers, not streams or transports: bytes are
received once and sent once, without a task, a future or a buffer copy between.

Memory is bounded. A flow is not read while its link's queue is full, while its receiver does not
take arrived bytes, or while the link is cut. So it holds at most the queue and the bytes in flight,
plus one RTT for a loss.

How a connection ends travels like its bytes: a half-close or a reset at one end is seen at the
other one link delay later, and behind everything that was sent before it.

**A cut link** holds everything. The kernel's TCP would retransmit lost bytes, so none are dropped:
bytes in flight wait, and when the link is healed they cross again from the start, in order of
arrival. (Here at once; after a real cut TCP waits for its retransmission timer, which by then may
be as long as the cut was.) Meanwhile connections that cross the link are read in neither direction,
because a sender soon stops where no acknowledgement comes back. Bytes in flight in the intact
direction still arrive. So an end that closes during a cut is noticed when the link is healed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from isthmus.orchestrator.emulator.link_shape import LinkShape, Passage, Transmitter
from isthmus.topology.faults.script import FIGURES

_SLACK_S = 0.0005
"""Half the granularity of epoll: items due this soon are delivered now, which centres the error on
0."""
_MAX_SENDS = 64
"""Sends of one flow before others have their turn."""
_MIN_RECEIVE_BYTES = 128 << 10
_MAX_RECEIVE_BYTES = 1 << 20


class Mark(Enum):
    """An event that crosses the link like bytes."""

    FIN = "fin"
    RESET = "reset"


class Item(NamedTuple):
    """Bytes or a mark in flight."""

    passage: Passage
    due_s: float
    """Time of arrival, never before that of earlier items of the connection."""
    load: memoryview | Mark


class SharedLink:
    """The state of a directed link, shared by all flows that cross it."""

    def __init__(self, transmitter: Transmitter) -> None:
        self.transmitter = transmitter
        self.is_cut = False
        self.sent_bytes = 0
        """Bytes taken from senders since the start."""
        self.delivered_bytes = 0
        """Bytes delivered to receivers since the start."""
        self.held_bytes = 0
        """Bytes taken from senders and not delivered yet: queued, in flight, or not accepted."""
        self.flows: set[Flow] = set()
        """The flows that cross this link."""
        self.returning: set[Flow] = set()
        """The flows whose acknowledgements would cross this link."""
        self._configured = transmitter.shape
        self._waiting: deque[Flow] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def shape(self) -> LinkShape:
        """Return the current figures."""
        return self.transmitter.shape

    def hold(self, flow: Flow) -> None:
        """Let `flow` wait until the queue has room again."""
        self._waiting.append(flow)
        if self._timer is None:
            self._timer = flow.loop.call_at(self.transmitter.room_at_s(), self._release)

    def reshape(self, figures: Mapping[str, float], now_s: float) -> None:
        """Change the figures at once, also for bytes that wait for the transmitter."""
        before = self.shape
        stretch = self.transmitter.reshape(before.changed(figures), now_s)
        later_s = self.shape.delay_s - before.delay_s
        for flow in list(self.flows):
            flow.retime(now_s, stretch, later_s)
        self._look_again()

    def cut(self) -> None:
        """Stop all deliveries until `heal`."""
        self.is_cut = True
        self._update_flows()

    def heal(self, now_s: float) -> None:
        """Restore the configured figures; held bytes cross again from the start."""
        self.reshape({name: getattr(self._configured, name) for name in FIGURES}, now_s)
        if not self.is_cut:
            return
        self.is_cut = False
        self.transmitter.clear()
        held = [(item, flow) for flow in self.flows for item in flow.take_back()]
        for item, flow in sorted(held, key=lambda each: each[0].due_s):
            flow.enter(item.load, now_s)
        self._look_again()
        self._update_flows()

    def close(self) -> None:
        """Forget waiting flows."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _update_flows(self) -> None:
        for flow in [*self.flows, *self.returning]:
            flow.update()

    def _look_again(self) -> None:
        """Reschedule the wake-up of waiting flows, because the figures changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._waiting[0].loop.call_at(self.transmitter.room_at_s(), self._release)

    def _release(self) -> None:
        self._timer = None
        while self._waiting:
            self._waiting.popleft().release()


class Flow:
    """One direction of one connection.

    Bytes go from `source` to `sink`, which the connection owns, and their acknowledgements would
    cross `opposite`.
    """

    def __init__(
        self,
        connection: Connection,
        link: SharedLink,
        opposite: SharedLink,
        source: socket.socket,
        sink: socket.socket,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._connection = connection
        self._link = link
        self._opposite = opposite
        self._source = source
        self._sink = sink
        self._items: deque[Item] = deque()
        self._last_due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._started = False
        self._reading = False
        self._waits_for_room = False
        self._blocked = False
        self._ended = False
        self.is_closed = False
        bound_receive_buffer(source, link.shape)
        link.flows.add(self)
        opposite.returning.add(self)

    def start(self) -> None:
        """Begin to read; both sockets are connected."""
        self._started = True
        self._update_reading()

    def release(self) -> None:
        """Read again: the link has room."""
        self._waits_for_room = False
        self._update_reading()

    def update(self) -> None:
        """React to a cut or heal of one of the links."""
        self._update_reading()
        self._schedule()

    def retime(self, now_s: float, stretch: float, later_s: float) -> None:
        """Adapt items that have not left the transmitter to the link's new figures.

        The time until it leaves is multiplied by `stretch`, and `later_s` added to its delay.
        """
        retimed: deque[Item] = deque()
        due_s = 0.0
        for item in self._items:
            departs_s, transit_s = item.passage
            if departs_s > now_s:
                departs_s = now_s + (departs_s - now_s) * stretch
                transit_s = max(0.0, transit_s + later_s)
                due_s = max(due_s, departs_s + transit_s)
                retimed.append(Item(Passage(departs_s, transit_s), due_s, item.load))
            else:
                due_s = item.due_s
                retimed.append(item)
        self._items = retimed
        self._last_due_s = due_s
        bound_receive_buffer(self._source, self._link.shape)
        self._schedule()

    def take_back(self) -> deque[Item]:
        """Remove all items in flight from the link, and return them."""
        taken, self._items = self._items, deque()
        self._last_due_s = 0.0
        return taken

    def reset(self) -> None:
        """Send a reset behind the accepted bytes; read no more."""
        if not self.is_closed:
            self._ended = True
            self._update_reading()
            self._admit(Mark.RESET)

    def close(self) -> None:
        """Drop everything and release both sockets. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._link.flows.discard(self)
        self._opposite.returning.discard(self)
        self._update_reading()
        self._schedule()
        if self._blocked:
            self.loop.remove_writer(self._sink)
        self._link.held_bytes -= sum(
            len(item.load) for item in self._items if not isinstance(item.load, Mark)
        )
        self._items.clear()

    def _update_reading(self) -> None:
        stopped = self._waits_for_room or self._blocked or self._ended or self.is_closed
        is_cut = self._link.is_cut or self._opposite.is_cut
        wanted = self._started and not stopped and not is_cut
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
            self._connection.lost(self._source)
            return
        if data:
            self._link.sent_bytes += len(data)
            self._link.held_bytes += len(data)
            self._admit(memoryview(data))
        else:
            self._ended = True
            self._update_reading()
            self._admit(Mark.FIN)

    def _admit(self, load: memoryview | Mark) -> None:
        now_s = self.loop.time()
        self.enter(load, now_s)
        if not isinstance(load, Mark) and self._link.transmitter.is_full(now_s):
            self._waits_for_room = True
            self._update_reading()
            self._link.hold(self)
        if self._timer is None:
            self._deliver()

    def enter(self, load: memoryview | Mark, now_s: float) -> None:
        """Put bytes or a mark on the link."""
        num_bytes = 0 if isinstance(load, Mark) else len(load)
        link = self._link
        rtt_s = link.shape.delay_s + self._opposite.shape.delay_s
        passage = link.transmitter.admit(num_bytes, now_s, rtt_s)
        self._last_due_s = max(self._last_due_s, passage.departs_s + passage.transit_s)
        self._items.append(Item(passage, self._last_due_s, load))

    def _schedule(self) -> None:
        """Schedule the first delivery, unless the link is cut or the receiver is blocked."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._items and not (self._blocked or self.is_closed or self._link.is_cut):
            self._timer = self.loop.call_at(self._items[0].due_s - _SLACK_S, self._deliver)

    def _deliver(self) -> None:
        """Deliver all due items, then wait for the next one, or for the receiver."""
        self._timer = None
        limit_s = self.loop.time() + _SLACK_S
        for _ in range(_MAX_SENDS):
            if self._blocked or self.is_closed or self._link.is_cut:
                return
            if not self._items or self._items[0].due_s > limit_s:
                break
            load = self._items[0].load
            if isinstance(load, Mark):
                self._items.popleft()
                self._connection.arrived(self, load)
            else:
                self._send(load)
        self._schedule()

    def _send(self, load: memoryview) -> None:
        """Send the first item's bytes; the rest waits for the receiver."""
        try:
            num_sent = self._sink.send(load)
        except (BlockingIOError, InterruptedError):
            num_sent = 0
        except OSError:
            self._connection.lost(self._sink)
            return
        self._link.held_bytes -= num_sent
        self._link.delivered_bytes += num_sent
        if num_sent == len(load):
            self._items.popleft()
            return
        self._items[0] = self._items[0]._replace(load=load[num_sent:])
        self._blocked = True
        self._update_reading()
        self.loop.add_writer(self._sink, self._unblock)

    def _unblock(self) -> None:
        self.loop.remove_writer(self._sink)
        self._blocked = False
        self._update_reading()
        self._deliver()


def bound_receive_buffer(end: socket.socket, shape: LinkShape) -> None:
    """Bound what the kernel holds for a reader of a link; accepted sockets inherit it.

    By default it grows to megabytes: a second queue before the link, and on a slow link seconds of
    latency.
    """
    receive_bytes = min(_MAX_RECEIVE_BYTES, max(_MIN_RECEIVE_BYTES, shape.room_bytes))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)


DIAL_WITHIN_S = 10.0
"""Time limit for a gateway to accept a connection."""
Address = tuple[socket.AddressFamily, tuple[object, ...]]
_ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 s: closing sends a reset."""


class Connection:
    """One connection; it ends by itself or by `close`.

    It owns the `dialler`, an accepted socket, and the socket with which it dials the gateway's
    `address`. `there` is the link from the dialler's site to the gateway's, `back` the opposite
    one. `on_closed` is called once, when the connection is gone.
    """

    def __init__(
        self,
        dialler: socket.socket,
        address: Address,
        there: SharedLink,
        back: SharedLink,
        on_closed: Callable[[Connection], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_closed = on_closed
        self._dialler = dialler
        family, self._address = address
        self._gateway = socket.socket(family, socket.SOCK_STREAM)
        for end in (dialler, self._gateway):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._there = Flow(self, there, back, dialler, self._gateway)
        self._back = Flow(self, back, there, self._gateway, dialler)
        self._sites = (there.shape.source, there.shape.target)
        self._num_open = 2
        self._closed = False
        self._dialling: asyncio.TimerHandle | None = None

    def dial(self) -> None:
        """Dial the gateway; read from the dialler once that has succeeded."""
        status = self._gateway.connect_ex(self._address)
        if status == 0:
            self._start()
        elif status == errno.EINPROGRESS:
            self._loop.add_writer(self._gateway, self._dialled)
            self._dialling = self._loop.call_later(DIAL_WITHIN_S, self.lost, self._gateway)
        else:
            self.lost(self._gateway)

    def joins(self, one: str, other: str) -> bool:
        """Return whether the connection is between these two sites, in either direction."""
        return {one, other} == set(self._sites)

    def close(self) -> None:
        """Reset and release both ends now. Idempotent."""
        for end in (self._dialler, self._gateway):
            _reset_when_closed(end)
        self._release()

    def _dialled(self) -> None:
        self._stop_dialling()
        if self._gateway.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.lost(self._gateway)
        else:
            self._start()

    def _start(self) -> None:
        self._there.start()
        self._back.start()

    def _stop_dialling(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
            self._loop.remove_writer(self._gateway)

    def lost(self, end: socket.socket) -> None:
        """Handle a broken end: its sent bytes still arrive, then a reset."""
        self._stop_dialling()
        from_it, to_it = self._there, self._back
        if end is self._gateway:
            from_it, to_it = to_it, from_it
        to_it.close()
        if from_it.is_closed:  # so is the other end
            self.close()
        else:
            from_it.reset()

    def arrived(self, flow: Flow, mark: Mark) -> None:
        """Handle a half-close or reset that has crossed the link."""
        if mark is Mark.RESET:
            self.close()
            return
        sink = self._gateway if flow is self._there else self._dialler
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self.lost(sink)
            return
        self._num_open -= 1
        if self._num_open == 0:
            self._release()

    def _release(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop_dialling()
        self._there.close()
        self._back.close()
        self._dialler.close()
        self._gateway.close()
        self._on_closed(self)


def _reset_when_closed(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)


_BACKLOG = 256
_ACCEPT_AGAIN_S = 1.0
_LOG = logging.getLogger("relay")


class Listener:
    """Accepts connections while neither link is cut.

    `on_accepted` is called with each new socket, and then owns it.
    """

    def __init__(
        self,
        family: socket.AddressFamily,
        there: SharedLink,
        back: SharedLink,
        on_accepted: Callable[[socket.socket], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._there = there
        self._back = back
        self._on_accepted = on_accepted
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._is_accepting = False
        self._resting: asyncio.TimerHandle | None = None

    def open(self, address: tuple[object, ...]) -> int:
        """Bind and accept; return the port. OSError when the address cannot be bound."""
        bound_receive_buffer(self._socket, self._there.shape)
        self._socket.bind(address)
        self._socket.listen(_BACKLOG)
        self.update()
        return int(self._socket.getsockname()[1])

    def update(self) -> None:
        """React to links that were cut, healed or changed."""
        bound_receive_buffer(self._socket, self._there.shape)
        wanted = not (self._there.is_cut or self._back.is_cut or self._resting)
        if wanted and not self._is_accepting:
            self._loop.add_reader(self._socket, self._accept)
        elif self._is_accepting and not wanted:
            self._loop.remove_reader(self._socket)
        self._is_accepting = wanted

    def close(self) -> None:
        """Close the port. Idempotent."""
        if self._resting is not None:
            self._resting.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        try:
            dialler, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: a ready listener would spin
            _LOG.warning("cannot accept: %s", error.strerror)
            self._resting = self._loop.call_later(_ACCEPT_AGAIN_S, self._go_on)
            self.update()
            return
        self._on_accepted(dialler)

    def _go_on(self) -> None:
        self._resting = None
        self.update()
