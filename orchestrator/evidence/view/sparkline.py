"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.,-=+*#"
"""The same eight levels where the stream cannot carry blocks."""


def sparkline(values: Sequence[float | None], width: int, levels: str = BLOCKS) -> str:
    """Draw `values` from left to right in at most `width` characters.

    More values than characters are averaged in equal parts. The smallest of what is then drawn has
    the lowest level, the largest the highest; a part without a finite value is a space.
    """
    parts = _averages(values, min(width, len(values)))
    finite = [part for part in parts if part is not None]
    if not finite:
        return " " * len(parts)
    low, high = min(finite), max(finite)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if part is None else levels[round((part - low) * scale)] for part in parts)


def _averages(values: Sequence[float | None], num_parts: int) -> list[float | None]:
    parts: list[float | None] = []
    for index in range(num_parts):
        begin = index * len(values) // num_parts
        end = (index + 1) * len(values) // num_parts
        finite = [
            value for value in values[begin:end] if value is not None and math.isfinite(value)
        ]
        parts.append(math.fsum(finite) / len(finite) if finite else None)
    return parts
