# cython: boundscheck=False, wraparound=False, cdivision=True, infer_types=True
# cython: annotation_typing=False, warn.unreachable=False
# ruff: noqa: F821 - names of loops.pxd
# mypy: disable-error-code="name-defined, no-any-return"
"""The arithmetic of codecs and sums: loops over chunks, without the interpreter's lock.

Kernels work on float32, on bfloat16 (the upper half of a float32), and on blocks of 128 elements
with one scale. Sizes are not checked: too short an array is accessed beyond its end. The codecs
check them. An array that is only read may begin anywhere, as in a frame.

Cython compiles this file, and loops.pxd says what is an array or a number of which type. Where it
was not compiled, the same lines run as plain Python, on numpy's scalars and Python's integers, and
give the same bits a thousand times more slowly.

No flag lets the compiler fuse a product and a sum, reorder sums, or divide by multiplying. So
kernels give the bits that IEEE 754 prescribes, on every processor. Integers stay as narrow as the
floats beside them, or a vector would hold half as many. Each kind of code has its own loops: a
branch inside would cost what the vectors gain.
"""

from __future__ import annotations

from typing import Final

import cython
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Octets = npt.NDArray[np.uint8]

_MAGNITUDE = cython.declare(cython.uint, 0x7FFFFFFF)
"""Mask without the sign bit. The masked bits, as integers, sort by magnitude, with infinity above
all numbers and NaN above infinity."""
_INFINITE = cython.declare(cython.uint, 0x7F800000)
"""Smallest magnitude bits that are not finite."""
_TOO_LARGE = cython.declare(cython.uint, 0x7F000000)
_NAN = cython.declare(cython.float, np.float32(np.nan))
"""0x7FC00000: the NaN of every sum that is not a number.

A processor would propagate one of the operands.
"""
MAGNITUDE: Final = np.uint32(_MAGNITUDE)
TOO_LARGE: Final = np.uint32(_TOO_LARGE)
"""The bits of 2**127. Below it, rounding up a scale cannot make a decoded number overflow
float32."""


def bits_of(value: np.float32) -> int:
    """Return the bits of a number."""
    if cython.compiled:
        return isthmus_bits_of(value)
    return int(np.float32(value).view(np.uint32))


def float_of(bits: int) -> np.float32:
    """Return the number that has these bits."""
    if cython.compiled:
        return isthmus_float_of(bits)
    return np.uint32(bits).view(np.float32)


def float_at(values: Floats, i: int) -> np.float32:
    """Return an element, wherever the array begins."""
    if cython.compiled:
        return isthmus_read_float(cython.address(values[i]))
    return values[i]


def half_at(halves: Halves, i: int) -> int:
    """Return an element, wherever the array begins."""
    if cython.compiled:
        return isthmus_read_half(cython.address(halves[i]))
    return int(halves[i])


def byte_at(octets: Octets, i: int) -> int:
    """Return an element."""
    if cython.compiled:
        return octets[i]
    return int(octets[i])


def magnitude(value: np.float32) -> int:
    """Return the bits of a number without its sign."""
    return bits_of(value) & _MAGNITUDE


def with_residual(value: np.float32, residual: np.float32) -> np.float32:
    """Return the sum; a NaN stays as it is, bit for bit."""
    return value + residual if value == value else value


def mean(left: np.float32, right: np.float32, divisor: np.float32) -> np.float32:
    """Return the sum divided by `divisor`; 0x7FC00000 if it is NaN."""
    quotient = (left + right) / divisor
    return quotient if quotient == quotient else _NAN


# ---------------------------------------------------------------- float32

_TILE = cython.declare(cython.Py_ssize_t, 1024)
"""Elements checked together: a loop that may stop at each element is not vectorised."""


def add_to_residual(values: Floats, residual: Floats) -> None:
    """Add `values` to the residual; a NaN among them replaces it, bit for bit."""
    with cython.nogil:
        for i in range(residual.shape[0]):
            residual[i] = with_residual(float_at(values, i), residual[i])


