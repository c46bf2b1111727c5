"""The arithmetic of codecs and sums: loops over chunks, compiled for the processor they run on.

Kernels are compiled, or loaded, when this module is imported. They work on float32, on bfloat16
(the upper half of a float32), and on blocks of 128 elements with one scale.

Numba widens integers to 64 bits. Casting back to 32 bits keeps twice as many elements in a vector.
Loops over blocks take a slice per block and index from zero: so numba sees that no index is
negative, and LLVM vectorises the loop. For the same reason each kind of code has its own loops: a
branch inside would cost what the vectors gain.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from isthmus.sites.codecs.kernels.kernel_cache import (
    DOUBLE,
    FLOAT,
    FLOATS,
    HALVES,
    INTEGER,
    NOTHING,
    OCTETS,
    READ_FLOATS,
    READ_HALVES,
    READ_OCTETS,
    inlined,
    kernel,
    load_kernels,
)

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Octets = npt.NDArray[np.uint8]

MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
"""Mask without the sign bit. The masked bits, as integers, sort by magnitude, with infinity above
all numbers and NaN above infinity."""
INFINITE: Final = np.uint32(0x7F800000)
"""Smallest magnitude bits that are not finite."""
TOO_LARGE: Final = np.uint32(0x7F000000)
"""The bits of 2**127. Below it, rounding up a scale cannot make a decoded number overflow
float32."""
_NAN: Final = np.float32(np.nan)
"""0x7FC00000: the NaN of every sum that is not a number.

A processor would propagate one of the operands.
"""


@inlined
def magnitude(value: np.float32) -> np.uint32:
    """Return the bits of a number without its sign."""
    return np.uint32(np.float32(value).view(np.uint32) & MAGNITUDE)


@inlined
def with_residual(value: np.float32, residual: np.float32) -> np.float32:
    """Return the sum; a NaN stays as it is, bit for bit."""
    return np.float32(value + residual if value == value else value)


@inlined
def mean(left: np.float32, right: np.float32, divisor: np.float32) -> np.float32:
    """Return the sum divided by `divisor`; 0x7FC00000 if it is NaN."""
    quotient = np.float32((left + right) / divisor)
    return quotient if quotient == quotient else _NAN


# ---------------------------------------------------------------- float32

_TILE: Final = 1024
"""Elements checked together: a loop that may stop at each element is not vectorised."""


@kernel(NOTHING, READ_FLOATS, FLOATS)
def add_to_residual(values: Floats, residual: Floats) -> None:
    """Add `values` to the residual; a NaN among them replaces it, bit for bit."""
    for i in range(residual.size):
        residual[i] = with_residual(values[i], residual[i])


@kernel(NOTHING, READ_FLOATS, FLOATS, FLOAT)
def add_floats(values: Floats, out: Floats, divisor: np.float32) -> None:
    """Add `values` to `out` and divide the sums: float32, shape (n,)."""
    for i in range(out.size):
        out[i] = mean(out[i], values[i], divisor)


@kernel(NOTHING, FLOATS, FLOAT)
def divide(out: Floats, divisor: np.float32) -> None:
    """Divide in place; a NaN keeps its bits."""
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


@inlined
def square(value: np.float32) -> np.float64:
    """Return the square, which float64 holds exactly."""
    return np.float64(value) * np.float64(value)


@kernel(DOUBLE, READ_FLOATS)
def sum_of_squares(values: Floats) -> float:
    """Return the sum of all squares, added in float64, in one order on every processor.

    Eight partial sums: a single one would wait for each addition.
    """
    a = b = c = d = e = f = g = h = np.float64(0)
    numel = values.size
    for row in range(numel // 8):
        first = row * 8
        a += square(values[first])
        b += square(values[first + 1])
        c += square(values[first + 2])
        d += square(values[first + 3])
        e += square(values[first + 4])
        f += square(values[first + 5])
        g += square(values[first + 6])
        h += square(values[first + 7])
    rest = np.float64(0)
    for i in range(numel - numel % 8, numel):
        rest += square(values[i])
    return (((a + e) + (c + g)) + ((b + f) + (d + h))) + rest


# ---------------------------------------------------------------- the outer optimizer

# A product is rounded before it is added: a fused multiply-add has other bits, and which of them
# are fused depends on the processor and on an element's place.


@kernel(NOTHING, READ_FLOATS, FLOATS, FLOAT)
def write_pseudo_gradient(base: Floats, out: Floats, tokens: np.float32) -> None:
    """Write (base - out) * tokens in the place of `out`: float32, shape (n,).

    Zeros without tokens, whatever `out` is.
    """
    for i in range(out.size):
        moved = np.float32(base[i] - out[i])
        out[i] = np.float32(moved * tokens) if tokens != np.float32(0) else np.float32(0)


@kernel(NOTHING, FLOATS, FLOATS, FLOATS, FLOAT, FLOAT)
def take_outer_step(
    parameters: Floats, momentum: Floats, mean: Floats, lr: np.float32, mu: np.float32
) -> None:
    """Take a step of SGD with Nesterov momentum, and write the new parameters in place of `mean`.

    M = mu M + d, G -= lr (d + mu M). The same bits however a tensor is cut.

    Args:
        parameters: G, float32, shape (n,).
        momentum: M, float32, shape (n,).
        mean: d, the sites' mean pseudo-gradient, float32, shape (n,). Overwritten.
        lr: the learning rate.
        mu: the momentum.
    """
    for i in range(parameters.size):
        d = mean[i]
        m = np.float32(np.float32(mu * momentum[i]) + d)
        step = np.float32(lr * np.float32(d + np.float32(mu * m)))
        momentum[i] = m
        parameters[i] = np.float32(parameters[i] - step)
        mean[i] = parameters[i]


@kernel(NOTHING, FLOATS, FLOATS, FLOAT)
def take_plain_outer_step(parameters: Floats, mean: Floats, lr: np.float32) -> None:
    """Take a step of SGD without momentum, as `take_outer_step`."""
    for i in range(parameters.size):
        parameters[i] = np.float32(parameters[i] - np.float32(lr * mean[i]))
        mean[i] = parameters[i]


# ---------------------------------------------------------------- bfloat16


@inlined
def _half_of(value: np.float32) -> np.uint16:
    """Return the upper half of a float32, rounded to nearest even.

    Adding 0x7FFF, plus one if the kept part is odd, carries exactly when the dropped part is above
    one half, or is one half and the kept part odd. A carry would turn a NaN into another number, so
    its upper half is kept and made quiet.
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
def round_to_halves(values: Floats, halves: Halves) -> None:
    """Round float32 to bfloat16, to nearest even; NaN stays NaN, and infinity infinity.

    Args:
        values: float32, shape (n,).
        halves: uint16, shape (n,).
    """
    for i in range(halves.size):
        halves[i] = _half_of(values[i])


