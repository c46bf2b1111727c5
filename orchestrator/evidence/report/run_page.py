"""The sections of one run, and those that put several beside each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
)
from isthmus.orchestrator.evidence.report.html import facts as fact_list
from isthmus.orchestrator.evidence.report.run_facts import RunFacts, SiteFacts
from isthmus.orchestrator.evidence.report.sitemap import site_map
from isthmus.orchestrator.evidence.report.wording import PART_CLASSES
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, columns_of

_COLOURS = 6
"""Line colours of the style sheet; more lines than that use them again."""


def run_article(facts: RunFacts, prefix: str, level: str = "h2") -> Markup:
    """Return everything about one run. `prefix` makes its ids unique on the page."""
    modelled = facts.plan is not None and facts.plan.compute == "modelled"
    return element(
        "article",
        element(level, wording.title(facts)),
        element(
            "p",
            element(
                "span",
                facts.state,
                class_=f"state {wording.STATE_CLASSES.get(facts.state, '')}".strip(),
            ),
            f" · run {facts.run_id} · {wording.began(facts)}",
            " · compute is modelled, communication is real" if modelled else None,
            class_="meta",
        ),
        _reason(facts),
        tiles(headline) if (headline := wording.headline(facts)) else None,
        join(*(missing(f"Not shown: {gap}.") for gap in facts.gaps)),
        _places(facts),
        _split(
            facts.sites,
            "The mean of each site's steps. The thin line is WAN time that backward hid: it took "
            "no time. MFU: model FLOPs a second, over the accelerators' peak; est., at 6 FLOPs a "
            "token and parameter; planned, what the step model predicts.",
        ),
        _slow(facts),
        _timeline(facts, prefix),
        _losses(facts),
        _faults(facts),
        _notes(facts),
        _plan(facts),
        id=prefix,
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
        Series(name, f"c{index % _COLOURS}", run.losses, formats.loss(run.losses[-1][1]))
        for index, (name, run) in enumerate(zip(names, runs, strict=True))
        if run.losses
    ]
    return element(
        "article",
        element("h2", "Side by side"),
        table(wording.comparison(runs)),
        _split(slowest, "The mean step of each run's slowest site."),
        section("Training loss", _curves(curves, [], "Training loss over steps, a line a run")),
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
    if not facts.reason_code:
        return None
    log = f" Log: {facts.log_path}" if facts.log_path else ""
    return element(
        "p", element("strong", facts.reason_code), f" {facts.reason}{log}", class_="reason"
    )


def _places(facts: RunFacts) -> Markup:
    links = table(wording.measured_links(facts), "Directed links, over the whole run")
    if len(facts.sites) < 2:
        return section("Sites and links", missing("One site: there are no links."))
    return section(
        "Sites and links",
        element("figure", site_map(facts.sites, facts.links)),
        links,
        lead="Each direction of a link, by its use: throughput while it was busy, over what is "
        "configured. The figure on a link is the busier direction's.",
    )


def _split(sites: Sequence[SiteFacts], note: str) -> Markup:
    told = [site for site in sites if site.step_s]
    if not told:
        words = "No site has told the time of a step."
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
    if not facts.timelines:
        return section(title, missing(wording.no_timelines(facts)))
    steps = list(facts.timelines)
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
        if facts.num_timelines == len(steps)
        else f" {len(steps)} of {facts.num_timelines} steps."
    )
    return section(
        title,
        key(entries),
        element("div", chooser, *panels, data_steps=True),
        lead="A row a bucket, numbered as backward hands them over. What lies on the shade was "
        f"hidden behind backward; what lies right of it, the step waited for.{shown}",
    )


def _losses(facts: RunFacts) -> Markup:
    series = []
    if facts.plan is not None and facts.plan.compute == "modelled":
        return section("Loss", missing("Compute is modelled: nothing is learnt."))
    if facts.losses:
        end = formats.loss(facts.losses[-1][1])
        series.append(Series("training", "c0", facts.losses, end))
    if facts.evaluations:
        end = formats.loss(facts.evaluations[-1][1])
        series.append(Series("held-out", "c1", facts.evaluations, end, dots=True))
    marks = [Mark(fault.step, f"{fault.what} {fault.where}") for fault in facts.faults]
    return section("Loss", _curves(series, marks, "Training and held-out loss over steps"))


def _curves(series: Sequence[Series], marks: Sequence[Mark], label: str) -> Markup:
    if not series:
        return missing("No loss was told: a step is counted once all sites have told theirs.")
    points = [point for each in series for point in each.points]
    last = max(max(x for x, _ in points), max((mark.x for mark in marks), default=0.0))
    spec = LineChart(
        label=label,
        x=linear(min(min(x for x, _ in points), 0.0), last, 6),
        y=rounded(min(y for _, y in points), max(y for _, y in points), 5),
        x_title="step",
        y_title="loss, nats a byte",
        x_text=lambda x: f"{x:g}",
        y_text=lambda y: f"{y:g}",
        series=series,
        marks=marks,
    )
    rows = [[each.name, f"{x:g}", formats.loss(y)] for each in series for x, y in _few(each.points)]
    note = "The dotted lines are the numbered faults below." if marks else ""
    return figure(line_chart(spec), table(columns_of(["curve", "step", "loss"], rows)), note=note)


def _few(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most some dozens of points, the last among them."""
    stride = -(-len(points) // 40)
    return [*points[:-1:stride], points[-1]]


def _faults(facts: RunFacts) -> Markup | None:
    if not facts.faults:
        return None
    lead = (
        "Changes that were made to the emulated WAN, switches to other trees, "
        "and what the run ended of."
    )
    return section("Faults", table(wording.fault_columns(facts)), lead=lead)


def _slow(facts: RunFacts) -> Markup | None:
    if not facts.slow:
        return None
    columns = table(wording.slow_columns(facts))
    return section("Whom the others waited for", columns, lead=wording.SLOW_LEAD)


def _notes(facts: RunFacts) -> Markup | None:
    if not facts.notes:
        return None
    lead = "Sites that were lost or came back, checkpoints that failed, and what else was noted."
    return section("What happened", table(wording.note_columns(facts)), lead=lead)


def _plan(facts: RunFacts) -> Markup:
    lines = wording.plan_lines(facts)
    if not lines:
        return section("The plan", missing("It follows from the job and the topology: see above."))
    return section("The plan", fact_list(lines), lead="How gradients crossed, and why so.")
