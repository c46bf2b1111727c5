"""Exact sums of squares, independent of the order and grouping of their parts.

A gateway or rank has the sum of squares of some chunks, and sites divide chunks differently.
Rounded sums would differ from site to site. So a sum is an integer number of units. A unit is the
square of the smallest float32, so every square of a float32 is an integer number of units, and so
is every float64 to which such squares were added up.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_UNITS_PER_ONE: Final = 298
"""Units per 1.0 as a power of two: the smallest float32 is 2**-149."""
_LIMB_BITS: Final = 32
_NUM_LIMBS: Final = 21
MOST_UNITS: Final = (1 << (_LIMB_BITS * _NUM_LIMBS)) - 1
"""Largest sum in units, more than that of 2**80 numbers of the largest magnitude."""
Units = Annotated[int, MOST_UNITS]
NUM_WORDS: Final = _NUM_LIMBS + 1
"""Words of a sum: `words_of`."""
_BLOCK_NUMEL: Final = 1 << 18


def units_of(squares: float) -> int | None:
    """Return a float64 sum of squares of float32 in units.

    None: the sum is NaN or infinite.
    """
    return int(math.ldexp(squares, _UNITS_PER_ONE)) if math.isfinite(squares) else None


def total_of(parts: Iterable[int | None]) -> int | None:
    """Return the sum of units; None if a part is None."""
    total = 0
    for each in parts:
        if each is None:
            return None
        total += each
    return total


def norm_of(units: int | None) -> float:
    """Return the square root of a sum of squares in units; NaN for None."""
    return math.nan if units is None else math.sqrt(units / (1 << _UNITS_PER_ONE))


def words_of(units: int | None) -> list[int]:
    """Return units as NUM_WORDS 32-bit words, whose sums over ranks can be decoded."""
    if units is None:
        return [0] * _NUM_LIMBS + [1]
    mask = (1 << _LIMB_BITS) - 1
    return [units >> (_LIMB_BITS * limb) & mask for limb in range(_NUM_LIMBS)] + [0]


def units_of_words(words: Sequence[int]) -> int | None:
    """Return the sum of the ranks' units from the sums of their words."""
    *limbs, num_unknown = words
    if num_unknown:
        return None
    return sum(word << (_LIMB_BITS * limb) for limb, word in enumerate(limbs))


def units_in(values: npt.NDArray[np.float32]) -> int | None:
    """Return the sum of squares of an array in units, if no gateway has computed it."""
    import numpy as np  # agents read of squares, and need no numpy for that

    blocks = [values[at : at + _BLOCK_NUMEL] for at in range(0, len(values), _BLOCK_NUMEL)]
    return total_of(units_of(float(np.square(each, dtype=np.float64).sum())) for each in blocks)
