"""HTML and SVG as values, and what a page is built of: tables, figures, tiles, keys.

What is not markup is escaped, for names come from YAML and from the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from isthmus.orchestrator.evidence.view.fitting_table import Column, told


class Markup(str):
    """Text that is HTML already. Only this module and literals of our own make it."""

    __slots__ = ()


Child = Markup | str | None
"""What stands between two tags; a str is escaped, None is left out."""
Value = str | int | float | bool | None
"""The value of an attribute; True is its bare name, False and None leave it out."""

_VOID = frozenset({"br", "hr", "input", "link", "meta"})


def element(tag: str, *children: Child, **attributes: Value) -> Markup:
    """Return one element.

    An attribute's name is written as in Python: `class_` is class, `stroke_width` is stroke-width;
    `viewBox` and its like stay as they are. A float is shortened to three decimals.
    """
    written = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(*children)}</{tag}>")


def join(*children: Child) -> Markup:
    """Return the children one after another."""
    return Markup("".join(_text(child) for child in children if child is not None))


def text_of(value: str) -> str:
    """Return a text from elsewhere without characters that HTML has not, or that reorder it."""
    return "".join(each if each.isprintable() else " " for each in value)


def shortened(text: str, max_length: int) -> str:
    """Return `text`, or its beginning and an ellipsis: drawings cannot wrap words."""
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def _text(child: Markup | str) -> str:
    return child if isinstance(child, Markup) else escape(text_of(child), quote=False)


def _attribute(name: str, value: Value) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    written = _number(value) if isinstance(value, float) else text_of(str(value))
    return f' {name}="{escape(written)}"'


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def percent(share: float) -> str:
    """Return a share of the width or height as SVG takes it: 0.5 is `50%`."""
    return f"{_number(share * 100)}%"


def section(title: str, *children: Child, lead: str | None = None) -> Markup:
    """Return a section with its heading, and a sentence under it."""
    return element(
        "section",
        element("h3", title),
        element("p", lead, class_="lead") if lead else None,
        *children,
    )


def table(columns: Sequence[Column], caption: str = "", *, as_cards: bool = False) -> Markup:
    """Return a table of the columns that are told; the first one names its row.

    It scrolls by itself where it is wider than the page. With `as_cards`, a row is a card of its
    own on a phone.
    """
    columns = told(columns)
    kinds = [None if each.is_text else "n" for each in columns]
    head = [
        element("th", each.heading, scope="col", class_=kind)
        for each, kind in zip(columns, kinds, strict=True)
    ]
    body = [
        element(
            "tr",
            element("th", name, scope="row"),
            *(
                element("td", cell, class_=kind, data_name=column.heading if as_cards else None)
                for cell, kind, column in zip(cells, kinds[1:], columns[1:], strict=True)
            ),
        )
        for name, *cells in zip(*(each.cells for each in columns), strict=True)
    ]
    drawn = element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    # Focusable: whoever has no pointer scrolls it with the arrow keys.
    class_ = "scroll cards" if as_cards else "scroll"
    return element(
        "div", drawn, class_=class_, tabindex=0, role="group", aria_label=caption or None
    )


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


Place = float | str
"""In a drawing: pixels, or what `percent` makes of a share of its width or height."""


def line(x1: Place, y1: Place, x2: Place, y2: Place, class_: str, **more: Value) -> Markup:
    """Return a straight line of a drawing."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, **more)


def words_at(x: Place, y: Place, words: str, class_: str, **more: Value) -> Markup:
    """Return a text of a drawing; its classes say what it is, and which end stands at x."""
    return element("text", words, x=x, y=y, class_=class_.strip(), **more)


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


def with_code(words: str) -> Markup:
    """Return a text whose parts between backticks are code."""
    parts = words.split("`")
    return join(*(element("code", part) if at % 2 else part for at, part in enumerate(parts)))


def missing(words: str) -> Markup:
    """Return a paragraph that tells what is missing, and why."""
    return element("p", words, class_="missing")
