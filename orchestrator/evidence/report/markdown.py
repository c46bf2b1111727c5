"""The report as Markdown: the page's figures without its charts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from isthmus.orchestrator.evidence.bench.bench_tables import (
    link_columns,
    setting_columns,
    split_columns,
)
from isthmus.orchestrator.evidence.record.bench_record import Bench
from isthmus.orchestrator.evidence.report import bench_page, wording
from isthmus.orchestrator.evidence.report.html import text_of
from isthmus.orchestrator.evidence.report.run_facts import RunFacts
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, columns_of, told

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~&])")


def markdown(runs: Sequence[RunFacts], benches: Sequence[Bench]) -> str:
    """Return the report; what came from elsewhere is escaped."""
    parts: list[str] = []
    if len(runs) > 1:
        parts += ["# Side by side", _table(wording.comparison(runs))]
    for run in runs:
        parts += _run(run)
    for bench in benches:
        parts += _bench(bench)
    return "\n\n".join(parts) + "\n"


def _run(facts: RunFacts) -> list[str]:
    about = f"{facts.outcome.state}, run {facts.run_id}, {wording.began(facts)}"
    parts = [f"# {_words(wording.title(facts))}", _words(about)]
    if facts.outcome.reason_code:
        parts.append(f"**{_words(facts.outcome.reason_code)}** {_words(facts.outcome.reason)}")
    parts += [f"Not shown: {_words(gap)}." for gap in facts.gaps]
    parts += _verdict(facts)
    parts.append(_headline(wording.headline(facts)))
    if facts.time.happened:
        parts += ["## What happened", _table(wording.event_columns(facts.time.happened))]
    parts += ["## Where the time of a step went", _table(wording.split_columns(facts.sites))]
    if facts.time.slow:
        parts += ["## Slow, not hung", _table(wording.slow_columns(facts))]
    if facts.links:
        parts += ["## Links", _table(wording.measured_links(facts))]
    parts += ["## Timeline of a step", _timelines(facts)]
    if facts.loss.evaluations:
        rows = [[str(step), formats.loss(loss)] for step, loss in facts.loss.evaluations]
        parts += ["## Held-out loss", _table(columns_of(["step", "loss"], rows, num_text=0))]
    if plan := wording.plan_lines(facts):
        parts += ["## The plan", "\n".join(f"- {name}: {_words(words)}" for name, words in plan)]
    if facts.plan is not None:
        parts += map(_words, facts.plan.why)
    if alternatives := wording.alternative_columns(facts):
        parts.append(_table(alternatives))
    parts += ["## Hardware, software and arguments", _table(wording.machine_columns(facts))]
    parts.append(
        "\n".join(f"- {name}: {_words(words)}" for name, words in wording.launch_lines(facts))
    )
    return parts


def _verdict(facts: RunFacts) -> list[str]:
    found = facts.verdict
    advice = [f"What would help: {_words(found.advice)}"] if found.advice else []
    return [f"**{_words(found.headline)}**", *map(_words, found.details), *advice]


def _timelines(facts: RunFacts) -> str:
    """Return a row a step and site: what the page draws in full."""
    if not facts.steps.timelines:
        return _words(wording.no_timelines(facts))
    rows = [
        [
            str(step.step),
            name,
            formats.duration(site.end_s - site.begin_s),
            formats.duration(site.computed_s - site.begin_s),
            formats.duration(site.exposed_s),
            str(len(site.buckets)),
        ]
        for step in facts.steps.timelines
        for name, site in step.sites.items()
    ]
    headings = ["step", "site", "all", "forward and backward", "waited after backward", "buckets"]
    return _table(columns_of(headings, rows, num_text=2))


def _bench(bench: Bench) -> list[str]:
    parts = [f"# {_words(bench.name)}: scaling efficiency", _words(bench_page.asked(bench))]
    tables = {
        "Every setting": setting_columns(bench.settings),
        "Where the time of a step went": split_columns(bench.settings),
        "Links": link_columns(bench.settings),
        "Runs that failed": bench_page.failure_columns(bench),
    }
    for title, columns in tables.items():
        if told(columns):
            parts += [f"## {title}", _table(columns)]
    return parts


def _headline(entries: Sequence[tuple[str, str, str]]) -> str:
    return "\n".join(
        f"- {name}: **{_words(figure)}**{f' ({_words(below)})' if below else ''}"
        for name, figure, below in entries
    )


def _table(columns: Sequence[Column]) -> str:
    columns = told(columns)
    lines = [
        [_words(each.heading) for each in columns],
        ["---" if each.is_text else "--:" for each in columns],
        *(map(_words, cells) for cells in zip(*(each.cells for each in columns), strict=True)),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _words(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text_of(text))
