"""The sections of one run, and those that put several beside each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.evidence.record.step_timelines import typical
from isthmus.orchestrator.evidence.report import wording
from isthmus.orchestrator.evidence.report.charts import (
    PHASE_WORDS,
    Bar,
    LineChart,
    Mark,
    Segment,
    Series,
    gantt,
    gantt_table,
    line_chart,
    linear,
    rounded,
    stacked_bars,
)
from isthmus.orchestrator.evidence.report.html import (
    Markup,
    element,
    figure,
    join,
    key,
    missing,
    section,
    table,
    tiles,
    with_code,
)
from isthmus.orchestrator.evidence.report.html import facts as fact_list
from isthmus.orchestrator.evidence.report.run_charts import (
    LANE_WORDS,
    SlowSpan,
    TimeAxis,
    busy_first,
    longest_shown,
    pace_chart,
    site_lanes,
    step_chart,
    step_marks,
    step_parts,
    time_marks,
)
from isthmus.orchestrator.evidence.report.run_facts import RunFacts, TimeFacts
from isthmus.orchestrator.evidence.report.sitemap import site_map
from isthmus.orchestrator.evidence.report.verdict import Verdict
from isthmus.orchestrator.evidence.report.wording import PART_CLASSES
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, columns_of
from isthmus.orchestrator.runs.facts import SiteFacts
from isthmus.protos import metrics

_COLOURS = 6
"""Line colours of the style sheet; more lines than that use them again."""


def run_article(facts: RunFacts, prefix: str, level: str = "h2") -> Markup:
    """Return everything about one run. `prefix` makes its ids unique on the page."""
    return element(
        "article",
        opening(facts, level),
        _over_time(facts),
        _happened(facts),
        _split(
            facts.sites,
            "The mean over each site's steps. The thin line is WAN time that the backward pass hid, "
            "at no cost. MFU is model FLOPs per second over the accelerators' peak; “est.” assumes "
            "6 FLOPs per token and parameter; “planned” is the step model's prediction.",
        ),
        over_steps(facts.steps.step_figures, step_marks(facts.time.happened), None),
        _slow(facts),
        _places(facts),
        _timeline(facts, prefix),
        _losses(facts),
        _plan(facts),
        _machines(facts),
        id=prefix,
    )


def opening(facts: RunFacts, level: str = "h2") -> Markup:
    """Return what comes first of a run: how it is, why, and its headline's figures."""
    modelled = facts.plan is not None and facts.plan.compute == "modelled"
    return join(
        element(level, wording.title(facts)),
        element(
            "p",
            element(
                "span",
                facts.outcome.state,
                class_=f"state {wording.STATE_CLASSES.get(facts.outcome.state, '')}".strip(),
            ),
            f" · run {facts.run_id} · {wording.began(facts)}",
            " · compute is modelled, communication is real" if modelled else None,
            class_="meta",
        ),
        _reason(facts),
        judgement(facts.verdict),
        tiles(headline) if (headline := wording.headline(facts)) else None,
        join(*(missing(f"Not shown: {gap}.") for gap in facts.gaps)),
    )


def comparison(runs: Sequence[RunFacts]) -> Markup:
    """Return several runs side by side: their figures, splits and curves."""
    names = wording.labels(runs)
    slowest = [
        dataclasses.replace(site, site=name)
        for name, run in zip(names, runs, strict=True)
        if (site := _slowest(run)) is not None
    ]
    curves = [
        Series(name, f"c{index % _COLOURS}", run.loss.losses, formats.loss(run.loss.losses[-1][1]))
        for index, (name, run) in enumerate(zip(names, runs, strict=True))
        if run.loss.losses
    ]
    return element(
        "article",
        element("h2", "Side by side"),
        table(wording.comparison(runs)),
        _split(slowest, "The mean step of each run's slowest site."),
        section(
            "Training loss", _curves(curves, [], "Training loss over steps, a line a run", "loss")
        ),
    )


def split_section(bars: Sequence[Bar], behind: Sequence[Column], note: str) -> Markup:
    """Return bars of where steps went, with their key, and the same in a table."""
    title = "Where the time of a step went"
    drawing = stacked_bars(title, bars)
    entries = {PART_CLASSES[part]: name for part, name in PARTS.items()}
    colours = key({**entries, "wan thin": "WAN, hidden behind compute"})
    return section(title, figure(drawing, table(behind), key=colours, note=note))


def _reason(facts: RunFacts) -> Markup | None:
    """Return why it did not end well, if it did not."""
    if not facts.outcome.reason_code:
        return None
    log = f" Log: {facts.outcome.log_path}" if facts.outcome.log_path else ""
    return element(
        "p",
        element("strong", facts.outcome.reason_code),
        f" {facts.outcome.reason}{log}",
        class_="reason",
    )


