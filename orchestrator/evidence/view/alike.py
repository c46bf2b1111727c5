"""Tells once what several sites or ranks report alike. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

_NUMBER = re.compile(r"\d+")


def told_once(
    items: Iterable[T], text: Callable[[T], str], sites: Sequence[str]
) -> list[tuple[T, int]]:
    """Return each item that says something new, with how many others say the same.

    Texts are alike that differ in numbers and in the names of `sites` only.
    """
    found: dict[str, tuple[T, int]] = {}
    for item in items:
        key = _masked(text(item), sites)
        first, num_others = found.get(key, (item, -1))
        found[key] = (first, num_others + 1)
    return list(found.values())


def is_alike(one: str, other: str, sites: Sequence[str]) -> bool:
    """Whether two texts differ in numbers and in the names of `sites` only."""
    return _masked(one, sites) == _masked(other, sites)


def and_others(text: str, num_others: int) -> str:
    """Return a text with how many others say the same."""
    if not num_others:
        return text
    return f"{text} (and {num_others} other{'s' if num_others > 1 else ''})"


def _masked(text: str, sites: Sequence[str]) -> str:
    """Return a text without what tells who says it."""
    names = sorted(filter(None, sites), key=len, reverse=True)
    if names:
        text = re.sub(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", "·", text)
    return _NUMBER.sub("#", text)
