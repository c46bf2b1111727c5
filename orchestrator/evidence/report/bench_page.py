"""A benchmark's figures in words and curves, as the page and Markdown both show them.

The sections of one benchmark: efficiency, where steps went, predicted against measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.evidence.record.bench_record import Bench, Interval, Result, Setting
from orchestrator.evidence.report.charts import (
    Bar,
    LineChart,
    Segment,
    Series,
    line_chart,
    logarithmic,
    rounded,
)
from orchestrator.evidence.report.html import (
    Grid,
    Markup,
    element,
    figure,
    missing,
    section,
    table,
    tiles,
)
from orchestrator.evidence.report.run_facts import PARTS
from orchestrator.evidence.report.run_page import split_figure
from orchestrator.evidence.report.wording import PART_CLASSES
from orchestrator.evidence.view import formats
from topology.units import UnitError, parse_duration, parse_rate

Point = tuple[float, float]


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


@dataclass(frozen=True, slots=True)
class Curve:
    """Efficiency over an axis, all else the same."""

    name: str
    measured: tuple[Point, ...]
    intervals: tuple[tuple[float, float, float], ...]
    predicted: tuple[Point, ...]
    """As the topology's figures let expect."""


def asked(bench: Bench) -> str:
    """Return what was measured, and how."""
    question = bench.question
    results = [setting.result for setting in bench.settings if setting.result]
    schedules = ", ".join(sorted({result.schedule for result in results}))
    emulators = ", ".join(sorted({result.emulator for result in results}))
    shared = ", and all sites share this machine" if question.compute == "real" else ""
    return (
        f"job {bench.job.name} on {bench.topology.name} · compute is {question.compute}{shared} · "
        + (f"exchange: {schedules} · WAN emulator: {emulators} · " if results else "")
        + f"{_plural(question.repeats, 'repeat')} of {_plural(question.steps, 'step')}, after "
        f"{question.warmup_steps} to warm up · "
        f"{_plural(len(bench.settings), 'setting')}"
    )


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


def settings_grid(bench: Bench) -> Grid:
    """Return each setting's figures."""
    headings = ["setting", "efficiency", "95 %", "tokens/s", "step", "compute", "inside site"]
    headings += ["WAN, exposed", "waiting", "egress, 10⁹ tokens"]
    rows = []
    for setting in bench.settings:
        result = setting.result
        if result is None:
            rows.append([name_of(setting), "not measured yet", *[""] * (len(headings) - 2)])
            continue
        shares = [result.shares.get(part) for part in ("compute", "intra", "exposed_inter", "wait")]
        rows.append(
            [
                name_of(setting),
                formats.percent(result.efficiency.mean),
                within(result.efficiency),
                formats.count(result.tokens_per_s.mean),
                formats.duration(result.step_s.mean),
                *(formats.show(share, formats.percent) for share in shares),
                _egress(result),
            ]
        )
    return Grid(headings, rows).told()


def predicted_grid(bench: Bench) -> Grid:
    """Return steps as predicted and as measured, of the settings that have both."""
    rows = [
        [
            name_of(setting),
            formats.percent(result.efficiency.mean),
            formats.percent(predicted.efficiency),
            formats.duration(result.step_s.mean),
            formats.duration(predicted.step_s),
            f"{predicted.deviation * 100:+.1f}%",
            formats.duration(predicted.compute_s),
            formats.duration(predicted.exchange_s),
        ]
        for setting in bench.settings
        if (result := setting.result) and (predicted := result.predicted)
    ]
    headings = [
        "setting",
        "efficiency",
        "predicted",
        "step",
        "predicted",
        "deviation",
        "predicted compute",
        "and exchange, if unhidden",
    ]
    return Grid(headings, rows)


def links_grid(bench: Bench) -> Grid:
    """Return what each directed link carried, a setting."""
    rows = [
        [
            name_of(setting),
            f"{link.source} → {link.target}",
            formats.rate(link.bytes_per_s),
            formats.duration(link.rtt_s),
            formats.share(link.loss) if link.loss else "0",
            formats.size(link.bytes_per_step),
            formats.percent(link.utilisation),
            formats.dollars(link.egress_usd_per_1e9_tokens)
            if link.egress_usd_per_1e9_tokens
            else "-",
        ]
        for setting in bench.settings
        if setting.result
        for link in setting.result.links
    ]
    headings = ["setting", "link", "bandwidth", "RTT", "loss", "sent a step", "utilisation"]
    return Grid([*headings, "egress, 10⁹ tokens"], rows, num_text=2).told()


