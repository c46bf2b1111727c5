"""How one directed link shapes traffic: pure arithmetic, the time is an argument.

A link is a queue, a transmitter and a delay line, shared by all connections that cross it. The
transmitter is a clock that says when it will be free: bytes that arrive start at once or when it
is free, whichever is later, take bytes/rate to leave, and arrive one delay after that. So four
connections get one link's rate between them, not four times it, in the order they came.

The queue is short on purpose. It must only bridge the time until a waiting sender is read
again, because what is in flight on the delay line is not in the queue; a longer one would add
nothing but latency under load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from topology.errors import ConfigError

QUEUE_S = 0.025
"""Queue of a link, in time at its rate: a busy machine's event loop is seldom later than this."""
MIN_QUEUE_BYTES = 64 << 10
READ_S = 0.002
"""Bytes are taken in pieces of this transmission time: finer is truer, and costs more CPU."""
MIN_READ_BYTES = 4 << 10
MAX_READ_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """One directed link, as configured."""

    source: str
    target: str
    bytes_per_s: float
    delay_s: float
    """One way."""
    jitter_s: float = 0.0
    """A delivery is early or late by up to this, but never before an earlier one."""

    def __post_init__(self) -> None:
        _check(self.source != self.target, "target", "another site than the source", self.target)
        _check(_positive(self.bytes_per_s), "bytes_per_s", "more than 0", self.bytes_per_s)
        _check(_not_negative(self.delay_s), "delay_s", "0 or more", self.delay_s)
        _check(_not_negative(self.jitter_s), "jitter_s", "0 or more", self.jitter_s)

    @property
    def queue_bytes(self) -> int:
        """Bytes that may wait for the transmitter before senders are no longer read."""
        return max(MIN_QUEUE_BYTES, round(self.bytes_per_s * QUEUE_S))

    @property
    def read_bytes(self) -> int:
        """Bytes that are taken from a sender at once."""
        return min(MAX_READ_BYTES, max(MIN_READ_BYTES, round(self.bytes_per_s * READ_S)))


class Transmitter:
    """The clock of one directed link.

    Args:
        shape: What it emulates.
        draw: The next number of [0, 1); seeded, so that the jitter of a run can be repeated.
    """

    def __init__(self, shape: LinkShape, draw: Callable[[], float]) -> None:
        self.shape = shape
        self._draw = draw
        self._free_at_s = -math.inf

    def admit(self, num_bytes: int, now_s: float, not_before_s: float) -> float:
        """Take bytes over, and return when they reach the other end.

        Args:
            num_bytes: 0 for what travels without bytes of its own, as a connection's end.
            now_s: When they came.
            not_before_s: When the connection's previous bytes arrive: order is kept.
        """
        shape = self.shape
        self._free_at_s = max(now_s, self._free_at_s) + num_bytes / shape.bytes_per_s
        delay_s = shape.delay_s
        if shape.jitter_s:
            delay_s = max(0.0, delay_s + (2 * self._draw() - 1) * shape.jitter_s)
        return max(not_before_s, self._free_at_s + delay_s)

    def backlog_bytes(self, now_s: float) -> float:
        """Return how many bytes wait for the transmitter or are on it."""
        return max(0.0, self._free_at_s - now_s) * self.shape.bytes_per_s

    def is_full(self, now_s: float) -> bool:
        """Say whether senders must wait."""
        return self.backlog_bytes(now_s) >= self.shape.queue_bytes

    def room_at_s(self) -> float:
        """Return when the queue will be down to half: then those who wait are read again."""
        return self._free_at_s - self.shape.queue_bytes / 2 / self.shape.bytes_per_s


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _not_negative(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _check(holds: bool, field: str, want: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"{field}: want {want}, got {got!r}")
