"""The lossy codecs and sums by their definitions, in numpy, one operation after another.

What the compiled kernels are held against, bit for bit. Nothing here is fast.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

BLOCK = 128
LEVEL_MAX = {"int8": 127, "int4": 7, "fp8": 448}


def _fp8_levels() -> Floats:
    """Return the numbers of the codes 0 to 126: float32, shape (127,), ascending."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    levels: Floats = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10)
    ).astype(np.float32)
    return levels


_FP8 = _fp8_levels()


def _nearest_fp8(scaled: Floats) -> npt.NDArray[np.uint8]:
    """Return the codes of the nearest numbers: of two as near, the even code."""
    magnitude = np.abs(scaled).astype(np.float64)
    above = np.minimum(np.searchsorted(_FP8, magnitude), 126)
    below = np.maximum(above - 1, 0)
    up, down = _FP8[above] - magnitude, magnitude - _FP8[below]
    takes_upper = (up < down) | ((up == down) & (above % 2 == 0))
    code = np.where(takes_upper, above, below).astype(np.uint8)
    code |= np.where(np.signbit(scaled), 0x80, 0).astype(np.uint8)
    return code


def encode_blocks(name: str, values: Floats) -> tuple[bytes, Floats] | None:
    """Return the body of a chunk and what it decodes to; None: a number has no code."""
    numel, num_blocks = len(values), -(-len(values) // BLOCK)
    padded = np.zeros(num_blocks * BLOCK, dtype=np.float32)
    padded[:numel] = values
    in_blocks = padded.reshape(num_blocks, BLOCK)
    if not (np.abs(values) < np.float32(2.0**127)).all():
        return None
    exact = np.abs(in_blocks).max(1, initial=0) / np.float32(LEVEL_MAX[name])
    upper = np.maximum((exact.view(np.uint32) + np.uint32(0xFFFF)) >> 16, 0x80).astype(np.uint32)
    scales = (upper << 16).astype(np.uint32).view(np.float32)[:, None]
    scaled = in_blocks * (np.float32(1) / scales)
    if name == "fp8":
        codes = _nearest_fp8(scaled)
        signs = np.where(codes & 0x80, np.float32(-1), np.float32(1))
        levels = _FP8[codes & 0x7F] * signs
    else:
        rounded = np.rint(scaled)
        whole = rounded.astype(np.int8)
        codes, levels = whole.astype(np.uint8), whole.astype(np.float32)
    flat: npt.NDArray[np.uint8] = codes.reshape(-1)[:numel]
    if name == "int4":
        pairs = np.zeros(-(-numel // 2) * 2, dtype=np.uint8)
        pairs[:numel] = flat & 0x0F
        flat = pairs[::2] | pairs[1::2] << np.uint8(4)
    body = upper.astype("<u2").tobytes() + flat.tobytes()
    return body, (levels * scales).reshape(-1)[:numel]


def round_to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the nearest of both neighbours, the even one of two as near; a NaN is made quiet."""
    bits = values.view(np.uint32).astype(np.uint64)
    low, dropped = bits >> 16, bits & 0xFFFF
    is_up = (dropped > 0x8000) | ((dropped == 0x8000) & (low & 1 == 1))
    return np.where(np.isnan(values), low | 0x40, low + is_up).astype(np.uint16)


def widen(upper: npt.NDArray[np.uint16]) -> Floats:
    """Return the float32 whose upper halves these are."""
    return (upper.astype(np.uint32) << 16).view(np.float32)


def meant(values: Floats, residual: Floats) -> Floats:
    """Return what is to be sent: a NaN as it is."""
    total = values + residual
    return np.where(
        np.isnan(values), values.view(np.uint32), total.astype(np.float32).view(np.uint32)
    ).view(np.float32)


def lost(total: Floats, decoded: Floats) -> Floats:
    """Return the residual from now on."""
    difference = total - decoded
    return np.where(np.isfinite(difference), difference, np.float32(0))


def mean(parts: list[Floats], divisor: np.float32 | None) -> Floats:
    """Return the sum in the order of the parts, divided; of several, each NaN is the same one."""
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    if divisor is not None:
        is_nan, bits = np.isnan(total), total.view(np.uint32)
        total = np.where(is_nan, bits, (total / divisor).view(np.uint32)).view(np.float32)
    if len(parts) > 1:
        total[np.isnan(total)] = np.uint32(0x7FC00000).view(np.float32)
    return total
