"""One directed link of the relay at work: its transmitter, its counters, and how it changes.

**A cut link** holds everything. The kernel's TCP would send again what a cut has swallowed, so
nothing is dropped: all that has not arrived waits, and when the link is healed it crosses again
from the start, in the order in which it was due. (Here at once; after a real cut TCP waits for its
retransmission timer, which by then may be as long as the cut was.) Meanwhile connections that cross
the link are read in neither direction, because where no acknowledgement comes back, a sender soon
stops; what the intact direction already holds still arrives. So an end that closes during a cut is
noticed when the link is healed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from orchestrator.emulator.link_shape import LinkShape, Transmitter
from topology.faults.script import FIGURES


class Crossing(Protocol):
    """What a link knows of a flow that crosses it, or whose acknowledgements would (flow.py)."""

    loop: asyncio.AbstractEventLoop

    def release(self) -> None:
        """Read again: the link has room."""

    def update(self) -> None:
        """One of its links has been cut or healed."""

    def retime(self, now_s: float, stretch: float, later_s: float) -> None:
        """Follow the link's other figures with what has not left its transmitter yet."""

    def take_back(self) -> list[float]:
        """Take all that is on its way off the link; return when each would have arrived."""

    def admit_again(self, now_s: float) -> None:
        """Put the first of what was taken back on its way, from the start."""


class SharedLink:
    """A directed link: what all flows that cross it have in common."""

    def __init__(self, transmitter: Transmitter) -> None:
        self.transmitter = transmitter
        self.is_cut = False
        self.sent_bytes = 0
        """Taken from senders since the start."""
        self.delivered_bytes = 0
        """Handed to receivers since the start."""
        self.held_bytes = 0
        """Taken from senders and not yet handed over: queued, in flight, or not accepted."""
        self.flows: set[Crossing] = set()
        """Those that cross it."""
        self.returning: set[Crossing] = set()
        """Those whose acknowledgements would cross it."""
        self._configured = transmitter.shape
        self._waiting: deque[Crossing] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def shape(self) -> LinkShape:
        """What it is like now."""
        return self.transmitter.shape

    def hold(self, flow: Crossing) -> None:
        """Let `flow` wait until the queue has room again."""
        self._waiting.append(flow)
        if self._timer is None:
            self._timer = flow.loop.call_at(self.transmitter.room_at_s(), self._release)

    def reshape(self, figures: Mapping[str, float], now_s: float) -> None:
        """Take other figures at once: what has not left yet leaves and travels by the new ones."""
        before = self.shape
        stretch = self.transmitter.reshape(before.changed(figures), now_s)
        later_s = self.shape.delay_s - before.delay_s
        for flow in list(self.flows):
            flow.retime(now_s, stretch, later_s)
        self._look_again()

    def cut(self) -> None:
        """Let nothing arrive until it is healed."""
        self.is_cut = True
        self._update_flows()

    def heal(self, now_s: float) -> None:
        """Be as configured, and not cut: what is held crosses from the start."""
        self.reshape({name: getattr(self._configured, name) for name in FIGURES}, now_s)
        if not self.is_cut:
            return
        self.is_cut = False
        self.transmitter.clear()
        held = [(due_s, flow) for flow in self.flows for due_s in flow.take_back()]
        for _, flow in sorted(held, key=lambda each: each[0]):
            flow.admit_again(now_s)
        self._look_again()
        self._update_flows()

    def close(self) -> None:
        """Forget who waits."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _update_flows(self) -> None:
        for flow in [*self.flows, *self.returning]:
            flow.update()

    def _look_again(self) -> None:
        """Who waits for room may have it sooner or later than was thought."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._waiting[0].loop.call_at(self.transmitter.room_at_s(), self._release)

    def _release(self) -> None:
        self._timer = None
        while self._waiting:
            self._waiting.popleft().release()
