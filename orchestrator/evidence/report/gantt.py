"""One step as a Gantt chart: each site's backward pass, and every bucket's way across under it.

What lies on the shaded ground was hidden behind the computation; what lies right of it was waited
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.evidence.report.blocks import chart, table
from orchestrator.evidence.report.markup import Markup, element, percent, shortened
from orchestrator.evidence.report.scales import Scale, linear
from orchestrator.evidence.report.timelines import Bucket, SiteTimeline, StepTimeline
from orchestrator.evidence.view import figures
from protos import metrics

PHASES = {
    "rs": "reduce-scatter inside the site",
    "wan": "WAN",
    "ag": "all-gather inside the site",
}
"""Of a bucket, in their order: CSS class, and what people call it."""
_AXIS_PX, _HEAD_PX, _COMPUTE_PX, _GAP_PX = 26, 24, 16, 20
_MAX_PITCH_PX, _MIN_PITCH_PX, _BUCKETS_PX = 13.0, 3.0, 160.0
_LABELLED_PITCH_PX = 11.0
"""Rows that are lower have no room for a bucket's number."""
_MAX_NAME = 22
"""Characters: beside them a phone has room for the step's times."""
_FITS = 0.16
"""Share of the width that the words in a compute bar need."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """Where one site's part of the chart is."""

    top_px: float
    pitch_px: float
    bottom_px: float


def gantt(step: StepTimeline) -> Markup:
    """Draw a step, from when the first site began it."""
    lanes = _lanes(step)
    scale = linear(0.0, max(step.end_s - step.begin_s, 1e-6), 4)
    bottom_px = lanes[-1].bottom_px
    drawn = [*_axis(scale, bottom_px)]
    for (name, site), lane in zip(step.sites.items(), lanes, strict=True):
        drawn += _site(name, site, step.begin_s, scale, lane)
    return chart(f"Timeline of step {step.step}", bottom_px, *drawn, class_="gantt")


def gantt_table(step: StepTimeline) -> Markup:
    """Return the same times as a table, in milliseconds since the first site began."""

    def since(wall_s: float) -> str:
        return f"{(wall_s - step.begin_s) * 1e3:.1f}"

    rows = []
    for name, site in step.sites.items():
        times = (site.begin_s, site.computed_s, site.end_s)
        rows.append([name, "step", since(times[0]), since(times[1]), "", since(times[2])])
        rows += [
            [
                name,
                f"bucket {bucket.index}",
                since(bucket.submitted_s),
                since(bucket.posted_s),
                since(bucket.reduced_s),
                since(bucket.finished_s),
            ]
            for bucket in site.buckets
        ]
    headings = [
        "site",
        "what",
        "begun or submitted, ms",
        "computed or handed over, ms",
        "reduced, ms",
        "finished, ms",
    ]
    return table(headings, rows, num_text=2, caption=f"Timeline of step {step.step}")


def _lanes(step: StepTimeline) -> list[_Lane]:
    lanes = []
    top_px: float = _AXIS_PX
    for site in step.sites.values():
        count = max(1, len(site.buckets))
        pitch_px = min(_MAX_PITCH_PX, max(_MIN_PITCH_PX, _BUCKETS_PX / count))
        bottom_px = top_px + _HEAD_PX + _COMPUTE_PX + 4 + pitch_px * len(site.buckets) + _GAP_PX
        lanes.append(_Lane(top_px, pitch_px, bottom_px))
        top_px = bottom_px
    return lanes


def _axis(scale: Scale, bottom_px: float) -> list[Markup]:
    drawn = []
    for tick in scale.ticks:
        x = percent(scale(tick))
        is_last = scale(tick) > 0.94
        drawn.append(element("line", x1=x, x2=x, y1=_AXIS_PX - 6, y2=bottom_px - 8, class_="grid"))
        text = figures.duration(tick) if tick else "0"
        anchor = "end" if is_last else "mid" if tick else ""
        drawn.append(element("text", text, x=x, y=12, class_=f"tick {anchor}".strip()))
    return drawn


