"""Exact sums of squares: the same number in whatever order and groups parts are added.

Gateways and ranks of a site have sums of squares of some chunks each, and each site divides chunks
among them in its own way. Rounded sums of these would differ from site to site. So a sum is a whole
number of units. A unit is the square of the least float32, so every square of a float32 is a whole
number of them, and every float64 that such squares were added up to.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

_UNITS_PER_ONE: Final = 298
"""As a power of two: the least float32 is 2**-149."""
_LIMB_BITS: Final = 32
_NUM_LIMBS: Final = 21
MOST_UNITS: Final = (1 << (_LIMB_BITS * _NUM_LIMBS)) - 1
"""More than 2**80 numbers of the largest magnitude come to."""
Units = Annotated[int, MOST_UNITS]
_BLOCK_NUMEL: Final = 1 << 18


def units_of(squares: float) -> int | None:
    """Return a sum of squares of float32, which was added up in float64, in units.

    None: one of them was no number, or infinite.
    """
    return int(math.ldexp(squares, _UNITS_PER_ONE)) if math.isfinite(squares) else None


def total_of(parts: Iterable[int | None]) -> int | None:
    """Return the sum of units; None: one part is None."""
    total = 0
    for each in parts:
        if each is None:
            return None
        total += each
    return total


def norm_of(units: int | None) -> float:
    """Return the square root of a sum of squares; NaN where it is None."""
    return math.nan if units is None else math.sqrt(units / (1 << _UNITS_PER_ONE))


def words_of(units: int | None) -> list[int]:
    """Return a fixed count of numbers below 2**32; `units_of_words` reads their sums over ranks."""
    if units is None:
        return [0] * _NUM_LIMBS + [1]
    mask = (1 << _LIMB_BITS) - 1
    return [units >> (_LIMB_BITS * limb) & mask for limb in range(_NUM_LIMBS)] + [0]


def units_of_words(words: Sequence[int]) -> int | None:
    """Return what the ranks' units come to, from the sums of their words."""
    *limbs, num_unknown = words
    if num_unknown:
        return None
    return sum(word << (_LIMB_BITS * limb) for limb, word in enumerate(limbs))


def units_in(values: npt.NDArray[np.float32]) -> int | None:
    """Return the squares of an array's elements in units, where no gateway has added them up."""
    blocks = [values[at : at + _BLOCK_NUMEL] for at in range(0, len(values), _BLOCK_NUMEL)]
    return total_of(units_of(float(np.square(each, dtype=np.float64).sum())) for each in blocks)