def judgement(found: Verdict) -> Markup:
    """Return a verdict: its headline, what it rests on, and what would help."""
    return element(
        "div",
        element("p", found.headline, class_="headline"),
        *(element("p", words) for words in found.details),
        element("p", element("strong", "What would help: "), with_code(found.advice))
        if found.advice
        else None,
        class_=f"verdict {found.grade}",
    )


def _over_time(facts: RunFacts) -> Markup:
    """Return the run over the wall clock: its pace with stalls and losses, and its sites."""
    end_s = max(
        [
            *(at_s for at_s, _ in facts.time.pace[-1:]),
            *(part.end_s for site in facts.time.lanes for part in site.phases),
        ],
        default=0.0,
    )
    slow = [
        SlowSpan(each.site, each.cost_s, *times)
        for each, times in zip(facts.time.slow, facts.time.slow_times, strict=True)
    ]
    axis = TimeAxis(end_s)
    marks = time_marks(facts.time.happened, axis)
    return over_time(facts.time, wording.pace_unit(facts.totals), slow, axis, marks)


def over_time(
    time: TimeFacts, unit: str, slow: Sequence[SlowSpan], axis: TimeAxis, marks: Sequence[Mark]
) -> Markup:
    """Return the pace of a run, and what each site did, over one axis."""
    title = f"{unit.capitalize()} per second, and what each site did"
    if not time.pace:
        return section(title, missing("Too few steps were completed."))
    shown, num_left = busy_first(time.lanes, slow)
    left = f" {num_left} more sites trained throughout." if num_left else ""
    return section(
        title,
        element(
            "div",
            figure(
                pace_chart(time.pace, unit, time.stalls, axis, marks),
                table(wording.pace_columns(time.pace, unit)),
                note=wording.pace_note(time.stalls),
            ),
            element(
                "figure",
                key(LANE_WORDS),
                site_lanes(shown, slow, axis, marks),
                element("figcaption", f"{axis.title[0].upper()}{axis.title[1:]}.{left}"),
            ),
            class_="whole",
        ),
    )


def over_steps(
    columns: Mapping[str, Any], marks: Sequence[Mark], axis: TimeAxis | None, begin_s: float = 0.0
) -> Markup | None:
    """Return the parts of steps over the run; None: too little is known of them.

    Args:
        columns: Those of StepSeries.
        marks: What happened, by steps or by the axis.
        axis: Of the time; None: over steps.
        begin_s: The wall time at which the axis has its 0.
    """
    if len(columns["step"]) < 2 or not step_parts(columns):
        return None
    xs = None if axis is None else [axis.of(wall_s - begin_s) for wall_s in columns["wall_s"]]
    longest_s = longest_shown(columns)
    cut = max(each or 0.0 for each in columns[metrics.STEP_S]["mean"]) > longest_s
    note = f"The mean over sites; each point is {wording.points_of(columns)}."
    if cut:
        note += f" Steps longer than {formats.duration(longest_s)} are cut off; the table has them."
    chart = step_chart(
        "Step time and its parts",
        "step time",
        step_parts(columns, longest_s, xs),
        marks,
        low=0.0,
        y_text=lambda y: formats.duration(y) if y else "0",
        axis=axis,
    )
    return section(
        "Step time over the run",
        figure(
            element("div", chart, class_="stacked whole"),
            table(wording.step_columns(columns)),
            key=key({PART_CLASSES[name]: words for name, words in PARTS.items()}),
            note=note,
        ),
    )


def _happened(facts: RunFacts) -> Markup | None:
    if not facts.time.happened:
        return None
    more = facts.time.num_happened - len(facts.time.happened)
    return section(
        "What happened",
        element("div", table(wording.event_columns(facts.time.happened)), class_="happened"),
        missing(f"And {more} earlier: isthmus events {facts.run_id} lists all.") if more else None,
        lead="Numbers are those of the dotted lines on the charts.",
    )


def _machines(facts: RunFacts) -> Markup:
    rows = wording.machine_columns(facts)
    warning = wording.unlike_commits(facts)
    return section(
        "Hardware, software and arguments",
        table(rows),
        missing(warning) if warning else None,
        fact_list(wording.launch_lines(facts)),
        lead="As each site's first rank reported it.",
    )


def _places(facts: RunFacts) -> Markup:
    links = table(wording.measured_links(facts), "Directed links, over the whole run")
    if len(facts.sites) < 2:
        return section("Sites and links", missing("One site: there are no links."))
    return section(
        "Sites and links",
        element("figure", site_map(facts.sites, facts.links)),
        links,
        lead="Each direction of a link by its use: throughput while it was busy, as a share of "
        "the configured bandwidth. The figure on a link is its busier direction's.",
    )


