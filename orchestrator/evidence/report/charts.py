"""The report's charts as SVG: stacked bars, lines, and the time line of a step.

A scale maps data to 0..1 of a chart's width or height, with ticks where a person would put them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from isthmus.orchestrator.evidence.record.step_timelines import (
    Bucket,
    SiteTimeline,
    Span,
    StepTimeline,
)
from isthmus.orchestrator.evidence.report.html import (
    Markup,
    chart,
    element,
    join,
    key,
    line,
    percent,
    shortened,
    table,
    words_at,
)
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import columns_of
from isthmus.orchestrator.runs.facts import known
from isthmus.protos import metrics


@dataclass(frozen=True, slots=True)
class Scale:
    """A monotone map from `low`..`high` to 0..1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    """Inside the range, ascending."""
    forward: Callable[[float], float] = float
    """The identity, or math.log10."""

    def __call__(self, value: float) -> float:
        """Return where `value` lies: 0 at the low end."""
        low, high = self.forward(self.low), self.forward(self.high)
        return (self.forward(value) - low) / (high - low)


def linear(low: float, high: float, num_ticks: int = 5) -> Scale:
    """Return a linear scale from `low` to `high`; equal ends are moved apart."""
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return Scale(low, high, tuple(ticks(low, high, num_ticks)))


def rounded(low: float, high: float, num_ticks: int = 5) -> Scale:
    """Return a linear scale that is widened to ticks at both ends."""
    scale = linear(low, high, num_ticks)
    step = _step(scale.high - scale.low, num_ticks)
    low = math.floor(scale.low / step + 1e-9) * step
    high = math.ceil(scale.high / step - 1e-9) * step
    return Scale(low, high, tuple(ticks(low, high, num_ticks)))


def logarithmic(values: Iterable[float]) -> Scale:
    """Return a scale of positive values, with a tick at each of them: sweeps measure few."""
    found = sorted(set(values))
    if len(found) == 1:
        return Scale(found[0] / 2, found[0] * 2, tuple(found), math.log10)
    return Scale(found[0], found[-1], tuple(found), math.log10)


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return about `wanted` multiples of 1, 2 or 5 times a power of ten in low..high."""
    step = _step(high - low, wanted)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def _step(span: float, wanted: int) -> float:
    rough = span / max(1, wanted)
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= rough * (1 - 1e-9))


_ROW_PX = 62
_BAR_Y_PX, _BAR_PX = 22, 24
_HIDDEN_Y_PX, _HIDDEN_PX = 49, 5
_BAR_FITS, _FITS_A_PHONE = 0.06, 0.2
"""Shares of the chart's width that a value's text needs."""
_BAR_NAME_MAX = 36
"""Characters: beside them a phone has room for the total."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a bar."""

    class_: str
    """Its colour."""
    name: str
    value_s: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a bar chart."""

    name: str
    segments: Sequence[Segment]
    hidden: Segment | None = None
    """Drawn below, from the bar's beginning: it took no time of its own."""

    @property
    def total_s(self) -> float:
        """Sum of the segments."""
        return sum(segment.value_s for segment in self.segments)


def stacked_bars(label: str, bars: Sequence[Bar]) -> Markup:
    """Draw the bars on one scale, each with its name, its total and its parts' values."""
    widest_s = max(max(bar.total_s, bar.hidden.value_s if bar.hidden else 0.0) for bar in bars)
    rows = [
        element("g", *_row(bar, widest_s or 1.0), transform=f"translate(0 {index * _ROW_PX})")
        for index, bar in enumerate(bars)
    ]
    return chart(label, len(bars) * _ROW_PX, *rows, class_="bars")


def _row(bar: Bar, widest_s: float) -> list[Markup]:
    total = formats.duration(bar.total_s)
    drawn = [
        words_at(0, 15, shortened(bar.name, _BAR_NAME_MAX), "name"),
        words_at("100%", 15, total, "end total"),
    ]
    at_s = 0.0
    for segment in bar.segments:
        drawn += _segment(segment, at_s / widest_s, segment.value_s / widest_s, bar.total_s)
        at_s += segment.value_s
    if bar.hidden and bar.hidden.value_s > 0:
        words = f"{bar.hidden.name}: {formats.duration(bar.hidden.value_s)}"
        width = bar.hidden.value_s / widest_s
        drawn.append(
            _rect(0.0, width, _HIDDEN_Y_PX, _HIDDEN_PX, f"fill-{bar.hidden.class_}", words)
        )
    return drawn