def _site(name: str, site: SiteTimeline, zero_s: float, scale: Scale, lane: _Lane) -> list[Markup]:
    begin, computed, end = (
        scale(wall_s - zero_s) for wall_s in (site.begin_s, site.computed_s, site.end_s)
    )
    last_s = max((bucket.finished_s for bucket in site.buckets), default=site.computed_s)
    settled = max(computed, min(end, scale(last_s - zero_s)))
    bars_px = lane.top_px + _HEAD_PX
    rows_px = bars_px + _COMPUTE_PX + 4
    length = figures.duration(site.end_s - site.begin_s)
    exposed = figures.duration(site.exposed_s)
    drawn = [
        element("text", shortened(name, _MAX_NAME), x=0, y=lane.top_px + 16, class_="name"),
        element(
            "text",
            f"{length}, {exposed} after backward",
            x="100%",
            y=lane.top_px + 16,
            class_="end tick",
        ),
        _rect(begin, computed - begin, bars_px, lane.bottom_px - _GAP_PX - bars_px, "shade", ""),
        _rect(
            begin,
            computed - begin,
            bars_px,
            _COMPUTE_PX,
            "fill-compute",
            f"forward and backward: {figures.duration(site.computed_s - site.begin_s)}",
        ),
        _rect(
            settled,
            end - settled,
            bars_px,
            _COMPUTE_PX,
            "fill-optimizer",
            f"optimizer: {figures.duration(max(0.0, site.end_s - last_s))}",
        ),
    ]
    if computed - begin > _FITS:
        x = percent((begin + computed) / 2)
        words = "forward and backward"
        drawn.append(element("text", words, x=x, y=bars_px + 12, class_="on-compute mid wide"))
    for row, bucket in enumerate(site.buckets):
        drawn += _bucket(bucket, zero_s, scale, rows_px + row * lane.pitch_px, lane.pitch_px)
    return drawn


def _bucket(
    bucket: Bucket, zero_s: float, scale: Scale, top_px: float, pitch_px: float
) -> list[Markup]:
    times = (bucket.submitted_s, bucket.posted_s, bucket.reduced_s, bucket.finished_s)
    height_px = max(2.0, pitch_px - 3)
    drawn = [
        _rect(
            scale(begin_s - zero_s),
            (end_s - begin_s) / (scale.high - scale.low),
            top_px,
            height_px,
            f"fill-{phase}",
            f"bucket {bucket.index}, {words}: {figures.duration(end_s - begin_s)}"
            + (_details(bucket) if phase == "wan" else ""),
        )
        for (phase, words), begin_s, end_s in zip(
            PHASES.items(), times[:-1], times[1:], strict=True
        )
    ]
    if pitch_px >= _LABELLED_PITCH_PX:
        y = top_px + height_px - 1
        drawn.append(element("text", str(bucket.index), x=-6, y=y, class_="end tick small"))
    return drawn


def _details(bucket: Bucket) -> str:
    """Return what else is known of a bucket's crossing."""
    wait_s = figures.known(bucket.values, metrics.WAIT_S)
    sent = figures.known(bucket.values, metrics.WIRE_BYTES)
    told = f", of it {figures.duration(wait_s)} for others" if wait_s else ""
    return told + (f", {figures.size(sent)} sent" if sent else "")


def _rect(
    begin: float, width: float, top_px: float, height_px: float, class_: str, title: str
) -> Markup:
    return element(
        "rect",
        element("title", title) if title else None,
        x=percent(begin),
        y=float(top_px),
        width=percent(max(0.0, width)),
        height=float(height_px),
        class_=class_,
    )


def steps_in_order(steps: Sequence[StepTimeline]) -> list[str]:
    """Return what the step selector offers."""
    return [f"step {step.step}, {figures.duration(step.end_s - step.begin_s)}" for step in steps]
