"""Buckets of a simulated step, and where its time went: by the rule that ranks measure by. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topology.model.step_parts import Crossing, RoundTimes, StepParts, step_parts


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


def parts_of(
    begin_s: float,
    computed_s: float,
    end_s: float,
    buckets: Sequence[BucketTimes],
    *,
    crosses: bool = True,
) -> StepParts:
    """Divide a step.

    Args:
        begin_s: of the step.
        computed_s: its last bucket was handed over.
        end_s: of the step.
        buckets: all of it.
        crosses: they crossed the WAN; else what is exposed was inside the site.
    """
    crossings = tuple(Crossing(each.posted_s, each.reduced_s, each.wait_s) for each in buckets)
    round_ = RoundTimes(computed_s, end_s, crossings if crosses else ())
    return step_parts(begin_s, end_s, [round_])