def add_floats(values: Floats, out: Floats, divisor: np.float32) -> None:
    """Add `values` to `out` and divide the sums: float32, shape (n,)."""
    with cython.nogil:
        for i in range(out.shape[0]):
            out[i] = mean(out[i], float_at(values, i), divisor)


def divide(out: Floats, divisor: np.float32) -> None:
    """Divide in place; a NaN keeps its bits."""
    with cython.nogil:
        for i in range(out.shape[0]):
            out[i] = out[i] / divisor if out[i] == out[i] else out[i]


def first_not_finite(values: Floats) -> int:
    """Return the index of the first NaN or infinity, or -1."""
    numel = values.shape[0]
    with cython.nogil:
        for tile in range((numel + _TILE - 1) // _TILE):
            first, largest = tile * _TILE, 0
            count = min(_TILE, numel - first)
            for i in range(count):
                largest = max(largest, magnitude(float_at(values, first + i)))
            if largest >= _INFINITE:
                for i in range(count):
                    if magnitude(float_at(values, first + i)) >= _INFINITE:
                        return first + i
    return -1


def square(value: np.float32) -> float:
    """Return the square, which float64 holds exactly."""
    return cython.cast(cython.double, value) * cython.cast(cython.double, value)


def sum_of_squares(values: Floats) -> float:
    """Return the sum of all squares, added in float64, in one order on every processor.

    Eight partial sums: a single one would wait for each addition.
    """
    a = b = c = d = e = f = g = h = rest = 0.0
    numel = values.shape[0]
    with cython.nogil:
        for row in range(numel // 8):
            first = row * 8
            a += square(float_at(values, first))
            b += square(float_at(values, first + 1))
            c += square(float_at(values, first + 2))
            d += square(float_at(values, first + 3))
            e += square(float_at(values, first + 4))
            f += square(float_at(values, first + 5))
            g += square(float_at(values, first + 6))
            h += square(float_at(values, first + 7))
        for i in range(numel - numel % 8, numel):
            rest += square(float_at(values, i))
    return (((a + e) + (c + g)) + ((b + f) + (d + h))) + rest


# ---------------------------------------------------------------- the outer optimizer

# A product is rounded before it is added: a fused multiply-add has other bits, and which of them
# are fused depends on the processor and on an element's place.


def write_pseudo_gradient(base: Floats, out: Floats, tokens: np.float32) -> None:
    """Write (base - out) * tokens in the place of `out`: float32, shape (n,).

    Zeros without tokens, whatever `out` is.
    """
    with cython.nogil:
        for i in range(out.shape[0]):
            moved = float_at(base, i) - out[i]
            out[i] = moved * tokens if tokens != 0 else 0


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
    with cython.nogil:
        for i in range(parameters.shape[0]):
            d = mean[i]
            m = mu * momentum[i] + d
            step = lr * (d + mu * m)
            momentum[i] = m
            parameters[i] = parameters[i] - step
            mean[i] = parameters[i]


def take_plain_outer_step(parameters: Floats, mean: Floats, lr: np.float32) -> None:
    """Take a step of SGD without momentum, as `take_outer_step`."""
    with cython.nogil:
        for i in range(parameters.shape[0]):
            parameters[i] = parameters[i] - lr * mean[i]
            mean[i] = parameters[i]


# ---------------------------------------------------------------- bfloat16


def half_of(value: np.float32) -> int:
    """Return the upper half of a float32, rounded to nearest even.

    Adding 0x7FFF, plus one if the kept part is odd, carries exactly when the dropped part is above
    one half, or is one half and the kept part odd. A carry would turn a NaN into another number, so
    its upper half is kept and made quiet.
    """
    bits = bits_of(value)
    upper = bits >> 16
    rounded = (bits + (upper & 1) + 0x7FFF) >> 16
    return upper | 0x40 if bits & _MAGNITUDE > _INFINITE else rounded


def widened(half: int) -> np.float32:
    """Return the number whose upper half this is; its lower one is 0."""
    return float_of(half << 16)


def round_to_halves(values: Floats, halves: Halves) -> None:
    """Round float32 to bfloat16, to nearest even; NaN stays NaN, and infinity infinity.

    Args:
        values: float32, shape (n,).
        halves: uint16, shape (n,).
    """
    with cython.nogil:
        for i in range(halves.shape[0]):
            halves[i] = half_of(float_at(values, i))


def round_with_residual_to_halves(values: Floats, residual: Floats, halves: Halves) -> None:
    """Round `values` plus the residual, and update the residual; 0 where it is not finite.

    Args:
        values: float32, shape (n,). A NaN among them crosses unchanged.
        residual: float32, shape (n,).
        halves: uint16, shape (n,).
    """
    with cython.nogil:
        for i in range(halves.shape[0]):
            total = with_residual(float_at(values, i), residual[i])
            half = half_of(total)
            halves[i] = half
            lost = total - widened(half)
            residual[i] = lost if magnitude(lost) < _INFINITE else 0


def write_halves(halves: Halves, out: Floats) -> None:
    """Widen bfloat16 to float32, exactly: uint16 and float32, shape (n,)."""
    with cython.nogil:
        for i in range(halves.shape[0]):
            out[i] = widened(half_at(halves, i))


def add_halves(halves: Halves, out: Floats, divisor: np.float32) -> None:
    """Widen bfloat16, add to `out` and divide the sums."""
    with cython.nogil:
        for i in range(halves.shape[0]):
            out[i] = mean(out[i], widened(half_at(halves, i)), divisor)


def write_sum_of_halves(halves: Halves, other: Halves, out: Floats, divisor: np.float32) -> None:
    """Widen two parts, add them and divide the sums."""
    with cython.nogil:
        for i in range(halves.shape[0]):
            out[i] = mean(widened(half_at(halves, i)), widened(half_at(other, i)), divisor)


# ---------------------------------------------------------------- blocks of codes under one scale

_BLOCK = cython.declare(cython.Py_ssize_t, 128)
_INT8 = cython.declare(cython.int, 0)
_INT4 = cython.declare(cython.int, 1)
_FP8 = cython.declare(cython.int, 2)
BLOCK: Final = _BLOCK
"""Elements that share a scale."""
INT8: Final = _INT8
"""Codes -127 to 127, two's complement."""
INT4: Final = _INT4
"""Codes -7 to 7, two's complement; two per byte, the first in its lower half."""
FP8: Final = _FP8
"""Codes in e4m3: a sign, 4 bits of exponent, 3 of mantissa."""

_SCALE_MIN = cython.declare(cython.uint, 0x0080)
"""2**-126 as bfloat16: the smallest normal number, and the largest with a finite inverse."""
_SUBNORMAL_END = cython.declare(cython.uint, 0x3C800000)
"""Bits of 2**-6: below it, numbers of FP8 are multiples of 2**-9."""
_STEP = cython.declare(cython.float, 2.0**-9)
_UNIT_IS_STEP = cython.declare(cython.float, 2.0**14)
"""A float32 whose last bit is worth 2**-9: adding it rounds a number to a multiple of that."""
_UNIT_IS_STEP_BITS = cython.declare(cython.int, 0x46800000)
_BIAS_DIFFERENCE = cython.declare(cython.int, (127 - 7) << 3)


def scale_of(peak: int, level_max: float) -> int:
    """Return a block's scale as bfloat16: the peak over the largest level, rounded up."""
    exact = bits_of(float_of(peak) / level_max)
    scale = (exact + 0xFFFF) >> 16
    return max(scale, _SCALE_MIN)


def scale_at(scales: Octets, block: int) -> np.float32:
    """Return a block's scale."""
    return widened(byte_at(scales, 2 * block) | byte_at(scales, 2 * block + 1) << 8)


def rounded_to_even(value: np.float32) -> np.float32:
    """Return the nearest whole number, and of two the even one."""
    return rintf(value) if cython.compiled else np.rint(value)


def to_byte(level: np.float32) -> int:
    """Return a level from -127 to 127 in two's complement."""
    if cython.compiled:
        return cython.cast(cython.uchar, cython.cast(cython.int, level))
    return int(level) & 0xFF


def from_int8(code: int) -> int:
    """Return the level of a byte, with its sign."""
    return (code ^ 0x80) - 0x80


def from_lower(code: int) -> int:
    """Return the level in a byte's lower half, with its sign."""
    return ((code & 15) ^ 8) - 8


def from_upper(code: int) -> int:
    """Return the level in a byte's upper half, with its sign."""
    return ((code >> 4) ^ 8) - 8


def to_fp8(scaled: np.float32) -> int:
    """Return the FP8 code of the nearest number, ties to even.

    A code's lower seven bits sort by magnitude. Normal numbers are float32 with 20 mantissa bits
    fewer and another bias; below 2**-6 codes are multiples of 2**-9. Each of the two formulas is
    too small where the other holds, so the larger result is right everywhere.
    """
    bits = bits_of(scaled)
    size = bits & _MAGNITUDE
    sign = (bits >> 24) & 0x80
    rounded = (size + ((size >> 20) & 1) + 0x7FFFF) >> 20
    normal = rounded - _BIAS_DIFFERENCE
    small = float_of(min(size, _SUBNORMAL_END))
    subnormal = bits_of(small + _UNIT_IS_STEP) - _UNIT_IS_STEP_BITS
    return max(normal, subnormal) | sign


def from_fp8(code: int) -> np.float32:
    """Return the number of an FP8 code.

    0x7F and 0xFF, NaN in the format, are never sent; here they decode as 480, as their bits
    suggest.
    """
    size = code & 0x7F
    normal = (size + _BIAS_DIFFERENCE) << 20
    subnormal = bits_of(size * _STEP)
    bits = normal if size >= 8 else subnormal
    return float_of(bits | (code & 0x80) << 24)


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
    numel = values.shape[0]
    num_blocks = (numel + _BLOCK - 1) // _BLOCK
    level_max = 448.0
    if kind == _INT8:
        level_max = 127.0
    elif kind == _INT4:
        level_max = 7.0
    with cython.nogil:
        for block in range(num_blocks):
            first, peak = block * _BLOCK, 0
            count = min(_BLOCK, numel - first)
            for i in range(count):
                total = with_residual(float_at(values, first + i), residual[first + i])
                residual[first + i] = total
                peak = max(peak, magnitude(total))
            if peak >= _TOO_LARGE:
                return block
            encoded = scale_of(peak, level_max)
            scales[2 * block] = encoded & 0xFF
            scales[2 * block + 1] = encoded >> 8
            scale = widened(encoded)
            inverse = 1 / scale
            if kind == _INT8:
                for i in range(count):
                    value = residual[first + i]
                    level = rounded_to_even(value * inverse)
                    codes[first + i] = to_byte(level)
                    residual[first + i] = value - level * scale
            elif kind == _INT4:
                for i in range(count):
                    value = residual[first + i]
                    level = rounded_to_even(value * inverse)
                    levels[i] = to_byte(level)
                    residual[first + i] = value - level * scale
                if count < _BLOCK:
                    levels[count] = 0  # pads the last byte of an odd number of elements
                half = block * (_BLOCK // 2)
                for i in range((count + 1) // 2):
                    lower, upper = byte_at(levels, 2 * i), byte_at(levels, 2 * i + 1)
                    codes[half + i] = (lower & 0x0F) | (upper << 4 & 0xF0)
            else:
                for i in range(count):
                    value = residual[first + i]
                    code = to_fp8(value * inverse)
                    codes[first + i] = code
                    residual[first + i] = value - from_fp8(code) * scale
    return num_blocks


def write_blocks(kind: int, scales: Octets, codes: Octets, out: Floats) -> None:
    """Decode to float32, shape (n,). `encode_blocks` has the shapes of scales and codes."""
    numel = out.shape[0]
    with cython.nogil:
        for block in range((numel + _BLOCK - 1) // _BLOCK):
            scale = scale_at(scales, block)
            first, half = block * _BLOCK, block * (_BLOCK // 2)
            count = min(_BLOCK, numel - first)
            if kind == _INT8:
                if count == 128:  # a whole block: what is one is known to the compiler
                    for i in range(128):
                        out[first + i] = from_int8(byte_at(codes, first + i)) * scale
                else:
                    for i in range(count):
                        out[first + i] = from_int8(byte_at(codes, first + i)) * scale
            elif kind == _INT4:
                for i in range(count // 2):
                    code = byte_at(codes, half + i)
                    out[first + 2 * i] = from_lower(code) * scale
                    out[first + 2 * i + 1] = from_upper(code) * scale
                if count % 2:
                    code = byte_at(codes, half + count // 2)
                    out[first + count - 1] = from_lower(code) * scale
            else:
                for i in range(count):
                    out[first + i] = from_fp8(byte_at(codes, first + i)) * scale


def add_blocks(kind: int, scales: Octets, codes: Octets, out: Floats, divisor: np.float32) -> None:
    """Decode, add to `out` and divide the sums."""
    numel = out.shape[0]
    with cython.nogil:
        for block in range((numel + _BLOCK - 1) // _BLOCK):
            scale = scale_at(scales, block)
            first, half = block * _BLOCK, block * (_BLOCK // 2)
            count = min(_BLOCK, numel - first)
            if kind == _INT8:
                for i in range(count):
                    part = from_int8(byte_at(codes, first + i)) * scale
                    out[first + i] = mean(out[first + i], part, divisor)
            elif kind == _INT4:
                for i in range(count // 2):
                    code = byte_at(codes, half + i)
                    part = from_lower(code) * scale
                    out[first + 2 * i] = mean(out[first + 2 * i], part, divisor)
                    part = from_upper(code) * scale
                    out[first + 2 * i + 1] = mean(out[first + 2 * i + 1], part, divisor)
                if count % 2:
                    part = from_lower(byte_at(codes, half + count // 2)) * scale
                    out[first + count - 1] = mean(out[first + count - 1], part, divisor)
            else:
                for i in range(count):
                    part = from_fp8(byte_at(codes, first + i)) * scale
                    out[first + i] = mean(out[first + i], part, divisor)


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
    numel = out.shape[0]
    with cython.nogil:
        for block in range((numel + _BLOCK - 1) // _BLOCK):
            scale, other_scale = scale_at(scales, block), scale_at(other_scales, block)
            first, half = block * _BLOCK, block * (_BLOCK // 2)
            count = min(_BLOCK, numel - first)
            if kind == _INT8:
                for i in range(count):
                    part = from_int8(byte_at(codes, first + i)) * scale
                    other = from_int8(byte_at(other_codes, first + i)) * other_scale
                    out[first + i] = mean(part, other, divisor)
            elif kind == _INT4:
                for i in range(count // 2):
                    code, other_code = byte_at(codes, half + i), byte_at(other_codes, half + i)
                    part = from_lower(code) * scale
                    other = from_lower(other_code) * other_scale
                    out[first + 2 * i] = mean(part, other, divisor)
                    part = from_upper(code) * scale
                    other = from_upper(other_code) * other_scale
                    out[first + 2 * i + 1] = mean(part, other, divisor)
                if count % 2:
                    part = from_lower(byte_at(codes, half + count // 2)) * scale
                    other = from_lower(byte_at(other_codes, half + count // 2)) * other_scale
                    out[first + count - 1] = mean(part, other, divisor)
            else:
                for i in range(count):
                    part = from_fp8(byte_at(codes, first + i)) * scale
                    other = from_fp8(byte_at(other_codes, first + i)) * other_scale
                    out[first + i] = mean(part, other, divisor)


if not cython.compiled:
    # numpy would warn of infinities and NaN.
    for _name in (
        *("add_to_residual", "add_floats", "divide", "first_not_finite", "sum_of_squares"),
        *("write_pseudo_gradient", "take_outer_step", "take_plain_outer_step"),
        *("round_to_halves", "round_with_residual_to_halves"),
        *("write_halves", "add_halves", "write_sum_of_halves"),
        *("encode_blocks", "write_blocks", "add_blocks", "write_sum_of_blocks"),
    ):
        globals()[_name] = np.errstate(all="ignore")(globals()[_name])