def _segment(segment: Segment, begin: float, width: float, total_s: float) -> list[Markup]:
    value = formats.duration(segment.value_s)
    share = formats.share(segment.value_s / total_s) if total_s else ""
    title = f"{segment.name}: {value}, {share}"
    drawn = [_rect(begin, width, _BAR_Y_PX, _BAR_PX, f"fill-{segment.class_}", title)]
    if width >= _BAR_FITS:
        class_ = f"on-{segment.class_} mid" + (" wide" if width < _FITS_A_PHONE else "")
        drawn.append(words_at(percent(begin + width / 2), _BAR_Y_PX + 16.5, value, class_))
    return drawn


_HEIGHT_PX = 280
_LINES_AXIS_PX = 26
_LABEL_PX = 16
"""The distance from one label at the lines' ends to the next."""
_UNITS = 10_000
"""Units of the paths' own coordinates, in both directions."""
MAX_POINTS = 1000
_MARKS_APART, _NAMED_MARKS = 0.03, 3
"""Share of the chart's width between two labels of marks; marks that one label names."""
_THINNEST_SHADE = 0.003
"""Share of the chart's width that can still be seen."""
_MAX_LABEL = 22
"""Characters of a line's name beside it."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    """Empty: neither labelled nor in the key."""
    class_: str
    """Its colour."""
    points: Sequence[tuple[float, float]]
    """Ascending in x, not empty."""
    end: str = ""
    """The last value, as text beside the name."""
    dots: bool = False
    intervals: Sequence[tuple[float, float, float]] = ()
    """x, and the low and high end of an interval."""
    dashed: bool = False
    band: Sequence[tuple[float, float, float]] = ()
    """x, and the low and high end of an area, which is filled. Ascending in x."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at an x."""

    x: float
    words: str
    name: str = ""
    """What stands beside it; empty: its number, from 1."""


