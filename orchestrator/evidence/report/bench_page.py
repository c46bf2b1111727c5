"""The sections of one benchmark: efficiency, where steps went, predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.evidence.bench.record import Bench, Setting
from orchestrator.evidence.report import bench_wording as wording
from orchestrator.evidence.report.bars import Bar, Segment
from orchestrator.evidence.report.bench_wording import AXES, Axis, Curve
from orchestrator.evidence.report.blocks import figure, missing, section, table, tiles
from orchestrator.evidence.report.facts import PARTS
from orchestrator.evidence.report.lines import LineChart, Series, line_chart
from orchestrator.evidence.report.markup import Markup, element
from orchestrator.evidence.report.run_page import grid_table, split_figure
from orchestrator.evidence.report.scales import logarithmic, rounded
from orchestrator.evidence.report.wording import PART_CLASSES
from orchestrator.evidence.view import figures

_MAX_BARS = 40
_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c0")


def bench_article(bench: Bench, level: str = "h2") -> Markup:
    """Return everything about one benchmark."""
    done = [setting for setting in bench.settings if setting.result is not None]
    body: list[Markup | None] = [missing("No setting has a complete repeat yet.")]
    if done:
        body = [
            tiles(wording.headline(bench)),
            *(_efficiency(bench, axis) for axis in AXES),
            _settings(bench),
            _split(done),
            _predicted(bench),
            _links(bench),
        ]
    return element(
        "article",
        element(level, f"{bench.name}: scaling efficiency"),
        element("p", wording.asked(bench), class_="meta"),
        *body,
        _failures(bench),
    )


def _settings(bench: Bench) -> Markup:
    return section("Every setting", grid_table(wording.settings_grid(bench)))


def _efficiency(bench: Bench, axis: Axis) -> Markup | None:
    curves = wording.curves(bench, axis)
    if not curves:
        return None
    series: list[Series] = []
    for index, curve in enumerate(curves):
        colour = _COLOURS[index % len(_COLOURS)]
        if len(curve.predicted) > 1:
            series.append(Series("", colour, curve.predicted, dashed=True))
        series.append(_measured(curve, colour))
    values = [y for each in series for _, y in each.points]
    lows = [low for each in series for _, low, _ in each.intervals]
    highs = [high for each in series for _, _, high in each.intervals]
    spec = LineChart(
        label=f"Scaling efficiency over {axis.words}",
        x=logarithmic(x for each in series for x, _ in each.points),
        y=rounded(max(0.0, min(values + lows) - 0.02), max(values + highs), 5),
        x_title=axis.words,
        y_title="efficiency: all sites together over the sum of each by itself",
        x_text=axis.text,
        y_text=lambda y: f"{y * 100:g}%",
        series=series,
    )
    rows = [
        [curve.name, axis.text(x), wording.percent(y)]
        for curve in curves
        for x, y in curve.measured
    ]
    note = "One repeat says nothing about its interval."
    if lows:
        note = "Vertical lines are 95 % intervals of the mean over repeats."
    if any(curve.predicted for curve in curves):
        note += " Dashed: as predicted."
    behind = table(["setting", axis.words, "efficiency"], rows)
    return section(f"Efficiency over {axis.words}", figure(line_chart(spec), behind, note=note))


def _measured(curve: Curve, colour: str) -> Series:
    end = wording.percent(curve.measured[-1][1])
    return Series(curve.name, colour, curve.measured, end, dots=True, intervals=curve.intervals)


def _split(done: Sequence[Setting]) -> Markup:
    bars = []
    for setting in done:
        assert setting.result is not None, "the caller chose"
        split = setting.result.split
        segments = [
            Segment(PART_CLASSES[part], name, getattr(split, part)) for part, name in PARTS.items()
        ]
        hidden = Segment("wan", "WAN, hidden", split.hidden_inter_s)
        bars.append(Bar(wording.name_of(setting), segments, hidden))
    rows = [
        [
            bar.name,
            *(figures.duration(part.value_s) for part in bar.segments),
            figures.duration(bar.hidden.value_s if bar.hidden else 0.0),
        ]
        for bar in bars
    ]
    behind = table(["setting", *PARTS.values(), "WAN, hidden"], rows)
    note = "The mean over sites and measured steps. The thin line took no time: backward hid it."
    if len(bars) > _MAX_BARS:
        note += f" The first {_MAX_BARS} of {len(bars)} settings are drawn, the table has all."
    return section("Where the time of a step went", split_figure(bars[:_MAX_BARS], behind, note))


def _predicted(bench: Bench) -> Markup:
    grid = wording.predicted_grid(bench)
    if not grid.rows:
        words = "Nothing was predicted: that takes modelled compute and the trainer that ships."
        return section("Predicted against measured", missing(words))
    lead = "What the topology's figures alone let expect, beside what was measured."
    return section("Predicted against measured", grid_table(grid), lead=lead)


def _links(bench: Bench) -> Markup:
    return section("Links", grid_table(wording.links_grid(bench)))


def _failures(bench: Bench) -> Markup | None:
    grid = wording.failures_grid(bench)
    return section("Runs that failed", grid_table(grid)) if grid.rows else None
