"""Blocks of 128 elements under one scale: encoding with error feedback, decoding, sums of decoded parts.

Each loop takes one block at a time, from its first element on, and its index begins at zero: so numba sees that no
index is negative, and LLVM makes vectors of the loop. Scales are two octets, little-endian, wherever they begin.
`kind` is one of the three below; the loops stand apart for each, for a choice inside of one would cost
what the vectors gain.
"""

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
    OCTETS,
    READ_FLOATS,
    READ_OCTETS,
    WORD,
    WORDS,
)

Floats = npt.NDArray[np.float32]
Octets = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

BLOCK: Final = 128
"""Elements that share a scale."""
INT8: Final = 0
"""-127 to 127, two's complement."""
INT4: Final = 1
"""-7 to 7, two's complement; two share a byte, the first in its lower half."""
FP8: Final = 2
"""e4m3: a sign, 4 bits of exponent, 3 of mantissa."""

_HALF_BLOCK: Final = BLOCK // 2
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_NAN: Final = np.float32(np.nan)
"""0x7FC00000: what a sum is that is not a number. Of its own accord, a processor would choose one of the operands."""
_SCALE_MIN: Final = np.uint32(0x0080)
"""2**-126 as bfloat16: the smallest normal number, and the largest with a finite inverse."""
_SUBNORMAL_END: Final = np.int32(0x3C800000)
"""Bits of 2**-6: below it, numbers of FP8 are multiples of 2**-9."""
_UNIT_IS_STEP: Final = np.float32(2.0**14)
"""What has a float32's last bit worth 2**-9: added to a number, it rounds it to a multiple."""
_UNIT_IS_STEP_BITS: Final = np.int32(0x46800000)
_BIAS_DIFFERENCE: Final = np.int32((127 - 7) << 3)


# Numba widens integers to 64 bits; each step that is named 32 bits again keeps twice as many in a vector.


@inlined
def _scale_of(peak: np.uint32, level_max: np.float32) -> np.uint32:
    """Return a block's scale as bfloat16: the peak over the largest level, rounded up."""
    exact = np.float32(np.uint32(peak).view(np.float32) / level_max).view(np.uint32)
    return max(np.uint32(np.uint32(exact + np.uint32(0xFFFF)) >> np.uint32(16)), _SCALE_MIN)


@inlined
def _scale_at(scales: Octets, block: int) -> np.float32:
    encoded = np.uint32(scales[2 * block]) | np.uint32(scales[2 * block + 1]) << np.uint32(8)
    return np.uint32(encoded << np.uint32(16)).view(np.float32)


@inlined
def _from_int8(code: np.uint8) -> np.float32:
    return np.float32(np.int8(code))


@inlined
def _from_lower(code: np.uint8) -> np.float32:
    """Return the level in a byte's lower half, with its sign."""
    return np.float32(np.int32(np.int32(code) << np.int32(28)) >> np.int32(28))


@inlined
def _from_upper(code: np.uint8) -> np.float32:
    return np.float32(np.int32(np.int32(code) << np.int32(24)) >> np.int32(28))


