"""Line charts: loss over steps, efficiency over RTT or bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orchestrator.evidence.report.blocks import chart, key
from orchestrator.evidence.report.markup import Markup, element, join, percent, shortened
from orchestrator.evidence.report.scales import Scale

_HEIGHT_PX = 280
_AXIS_PX = 26
_LABEL_PX = 16
"""From one label at the lines' ends to the next."""
_UNITS = 10_000
"""Of the paths' own coordinates, in both directions."""
MAX_POINTS = 1000
_MAX_LABEL = 22
"""Characters of a line's name beside it."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line."""

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


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at an x."""

    x: float
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


def line_chart(spec: LineChart) -> Markup:
    """Draw it: lines labelled at their ends where there is room, with a key where there is not."""
    drawing = chart(
        spec.label,
        _HEIGHT_PX,
        *_axes(spec),
        *(_mark(index, mark, spec.x) for index, mark in enumerate(spec.marks)),
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
    return (1 - spec.y(value)) * (_HEIGHT_PX - _AXIS_PX - 8) + 8


def _axes(spec: LineChart) -> list[Markup]:
    drawn = []
    for tick in spec.y.ticks:
        y = _y_px(spec, tick)
        drawn.append(element("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        drawn.append(element("text", spec.y_text(tick), x=-8, y=y + 4, class_="end tick"))
    for tick in spec.x.ticks:
        x = spec.x(tick)
        anchor = "end" if x > 0.97 else "mid" if x > 0.03 else ""
        words = spec.x_text(tick)
        drawn.append(
            element(
                "text",
                words,
                x=percent(x),
                y=float(_HEIGHT_PX - 6),
                class_=f"tick {anchor}".strip(),
            )
        )
    return drawn


def _mark(index: int, mark: Mark, scale: Scale) -> Markup:
    x = scale(mark.x)
    side = "end" if x > 0.7 else ""
    return element(
        "g",
        element("title", mark.words),
        element(
            "line", x1=percent(x), x2=percent(x), y1=8, y2=_HEIGHT_PX - _AXIS_PX, class_="mark"
        ),
        element(
            "text",
            f"{index + 1}",
            x=percent(x),
            dx=-4 if side else 4,
            y=18,
            class_=f"mark-name {side}".strip(),
        ),
    )


def _line(series: Series, spec: LineChart) -> Markup:
    """Return one line; its path is stretched to the chart's width, its stroke is not."""
    stride = -(-len(series.points) // MAX_POINTS)
    kept = [*series.points[:-1:stride], series.points[-1]]
    places = [(spec.x(x), _y_px(spec, y)) for x, y in kept]
    path = "M" + "L".join(f"{x * _UNITS:.0f} {y:.2f}" for x, y in places)
    stretched = element(
        "svg",
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
        element(
            "line",
            x1=percent(spec.x(x)),
            x2=percent(spec.x(x)),
            y1=_y_px(spec, low),
            y2=_y_px(spec, high),
            class_="whisker",
        )
        for x, low, high in series.intervals
    ]
    return element("g", stretched, *whiskers, *dots, class_=f"series {series.class_}")


def _end_labels(spec: LineChart) -> list[Markup]:
    """Return each line's name right of its end, moved apart where they would overlap."""
    wanted = sorted(
        (_y_px(spec, each.points[-1][1]), at) for at, each in enumerate(spec.series) if each.name
    )
    places: list[float] = []
    for y, _ in wanted:
        places.append(max(y, places[-1] + _LABEL_PX) if places else y)
    overflow = max(0.0, places[-1] - (_HEIGHT_PX - _AXIS_PX)) if places else 0.0
    drawn = []
    for (_, at), y in zip(wanted, places, strict=True):
        series = spec.series[at]
        words = f"{shortened(series.name, _MAX_LABEL)} {series.end}".strip()
        text = element("text", words, x="100%", dx=8, y=y - overflow + 4, class_="label wide")
        drawn.append(element("g", text, class_=f"series {series.class_}"))
    return drawn
