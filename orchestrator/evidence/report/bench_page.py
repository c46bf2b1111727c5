"""A benchmark's figures in words and curves, as the page and Markdown both show them.

The sections of one benchmark: efficiency, where steps went, predicted against measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.evidence.bench.bench_tables import (
    link_columns,
    scaling_tables,
    setting_columns,
    split_columns,
)
from isthmus.orchestrator.evidence.record.bench_record import Bench, Interval, Result, Setting
from isthmus.orchestrator.evidence.report.charts import (
    Bar,
    LineChart,
    Segment,
    Series,
    line_chart,
    logarithmic,
    rounded,
)
from isthmus.orchestrator.evidence.report.html import (
    Markup,
    element,
    figure,
    missing,
    section,
    table,
    tiles,
)
from isthmus.orchestrator.evidence.report.run_page import split_section
from isthmus.orchestrator.evidence.report.wording import PART_CLASSES
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, columns_of, told
from isthmus.topology.spec.units import UnitError, parse_duration, parse_rate


@dataclass(frozen=True, slots=True)
class Axis:
    """What a sweep may run over, and be drawn over."""

    key: str
    """The last part of its path."""
    words: str
    parse: Callable[[object], float]
    text: Callable[[float], str]


AXES = (
    Axis("rtt", "RTT", parse_duration, formats.duration),
    Axis("bandwidth", "bandwidth", parse_rate, formats.rate),
)


def asked(bench: Bench) -> str:
    """Return what was measured, and how."""
    how = scaling_tables(bench).how
    settings = f"{len(bench.settings)} setting{'' if len(bench.settings) == 1 else 's'}"
    job = f"job {bench.job.name} on {bench.topology.name}"
    return " · ".join(filter(None, (job, *how, settings)))


def headline(bench: Bench) -> list[tuple[str, str, str]]:
    """Return the best and the worst setting, or the only one's figures."""
    results = [(setting, setting.result) for setting in bench.settings if setting.result]
    if len(results) == 1:
        ((_, result),) = results
        return [
            (
                "efficiency",
                formats.percent(result.efficiency.mean),
                within(result.efficiency) or "one repeat: no interval",
            ),
            ("tokens a second", formats.count(result.tokens_per_s.mean), "all sites together"),
            ("a step", formats.duration(result.step_s.mean), "mean over sites and steps"),
            (
                "WAN, exposed",
                formats.percent(result.shares.get("exposed_inter", 0.0)),
                "of the step",
            ),
            *([("egress", egress, "for 10⁹ tokens")] if (egress := _egress(result)) else []),
        ]
    best = max(results, key=lambda pair: pair[1].efficiency.mean)
    worst = min(results, key=lambda pair: pair[1].efficiency.mean)
    return [
        ("best efficiency", formats.percent(best[1].efficiency.mean), name_of(best[0])),
        ("worst efficiency", formats.percent(worst[1].efficiency.mean), name_of(worst[0])),
        ("settings measured", f"{len(results)} of {len(bench.settings)}", ""),
    ]


def failure_columns(bench: Bench) -> list[Column]:
    """Return the runs that gave no figures, and why."""
    rows = [
        [name_of(setting), run.run_id, run.site or "all sites", run.failed.code, run.failed.message]
        for setting in bench.settings
        for run in setting.runs
        if run.failed
    ]
    return columns_of(["setting", "run", "of", "code", "why"], rows, num_text=5)


def name_of(setting: Setting) -> str:
    """Return what tells a setting from the others."""
    return _name(setting.overrides) or "as the job says"


def _name(overrides: dict[str, str]) -> str:
    """Return `20ms RTT, 1Gbit/s, fp32`: what a value says by itself is not said again."""
    return ", ".join(_value(path, value) for path, value in overrides.items())


def _value(path: str, value: str) -> str:
    *before, key = path.split(".")
    of_one_link = before[:1] == ["links"] and before[1:] != ["*"]
    words = {"rtt": f"{value} RTT", "bandwidth": value, "codec": value}
    if key in words and not of_one_link:
        return words[key]
    return f"{'.'.join([*before, key]) if of_one_link else key} {value}"


