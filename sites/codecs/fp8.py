"""Blocks of 8-bit floating point: sign, 4 bits of exponent, 3 of mantissa (e4m3).

A code's lower seven bits are in the order of the magnitudes. Normal numbers are those of float32 with
20 mantissa bits fewer and another bias; below 2**-6 codes are multiples of 2**-9. Of the two formulas,
each is too small where the other one holds, so that the larger is right everywhere.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sites.codecs.blocks import BlockCodec, Codes
from sites.codecs.codec import TILE, Floats
from sites.codecs.lossy import MAGNITUDE

_SUBNORMAL_END: Final = np.float32(2.0**-6).view(np.int32)
_UNIT_IS_STEP: Final = np.float32(2.0**14)
"""What has a float32's last bit worth 2**-9: added to a number, it rounds it to a multiple."""
_BIAS_DIFFERENCE: Final = (127 - 7) << 3


class _Words(threading.local):
    def __init__(self) -> None:
        self.normal = np.empty(TILE, dtype=np.int32)
        self.odd = np.empty(TILE, dtype=np.int32)
        self.levels = np.empty(TILE, dtype=np.float32)


_words = _Words()


def _all_levels() -> Floats:
    """Return the number of each code: float32, shape (256,).

    0x7F and 0xFF, which the format defines as NaN, are never sent; here they are the 480 that their
    bits would say.
    """
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10)
    )
    levels: Floats = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    return levels


_LEVELS: Final = _all_levels()


class Fp8(BlockCodec):
    """A byte an element, with the same relative error for small and large ones."""

    name = "fp8"
    number = 9
    level_max = 448.0
    codes_per_byte = 1

    def _to_codes(self, scaled: Floats, codes: Codes) -> None:
        numel = len(scaled)
        normal, odd = _words.normal[:numel], _words.odd[:numel]
        bits = scaled.view(np.int32)
        np.right_shift(bits, 24, out=normal)
        normal &= 0x80
        np.copyto(codes, normal, casting="unsafe")
        bits &= np.int32(MAGNITUDE)
        # To nearest, ties to even: as in round_to_bf16, four bits further up.
        np.right_shift(bits, 20, out=odd)
        odd &= 1
        odd += 0x7FFFF
        np.add(bits, odd, out=normal)
        normal >>= 20
        normal -= _BIAS_DIFFERENCE
        np.minimum(
            bits, _SUBNORMAL_END, out=bits
        )  # magnitudes: as integers, it is six times as fast
        scaled += _UNIT_IS_STEP
        bits -= _UNIT_IS_STEP.view(np.int32)
        np.maximum(normal, bits, out=normal)
        np.copyto(odd.view(np.uint8)[:numel], normal, casting="unsafe")
        codes |= odd.view(np.uint8)[:numel]

    def _to_levels(self, codes: Codes, numel: int) -> npt.NDArray[Any]:
        # `wrap` changes no index of a byte, and saves the check of each.
        return np.take(_LEVELS, codes, out=_words.levels[:numel], mode="wrap")


class Fp8Zstd(Fp8):
    """The same under zstd, where that pays."""

    name = "fp8-zstd"
    number = 10
    compresses = True