@kernel(NOTHING, READ_FLOATS, FLOATS, HALVES)
def round_with_residual_to_halves(values: Floats, residual: Floats, halves: Halves) -> None:
    """Round `values` plus the residual, and update the residual; 0 where it is not finite.

    Args:
        values: float32, shape (n,). A NaN among them crosses unchanged.
        residual: float32, shape (n,).
        halves: uint16, shape (n,).
    """
    for i in range(halves.size):
        total = with_residual(values[i], residual[i])
        half = _half_of(total)
        halves[i] = half
        lost = np.float32(total - _widened(half))
        is_finite = magnitude(lost) < INFINITE
        residual[i] = lost if is_finite else np.float32(0)


@kernel(NOTHING, READ_HALVES, FLOATS)
def write_halves(halves: Halves, out: Floats) -> None:
    """Widen bfloat16 to float32, exactly: uint16 and float32, shape (n,)."""
    for i in range(halves.size):
        out[i] = _widened(halves[i])


@kernel(NOTHING, READ_HALVES, FLOATS, FLOAT)
def add_halves(halves: Halves, out: Floats, divisor: np.float32) -> None:
    """Widen bfloat16, add to `out` and divide the sums."""
    for i in range(halves.size):
        out[i] = mean(out[i], _widened(halves[i]), divisor)


@kernel(NOTHING, READ_HALVES, READ_HALVES, FLOATS, FLOAT)
def write_sum_of_halves(halves: Halves, other: Halves, out: Floats, divisor: np.float32) -> None:
    """Widen two parts, add them and divide the sums."""
    for i in range(halves.size):
        out[i] = mean(_widened(halves[i]), _widened(other[i]), divisor)