def _egress(result: Result) -> str:
    """Return what all links together cost for 10⁹ tokens; empty where nothing does."""
    amount = math.fsum(link.egress_usd_per_1e9_tokens for link in result.links)
    return formats.dollars(amount) if amount else ""


def within(interval: Interval) -> str:
    """Return `± 0.4 points`; empty where one repeat says nothing about it."""
    return "" if interval.half_width is None else f"± {interval.half_width * 100:.2g} points"


_MAX_BARS = 40
_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c0")


def bench_article(bench: Bench, level: str = "h2") -> Markup:
    """Return everything about one benchmark."""
    done = [(each, each.result) for each in bench.settings if each.result is not None]
    failures, links = failure_columns(bench), link_columns(bench.settings)
    body: list[Markup | None] = [missing("No setting has a complete repeat yet.")]
    if done:
        body = [
            tiles(headline(bench)),
            *(_efficiency(bench, axis) for axis in AXES),
            section("Every setting", table(setting_columns(bench.settings))),
            _split(done),
            section("Links", table(links)) if told(links) else None,
        ]
    return element(
        "article",
        element(level, f"{bench.name}: scaling efficiency"),
        element("p", asked(bench), class_="meta"),
        *body,
        section("Runs that failed", table(failures)) if told(failures) else None,
    )


def _efficiency(bench: Bench, axis: Axis) -> Markup | None:
    """Draw efficiency over an axis, a curve for each combination of the other values."""
    groups = _over(bench, axis)
    if not groups:
        return None
    series: list[Series] = []
    rows: list[list[str]] = []
    for index, (name, found) in enumerate(groups.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        predicted = [(x, each.predicted.efficiency) for x, each in found if each.predicted]
        if len(predicted) > 1:
            series.append(Series("", colour, predicted, dashed=True))
        measured = [(x, each.efficiency.mean) for x, each in found]
        intervals = [
            (x, each.efficiency.mean - half, each.efficiency.mean + half)
            for x, each in found
            if (half := each.efficiency.half_width) is not None
        ]
        end = formats.percent(measured[-1][1])
        series.append(Series(name, colour, measured, end, dots=True, intervals=intervals))
        rows += [[name, axis.text(x), formats.percent(y)] for x, y in measured]
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
    note = "One repeat says nothing about its interval."
    if lows:
        note = "Vertical lines are 95 % intervals of the mean over repeats."
    if any(each.dashed for each in series):
        note += " Dashed: as predicted."
    behind = table(columns_of(["setting", axis.words, "efficiency"], rows))
    return section(f"Efficiency over {axis.words}", figure(line_chart(spec), behind, note=note))


def _over(bench: Bench, axis: Axis) -> dict[str, list[tuple[float, Result]]]:
    """Return results in the order of an axis, by the other values.

    Empty unless exactly one --sweep runs over it, with two values or more.
    """
    paths = [
        sweep.path
        for sweep in bench.question.sweeps
        if sweep.path.split(".")[-1] == axis.key and len(sweep.values) > 1
    ]
    groups: dict[str, list[tuple[float, Result]]] = {}
    for setting in bench.settings if len(paths) == 1 else ():
        rest = {path: value for path, value in setting.overrides.items() if path != paths[0]}
        try:
            x = axis.parse(setting.overrides[paths[0]])
        except (UnitError, KeyError):
            return {}
        if setting.result is not None and x > 0:
            groups.setdefault(_name(rest) or "measured", []).append((x, setting.result))
    return {name: sorted(found, key=lambda pair: pair[0]) for name, found in groups.items()}


def _split(done: Sequence[tuple[Setting, Result]]) -> Markup:
    bars = [
        Bar(
            name_of(setting),
            [
                Segment(PART_CLASSES[key], name, getattr(each.split, key))
                for key, name in PARTS.items()
            ],
            Segment("wan", "WAN, hidden", each.split.hidden_inter_s),
        )
        for setting, each in done[:_MAX_BARS]
    ]
    note = "The mean over sites and measured steps. The thin line took no time: backward hid it."
    if len(done) > _MAX_BARS:
        note += f" The first {_MAX_BARS} of {len(done)} settings are drawn, the table has all."
    return split_section(bars, split_columns([setting for setting, _ in done]), note)
