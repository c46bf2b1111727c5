"""Decides when a site has taken its part of a round that waits for nobody. Pure.

A round ends when the fastest site has taken H steps, and says so. The others then end theirs with
the step that they are in. A slow site has longer steps, for which the others would wait. So it goes
by how long rounds have taken the fastest one: it takes no step that would end much later than that.
Then it waits for the fastest site, and not that one for it.

Where all go by that, none may come to H steps; then who has waited for longer than a step says it.

A site that has stopped is not waited for. It gets as long as its steps have taken: once that is
over, and a round has ended at another site, it is passed over.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from isthmus.topology.spec.regime import LATE

_SAMPLES = 9
"""Steps, and rounds, whose median counts."""
_GRACE = 1.5
"""The time that a step may take beside the longest one but one, before the site is passed over: a
step that stood for long makes it no longer."""


class RoundClock:
    """One site's steps in a round."""

    def __init__(self, sync_every: int, min_steps: int) -> None:
        """Know no lengths yet. `sync_every` and `min_steps` are the regime's."""
        self._sync_every, self._min_steps = sync_every, min_steps
        self._steps_s: deque[float] = deque(maxlen=_SAMPLES)
        self._rounds_s: deque[float] = deque(maxlen=_SAMPLES)
        """How long the fastest site has taken for its steps."""
        self._round_began_s = self._step_began_s = math.inf
        self._ended_s = math.inf
        """When another site had taken all steps of this round."""
        self.num_steps = 0
        """Steps that were taken in this round."""

    def begin_round(self, now_s: float) -> None:
        """The round before is over."""
        self._round_began_s, self._ended_s, self.num_steps = now_s, math.inf, 0

    def begin_step(self, now_s: float) -> None:
        """A step begins."""
        self._step_began_s = now_s

    def end_step(self, now_s: float) -> None:
        """A step's gradients are there."""
        self._steps_s.append(now_s - self._step_began_s)
        self.num_steps += 1

    def drop_steps(self) -> None:
        """Steps of a round that the site was passed over in count for nothing."""
        self.num_steps = 0

    def end_at_another(self, now_s: float, *, is_now: bool = True) -> None:
        """Another site has taken all steps of this round; unless `is_now`, some time ago."""
        if self._ended_s == math.inf:
            self._ended_s = now_s
            if is_now:
                self._rounds_s.append(now_s - self._round_began_s)

    @property
    def has_all(self) -> bool:
        """Whether the site has taken all steps of this round."""
        return self.num_steps >= self._sync_every

    @property
    def has_ended(self) -> bool:
        """Whether another site has taken all steps of this round."""
        return self._ended_s < math.inf

    @property
    def counts(self) -> bool:
        """Whether the steps that were taken are enough."""
        return self.num_steps >= self._min_steps

    def is_over(self, now_s: float) -> bool:
        """Whether the step that has just been taken is the site's last one of the round."""
        if self.has_all:
            return True
        if not self.counts:
            return False
        if self.has_ended or not self._rounds_s:
            return self.has_ended
        return now_s + (1 - LATE) * median(self._steps_s) > self._expected_end_s

    @property
    def _expected_end_s(self) -> float:
        return self._round_began_s + median(self._rounds_s)

    @property
    def _patience_s(self) -> float:
        return _GRACE * sorted(self._steps_s)[-2:][0]

    @property
    def overdue_s(self) -> float:
        """When another site should have taken all steps, if this one has ended before that."""
        return self._expected_end_s + self._patience_s

    @property
    def passed_over_s(self) -> float:
        """When the site is to be passed over, unless its step ends before; infinity: never.

        It is waited for in its first step, of which nobody knows how long it takes.
        """
        if not (self.has_ended and self._steps_s):
            return math.inf
        if self.num_steps + 1 < self._min_steps:
            return self._ended_s
        return max(self._ended_s, self._step_began_s + self._patience_s)
