"""Blocks of small integers: 8 or 4 bits an element.

Levels are symmetric, -127 to 127 and -7 to 7, so that a sum of roundings has no drift to one side.
Two's complement; two of 4 bits share a byte, the first in its lower half.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from sites.codecs.blocks import BlockCodec, Codes
from sites.codecs.codec import TILE, Floats


class Int8(BlockCodec):
    """A byte an element."""

    name = "int8"
    number = 5
    level_max = 127.0
    codes_per_byte = 1

    def _to_codes(self, scaled: Floats, codes: Codes) -> None:
        np.rint(scaled, out=scaled)
        np.copyto(codes.view(np.int8), scaled, casting="unsafe")

    def _to_levels(self, codes: Codes, numel: int) -> npt.NDArray[Any]:
        assert len(codes) == numel
        return codes.view(np.int8)


class Int8Zstd(Int8):
    """The same under zstd, where that pays."""

    name = "int8-zstd"
    number = 6
    compresses = True


class _Nibbles(threading.local):
    """Two to a word on the way between one to a byte and two to a byte."""

    def __init__(self) -> None:
        self.words = np.empty(TILE // 2, dtype="<u2")
        self.shifted = np.empty(TILE // 2, dtype="<u2")


_nibbles = _Nibbles()


class Int4(BlockCodec):
    """Half a byte an element."""

    name = "int4"
    number = 7
    level_max = 7.0
    codes_per_byte = 2

    def _to_codes(self, scaled: Floats, codes: Codes) -> None:
        words = _nibbles.words[: len(codes)]
        levels = words.view(np.int8)
        levels[-1:] = 0  # the upper half of the last byte of an odd number of elements
        np.rint(scaled, out=scaled)
        np.copyto(levels[: len(scaled)], scaled, casting="unsafe")
        # A word holds ....abcd in its upper and ....efgh in its lower byte; wanted: abcdefgh.
        words &= np.uint16(0x0F0F)
        shifted = np.right_shift(words, np.uint16(4), out=_nibbles.shifted[: len(codes)])
        words |= shifted
        np.copyto(codes, words, casting="unsafe")

    def _to_levels(self, codes: Codes, numel: int) -> npt.NDArray[Any]:
        words, shifted = _nibbles.words[: len(codes)], _nibbles.shifted[: len(codes)]
        # Both halves go to the upper half of a byte of their own, and come down with their signs.
        np.left_shift(codes, np.uint16(4), out=words, dtype=np.uint16)
        np.left_shift(words, np.uint16(4), out=shifted)
        words |= shifted
        words &= np.uint16(0xF0F0)
        levels = words.view(np.int8)
        levels >>= np.int8(4)
        return levels[:numel]


class Int4Zstd(Int4):
    """The same under zstd, where that pays."""

    name = "int4-zstd"
    number = 8
    compresses = True
