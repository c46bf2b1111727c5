"""The report as Markdown: the page's figures without its charts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from orchestrator.evidence.record.bench_record import Bench
from orchestrator.evidence.report import bench_page, wording
from orchestrator.evidence.report.html import Grid, text_of
from orchestrator.evidence.report.run_facts import RunFacts
from orchestrator.evidence.view import formats

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~&])")


def markdown(runs: Sequence[RunFacts], benches: Sequence[Bench]) -> str:
    """Return the report; what came from elsewhere is escaped."""
    parts: list[str] = []
    if len(runs) > 1:
        parts += ["# Side by side", _grid(wording.comparison_grid(runs))]
    for run in runs:
        parts += _run(run)
    for bench in benches:
        parts += _bench(bench)
    return "\n\n".join(parts) + "\n"


def _run(facts: RunFacts) -> list[str]:
    about = f"{facts.state}, run {facts.run_id}, {wording.began(facts)}"
    parts = [f"# {_words(wording.title(facts))}", _words(about)]
    if facts.reason_code:
        parts.append(f"**{_words(facts.reason_code)}** {_words(facts.reason)}")
    parts += [f"Not shown: {_words(gap)}." for gap in facts.gaps]
    parts.append(_headline(wording.headline(facts)))
    parts += ["## Where the time of a step went", _grid(wording.split_grid(facts))]
    if facts.links:
        parts += ["## Links", _grid(wording.links_grid(facts))]
    parts += ["## Timeline of a step", _timelines(facts)]
    if facts.evaluations:
        rows = [[str(step), formats.loss(loss)] for step, loss in facts.evaluations]
        parts += ["## Held-out loss", _grid(Grid(["step", "loss"], rows, num_text=0))]
    if facts.faults:
        parts += ["## Faults", _grid(wording.faults_grid(facts))]
    if plan := wording.plan_lines(facts):
        parts += ["## The plan", "\n".join(f"- {name}: {_words(words)}" for name, words in plan)]
    return parts


def _timelines(facts: RunFacts) -> str:
    """Return a row a step and site: what the page draws in full."""
    if not facts.timelines:
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
        for step in facts.timelines
        for name, site in step.sites.items()
    ]
    headings = ["step", "site", "all", "forward and backward", "waited after backward", "buckets"]
    return _grid(Grid(headings, rows, num_text=2))


def _bench(bench: Bench) -> list[str]:
    parts = [f"# {_words(bench.name)}: scaling efficiency", _words(bench_page.asked(bench))]
    grids = {
        "Every setting": bench_page.settings_grid(bench),
        "Predicted against measured": bench_page.predicted_grid(bench),
        "Links": bench_page.links_grid(bench),
        "Runs that failed": bench_page.failures_grid(bench),
    }
    for title, grid in grids.items():
        if grid.rows:
            parts += [f"## {title}", _grid(grid)]
    return parts


def _headline(entries: Sequence[tuple[str, str, str]]) -> str:
    return "\n".join(
        f"- {name}: **{_words(figure)}**{f' ({_words(below)})' if below else ''}"
        for name, figure, below in entries
    )


def _grid(grid: Grid) -> str:
    rule = ["---" if at < grid.num_text else "--:" for at in range(len(grid.headings))]
    lines = [
        [_words(each) for each in grid.headings],
        rule,
        *([_words(cell) for cell in row] for row in grid.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _words(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text_of(text))
