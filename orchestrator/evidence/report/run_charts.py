"""A run's charts over its time and over its steps: pace, sites, parts of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.evidence.record.run_timeline import (
    CATCHING_UP,
    OUT,
    STARTING,
    TRAINING,
    SiteLane,
    Stall,
)
from isthmus.orchestrator.evidence.report.charts import (
    Lane,
    LanePart,
    LineChart,
    Mark,
    Scale,
    Series,
    Shade,
    lanes,
    line_chart,
    linear,
    rounded,
)
from isthmus.orchestrator.evidence.report.html import Markup
from isthmus.orchestrator.evidence.report.run_facts import EventFacts
from isthmus.orchestrator.evidence.report.wording import PART_CLASSES
from isthmus.orchestrator.evidence.view import formats
from isthmus.protos import metrics

MAX_LANES = 16
"""Sites that are drawn over time: first those to which something happened."""
LANE_CLASSES = {TRAINING: "compute", STARTING: "optimizer", CATCHING_UP: "rs", OUT: "bad"}
"""The colour of what a site does."""
LANE_WORDS = {
    "compute": "training",
    "optimizer": "starting",
    "rs": "catching up",
    "bad": "out",
    "wait thin": "kept others waiting",
}
_UNITS = (("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0), ("days", 86_400.0))
_CUT_OFF = 3.0
"""Times the median step."""
_LEAST_UNITS = 3.0
"""A unit is used from so many of it on."""


class TimeAxis:
    """The time since a run was active, in a unit that people count in."""

    def __init__(self, end_s: float, begin_s: float = 0.0) -> None:
        """Take both ends, in seconds since then."""
        fitting = [each for each in _UNITS if end_s >= _LEAST_UNITS * each[1]] or [_UNITS[0]]
        self.unit, self._unit_s = fitting[-1]
        self.scale: Scale = linear(self.of(begin_s), self.of(end_s), 6)

    def of(self, at_s: float) -> float:
        """Return a time in the axis's unit."""
        return at_s / self._unit_s

    @property
    def title(self) -> str:
        """What the axis counts."""
        return f"{self.unit} since training began"


def time_marks(happened: Sequence[EventFacts], axis: TimeAxis) -> list[Mark]:
    """Return what is drawn on charts over time."""
    return [
        Mark(axis.of(each.at_s), _words(each), str(each.mark))
        for each in happened
        if each.mark is not None and each.at_s is not None
        if axis.scale.low <= axis.of(each.at_s) <= axis.scale.high
    ]


def step_marks(happened: Sequence[EventFacts]) -> list[Mark]:
    """Return what is drawn on charts over steps."""
    return [
        Mark(each.step, _words(each), str(each.mark)) for each in happened if each.mark is not None
    ]


def _words(event: EventFacts) -> str:
    return f"{event.where}: {event.what}" if event.where else event.what


@dataclass(frozen=True, slots=True)
class SlowSpan:
    """A site kept the others waiting; times are seconds since the run was active."""

    site: str
    cost_s: float
    """What a step has cost each other site, on average."""
    begin_s: float
    end_s: float


def pace_chart(
    points: Sequence[tuple[float, float]],
    unit: str,
    stalls: Sequence[Stall],
    axis: TimeAxis,
    marks: Sequence[Mark],
) -> Markup:
    """Draw the pace of a run over its time, with its stalls shaded.

    Args:
        points: Seconds since the run was active, and amounts a second; not empty.
        unit: What they count.
        stalls: When it stood still.
        axis: Of the time.
        marks: What happened, in the axis's unit.
    """
    series = Series(
        "all sites", "c2", [(axis.of(at_s), each) for at_s, each in points], _last(points)
    )
    shades = [
        Shade(axis.of(each.begin_s), axis.of(each.end_s), stall_words(each)) for each in stalls
    ]
    return line_chart(
        LineChart(
            label=f"{unit.capitalize()} per second over the run",
            x=axis.scale,
            y=rounded(0.0, max(each for _, each in points) or 1.0, 5),
            x_title=axis.title,
            y_title=f"{unit} per second",
            x_text=lambda x: f"{x:g}",
            y_text=formats.count,
            series=[series],
            marks=marks,
            shades=shades,
        )
    )


def _last(points: Sequence[tuple[float, float]]) -> str:
    return formats.count(points[-1][1])


