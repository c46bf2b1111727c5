"""Models how a directed link shapes traffic: its figures, losses, and the relay's transmitter.

All is pure arithmetic; the time is an argument. A link is a queue, a transmitter and a delay line,
shared by all connections that cross it. The transmitter is a clock that says when it will be free.
Bytes that come start at once, or when it is free if that is later. They take bytes/rate to leave,
and arrive one delay after that. So four connections share one link's rate, in the order in which
they came.

The queue is short on purpose. What is in flight on the delay line is not in the queue. So the queue
must only bridge the time until a waiting sender is read again. A longer one would add nothing but
latency under load.

**Which packets are lost** is drawn without replacement from shuffled decks. With independent draws
the number of losses in 10^5 packets at p = 0.1 % has a standard deviation of 10 %, so that one seed
in three is off by more than that. A deck of about 4/p packets holds exactly 4 losses; p times the
deck's size is seldom whole, so its fraction is carried to the next deck. Any window of n packets
therefore has p*n losses, give or take 5, for every seed. What is missing are the longer lulls and
bursts of independent losses.

**Losses in the relay.** The bytes of each connection are cut into packets of `SEGMENT_BYTES`. A
lost packet takes its share of the rate a second time, and arrives one RTT late, as after a fast
retransmission. Everything behind it on its connection waits for it, while other connections go on.
There is no congestion control: a connection does not slow down after a loss, retransmissions are
not lost again, and a loss at the end of a burst costs no retransmission timeout. Where that
matters, the kernel's own TCP across the packet emulator shows it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from isthmus.topology.faults.script import FIGURES, check_figures
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.tcp_constants import SEGMENT_BYTES

LOSSES_PER_DECK = 4
MAX_DECK_PACKETS = 1 << 40
"""Largest deck, for tiny probabilities: no link carries that many packets."""


class LossDeck:
    """Decides for each packet of a link in turn whether it is lost."""

    def __init__(self, probability: float, generator: random.Random) -> None:
        self._probability = probability
        self._generator = generator
        self._carry = 0.0
        self._left = 0  # packets left in the deck
        self._positions: list[int] = []  # of losses, from the deck's end

    def take(self, num_packets: int) -> list[int]:
        """Return the indices of the lost ones of the next `num_packets`, ascending."""
        if not self._probability:
            return []
        lost = []
        taken = 0
        while taken < num_packets:
            if not self._left:
                self._shuffle()
            step = min(self._left, num_packets - taken)
            rest = self._left - step
            while self._positions and self._positions[-1] >= rest:
                lost.append(taken + self._left - 1 - self._positions.pop())
            self._left = rest
            taken += step
        return lost

    def _shuffle(self) -> None:
        self._left = math.ceil(min(MAX_DECK_PACKETS, LOSSES_PER_DECK / self._probability))
        due = self._probability * self._left + self._carry
        # Rounding errors of the carry must never ask for more losses than there are packets.
        num_lost = min(self._left, math.floor(due + 1e-9))
        self._carry = due - num_lost
        self._positions = sorted(self._generator.sample(range(self._left), num_lost))


QUEUE_S = 0.025
"""Default queue of a link, in seconds at its rate: event loops are seldom later than this."""
MIN_QUEUE_BYTES = 64 << 10
READ_S = 0.002
"""Transmission time of a piece of bytes: smaller is more accurate, and costs more CPU."""
MIN_READ_BYTES = 3 * SEGMENT_BYTES
MAX_READ_BYTES = 45 * SEGMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """One directed link, as configured."""

    source: str
    target: str
    bytes_per_s: float
    delay_s: float
    """One-way delay."""
    jitter_s: float = 0.0
    """A delivery is early or late by up to this, but never before an earlier one."""
    loss: float = 0.0
    """Share of the packets that are lost, 0 to 1."""
    queue_bytes: int | None = None
    """Bytes that may wait for the transmitter; None: the emulator's default."""

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ConfigError(f"target: want another site than the source, got {self.target!r}")
        check_figures({name: getattr(self, name) for name in FIGURES})
        if self.queue_bytes is not None and self.queue_bytes <= 0:
            raise ConfigError(f"queue_bytes: want more than 0, got {self.queue_bytes!r}")

    def changed(self, figures: Mapping[str, float]) -> LinkShape:
        """Return this link with other figures, named as in topology/faults/script.py."""
        values: dict[str, Any] = {**figures}
        return replace(self, **values)

    @property
    def room_bytes(self) -> int:
        """Bytes that may wait for the relay's transmitter before senders are no longer read."""
        return self.queue_bytes or max(MIN_QUEUE_BYTES, round(self.bytes_per_s * QUEUE_S))

    @property
    def read_bytes(self) -> int:
        """Bytes that the relay takes from a sender at once: whole packets."""
        packets = round(self.bytes_per_s * READ_S) // SEGMENT_BYTES
        return min(MAX_READ_BYTES, max(MIN_READ_BYTES, packets * SEGMENT_BYTES))


class Passage(NamedTuple):
    """The times at which bytes cross a link.

    They arrive at `departs_s + transit_s`, unless earlier ones are later.
    """

    departs_s: float
    """When the last of them has left the transmitter."""
    transit_s: float


class Transmitter:
    """The clock of one directed link.

    `draw` returns the next number in [0, 1) for the jitter; `losses` drives packet losses. Both
    belong to the link and are seeded, so that a run can be repeated.
    """

    def __init__(self, shape: LinkShape, draw: Callable[[], float], losses: random.Random) -> None:
        self.shape = shape
        self.lost_packets = 0
        """Number of lost packets since the start."""
        self._draw = draw
        self._losses = losses
        self._deck = LossDeck(shape.loss, losses)
        self._free_at_s = -math.inf

    def admit(self, num_bytes: int, now_s: float, rtt_s: float) -> Passage:
        """Accept bytes that came at `now_s`; 0 for events such as a connection's end.

        `rtt_s` is the connection's round trip, the cost of a loss.
        """
        shape = self.shape
        lost = len(self._deck.take(-(-num_bytes // SEGMENT_BYTES)))
        self.lost_packets += lost
        wire_bytes = num_bytes + lost * SEGMENT_BYTES
        self._free_at_s = max(now_s, self._free_at_s) + wire_bytes / shape.bytes_per_s
        transit_s = shape.delay_s
        if shape.jitter_s:
            transit_s = max(0.0, transit_s + (2 * self._draw() - 1) * shape.jitter_s)
        return Passage(self._free_at_s, transit_s + rtt_s if lost else transit_s)

    def reshape(self, shape: LinkShape, now_s: float) -> float:
        """Change the figures; return the factor on the time until the waiting bytes leave."""
        if shape.loss != self.shape.loss:
            self._deck = LossDeck(shape.loss, self._losses)
        stretch = self.shape.bytes_per_s / shape.bytes_per_s
        self.shape = shape
        self._free_at_s = now_s + max(0.0, self._free_at_s - now_s) * stretch
        return stretch

    def clear(self) -> None:
        """Forget waiting bytes; they will be admitted again."""
        self._free_at_s = -math.inf

    def backlog_bytes(self, now_s: float) -> float:
        """Return how many bytes wait for the transmitter or are on it."""
        return max(0.0, self._free_at_s - now_s) * self.shape.bytes_per_s

    def is_full(self, now_s: float) -> bool:
        """Return whether senders must wait."""
        return self.backlog_bytes(now_s) >= self.shape.room_bytes

    def room_at_s(self) -> float:
        """Return when the queue will be half empty, so that waiting senders are read again."""
        return self._free_at_s - self.shape.room_bytes / 2 / self.shape.bytes_per_s
