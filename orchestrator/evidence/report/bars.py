"""Stacked bars: where each site's step went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.evidence.report.blocks import chart
from orchestrator.evidence.report.markup import Markup, element, percent, shortened
from orchestrator.evidence.view import figures

_ROW_PX = 62
_BAR_Y_PX, _BAR_PX = 22, 24
_HIDDEN_Y_PX, _HIDDEN_PX = 49, 5
_FITS, _FITS_A_PHONE = 0.06, 0.2
"""Shares of the chart's width that a value's text needs."""
_MAX_NAME = 36
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
    """One row."""

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
    total = figures.duration(bar.total_s)
    drawn = [
        element("text", shortened(bar.name, _MAX_NAME), x=0, y=15, class_="name"),
        element("text", total, x="100%", y=15, class_="end total"),
    ]
    at_s = 0.0
    for segment in bar.segments:
        drawn += _segment(segment, at_s / widest_s, segment.value_s / widest_s, bar.total_s)
        at_s += segment.value_s
    if bar.hidden and bar.hidden.value_s > 0:
        words = f"{bar.hidden.name}: {figures.duration(bar.hidden.value_s)}"
        drawn.append(
            element(
                "rect",
                element("title", words),
                x=0,
                y=_HIDDEN_Y_PX,
                width=percent(bar.hidden.value_s / widest_s),
                height=_HIDDEN_PX,
                class_=f"fill-{bar.hidden.class_}",
            )
        )
    return drawn


def _segment(segment: Segment, begin: float, width: float, total_s: float) -> list[Markup]:
    value = figures.duration(segment.value_s)
    share = figures.share(segment.value_s / total_s) if total_s else ""
    rect = element(
        "rect",
        element("title", f"{segment.name}: {value}, {share}"),
        x=percent(begin),
        y=_BAR_Y_PX,
        width=percent(width),
        height=_BAR_PX,
        class_=f"fill-{segment.class_}",
    )
    if width < _FITS:
        return [rect]
    text = element(
        "text",
        value,
        x=percent(begin + width / 2),
        y=_BAR_Y_PX + 16.5,
        class_=f"on-{segment.class_} mid" + (" wide" if width < _FITS_A_PHONE else ""),
    )
    return [rect, text]