# ---------------------------------------------------------------- blocks of codes under one scale

BLOCK: Final = 128
"""Elements that share a scale."""
INT8: Final = 0
"""Codes -127 to 127, two's complement."""
INT4: Final = 1
"""Codes -7 to 7, two's complement; two per byte, the first in its lower half."""
FP8: Final = 2
"""Codes in e4m3: a sign, 4 bits of exponent, 3 of mantissa."""

_HALF_BLOCK: Final = BLOCK // 2
_SCALE_MIN: Final = np.uint32(0x0080)
"""2**-126 as bfloat16: the smallest normal number, and the largest with a finite inverse."""
_SUBNORMAL_END: Final = np.int32(0x3C800000)
"""Bits of 2**-6: below it, numbers of FP8 are multiples of 2**-9."""
_UNIT_IS_STEP: Final = np.float32(2.0**14)
"""A float32 whose last bit is worth 2**-9: adding it rounds a number to a multiple of that."""
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
    """Return the FP8 code of the nearest number, ties to even.

    A code's lower seven bits sort by magnitude. Normal numbers are float32 with 20 mantissa bits
    fewer and another bias; below 2**-6 codes are multiples of 2**-9. Each of the two formulas is
    too small where the other holds, so the larger result is right everywhere.
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
    """Return the number of an FP8 code.

    0x7F and 0xFF, NaN in the format, are never sent; here they decode as 480, as their bits
    suggest.
    """
    magnitude = np.int32(code & np.int32(0x7F))
    normal = np.int32(np.int32(magnitude + _BIAS_DIFFERENCE) << np.int32(20))
    subnormal = np.float32(np.float32(magnitude) * np.float32(2.0**-9)).view(np.int32)
    bits = np.int32(normal if magnitude >= np.int32(8) else subnormal)
    sign = np.int32(np.int32(code & np.int32(0x80)) << np.int32(24))
    return np.int32(bits | sign).view(np.float32)


@kernel(INTEGER, INTEGER, READ_FLOATS, FLOATS, OCTETS, OCTETS, OCTETS)
def encode_blocks(
    kind: int, values: Floats, residual: Floats, scales: Octets, codes: Octets, levels: Octets
) -> int:
    """Encode `values` plus the `residual` as scales and codes, and update the residual.

    Args:
        kind: INT8, INT4 or FP8.
        values: float32, shape (n,).
        residual: float32, shape (n,).
        scales: uint8, shape (2 ceil(n / BLOCK),).
        codes: uint8, shape (n,), or (ceil(n / 2),) for INT4.
        levels: uint8, shape (BLOCK,): scratch memory.

    Returns:
        The number of encoded blocks. If not all are, the next block has a sum of 2**127 or more, or
        NaN: `residual` holds its sums, and is unchanged for later blocks.
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
            total = with_residual(values[first + i], residual[first + i])
            residual[first + i] = total
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
                value = residual[first + i]
                level = np.rint(value * inverse)
                codes[first + i] = np.uint8(np.int8(level))
                residual[first + i] = value - level * scale
        elif kind == INT4:
            for i in range(count):
                value = residual[first + i]
                level = np.rint(value * inverse)
                levels[i] = np.uint8(np.int8(level))
                residual[first + i] = value - level * scale
            if count < BLOCK:
                levels[count] = 0  # pads the last byte of an odd number of elements
            half = block * _HALF_BLOCK
            for i in range((count + 1) // 2):
                lower, upper = levels[2 * i], levels[2 * i + 1]
                codes[half + i] = (lower & np.uint8(15)) | (upper << np.uint8(4))
        else:
            for i in range(count):
                value = residual[first + i]
                code = to_fp8(value * inverse)
                codes[first + i] = np.uint8(code)
                residual[first + i] = value - from_fp8(code) * scale
    return num_blocks


@kernel(NOTHING, INTEGER, READ_OCTETS, READ_OCTETS, FLOATS)
def write_blocks(kind: int, scales: Octets, codes: Octets, out: Floats) -> None:
    """Decode to float32, shape (n,). `encode_blocks` has the shapes of scales and codes."""
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
def add_blocks(kind: int, scales: Octets, codes: Octets, out: Floats, divisor: np.float32) -> None:
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
def write_sum_of_blocks(
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


load_kernels()