@dataclass(frozen=True, slots=True)
class Shade:
    """A stretch of the x axis in which something lasted."""

    begin: float
    end: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Axes and what is drawn on them."""

    label: str
    x: Scale
    y: Scale
    x_title: str
    y_title: str
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    series: Sequence[Series]
    marks: Sequence[Mark] = field(default=())
    shades: Sequence[Shade] = field(default=())


def line_chart(spec: LineChart) -> Markup:
    """Draw it: lines labelled at their ends where there is room, with a key where there is not."""
    drawing = chart(
        spec.label,
        _HEIGHT_PX,
        *(_shade(shade, spec.x) for shade in spec.shades),
        *_axes(spec),
        *_marks(spec.marks, spec.x),
        *(_line(series, spec) for series in spec.series),
        *_end_labels(spec),
        class_="lines",
    )
    names = {
        f"line {each.class_}": f"{each.name} {each.end}".strip()
        for each in spec.series
        if each.name
    }
    return join(
        element("p", spec.y_title, class_="axis-title"),
        key(names, "narrow"),
        element("div", drawing, class_="plot"),
        element("p", spec.x_title, class_="axis-title x"),
    )


def _y_px(spec: LineChart, value: float) -> float:
    return (1 - spec.y(value)) * (_HEIGHT_PX - _LINES_AXIS_PX - 8) + 8


def _axes(spec: LineChart) -> list[Markup]:
    drawn = []
    for tick in spec.y.ticks:
        y = _y_px(spec, tick)
        drawn.append(line(0, y, "100%", y, "grid"))
        drawn.append(words_at(-8, y + 4, spec.y_text(tick), "end tick"))
    for tick in spec.x.ticks:
        x = spec.x(tick)
        anchor = "end" if x > 0.97 else "mid" if x > 0.03 else ""
        drawn.append(words_at(percent(x), _HEIGHT_PX - 6, spec.x_text(tick), f"tick {anchor}"))
    return drawn


def _shade(shade: Shade, scale: Scale) -> Markup:
    height_px = _HEIGHT_PX - _LINES_AXIS_PX - 8
    begin = scale(shade.begin)
    width = max(_THINNEST_SHADE, scale(shade.end) - begin)
    return _rect(begin, width, 8, height_px, "stall", shade.words)


def _marks(marks: Sequence[Mark], scale: Scale) -> list[Markup]:
    """Return a line for each mark; those that are close together share a label, as `1, 2`."""
    named = [(scale(mark.x), mark.name or f"{at}", mark) for at, mark in enumerate(marks, 1)]
    named.sort(key=lambda each: each[0])
    drawn, labels = [], list[tuple[float, list[str]]]()
    for place, name, mark in named:
        x = percent(place)
        drawn_line = line(x, 8, x, _HEIGHT_PX - _LINES_AXIS_PX, "mark")
        drawn.append(element("g", element("title", mark.words), drawn_line))
        if labels and place - labels[-1][0] < _MARKS_APART:
            labels[-1][1].append(name)
        else:
            labels.append((place, [name]))
    for place, names in labels:
        side, dx = ("end", -4) if place > 0.7 else ("", 4)
        text = ", ".join(names[:_NAMED_MARKS]) + (", …" if len(names) > _NAMED_MARKS else "")
        drawn.append(words_at(percent(place), 18, text, f"mark-name {side}", dx=dx))
    return drawn


def _line(series: Series, spec: LineChart) -> Markup:
    """Return one line; its path is stretched to the chart's width, its stroke is not."""
    stride = -(-len(series.points) // MAX_POINTS)
    kept = [*series.points[:-1:stride], series.points[-1]]
    places = [(spec.x(x), _y_px(spec, y)) for x, y in kept]
    path = "M" + "L".join(f"{x * _UNITS:.0f} {y:.2f}" for x, y in places)
    stretched = element(
        "svg",
        _band(series, spec) if series.band else None,
        element("path", d=path, class_="dashed" if series.dashed else None),
        viewBox=f"0 0 {_UNITS} {_HEIGHT_PX}",
        preserveAspectRatio="none",
        aria_hidden="true",
        width="100%",
        height=_HEIGHT_PX,
    )
    dots = [
        element("circle", cx=percent(x), cy=y, r=3.5) for x, y in (places if series.dots else [])
    ]
    whiskers = [
        line(percent(spec.x(x)), _y_px(spec, low), percent(spec.x(x)), _y_px(spec, high), "whisker")
        for x, low, high in series.intervals
    ]
    return element("g", stretched, *whiskers, *dots, class_=f"series {series.class_}")


def _band(series: Series, spec: LineChart) -> Markup:
    """Return the area of a line: along its high end, and back along its low one."""
    stride = -(-len(series.band) // MAX_POINTS)
    kept = [*series.band[:-1:stride], series.band[-1]]
    ends = [(x, high) for x, _, high in kept] + [(x, low) for x, low, _ in reversed(kept)]
    path = "L".join(f"{spec.x(x) * _UNITS:.0f} {_y_px(spec, y):.2f}" for x, y in ends)
    return element("path", d=f"M{path}Z", class_="band")


def _end_labels(spec: LineChart) -> list[Markup]:
    """Return each line's name right of its end, moved apart where they would overlap."""
    wanted = sorted(
        (_y_px(spec, each.points[-1][1]), at) for at, each in enumerate(spec.series) if each.name
    )
    places: list[float] = []
    for y, _ in wanted:
        places.append(max(y, places[-1] + _LABEL_PX) if places else y)
    overflow = max(0.0, places[-1] - (_HEIGHT_PX - _LINES_AXIS_PX)) if places else 0.0
    drawn = []
    for (_, at), y in zip(wanted, places, strict=True):
        series = spec.series[at]
        words = f"{shortened(series.name, _MAX_LABEL)} {series.end}".strip()
        text = words_at("100%", y - overflow + 4, words, "label wide", dx=8)
        drawn.append(element("g", text, class_=f"series {series.class_}"))
    return drawn


_LANE_PX, _LANE_BAR_PX, _LANES_AXIS_PX = 34, 12, 26
_LANE_NAME_MAX = 36


@dataclass(frozen=True, slots=True)
class LanePart:
    """A stretch of a lane."""

    begin: float
    end: float
    class_: str
    """Its colour."""
    words: str
    is_thin: bool = False
    """Drawn below the lane's bar, beside what else there is."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a chart over time."""

    name: str
    parts: Sequence[LanePart]


def lanes(
    label: str,
    rows: Sequence[Lane],
    x: Scale,
    x_text: Callable[[float], str],
    marks: Sequence[Mark],
) -> Markup:
    """Draw rows of bars over one scale, as wide as a line chart's plot."""
    height_px = len(rows) * _LANE_PX
    drawn = []
    for tick in x.ticks:
        at = x(tick)
        anchor = "end" if at > 0.97 else "mid" if at > 0.03 else ""
        drawn.append(words_at(percent(at), height_px + 20, x_text(tick), f"tick {anchor}"))
    for index, row in enumerate(rows):
        top_px = index * _LANE_PX
        drawn.append(
            words_at(0, top_px + 12, shortened(row.name, _LANE_NAME_MAX), "name small-name")
        )
        for part in row.parts:
            begin = max(0.0, x(part.begin))
            width = min(1.0, x(part.end)) - begin
            at_px = top_px + 16 + (_LANE_BAR_PX + 1 if part.is_thin else 0)
            part_px = 4 if part.is_thin else _LANE_BAR_PX
            drawn.append(_rect(begin, width, at_px, part_px, f"fill-{part.class_}", part.words))
    for mark in marks:
        place = percent(x(mark.x))
        drawn.append(
            element("g", element("title", mark.words), line(place, 0, place, height_px, "mark"))
        )
    drawing = chart(label, height_px + _LANES_AXIS_PX, *drawn, class_="lanes")
    return element("div", drawing, class_="plot")


PHASE_WORDS = {
    "rs": "reduce-scatter inside the site",
    "wan": "WAN",
    "ag": "all-gather inside the site",
}
_GANTT_AXIS_PX, _HEAD_PX, _COMPUTE_PX, _GAP_PX = 26, 24, 16, 20
_MAX_PITCH_PX, _MIN_PITCH_PX, _BUCKETS_PX = 13.0, 3.0, 160.0
_LABELLED_PITCH_PX = 11.0
"""Rows that are lower have no room for a bucket's number."""
_GANTT_NAME_MAX = 22
"""Characters: beside them a phone has room for the step's times."""
_GANTT_FITS = 0.16
"""Share of the width that the words in a compute bar need."""


def gantt(step: StepTimeline) -> Markup:
    """Draw a step, from when the first site began it."""
    scale = linear(0.0, max(step.end_s - step.begin_s, 1e-6), 4)
    top_px: float = _GANTT_AXIS_PX
    drawn = []
    for name, site in step.sites.items():
        height_px, rows = _site(name, site, step.begin_s, scale)
        drawn.append(element("g", *rows, transform=f"translate(0 {top_px:g})"))
        top_px += height_px
    drawn = [*_axis(scale, top_px), *drawn]
    return chart(f"Timeline of step {step.step}", top_px, *drawn, class_="gantt")


def gantt_table(step: StepTimeline) -> Markup:
    """Return the same times as a table, in milliseconds since the first site began."""

    def since(wall_s: float) -> str:
        return f"{(wall_s - step.begin_s) * 1e3:.1f}"

    rows = []
    for name, site in step.sites.items():
        rows.append(
            [name, "step", since(site.begin_s), since(site.computed_s), "", since(site.end_s)]
        )
        for each in site.buckets:
            times = (each.submitted_s, each.posted_s, each.reduced_s, each.finished_s)
            rows.append([name, f"bucket {each.index}", *map(since, times)])
    headings = [
        "site",
        "what",
        "begun or submitted, ms",
        "computed or handed over, ms",
        "reduced, ms",
        "finished, ms",
    ]
    return table(columns_of(headings, rows, num_text=2), f"Timeline of step {step.step}")


def _axis(scale: Scale, bottom_px: float) -> list[Markup]:
    drawn = []
    for tick in scale.ticks:
        x = percent(scale(tick))
        drawn.append(line(x, _GANTT_AXIS_PX - 6, x, bottom_px - 8, "grid"))
        text = formats.duration(tick) if tick else "0"
        anchor = "end" if scale(tick) > 0.94 else "mid" if tick else ""
        drawn.append(words_at(x, 12, text, f"tick {anchor}"))
    return drawn


def _site(name: str, site: SiteTimeline, zero_s: float, scale: Scale) -> tuple[float, list[Markup]]:
    """Return the height of one site's part, and what is drawn in it."""
    pitch_px = _BUCKETS_PX / max(1, len(site.buckets))
    pitch_px = min(_MAX_PITCH_PX, max(_MIN_PITCH_PX, pitch_px))
    buckets_px = _HEAD_PX + _COMPUTE_PX + 4
    bottom_px = buckets_px + pitch_px * len(site.buckets)
    length = formats.duration(site.end_s - site.begin_s)
    compute, _, optimizer = site.spans()
    shade = _place(compute, zero_s, scale)
    after = f"{length}, {formats.duration(site.exposed_s)} after backward"
    drawn = [
        words_at(0, 16, shortened(name, _GANTT_NAME_MAX), "name"),
        words_at("100%", 16, after, "end tick"),
        _rect(*shade, _HEAD_PX, bottom_px - _HEAD_PX, "shade"),
    ]
    for span in (compute, optimizer):
        title = f"{span.words}: {formats.duration(span.length_s)}"
        place = _place(span, zero_s, scale)
        drawn.append(_rect(*place, _HEAD_PX, _COMPUTE_PX, f"fill-{span.key}", title))
    if shade[1] > _GANTT_FITS:
        x = percent(shade[0] + shade[1] / 2)
        drawn.append(words_at(x, _HEAD_PX + 12, compute.words, "on-compute mid wide"))
    for row, bucket in enumerate(site.buckets):
        drawn += _bucket(bucket, zero_s, scale, buckets_px + row * pitch_px, pitch_px)
    return bottom_px + _GAP_PX, drawn


def _place(span: Span, zero_s: float, scale: Scale) -> tuple[float, float]:
    """Return where a span begins, and its width, as shares of the chart's."""
    return scale(span.begin_s - zero_s), span.length_s / (scale.high - scale.low)


def _bucket(
    bucket: Bucket, zero_s: float, scale: Scale, top_px: float, pitch_px: float
) -> list[Markup]:
    height_px = max(2.0, pitch_px - 3)
    drawn = []
    for span in bucket.spans():
        title = f"bucket {bucket.index}, {PHASE_WORDS[span.key]}: {formats.duration(span.length_s)}"
        title += _details(bucket) if span.key == "wan" else ""
        place = _place(span, zero_s, scale)
        drawn.append(_rect(*place, top_px, height_px, f"fill-{span.key}", title))
    if pitch_px >= _LABELLED_PITCH_PX:
        drawn.append(words_at(-6, top_px + height_px - 1, str(bucket.index), "end tick small"))
    return drawn


def _details(bucket: Bucket) -> str:
    """Return what else is known of a bucket's crossing."""
    wait_s = known(bucket.values, metrics.WAIT_S)
    sent = known(bucket.values, metrics.WIRE_BYTES)
    told = f", of it {formats.duration(wait_s)} for others" if wait_s else ""
    return told + (f", {formats.size(sent)} sent" if sent else "")


def _rect(
    begin: float, width: float, top_px: float, height_px: float, class_: str, title: str = ""
) -> Markup:
    """Return a rectangle with a title; the first two are shares of the chart's width."""
    return element(
        "rect",
        element("title", title) if title else None,
        x=percent(begin),
        y=float(top_px),
        width=percent(max(0.0, width)),
        height=float(height_px),
        class_=class_,
    )
