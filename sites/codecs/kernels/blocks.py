"""Blocks of 128 elements under one scale.

Encoding with error feedback, decoding, sums of decoded parts.

Each loop takes one block at a time, from its first element on, and its index begins at zero: so
numba sees that no index is negative, and LLVM makes vectors of the loop. Scales are two octets,
little-endian, wherever they begin. `kind` is one of the three below; the loops stand apart for
each, for a choice inside of one would cost what the vectors gain.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sites.codecs.kernels.compiling import kernel
from sites.codecs.kernels.levels import (
    Octets,
    from_fp8,
    from_int8,
    from_lower,
    from_upper,
    scale_at,
    scale_of,
    to_fp8,
)
from sites.codecs.kernels.numbers import TOO_LARGE, Floats, magnitude, mean, with_owed
from sites.codecs.kernels.signatures import (
    FLOAT,
    FLOATS,
    INTEGER,
    NOTHING,
    OCTETS,
    READ_FLOATS,
    READ_OCTETS,
)

BLOCK: Final = 128
"""Elements that share a scale."""
INT8: Final = 0
"""-127 to 127, two's complement."""
INT4: Final = 1
"""-7 to 7, two's complement; two share a byte, the first in its lower half."""
FP8: Final = 2
"""e4m3: a sign, 4 bits of exponent, 3 of mantissa."""

_HALF_BLOCK: Final = BLOCK // 2


@kernel(INTEGER, INTEGER, READ_FLOATS, FLOATS, OCTETS, OCTETS, OCTETS)
def encode(
    kind: int, values: Floats, owed: Floats, scales: Octets, codes: Octets, levels: Octets
) -> int:
    """Add `values` to what is `owed`, write the sums' scales and codes, keep there what they lose.

    Args:
        kind: INT8, INT4 or FP8.
        values: float32, shape (n,).
        owed: float32, shape (n,).
        scales: uint8, shape (2 ceil(n / BLOCK),).
        codes: uint8, shape (n,), or (ceil(n / 2),) for INT4.
        levels: uint8, shape (BLOCK,): for what happens in between.

    Returns:
        How many blocks are done. Where not all are, the next one has a sum of 2**127 or more, or
        one that is no number: `owed` holds its sums, and what is owed to those after it is as it
        was.
    """
    numel = values.size
    level_max = np.float32(448)
    if kind == INT8:
        level_max = np.float32(127)
    elif kind == INT4:
        level_max = np.float32(7)
    num_blocks = (numel + BLOCK - 1) // BLOCK
    for block in range(num_blocks):
        first, peak = block * BLOCK, np.uint32(0)
        count = min(BLOCK, numel - first)
        for i in range(count):
            total = with_owed(values[first + i], owed[first + i])
            owed[first + i] = total
            peak = max(peak, magnitude(total))
        if peak >= TOO_LARGE:
            return block
        encoded = scale_of(peak, level_max)
        scales[2 * block] = encoded & np.uint32(0xFF)
        scales[2 * block + 1] = encoded >> np.uint32(8)
        scale = np.uint32(encoded << np.uint32(16)).view(np.float32)
        inverse = np.float32(1) / scale
        if kind == INT8:
            for i in range(count):
                value = owed[first + i]
                level = np.rint(value * inverse)
                codes[first + i] = np.uint8(np.int8(level))
                owed[first + i] = value - level * scale
        elif kind == INT4:
            for i in range(count):
                value = owed[first + i]
                level = np.rint(value * inverse)
                levels[i] = np.uint8(np.int8(level))
                owed[first + i] = value - level * scale
            if count < BLOCK:
                levels[count] = 0  # the upper half of the last byte of an odd number of elements
            half = block * _HALF_BLOCK
            for i in range((count + 1) // 2):
                lower, upper = levels[2 * i], levels[2 * i + 1]
                codes[half + i] = (lower & np.uint8(15)) | (upper << np.uint8(4))
        else:
            for i in range(count):
                value = owed[first + i]
                code = to_fp8(value * inverse)
                codes[first + i] = np.uint8(code)
                owed[first + i] = value - from_fp8(code) * scale
    return num_blocks


@kernel(NOTHING, INTEGER, READ_OCTETS, READ_OCTETS, FLOATS)
def write(kind: int, scales: Octets, codes: Octets, out: Floats) -> None:
    """Decode: float32, shape (n,). Scales and codes are as many as `quantise` makes of as many."""
    numel = out.size
    for block in range((numel + BLOCK - 1) // BLOCK):
        scale = scale_at(scales, block)
        first, half = block * BLOCK, block * _HALF_BLOCK
        count = min(BLOCK, numel - first)
        if kind == INT8:
            for i in range(count):
                out[first + i] = from_int8(codes[first + i]) * scale
        elif kind == INT4:
            for i in range(count // 2):
                out[first + 2 * i] = from_lower(codes[half + i]) * scale
                out[first + 2 * i + 1] = from_upper(codes[half + i]) * scale
            if count % 2:
                out[first + count - 1] = from_lower(codes[half + count // 2]) * scale
        else:
            for i in range(count):
                out[first + i] = from_fp8(np.int32(codes[first + i])) * scale


@kernel(NOTHING, INTEGER, READ_OCTETS, READ_OCTETS, FLOATS, FLOAT)
def add(kind: int, scales: Octets, codes: Octets, out: Floats, divisor: np.float32) -> None:
    """Decode, add to `out` and divide the sums."""
    numel = out.size
    for block in range((numel + BLOCK - 1) // BLOCK):
        scale = scale_at(scales, block)
        first, half = block * BLOCK, block * _HALF_BLOCK
        count = min(BLOCK, numel - first)
        if kind == INT8:
            for i in range(count):
                part = from_int8(codes[first + i]) * scale
                out[first + i] = mean(out[first + i], part, divisor)
        elif kind == INT4:
            for i in range(count // 2):
                part = from_lower(codes[half + i]) * scale
                out[first + 2 * i] = mean(out[first + 2 * i], part, divisor)
                part = from_upper(codes[half + i]) * scale
                out[first + 2 * i + 1] = mean(out[first + 2 * i + 1], part, divisor)
            if count % 2:
                part = from_lower(codes[half + count // 2]) * scale
                out[first + count - 1] = mean(out[first + count - 1], part, divisor)
        else:
            for i in range(count):
                part = from_fp8(np.int32(codes[first + i])) * scale
                out[first + i] = mean(out[first + i], part, divisor)


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
        scale, other_scale = scale_at(scales, block), scale_at(other_scales, block)
        first, half = block * BLOCK, block * _HALF_BLOCK
        count = min(BLOCK, numel - first)
        if kind == INT8:
            for i in range(count):
                part = from_int8(codes[first + i]) * scale
                other = from_int8(other_codes[first + i]) * other_scale
                out[first + i] = mean(part, other, divisor)
        elif kind == INT4:
            for i in range(count // 2):
                part = from_lower(codes[half + i]) * scale
                other = from_lower(other_codes[half + i]) * other_scale
                out[first + 2 * i] = mean(part, other, divisor)
                part = from_upper(codes[half + i]) * scale
                other = from_upper(other_codes[half + i]) * other_scale
                out[first + 2 * i + 1] = mean(part, other, divisor)
            if count % 2:
                part = from_lower(codes[half + count // 2]) * scale
                other = from_lower(other_codes[half + count // 2]) * other_scale
                out[first + count - 1] = mean(part, other, divisor)
        else:
            for i in range(count):
                part = from_fp8(np.int32(codes[first + i])) * scale
                other = from_fp8(np.int32(other_codes[first + i])) * other_scale
                out[first + i] = mean(part, other, divisor)
