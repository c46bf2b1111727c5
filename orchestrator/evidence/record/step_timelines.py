"""The timelines of steps: when each bucket crossed, against backward.

The records of kind `timeline` and `bucket`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from isthmus.protos import metrics

MAX_STEPS = 12
"""Steps that a page draws; a trace has all that were read."""
MAX_READ_STEPS = 2000
"""Steps that are kept at least; once they are twice as many, every second one is let go."""

_OPEN_STEPS = 16


PHASES = {
    "rs": "reduce-scatter",
    "wan": "WAN",
    "ag": "all-gather",
}
"""The phases of a bucket in their order: key, and what people call it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a time line, in wall-clock seconds: the report and the trace draw the same ones."""

    key: str
    """What is done: one of PHASES, `compute`, `wait` or `optimizer`."""
    words: str
    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket's way, in wall-clock seconds."""

    index: int
    submitted_s: float
    posted_s: float
    reduced_s: float
    finished_s: float
    values: Mapping[str, float]
    """What else was measured of it, by the names of protos/metrics.py."""

    def spans(self) -> list[Span]:
        """Return its phases, in their order."""
        times = (self.submitted_s, self.posted_s, self.reduced_s, self.finished_s)
        return [
            Span(key, words, begin_s, end_s)
            for (key, words), begin_s, end_s in zip(
                PHASES.items(), times[:-1], times[1:], strict=True
            )
        ]


@dataclass(slots=True)
class SiteTimeline:
    """One step of a site's first rank, in wall-clock seconds."""

    begin_s: float
    computed_s: float
    end_s: float
    buckets: list[Bucket] = field(default_factory=list)

    @property
    def averaged_s(self) -> float:
        """When the last gradient was in place; backward's end, if that came later."""
        last_s = max((bucket.finished_s for bucket in self.buckets), default=self.computed_s)
        return min(self.end_s, max(self.computed_s, last_s))

    @property
    def exposed_s(self) -> float:
        """From backward's end until the last gradient was in place, if the step waited for it."""
        return self.averaged_s - self.computed_s

    def spans(self) -> list[Span]:
        """Return what its accelerator did, one after the other."""
        return [
            Span("compute", "forward and backward", self.begin_s, self.computed_s),
            Span("wait", "waiting for gradients", self.computed_s, self.averaged_s),
            Span("optimizer", "optimizer", self.averaged_s, self.end_s),
        ]


@dataclass(slots=True)
class StepTimeline:
    """One step at all sites that told of it."""

    step: int
    sites: dict[str, SiteTimeline] = field(default_factory=dict)

    @property
    def begin_s(self) -> float:
        """When the first site began."""
        return min(site.begin_s for site in self.sites.values())

    @property
    def end_s(self) -> float:
        """When the last site was done."""
        return max(site.end_s for site in self.sites.values())


class TimelineReader:
    """Puts records together: a bucket's may come before its step's."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, str], SiteTimeline] = {}
        self._buckets: dict[tuple[int, str], dict[int, Bucket]] = {}
        self._known: set[int] = set()
        self.num_dropped = 0
        """Steps that were let go, so that memory is bounded however long the run was."""

    def add(self, site: str, kind: str, step: int, values: Mapping[str, float]) -> bool:
        """Take one record; False if a time is missing or they run backwards."""
        key = (step, site)
        if kind == metrics.TIMELINE:
            times = _rising(values, (metrics.BEGIN_S, metrics.COMPUTED_S, metrics.END_S))
            if times is None:
                return False
            self._steps[key] = SiteTimeline(times[0], times[1], times[2])
            self._known.add(step)
            if len(self._known) > 2 * MAX_READ_STEPS:
                self._thin()
            return True
        names = (metrics.SUBMITTED_S, metrics.POSTED_S, metrics.REDUCED_S, metrics.FINISHED_S)
        times = _rising(values, names)
        if times is None or metrics.BUCKET_INDEX not in values:
            return False
        index = int(values[metrics.BUCKET_INDEX])
        rest = {
            name: value
            for name, value in values.items()
            if name not in names and name != metrics.BUCKET_INDEX
        }
        self._buckets.setdefault(key, {})[index] = Bucket(
            index, times[0], times[1], times[2], times[3], rest
        )
        return True

    def _thin(self) -> None:
        """Let every second step go, but for the last ones: some sites have yet to tell of them."""
        dropped = set(sorted(self._known)[1:-_OPEN_STEPS:2])
        self.num_dropped += len(dropped)
        self._known -= dropped
        self._steps = {key: each for key, each in self._steps.items() if key[0] not in dropped}
        self._buckets = {key: each for key, each in self._buckets.items() if key[0] not in dropped}

    def steps(self, sites: Iterable[str]) -> list[StepTimeline]:
        """Return the steps in order, their sites in that of `sites`, their buckets by index."""
        order = list(sites)
        found: dict[int, StepTimeline] = {}
        for step, site in sorted(self._steps, key=lambda key: (key[0], order.index(key[1]))):
            timeline = self._steps[step, site]
            buckets = self._buckets.get((step, site), {})
            timeline.buckets = [buckets[index] for index in sorted(buckets)]
            found.setdefault(step, StepTimeline(step)).sites[site] = timeline
        return list(found.values())


def choose(steps: list[StepTimeline], limit: int = MAX_STEPS) -> list[StepTimeline]:
    """Return at most `limit` steps: evenly over the run, the first and the last among them."""
    if len(steps) <= limit:
        return steps
    first, last = steps[0].step, steps[-1].step
    wanted = [first + (last - first) * index / (limit - 1) for index in range(limit)]
    nearest = {min(range(len(steps)), key=lambda at: abs(steps[at].step - step)) for step in wanted}
    return [steps[index] for index in sorted(nearest)]


def typical(steps: list[StepTimeline]) -> StepTimeline:
    """Return the step of median length.

    The first ones, which warm up and are longer, are seldom it.
    """
    by_length = sorted(steps, key=lambda step: step.end_s - step.begin_s)
    return by_length[(len(by_length) - 1) // 2]


def hold_back(steps: Iterable[StepTimeline]) -> None:
    """Let no bucket be submitted before backward has ended, as `schedule: serial` has it.

    Until then it waited for backward, not for the ranks of its site.
    """
    for site in (site for step in steps for site in step.sites.values()):
        site.buckets = [
            dataclasses.replace(
                bucket,
                submitted_s=min(bucket.posted_s, max(bucket.submitted_s, site.computed_s)),
            )
            for bucket in site.buckets
        ]


def _rising(values: Mapping[str, float], names: tuple[str, ...]) -> list[float] | None:
    """Return the times of those names; None if one is missing, or earlier than the one before."""
    times = [values[name] for name in names if name in values]
    if len(times) != len(names) or times != sorted(times):
        return None
    return times
