"""One simulated step at one site, and steps that repeat those before. Pure.

**Steps that repeat themselves.** Without stragglers all that a step depends on is how far apart the
sites began it, and what the steps before had left on the links: whatever site was early, nothing of
two rounds before can be. So once two consecutive rounds had the same offsets as two before, p
rounds apart, every round is that of p before, p rounds' time later. With an exchange in every step
a round is a step. Offsets count as the same within REPEATS of a step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from topology.model.step_parts import StepParts
from topology.simulator.parts import BucketTimes

REPEATS = 1e-9
"""Of a step: rounding."""
_ALIKE_ROUNDS = 2
_PERIOD_MAX = 16
"""Rounds; of more than one step, fewer: sites that settle do so within some exchanges."""
_PERIOD_STEPS_MAX = 64


@dataclass(frozen=True, slots=True)
class SiteStep:
    """One step at one site, in seconds since the simulation began."""

    begin_s: float
    computed_s: float
    end_s: float
    parts: StepParts
    buckets: tuple[BucketTimes, ...] | None
    """Those that left in it; None where nobody keeps them."""

    def later(self, shift_s: float) -> SiteStep:
        """Return the same, some seconds later."""
        return SiteStep(
            self.begin_s + shift_s,
            self.computed_s + shift_s,
            self.end_s + shift_s,
            self.parts,
            None if self.buckets is None else tuple(each.later(shift_s) for each in self.buckets),
        )

    def without_buckets(self) -> SiteStep:
        """Return the same for those who do not draw it."""
        return dataclasses.replace(self, buckets=None)


Step = tuple[SiteStep, ...]
"""One step, at all sites."""


def repeating(
    simulated: Callable[[int], Step], *, round_steps: int = 1, reuse: bool = True
) -> Iterator[tuple[Step, float]]:
    """Yield step after step without end, each with how much later it is than it says.

    Args:
        simulated: makes the next step, of this number from 0.
        round_steps: steps of a round.
        reuse: rounds that repeat themselves are not simulated again.
    """
    rounds_max = max(1, min(_PERIOD_MAX, _PERIOD_STEPS_MAX // round_steps))
    latest: deque[Step] = deque(maxlen=(rounds_max + _ALIKE_ROUNDS) * round_steps)
    for number in itertools.count():
        latest.append(simulated(number))
        yield latest[-1], 0.0
        if reuse and (number + 1) % round_steps == 0:
            steps = list(latest)
            period = _period(steps, round_steps, rounds_max)
            if period:
                yield from _repeated(steps[-period:])
    raise AssertionError("numbers never end")


def _period(latest: list[Step], round_steps: int, rounds_max: int) -> int:
    """Return after how many steps they repeat themselves; 0: not that one could tell."""
    alike = _ALIKE_ROUNDS * round_steps
    for rounds in range(1, rounds_max + 1):
        period = rounds * round_steps
        if len(latest) >= alike + period and all(
            _alike(latest[-each], latest[-each - period]) for each in range(1, alike + 1)
        ):
            return period
    return 0


def _alike(one: Step, other: Step) -> bool:
    """Whether the sites ended two steps equally far apart, and took as long for them."""
    tolerance_s = REPEATS * max(each.end_s - each.begin_s for each in one)
    return all(
        abs((a.end_s - one[0].end_s) - (b.end_s - other[0].end_s)) <= tolerance_s
        and abs((a.end_s - a.begin_s) - (b.end_s - b.begin_s)) <= tolerance_s
        for a, b in zip(one, other, strict=True)
    )


def _repeated(pattern: list[Step]) -> Iterator[tuple[Step, float]]:
    """Yield the steps of a period again and again, each time later by its length."""
    period_s = pattern[-1][0].end_s - pattern[0][0].begin_s
    shift_s = 0.0
    while True:
        shift_s += period_s
        yield from ((step, shift_s) for step in pattern)
