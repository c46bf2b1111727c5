"""One directed link that carries packets: pure arithmetic, the time is an argument.

A packet waits in a queue, is transmitted at the link's rate, may be lost, and arrives one delay
later. The queue is drop-tail and bounded in bytes of IP packets: what finds no room is dropped,
and that is how TCP learns the rate. What has begun its transmission no longer counts.

**What a frame of many packets becomes.** It is taken up in pieces of at most `PIECE_S` of
transmission time (at least one packet). A piece is transmitted without a break and arrives as one
frame when its last byte would, so a packet arrives up to `PIECE_S` later than it would alone, never
earlier. A lost packet ends its piece early; what follows it is a frame of its own. When a piece
finds room for only some of its packets, the others are dropped, and so are the frame's later
pieces.

**Rates and delays may change at any time.** What is on the transmitter finishes at the old rate;
what waits goes out at the new one. Nothing overtakes, whatever the jitter and the delays.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.emulator.link import LinkShape
from orchestrator.emulator.losses import LossDeck
from orchestrator.emulator.packets import Packet, Part

MTU_BYTES = 1500
PIECE_S = 0.001
MIN_QUEUE_BYTES = 64 * MTU_BYTES
"""Room for one frame of the kernel and half another, however narrow the link is."""
MIN_QUEUE_S = 0.005
"""Room for what comes at once when this machine was busy elsewhere for a moment: on a short link a
smaller queue would show TCP a congestion that the link does not have."""


@dataclass(slots=True)
class LinkCounters:
    """What has passed since the start. Bytes are those of IP packets."""

    sent_bytes: int = 0
    """That the source handed over, whatever became of them."""
    delivered_bytes: int = 0
    dropped_packets: int = 0
    """That found the queue full."""
    lost_packets: int = 0
    """By chance, or because the link was cut."""


class PacketLink:
    """The queue, the transmitter and the delay line of one directed link.

    Args:
        shape: What it emulates.
        seed: Of its losses and its jitter, which depend on nothing else but the sites' names.
    """

    def __init__(self, shape: LinkShape, seed: int) -> None:
        name = f"{seed}/{shape.source}/{shape.target}"
        self._jitter = random.Random(f"{name}/jitter")  # noqa: S311 - not a secret
        self._loss = random.Random(f"{name}/loss")  # noqa: S311
        self._queue: deque[tuple[float, Packet, int, int]] = deque()  # came at, first, last
        self._queued_bytes = 0
        self._line: deque[tuple[float, Packet, int, int]] = deque()  # due at, first, last
        self._free_at_s = -math.inf
        self._last_due_s = -math.inf
        self._is_cut = False
        self.counters = LinkCounters()
        self._take(shape)

    def queued_bytes(self, now_s: float) -> int:
        """Return the bytes that wait for the transmitter."""
        self._advance(now_s)
        return self._queued_bytes

    def due_s(self) -> float:
        """Return when to ask for what is `delivered` next; infinity on an idle link."""
        if self._line:
            return self._line[0][0]
        if self._queue:  # when its head's transmission begins: then losses and jitter are drawn
            return max(self._queue[0][0], self._free_at_s)
        return math.inf

    def offer(self, packet: Packet, now_s: float) -> None:
        """Take a frame from the source at `now_s`, or what there is room for."""
        self._advance(now_s)
        self.counters.sent_bytes += packet.num_bytes
        if self._is_cut:
            self.counters.lost_packets += packet.num_wire
            return
        num_wire = packet.num_wire
        step = max(1, int(self._piece_bytes // (packet.segment_bytes + packet.header_bytes)))
        first = 0
        while first < num_wire:
            last = min(num_wire, first + step)
            if not self._queue and self._free_at_s <= now_s:
                self._transmit(now_s, packet, first, last)
            else:
                room_bytes = self._room_bytes - self._queued_bytes
                num_fitting = packet.num_fitting(first, room_bytes)
                if num_fitting < last - first:
                    self._enqueue(now_s, packet, first, first + num_fitting)
                    self.counters.dropped_packets += num_wire - first - num_fitting
                    return
                self._enqueue(now_s, packet, first, last)
            first = last

    def delivered(self, now_s: float) -> Iterator[Part]:
        """Yield the frames that have arrived by `now_s`, in order."""
        self._advance(now_s)
        line, counters = self._line, self.counters
        while line and line[0][0] <= now_s:
            _, packet, first, last = line.popleft()
            counters.delivered_bytes += packet.bytes_of(first, last)
            yield packet.part(first, last)

    def reshape(self, shape: LinkShape, now_s: float) -> None:
        """Be another link from `now_s` on, for all that has not begun its transmission."""
        self._advance(now_s)
        self._take(shape)

    def cut(self, now_s: float) -> None:
        """Lose all that is under way, and all that comes until `mend`."""
        self._advance(now_s)
        self._is_cut = True
        for waiting in (self._queue, self._line):
            self.counters.lost_packets += sum(last - first for _, _, first, last in waiting)
            waiting.clear()
        self._queued_bytes = 0
        # Nothing is left that the next packet would have to wait for, or could overtake.
        self._free_at_s = self._last_due_s = -math.inf

    def mend(self) -> None:
        """No longer be cut."""
        self._is_cut = False

    def _take(self, shape: LinkShape) -> None:
        self._shape = shape
        self._deck = LossDeck(shape.loss, self._loss)
        self._piece_bytes = PIECE_S * shape.bytes_per_s
        self._room_bytes = shape.queue_bytes or default_queue_bytes(shape)

    def _enqueue(self, now_s: float, packet: Packet, first: int, last: int) -> None:
        if first < last:
            self._queue.append((now_s, packet, first, last))
            self._queued_bytes += packet.bytes_of(first, last)

    def _advance(self, now_s: float) -> None:
        """Begin the transmissions that have begun by `now_s`."""
        queue = self._queue
        while queue and self._free_at_s <= now_s:
            came_at_s, packet, first, last = queue.popleft()
            self._queued_bytes -= packet.bytes_of(first, last)
            self._transmit(max(came_at_s, self._free_at_s), packet, first, last)

    def _transmit(self, start_s: float, packet: Packet, first: int, last: int) -> None:
        """Put a piece on the line: a frame for each unbroken run of packets that survive."""
        shape = self._shape
        delay_s = shape.delay_s
        if shape.jitter_s:
            delay_s = max(0.0, delay_s + self._jitter.uniform(-shape.jitter_s, shape.jitter_s))
        self._free_at_s = start_s + packet.bytes_of(first, last) / shape.bytes_per_s
        run = first
        for index in self._deck.take(last - first):
            lost = first + index
            self.counters.lost_packets += 1
            if run < lost:
                sent_at_s = start_s + packet.bytes_of(first, lost) / shape.bytes_per_s
                self._append(sent_at_s + delay_s, packet, run, lost)
            run = lost + 1
        if run < last:
            self._append(self._free_at_s + delay_s, packet, run, last)

    def _append(self, due_s: float, packet: Packet, first: int, last: int) -> None:
        self._last_due_s = max(self._last_due_s, due_s)
        self._line.append((self._last_due_s, packet, first, last))


def default_queue_bytes(shape: LinkShape) -> int:
    """Return the room of a queue that is not configured: what a round trip at full rate carries."""
    queue_s = max(MIN_QUEUE_S, 2 * shape.delay_s)
    return max(MIN_QUEUE_BYTES, round(shape.bytes_per_s * queue_s))
