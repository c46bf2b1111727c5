"""float32 as they are: what is owed, sums, and the first that is not finite."""

from __future__ import annotations

from typing import Final

import numpy as np

from sites.codecs.kernels.compiling import kernel
from sites.codecs.kernels.numbers import INFINITE, Floats, magnitude, mean, with_owed
from sites.codecs.kernels.signatures import FLOAT, FLOATS, INTEGER, NOTHING, READ_FLOATS

_TILE: Final = 1024
"""Elements that are looked at together: a loop that may stop at each is none of vectors."""


@kernel(NOTHING, READ_FLOATS, FLOATS)
def owe(values: Floats, owed: Floats) -> None:
    """Add `values` to what is owed; a NaN among them replaces it, bit for bit."""
    for i in range(owed.size):
        owed[i] = with_owed(values[i], owed[i])


@kernel(NOTHING, READ_FLOATS, FLOATS, FLOAT)
def add(values: Floats, out: Floats, divisor: np.float32) -> None:
    """Add `values` to `out` and divide the sums: float32, shape (n,)."""
    for i in range(out.size):
        out[i] = mean(out[i], values[i], divisor)


@kernel(NOTHING, FLOATS, FLOAT)
def divide(out: Floats, divisor: np.float32) -> None:
    """Divide; a NaN stays as it is, bit for bit."""
    for i in range(out.size):
        value = out[i]
        out[i] = np.float32(value / divisor if value == value else value)


@kernel(INTEGER, READ_FLOATS)
def first_not_finite(values: Floats) -> int:
    """Return the index of the first NaN or infinity, or -1."""
    numel = values.size
    for tile in range((numel + _TILE - 1) // _TILE):
        first, largest = tile * _TILE, np.uint32(0)
        count = min(_TILE, numel - first)
        for i in range(count):
            largest = max(largest, magnitude(values[first + i]))
        if largest >= INFINITE:
            for i in range(count):
                if magnitude(values[first + i]) >= INFINITE:
                    return first + i
    return -1
