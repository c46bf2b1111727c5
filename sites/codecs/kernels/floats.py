"""float32 as they are: what is owed, sums, and the first that is not finite."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sites.codecs.kernels.compiling import inlined, kernel
from sites.codecs.kernels.signatures import (
    FLOAT,
    FLOATS,
    INTEGER,
    NOTHING,
    READ_FLOATS,
)

Floats = npt.NDArray[np.float32]

_TILE: Final = 1024
"""Elements that are looked at together: a loop that may stop at each is none of vectors."""
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITE: Final = np.uint32(0x7F800000)
_NAN: Final = np.float32(np.nan)
"""0x7FC00000: what a sum is that is not a number."""


@inlined
def _magnitude(value: np.float32) -> np.uint32:
    return np.uint32(np.float32(value).view(np.uint32) & _MAGNITUDE)


@kernel(NOTHING, READ_FLOATS, FLOATS)
def owe(values: Floats, owed: Floats) -> None:
    """Add `values` to what is owed; a NaN among them replaces it, bit for bit."""
    for i in range(owed.size):
        value = values[i]
        owed[i] = np.float32(value + owed[i] if value == value else value)


@kernel(NOTHING, READ_FLOATS, FLOATS, FLOAT)
def add(values: Floats, out: Floats, divisor: np.float32) -> None:
    """Add `values` to `out` and divide the sums: float32, shape (n,)."""
    for i in range(out.size):
        quotient = np.float32((out[i] + values[i]) / divisor)
        out[i] = quotient if quotient == quotient else _NAN


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
            largest = max(largest, _magnitude(values[first + i]))
        if largest >= _INFINITE:
            for i in range(count):
                if _magnitude(values[first + i]) >= _INFINITE:
                    return first + i
    return -1