@inlined
def _to_fp8(scaled: np.float32) -> np.int32:
    """Return the code of the nearest number, of two the even one.

    A code's lower seven bits are in the order of the magnitudes. Normal numbers are those of float32 with 20 mantissa
    bits fewer and another bias; below 2**-6 codes are multiples of 2**-9. Of the two formulas, each is
    too small where the other one holds, so that the larger is right everywhere.
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
def _from_fp8(code: np.int32) -> np.float32:
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


@inlined
def _mean(left: np.float32, right: np.float32, divisor: np.float32) -> np.float32:
    quotient = np.float32((left + right) / divisor)
    return quotient if quotient == quotient else _NAN


@kernel(WORD, READ_FLOATS, FLOATS, WORDS)
def owe(values: Floats, owed: Floats, peaks: Words) -> np.uint32:
    """Add `values` to what is owed; a NaN among them replaces it, bit for bit.

    Args:
        values: float32, shape (n,).
        owed: float32, shape (n,).
        peaks: uint32, shape (ceil(n / BLOCK),): takes the bits of each block's largest magnitude.

    Returns:
        the largest of `peaks`, or 0.
    """
    numel, largest = values.size, np.uint32(0)
    for block in range(peaks.size):
        first, peak = block * BLOCK, np.uint32(0)
        for i in range(min(BLOCK, numel - first)):
            value = values[first + i]
            total = np.float32(value + owed[first + i] if value == value else value)
            owed[first + i] = total
            peak = max(peak, np.float32(total).view(np.uint32) & _MAGNITUDE)
        peaks[block] = peak
        largest = max(largest, peak)
    return largest


@kernel(WORD, READ_FLOATS, WORDS)
def find_peaks(values: Floats, peaks: Words) -> np.uint32:
    """Write the bits of each block's largest magnitude to `peaks`, as `owe` does, and return the largest."""
    numel, largest = values.size, np.uint32(0)
    for block in range(peaks.size):
        first, peak = block * BLOCK, np.uint32(0)
        for i in range(min(BLOCK, numel - first)):
            peak = max(peak, np.float32(values[first + i]).view(np.uint32) & _MAGNITUDE)
        peaks[block] = peak
        largest = max(largest, peak)
    return largest


