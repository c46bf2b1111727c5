"""A benchmark's figures in words and curves, as the page and Markdown both show them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.evidence.bench.record import Bench, Interval, Result, Setting
from orchestrator.evidence.report.wording import Grid, dollars
from orchestrator.evidence.view import figures
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
    Axis("rtt", "RTT", parse_duration, figures.duration),
    Axis("bandwidth", "bandwidth", parse_rate, figures.rate),
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
                percent(result.efficiency.mean),
                within(result.efficiency) or "one repeat: no interval",
            ),
            ("tokens a second", figures.count(result.tokens_per_s.mean), "all sites together"),
            ("a step", figures.duration(result.step_s.mean), "mean over sites and steps"),
            ("WAN, exposed", percent(result.shares.get("exposed_inter", 0.0)), "of the step"),
            *([("egress", egress, "for 10⁹ tokens")] if (egress := _egress(result)) else []),
        ]
    best = max(results, key=lambda pair: pair[1].efficiency.mean)
    worst = min(results, key=lambda pair: pair[1].efficiency.mean)
    return [
        ("best efficiency", percent(best[1].efficiency.mean), name_of(best[0])),
        ("worst efficiency", percent(worst[1].efficiency.mean), name_of(worst[0])),
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
                percent(result.efficiency.mean),
                within(result.efficiency),
                figures.count(result.tokens_per_s.mean),
                figures.duration(result.step_s.mean),
                *(figures.show(share, percent) for share in shares),
                _egress(result),
            ]
        )
    return Grid(headings, rows).told()


def predicted_grid(bench: Bench) -> Grid:
    """Return steps as predicted and as measured, of the settings that have both."""
    rows = [
        [
            name_of(setting),
            percent(result.efficiency.mean),
            percent(predicted.efficiency),
            figures.duration(result.step_s.mean),
            figures.duration(predicted.step_s),
            f"{predicted.deviation * 100:+.1f}%",
            figures.duration(predicted.compute_s),
            figures.duration(predicted.exchange_s),
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
            figures.rate(link.bytes_per_s),
            figures.duration(link.rtt_s),
            figures.share(link.loss) if link.loss else "0",
            figures.size(link.bytes_per_step),
            percent(link.utilisation),
            dollars(link.egress_usd_per_1e9_tokens) if link.egress_usd_per_1e9_tokens else "-",
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
    return dollars(amount) if amount else ""


def within(interval: Interval) -> str:
    """Return `± 0.4 points`; empty where one repeat says nothing about it."""
    return "" if interval.half_width is None else f"± {interval.half_width * 100:.2g} points"


def percent(share: float) -> str:
    """Return `93.4%`."""
    return f"{share * 100:.1f}%"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