def failures_grid(bench: Bench) -> Grid:
    """Return the runs that gave no figures, and why."""
    rows = [
        [name_of(setting), run.run_id, run.site or "all sites", run.failed.code, run.failed.message]
        for setting in bench.settings
        for run in setting.runs
        if run.failed
    ]
    return Grid(["setting", "run", "of", "code", "why"], rows, num_text=5)


def curves(bench: Bench, axis: Axis) -> list[Curve]:
    """Return efficiency over an axis, a curve for each combination of the other values.

    Empty unless exactly one --sweep runs over it, with two values or more.
    """
    paths = [
        sweep.path
        for sweep in bench.question.sweeps
        if sweep.path.split(".")[-1] == axis.key and len(sweep.values) > 1
    ]
    if len(paths) != 1:
        return []
    groups: dict[str, list[tuple[float, Result]]] = {}
    for setting in bench.settings:
        rest = {path: value for path, value in setting.overrides.items() if path != paths[0]}
        try:
            x = axis.parse(setting.overrides[paths[0]])
        except (UnitError, KeyError):
            return []
        if setting.result is not None and x > 0:
            groups.setdefault(_name(rest) or "measured", []).append((x, setting.result))
    return [_curve(name, sorted(found, key=lambda pair: pair[0])) for name, found in groups.items()]


def _curve(name: str, found: list[tuple[float, Result]]) -> Curve:
    intervals = [
        (x, result.efficiency.mean - half, result.efficiency.mean + half)
        for x, result in found
        if (half := result.efficiency.half_width) is not None
    ]
    predicted = [(x, result.predicted.efficiency) for x, result in found if result.predicted]
    measured = [(x, result.efficiency.mean) for x, result in found]
    return Curve(name, tuple(measured), tuple(intervals), tuple(predicted))


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


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


_MAX_BARS = 40
_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c0")


def bench_article(bench: Bench, level: str = "h2") -> Markup:
    """Return everything about one benchmark."""
    done = [(each, each.result) for each in bench.settings if each.result is not None]
    failures = failures_grid(bench)
    body: list[Markup | None] = [missing("No setting has a complete repeat yet.")]
    if done:
        body = [
            tiles(headline(bench)),
            *(_efficiency(bench, axis) for axis in AXES),
            section("Every setting", table(settings_grid(bench))),
            _split(done),
            _predicted(bench),
            section("Links", table(links_grid(bench))),
        ]
    return element(
        "article",
        element(level, f"{bench.name}: scaling efficiency"),
        element("p", asked(bench), class_="meta"),
        *body,
        section("Runs that failed", table(failures)) if failures.rows else None,
    )


def _efficiency(bench: Bench, axis: Axis) -> Markup | None:
    drawn = curves(bench, axis)
    if not drawn:
        return None
    series: list[Series] = []
    for index, curve in enumerate(drawn):
        colour = _COLOURS[index % len(_COLOURS)]
        if len(curve.predicted) > 1:
            series.append(Series("", colour, curve.predicted, dashed=True))
        end = formats.percent(curve.measured[-1][1])
        series.append(
            Series(curve.name, colour, curve.measured, end, dots=True, intervals=curve.intervals)
        )
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
        [curve.name, axis.text(x), formats.percent(y)] for curve in drawn for x, y in curve.measured
    ]
    note = "One repeat says nothing about its interval."
    if lows:
        note = "Vertical lines are 95 % intervals of the mean over repeats."
    if any(curve.predicted for curve in drawn):
        note += " Dashed: as predicted."
    behind = table(Grid(["setting", axis.words, "efficiency"], rows))
    return section(f"Efficiency over {axis.words}", figure(line_chart(spec), behind, note=note))


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
        for setting, each in done
    ]
    note = "The mean over sites and measured steps. The thin line took no time: backward hid it."
    if len(bars) > _MAX_BARS:
        note += f" The first {_MAX_BARS} of {len(bars)} settings are drawn, the table has all."
    return section("Where the time of a step went", split_figure(bars, note, limit=_MAX_BARS))


def _predicted(bench: Bench) -> Markup:
    grid = predicted_grid(bench)
    if not grid.rows:
        words = "Nothing was predicted: that takes modelled compute and the trainer that ships."
        return section("Predicted against measured", missing(words))
    lead = "What the topology's figures alone let expect, beside what was measured."
    return section("Predicted against measured", table(grid), lead=lead)
