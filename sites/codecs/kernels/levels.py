"""Numbers of one block's codes and its scale: what a float32 becomes, and what comes back.

Numba widens integers to 64 bits; each step that is named 32 bits again keeps twice as many in a
vector.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sites.codecs.kernels.compiling import inlined

Octets = npt.NDArray[np.uint8]

_SCALE_MIN: Final = np.uint32(0x0080)
"""2**-126 as bfloat16: the smallest normal number, and the largest with a finite inverse."""
_SUBNORMAL_END: Final = np.int32(0x3C800000)
"""Bits of 2**-6: below it, numbers of FP8 are multiples of 2**-9."""
_UNIT_IS_STEP: Final = np.float32(2.0**14)
"""What has a float32's last bit worth 2**-9: added to a number, it rounds it to a multiple."""
_UNIT_IS_STEP_BITS: Final = np.int32(0x46800000)
_BIAS_DIFFERENCE: Final = np.int32((127 - 7) << 3)


@inlined
def scale_of(peak: np.uint32, level_max: np.float32) -> np.uint32:
    """Return a block's scale as bfloat16: the peak over the largest level, rounded up."""
    exact = np.float32(np.uint32(peak).view(np.float32) / level_max).view(np.uint32)
    return max(np.uint32(np.uint32(exact + np.uint32(0xFFFF)) >> np.uint32(16)), _SCALE_MIN)


@inlined
def scale_at(scales: Octets, block: int) -> np.float32:
    """Return a block's scale."""
    encoded = np.uint32(scales[2 * block]) | np.uint32(scales[2 * block + 1]) << np.uint32(8)
    return np.uint32(encoded << np.uint32(16)).view(np.float32)


@inlined
def from_int8(code: np.uint8) -> np.float32:
    """Return the level of a byte, with its sign."""
    return np.float32(np.int8(code))


@inlined
def from_lower(code: np.uint8) -> np.float32:
    """Return the level in a byte's lower half, with its sign."""
    return np.float32(np.int32(np.int32(code) << np.int32(28)) >> np.int32(28))


@inlined
def from_upper(code: np.uint8) -> np.float32:
    """Return the level in a byte's upper half, with its sign."""
    return np.float32(np.int32(np.int32(code) << np.int32(24)) >> np.int32(28))


@inlined
def to_fp8(scaled: np.float32) -> np.int32:
    """Return the code of the nearest number, of two the even one.

    A code's lower seven bits are in the order of the magnitudes. Normal numbers are those of
    float32 with 20 mantissa bits fewer and another bias; below 2**-6 codes are multiples of 2**-9.
    Of the two formulas, each is too small where the other one holds, so that the larger is right
    everywhere.
    """
    bits = np.float32(scaled).view(np.int32)
    magnitude = np.int32(bits & np.int32(0x7FFFFFFF))
    sign = np.int32(np.int32(bits >> np.int32(24)) & np.int32(0x80))
    odd = np.int32(np.int32(magnitude >> np.int32(20)) & np.int32(1))
    rounded = np.int32(np.int32(magnitude + odd) + np.int32(0x7FFFF))
    normal = np.int32(np.int32(rounded >> np.int32(20)) - _BIAS_DIFFERENCE)
    small = np.int32(min(magnitude, _SUBNORMAL_END)).view(np.float32)
    subnormal = np.int32(np.float32(small + _UNIT_IS_STEP).view(np.int32) - _UNIT_IS_STEP_BITS)
    return np.int32(np.int32(max(normal, subnormal)) | sign)


@inlined
def from_fp8(code: np.int32) -> np.float32:
    """Return the number of a code.

    0x7F and 0xFF, which the format defines as NaN, are never sent; here they are the 480 that their
    bits would say.
    """
    magnitude = np.int32(code & np.int32(0x7F))
    normal = np.int32(np.int32(magnitude + _BIAS_DIFFERENCE) << np.int32(20))
    subnormal = np.float32(np.float32(magnitude) * np.float32(2.0**-9)).view(np.int32)
    bits = np.int32(normal if magnitude >= np.int32(8) else subnormal)
    sign = np.int32(np.int32(code & np.int32(0x80)) << np.int32(24))
    return np.int32(bits | sign).view(np.float32)