def stall_words(stall: Stall) -> str:
    """Return `no step for 12s: oregon was lost`."""
    words = f"no step for {formats.duration(stall.length_s)}"
    return f"{words}: {stall.cause}" if stall.cause else words


def site_lanes(
    sites: Sequence[SiteLane],
    slow: Sequence[SlowSpan],
    axis: TimeAxis,
    marks: Sequence[Mark],
) -> Markup:
    """Draw what sites did over the run's time.

    Args:
        sites: What they did.
        slow: Who kept others waiting.
        axis: Of the time.
        marks: What happened, in the axis's unit.
    """
    rows = []
    for site in sites:
        parts = [
            LanePart(
                axis.of(phase.begin_s),
                axis.of(phase.end_s),
                LANE_CLASSES[phase.what],
                f"{site.site}: {phase.what} for {formats.duration(phase.end_s - phase.begin_s)}",
            )
            for phase in site.phases
        ]
        parts += [
            LanePart(
                axis.of(span.begin_s),
                axis.of(span.end_s),
                "wait",
                f"{site.site}: cost others {formats.duration(span.cost_s)} a step",
                is_thin=True,
            )
            for span in slow
            if span.site == site.site
        ]
        rows.append(Lane(site.site, parts))
    return lanes("What each site did", rows, axis.scale, lambda x: f"{x:g}", marks)


def busy_first(
    sites: Sequence[SiteLane], slow: Sequence[SlowSpan]
) -> tuple[Sequence[SiteLane], int]:
    """Return at most MAX_LANES sites, and how many are left out: those with nothing to tell."""
    if len(sites) <= MAX_LANES:
        return sites, 0
    named = {each.site for each in slow}
    order = sorted(sites, key=lambda each: -(len(each.phases) + (each.site in named)))
    kept = {each.site for each in order[:MAX_LANES]}
    return [each for each in sites if each.site in kept], len(sites) - MAX_LANES


def longest_shown(columns: Mapping[str, Any]) -> float:
    """Return the time beyond which steps are cut off: a first step would flatten all others."""
    means = [each for each in columns[metrics.STEP_S]["mean"] if each is not None]
    return _CUT_OFF * statistics.median(means) if means else math.inf


def step_parts(
    columns: Mapping[str, Any],
    longest_s: float = math.inf,
    xs: Sequence[float] | None = None,
) -> list[Series]:
    """Return the parts of steps as bands one on the other; empty: nothing is known of steps.

    Args:
        columns: Those of StepSeries.
        longest_s: Where steps are cut off.
        xs: Where the points lie; None: at their steps.
    """
    if metrics.STEP_S not in columns:
        return []
    steps = columns["step"] if xs is None else xs
    below = [0.0] * len(steps)
    series = []
    for name, words in PARTS.items():
        means = columns.get(name, {}).get("mean") or [None] * len(steps)
        above = [
            min(longest_s, low + (mean or 0.0)) for low, mean in zip(below, means, strict=True)
        ]
        points = list(zip(steps, above, strict=True))
        band = list(zip(steps, below, above, strict=True))
        series.append(Series(words, PART_CLASSES[name], points, band=band))
        below = above
    return series


def step_chart(
    label: str,
    y_title: str,
    series: Sequence[Series],
    marks: Sequence[Mark],
    *,
    low: float | None = None,
    y_text: Callable[[float], str] = lambda y: formats.count(y) if y >= 1000 else f"{y:g}",
    axis: TimeAxis | None = None,
) -> Markup:
    """Draw figures over steps, or over an axis of time.

    `low`: where the y axis begins, else at the least.
    """
    ys = [y for each in series for _, y in each.points]
    if low is None:
        ys += [y for each in series for _, *ends in each.band for y in ends]
    xs = [x for each in series for x, _ in each.points]
    x = linear(min(xs), max(xs), 6) if axis is None else axis.scale
    return line_chart(
        LineChart(
            label=label,
            x=x,
            y=rounded(min(ys) if low is None else low, max(ys), 5),
            x_title="step" if axis is None else axis.title,
            y_title=y_title,
            x_text=lambda x: f"{x:g}",
            y_text=y_text,
            series=series,
            marks=[mark for mark in marks if x.low <= mark.x <= x.high],
        )
    )
