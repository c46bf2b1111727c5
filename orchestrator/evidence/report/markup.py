"""HTML and SVG as values.

What is not markup is escaped, for names come from YAML and from the wire.
"""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is HTML already. Only this module and literals of our own make it."""

    __slots__ = ()


Child = Markup | str | None
"""What stands between two tags; a str is escaped, None is left out."""
Value = str | int | float | bool | None
"""Of an attribute; True is its bare name, False and None leave it out."""

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
