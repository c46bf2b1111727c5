"""bfloat16, the upper half of a float32.

Rounding with error feedback, widening, sums of widened parts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sites.codecs.kernels.compiling import inlined, kernel
from sites.codecs.kernels.numbers import INFINITE, MAGNITUDE, Floats, magnitude, mean, with_owed
from sites.codecs.kernels.signatures import FLOAT, FLOATS, HALVES, NOTHING, READ_FLOATS, READ_HALVES

Halves = npt.NDArray[np.uint16]


@inlined
def _half_of(value: np.float32) -> np.uint16:
    """Return the upper half, rounded.

    Adding 0x7FFF, and one more where the kept part is odd, carries into the kept part exactly when
    the dropped part is above one half, or is one half and the kept part odd. The carry of a NaN
    would make another number of it, so its upper half is kept and made quiet.
    """
    bits = np.float32(value).view(np.uint32)
    upper = np.uint32(bits >> np.uint32(16))
    odd = np.uint32(upper & np.uint32(1))
    rounded = np.uint32(np.uint32(np.uint32(bits + odd) + np.uint32(0x7FFF)) >> np.uint32(16))
    is_nan = np.uint32(bits & MAGNITUDE) > INFINITE
    return np.uint16(np.uint32(upper | np.uint32(0x40)) if is_nan else rounded)


@inlined
def _widened(half: np.uint16) -> np.float32:
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@kernel(NOTHING, READ_FLOATS, HALVES)
def round_to(values: Floats, halves: Halves) -> None:
    """Round to nearest even; NaN stays NaN, and infinity infinity.

    Args:
        values: float32, shape (n,).
        halves: uint16, shape (n,).
    """
    for i in range(halves.size):
        halves[i] = _half_of(values[i])


@kernel(NOTHING, READ_FLOATS, FLOATS, HALVES)
def round_owed(values: Floats, owed: Floats, halves: Halves) -> None:
    """Round the sums of `values` and what is owed; owe what that loses, unless it is not finite.

    Args:
        values: float32, shape (n,). A NaN among them crosses as it is.
        owed: float32, shape (n,).
        halves: uint16, shape (n,).
    """
    for i in range(halves.size):
        total = with_owed(values[i], owed[i])
        half = _half_of(total)
        halves[i] = half
        lost = np.float32(total - _widened(half))
        is_finite = magnitude(lost) < INFINITE
        owed[i] = lost if is_finite else np.float32(0)


@kernel(NOTHING, READ_HALVES, FLOATS)
def write(halves: Halves, out: Floats) -> None:
    """Widen, exactly: uint16 and float32, shape (n,)."""
    for i in range(halves.size):
        out[i] = _widened(halves[i])


@kernel(NOTHING, READ_HALVES, FLOATS, FLOAT)
def add(halves: Halves, out: Floats, divisor: np.float32) -> None:
    """Widen, add to `out` and divide the sums."""
    for i in range(halves.size):
        out[i] = mean(out[i], _widened(halves[i]), divisor)


@kernel(NOTHING, READ_HALVES, READ_HALVES, FLOATS, FLOAT)
def write_sum(halves: Halves, other: Halves, out: Floats, divisor: np.float32) -> None:
    """Widen two parts, add them and divide the sums."""
    for i in range(halves.size):
        out[i] = mean(_widened(halves[i]), _widened(other[i]), divisor)
