"""Where the time of a simulated step went, by the rules that ranks measure by. Pure.

After backward has handed over its last bucket, communication is exposed until the last result is in
place. Of that, the time with at least one bucket on the WAN is waiting as far as other sites were later
with their part, else crossing; what remains are collectives inside the site.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """One bucket's way at one site, in seconds since the simulation began."""

    index: int
    """Of the step work's buckets."""
    submitted_s: float
    posted_s: float
    reduced_s: float
    finished_s: float
    wait_s: float
    """Until the last other site had posted its part."""

    def later(self, shift_s: float) -> BucketTimes:
        """Return the same, some seconds later."""
        return BucketTimes(
            self.index,
            self.submitted_s + shift_s,
            self.posted_s + shift_s,
            self.reduced_s + shift_s,
            self.finished_s + shift_s,
            self.wait_s,
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """A step's seconds; the first four add up to it."""

    compute_s: float
    intra_s: float
    exposed_inter_s: float
    wait_s: float
    hidden_inter_s: float
    """Buckets were on the WAN before backward had handed over the last one: no part of the step."""
    inter_s: float
    """From the first bucket's leaving to the last one's coming back: no part either."""


def parts_of(
    begin_s: float,
    computed_s: float,
    end_s: float,
    buckets: Sequence[BucketTimes],
    *,
    crosses: bool = True,
) -> Parts:
    """Divide a step.

    Args:
        begin_s: of the step.
        computed_s: its last bucket was handed over.
        end_s: of the step.
        buckets: all of it.
        crosses: they crossed the WAN; else what is exposed was inside the site.
    """
    exposed_s = max(0.0, end_s - computed_s)
    away = [(each.posted_s, each.reduced_s) for each in buckets] if crosses else []
    late = [
        (each.posted_s, min(each.reduced_s, each.posted_s + each.wait_s))
        for each in (buckets if crosses else ())
    ]
    crossing_s = _covered_s(away, (computed_s, end_s))
    wait_s = _covered_s(late, (computed_s, end_s))
    return Parts(
        compute_s=max(0.0, end_s - begin_s - exposed_s),
        intra_s=max(0.0, exposed_s - crossing_s),
        exposed_inter_s=max(0.0, crossing_s - wait_s),
        wait_s=wait_s,
        hidden_inter_s=_covered_s(away, (begin_s, computed_s)),
        inter_s=max((end for _, end in away), default=0.0)
        - min((start for start, _ in away), default=0.0),
    )


def _covered_s(intervals: Iterable[Interval], window: Interval) -> float:
    """Return how much of `window` lies in at least one interval."""
    covered_s, reached_s = 0.0, window[0]
    for start_s, end_s in sorted(intervals):
        start_s, end_s = max(start_s, reached_s), min(end_s, window[1])
        if end_s > start_s:
            covered_s += end_s - start_s
            reached_s = end_s
    return covered_s
