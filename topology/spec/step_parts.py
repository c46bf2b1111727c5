"""The parts of a step's time, measured by a rank or simulated. Pure.

Communication is exposed while training waits for it. For gradients that is from the last bucket on,
after which backward has nothing left to compute, until the last bucket's result is back. A round
that crosses in the background says itself when it was waited for. Exposed time has three parts. As
far as the gateway says that peers were late, the rank waited for them. The rest of the time in
which at least one bucket was with the gateway, gradients crossed the WAN. What remains are
collectives inside the site.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Crossing:
    """One bucket's stay with the gateway."""

    start_s: float
    end_s: float
    wait_s: float
    """Seconds that peers' contributions were later than ours."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """The times of one round of the exchange, on one clock."""

    exposed: tuple[Interval, ...]
    """From when to when training waited for it, in order, in seconds of the clock."""
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a step in seconds: the first four add up to it."""

    compute_s: float
    intra_s: float
    exposed_inter_s: float
    wait_s: float
    inter_s: float
    """Seconds that buckets were with the gateway, hidden or not; not a part."""
    hidden_inter_s: float
    """Seconds of the step that buckets were with the gateway while training went on; not a part."""


def step_parts(start_s: float, end_s: float, rounds: Sequence[RoundTimes]) -> StepParts:
    """Divide the step [start_s, end_s] that contained `rounds`."""
    exposed_s = wait_s = crossing_s = inter_s = hidden_s = 0.0
    for each in rounds:
        away = [(crossing.start_s, crossing.end_s) for crossing in each.crossings]
        # Peers' lateness comes first: only once they are there do bytes that we wait for flow.
        late = [
            (crossing.start_s, min(crossing.end_s, crossing.start_s + max(0.0, crossing.wait_s)))
            for crossing in each.crossings
        ]
        exposed_s += sum(max(0.0, stop - start) for start, stop in each.exposed)
        crossing_s += sum(_covered_s(away, window) for window in each.exposed)
        wait_s += sum(_covered_s(late, window) for window in each.exposed)
        hidden_s += sum(_covered_s(away, gap) for gap in _gaps(start_s, end_s, each.exposed))
        if away:
            inter_s += max(end for _, end in away) - min(start for start, _ in away)
    return StepParts(
        compute_s=max(0.0, end_s - start_s - exposed_s),
        intra_s=max(0.0, exposed_s - crossing_s),
        exposed_inter_s=max(0.0, crossing_s - wait_s),
        wait_s=wait_s,
        inter_s=inter_s,
        hidden_inter_s=hidden_s,
    )


def _gaps(start_s: float, end_s: float, windows: Iterable[Interval]) -> Iterator[Interval]:
    """Yield what is left of a step beside these windows, which are in order."""
    for window_start_s, window_end_s in windows:
        yield start_s, window_start_s
        start_s = max(window_start_s, window_end_s)
    yield start_s, end_s


def _covered_s(intervals: Iterable[Interval], window: Interval) -> float:
    """Return how much of `window` lies in at least one interval."""
    covered_s = 0.0
    reached_s = window[0]
    for start_s, end_s in sorted(intervals):
        start_s, end_s = max(start_s, reached_s), min(end_s, window[1])
        if end_s > start_s:
            covered_s += end_s - start_s
            reached_s = end_s
    return covered_s
