"""What a page is built of: figures with the table behind them, tables, tiles, keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from orchestrator.evidence.report.markup import Child, Markup, element, join

Rows = Sequence[Sequence[str]]


def section(title: str, *children: Child, lead: str | None = None) -> Markup:
    """Return a section with its heading, and a sentence under it."""
    return element(
        "section",
        element("h3", title),
        element("p", lead, class_="lead") if lead else None,
        *children,
    )


def table(headings: Sequence[str], rows: Rows, *, num_text: int = 1, caption: str = "") -> Markup:
    """Return a table; the first `num_text` columns are words, the others figures.

    The first column names its row. It scrolls by itself where it is wider than the page.
    """
    head = [
        element("th", each, scope="col", class_=_kind(at, num_text))
        for at, each in enumerate(headings)
    ]
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(
                element("td", cell, class_=_kind(at, num_text))
                for at, cell in enumerate(row[1:], start=1)
            ),
        )
        for row in rows
    ]
    grid = element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    # Focusable: whoever has no pointer scrolls it with the arrow keys.
    return element(
        "div", grid, class_="scroll", tabindex=0, role="group", aria_label=caption or None
    )


def _kind(column: int, num_text: int) -> str | None:
    return None if column < num_text else "n"


def figure(chart: Markup, behind: Markup, *, key: Markup | None = None, note: str = "") -> Markup:
    """Return a chart with its key, a note, and its figures as a table to unfold."""
    return element(
        "figure",
        key,
        chart,
        element("figcaption", note) if note else None,
        element("details", element("summary", "The figures as a table"), behind),
    )


def chart(label: str, height_px: float, *children: Child, class_: str = "") -> Markup:
    """Return an SVG as wide as the page lets it be; its children place themselves in percents.

    So text keeps its size on a phone, and one drawing serves every width.
    """
    return element(
        "svg",
        *children,
        role="img",
        aria_label=label,
        width="100%",
        height=float(height_px),
        class_=f"chart {class_}".strip(),
    )


def key(entries: Mapping[str, str], class_: str = "") -> Markup:
    """Return a list of colours: CSS class of a swatch, and what it stands for."""
    items = [
        element("li", element("i", class_=f"swatch {swatch}"), words)
        for swatch, words in entries.items()
    ]
    return element("ul", *items, class_=f"key {class_}".strip())


def tiles(entries: Iterable[tuple[str, str, str]]) -> Markup:
    """Return headline figures: name, figure, and a smaller line under it."""
    return element(
        "dl",
        *(
            element(
                "div",
                element("dt", name),
                element("dd", figure_text, element("small", below) if below else None),
            )
            for name, figure_text, below in entries
        ),
        class_="tiles",
    )


def facts(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return names and what they are, one a line."""
    return element(
        "dl",
        *(join(element("dt", name), element("dd", words)) for name, words in entries),
        class_="facts",
    )


def missing(words: str) -> Markup:
    """Say what is not there, and why."""
    return element("p", words, class_="missing")
