"""The page: one self-contained file, which asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from isthmus.orchestrator.evidence.record.bench_record import Bench
from isthmus.orchestrator.evidence.report import wording
from isthmus.orchestrator.evidence.report.bench_page import bench_article
from isthmus.orchestrator.evidence.report.html import Markup, element, join
from isthmus.orchestrator.evidence.report.html import facts as fact_list
from isthmus.orchestrator.evidence.report.run_facts import RunFacts
from isthmus.orchestrator.evidence.report.run_page import comparison, opening, run_article

FRAME_PX = 420
"""Height of a report's first screen in a notebook."""
_HERE = Path(__file__).resolve().parent


def page(runs: Sequence[RunFacts], benches: Sequence[Bench], build: str) -> str:
    """Return the report as HTML."""
    names = [*wording.labels(runs), *(bench.name for bench in benches)]
    is_single = len(names) == 1
    title = f"{names[0]} · isthmus" if is_single else f"{len(names)} compared · isthmus"
    body = join(
        element("a", "To the figures", href="#figures", class_="skip"),
        element(
            "header",
            element("p", "isthmus report"),
            element("button", "Dark", id="theme", type="button", hidden=True),
            class_="top",
        ),
        element(
            "main",
            None if is_single else element("h1", ", ".join(names)),
            comparison(runs) if len(runs) > 1 else None,
            *(
                run_article(run, f"run{index}", "h1" if is_single else "h2")
                for index, run in enumerate(runs)
            ),
            *(bench_article(bench, "h1" if is_single else "h2") for bench in benches),
            _definitions(has_runs=bool(runs), has_benches=bool(benches)),
            id="figures",
        ),
        element("footer", f"Written by isthmus {build}. This file is complete: it loads nothing."),
        element("script", Markup(_script())),
    )
    return _document(title, body)


def first_screen(run: RunFacts) -> str:
    """Return what a run's report begins with, in a frame of its own, for notebooks."""
    title = wording.labels([run])[0]
    text = _document(title, element("main", element("article", opening(run))))
    style = f"width:100%;height:{FRAME_PX}px;border:0"
    return str(element("iframe", srcdoc=text, style=style, title=title))


def _document(title: str, body: Markup) -> str:
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy()),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", Markup(_text("page.css"))),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def _definitions(*, has_runs: bool, has_benches: bool) -> Markup:
    entries = [
        *(wording.DEFINITIONS if has_runs else ()),
        *(wording.BENCH_DEFINITIONS if has_benches else ()),
    ]
    return element("section", element("h3", "How the figures are made"), fact_list(entries))


def policy() -> str:
    """Return a policy that lets nothing run but our own script, whatever a name holds."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )


def _script() -> str:
    return _text("page.js")


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