def _split(sites: Sequence[SiteFacts], note: str) -> Markup:
    told = [site for site in sites if site.step_s]
    if not told:
        words = "No site reported the time of a step."
        return section("Where the time of a step went", missing(words))
    bars = [
        Bar(
            site.site,
            [
                Segment(PART_CLASSES[part], PARTS[part], spent_s)
                for part, spent_s in site.parts_s.items()
            ],
            Segment("wan", "WAN, hidden", site.hidden_inter_s or 0.0),
        )
        for site in told
    ]
    return split_section(bars, wording.split_columns(told), note)


def _slowest(run: RunFacts) -> SiteFacts | None:
    told = [site for site in run.sites if site.step_s]
    return max(told, key=lambda site: site.step_s or 0.0, default=None)


def _timeline(facts: RunFacts, prefix: str) -> Markup:
    title = "Timeline of a step"
    if not facts.steps.timelines:
        return section(title, missing(wording.no_timelines(facts)))
    steps = list(facts.steps.timelines)
    chosen = steps.index(typical(steps))
    options = [
        element(
            "option",
            f"step {step.step}, {formats.duration(step.end_s - step.begin_s)}",
            selected=index == chosen,
        )
        for index, step in enumerate(steps)
    ]
    chooser = element(
        "div",
        element("label", "Show", for_=f"{prefix}-step"),
        element("button", "Before", type="button"),
        element("select", *options, id=f"{prefix}-step", autocomplete="off"),
        element("button", "After", type="button"),
        class_="steps",
        hidden=True,
    )
    panels = [
        element(
            "div",
            element("div", gantt(step), class_="gantt-chart"),
            element("details", element("summary", "The figures as a table"), gantt_table(step)),
            data_step=str(step.step),
        )
        for step in steps
    ]
    entries = {"compute": "forward, backward", **PHASE_WORDS, "optimizer": "optimizer"}
    entries["shade"] = "while backward computes"
    shown = (
        ""
        if facts.steps.num_timelines == len(steps)
        else f" {len(steps)} of {facts.steps.num_timelines} steps."
    )
    return section(
        title,
        key(entries),
        element("div", chooser, *panels, data_steps=True),
        lead="One row per bucket, numbered in the order of the backward pass. What lies on the shade "
        f"was hidden behind it; for what lies to the right, the step waited.{shown}",
    )


def _losses(facts: RunFacts) -> Markup:
    series = []
    if facts.plan is not None and facts.plan.compute == "modelled":
        return section("Loss", missing("Compute is modelled: nothing is learnt."))
    if facts.loss.losses:
        end = formats.loss(facts.loss.losses[-1][1])
        series.append(Series("training", "c0", facts.loss.losses, end))
    if facts.loss.evaluations:
        end = formats.loss(facts.loss.evaluations[-1][1])
        series.append(Series("held-out", "c1", facts.loss.evaluations, end, dots=True))
    marks = step_marks(facts.time.happened)
    words = "Training and held-out loss over steps"
    return section(
        "Loss", _curves(series, marks, words, wording.loss_title(not facts.place.launched.script))
    )


def _curves(series: Sequence[Series], marks: Sequence[Mark], label: str, y_title: str) -> Markup:
    if not series:
        return missing("No loss was reported: a step counts once every site has reported its own.")
    points = [point for each in series for point in each.points]
    last = max(max(x for x, _ in points), max((mark.x for mark in marks), default=0.0))
    spec = LineChart(
        label=label,
        x=linear(min(min(x for x, _ in points), 0.0), last, 6),
        y=rounded(min(y for _, y in points), max(y for _, y in points), 5),
        x_title="step",
        y_title=y_title,
        x_text=lambda x: f"{x:g}",
        y_text=lambda y: f"{y:g}",
        series=series,
        marks=marks,
    )
    rows = [[each.name, f"{x:g}", formats.loss(y)] for each in series for x, y in _few(each.points)]
    note = "The dotted lines are the numbered events above." if marks else ""
    return figure(line_chart(spec), table(columns_of(["curve", "step", "loss"], rows)), note=note)


def _few(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most some dozens of points, the last among them."""
    stride = -(-len(points) // 40)
    return [*points[:-1:stride], points[-1]]


def _slow(facts: RunFacts) -> Markup | None:
    if not facts.time.slow:
        return None
    columns = table(wording.slow_columns(facts))
    return section("Slow, not hung", columns, lead=wording.SLOW_LEAD)


def _plan(facts: RunFacts) -> Markup:
    plan, lines = facts.plan, wording.plan_lines(facts)
    if plan is None:
        return section("The plan", missing("It follows from the job and the topology: see above."))
    alternatives = wording.alternative_columns(facts)
    return section(
        "The plan",
        fact_list(lines),
        *(element("p", sentence, class_="why") for sentence in plan.why),
        table(alternatives, "Alternatives, as the planner predicted them")
        if alternatives
        else None,
        lead="How gradients crossed the WAN, and why.",
    )