@kernel(NOTHING, INTEGER, FLOATS, WORDS, OCTETS, OCTETS, OCTETS)
def quantise(
    kind: int, values: Floats, peaks: Words, scales: Octets, codes: Octets, levels: Octets
) -> None:
    """Write scales and codes, and leave in `values` what they lose.

    Args:
        kind: INT8, INT4 or FP8.
        values: float32, shape (n,), all below 2**127.
        peaks: uint32, shape (b,): the bits of each block's largest magnitude.
        scales: uint8, shape (2 b,).
        codes: uint8, shape (n,), or (ceil(n / 2),) for INT4.
        levels: uint8, shape (BLOCK,): for what happens in between.
    """
    numel = values.size
    level_max = np.float32(448)
    if kind == INT8:
        level_max = np.float32(127)
    elif kind == INT4:
        level_max = np.float32(7)
    for block in range(peaks.size):
        encoded = _scale_of(peaks[block], level_max)
        scales[2 * block] = encoded & np.uint32(0xFF)
        scales[2 * block + 1] = encoded >> np.uint32(8)
        scale = np.uint32(encoded << np.uint32(16)).view(np.float32)
        inverse = np.float32(1) / scale
        first = block * BLOCK
        count = min(BLOCK, numel - first)
        if kind == INT8:
            for i in range(count):
                value = values[first + i]
                level = np.rint(value * inverse)
                codes[first + i] = np.uint8(np.int8(level))
                values[first + i] = value - level * scale
        elif kind == INT4:
            for i in range(count):
                value = values[first + i]
                level = np.rint(value * inverse)
                levels[i] = np.uint8(np.int8(level))
                values[first + i] = value - level * scale
            if count < BLOCK:
                levels[count] = 0  # the upper half of the last byte of an odd number of elements
            half = block * _HALF_BLOCK
            for i in range((count + 1) // 2):
                lower, upper = levels[2 * i], levels[2 * i + 1]
                codes[half + i] = (lower & np.uint8(15)) | (upper << np.uint8(4))
        else:
            for i in range(count):
                value = values[first + i]
                code = _to_fp8(value * inverse)
                codes[first + i] = np.uint8(code)
                values[first + i] = value - _from_fp8(code) * scale


@kernel(NOTHING, INTEGER, READ_OCTETS, READ_OCTETS, FLOATS)
def write(kind: int, scales: Octets, codes: Octets, out: Floats) -> None:
    """Decode: float32, shape (n,). Scales and codes are as many as `quantise` makes of as many."""
    numel = out.size
    for block in range((numel + BLOCK - 1) // BLOCK):
        scale = _scale_at(scales, block)
        first, half = block * BLOCK, block * _HALF_BLOCK
        count = min(BLOCK, numel - first)
        if kind == INT8:
            for i in range(count):
                out[first + i] = _from_int8(codes[first + i]) * scale
        elif kind == INT4:
            for i in range(count // 2):
                out[first + 2 * i] = _from_lower(codes[half + i]) * scale
                out[first + 2 * i + 1] = _from_upper(codes[half + i]) * scale
            if count % 2:
                out[first + count - 1] = _from_lower(codes[half + count // 2]) * scale
        else:
            for i in range(count):
                out[first + i] = _from_fp8(np.int32(codes[first + i])) * scale


@kernel(NOTHING, INTEGER, READ_OCTETS, READ_OCTETS, FLOATS, FLOAT)
def add(kind: int, scales: Octets, codes: Octets, out: Floats, divisor: np.float32) -> None:
    """Decode, add to `out` and divide the sums."""
    numel = out.size
    for block in range((numel + BLOCK - 1) // BLOCK):
        scale = _scale_at(scales, block)
        first, half = block * BLOCK, block * _HALF_BLOCK
        count = min(BLOCK, numel - first)
        if kind == INT8:
            for i in range(count):
                part = _from_int8(codes[first + i]) * scale
                out[first + i] = _mean(out[first + i], part, divisor)
        elif kind == INT4:
            for i in range(count // 2):
                part = _from_lower(codes[half + i]) * scale
                out[first + 2 * i] = _mean(out[first + 2 * i], part, divisor)
                part = _from_upper(codes[half + i]) * scale
                out[first + 2 * i + 1] = _mean(out[first + 2 * i + 1], part, divisor)
            if count % 2:
                part = _from_lower(codes[half + count // 2]) * scale
                out[first + count - 1] = _mean(out[first + count - 1], part, divisor)
        else:
            for i in range(count):
                part = _from_fp8(np.int32(codes[first + i])) * scale
                out[first + i] = _mean(out[first + i], part, divisor)


@kernel(NOTHING, INTEGER, READ_OCTETS, READ_OCTETS, READ_OCTETS, READ_OCTETS, FLOATS, FLOAT)
def write_sum(
    kind: int,
    scales: Octets,
    codes: Octets,
    other_scales: Octets,
    other_codes: Octets,
    out: Floats,
    divisor: np.float32,
) -> None:
    """Decode two parts of one kind, add them and divide the sums."""
    numel = out.size
    for block in range((numel + BLOCK - 1) // BLOCK):
        scale, other_scale = _scale_at(scales, block), _scale_at(other_scales, block)
        first, half = block * BLOCK, block * _HALF_BLOCK
        count = min(BLOCK, numel - first)
        if kind == INT8:
            for i in range(count):
                part = _from_int8(codes[first + i]) * scale
                other = _from_int8(other_codes[first + i]) * other_scale
                out[first + i] = _mean(part, other, divisor)
        elif kind == INT4:
            for i in range(count // 2):
                part = _from_lower(codes[half + i]) * scale
                other = _from_lower(other_codes[half + i]) * other_scale
                out[first + 2 * i] = _mean(part, other, divisor)
                part = _from_upper(codes[half + i]) * scale
                other = _from_upper(other_codes[half + i]) * other_scale
                out[first + 2 * i + 1] = _mean(part, other, divisor)
            if count % 2:
                part = _from_lower(codes[half + count // 2]) * scale
                other = _from_lower(other_codes[half + count // 2]) * other_scale
                out[first + count - 1] = _mean(part, other, divisor)
        else:
            for i in range(count):
                part = _from_fp8(np.int32(codes[first + i])) * scale
                other = _from_fp8(np.int32(other_codes[first + i])) * other_scale
                out[first + i] = _mean(part, other, divisor)
