"""Codecs that give each block of 128 elements a scale of its own.

A payload's body holds one bfloat16 scale a block, then the elements' codes. The scale is the
block's largest magnitude divided by the codec's largest level, rounded up, so that no element falls
off the end; and at least 2**-126, so that its inverse is finite. An element times the inverse (both
rounded to nearest, as IEEE 754 says) is rounded to the nearest level, ties to the even one. A
maximum is the same in any order and all else is element by element: the bytes do not depend on the
machine.

128: with 64, int4 is only 7.53 times smaller than float32; with 256 its error on real gradients is
15 % instead of 13 % (docs/codecs.md).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from protos.errors import CorruptDataError
from sites.codecs import zstd_guard
from sites.codecs.codec import BodyCodec, Encoded, expect_size
from sites.codecs.kernels import blocks
from sites.codecs.kernels.numbers import TOO_LARGE
from sites.codecs.lossy import COMPRESSED, QUANTISED, Lossy, as_it_is
from sites.codecs.parts import BlockPart, Floats, Octets, Part
from topology.codec_costs import BLOCK

assert blocks.BLOCK == BLOCK


class BlockCodec(Lossy, BodyCodec):
    """Scales a block; its subclasses say what the levels are."""

    kind: ClassVar[int]
    """Of the kernels."""
    level_max: ClassVar[float]
    """The largest level: what a block's largest magnitude becomes."""
    codes_per_byte: ClassVar[int] = 1
    compresses: ClassVar[bool] = False
    """Whether zstd follows, where it pays."""

    def encode_owed(self, values: Floats, owed: Floats | None) -> Encoded:
        """Quantise block by block; or copy all, where one cannot be."""
        numel = len(values)
        num_blocks = _num_blocks(numel)
        payload = np.empty(1 + self.body_bytes(numel), dtype=np.uint8)
        payload[0] = QUANTISED
        body = payload[1:]
        scales, codes = body[: 2 * num_blocks], body[2 * num_blocks :]
        # To add -0.0 leaves every number as it is, -0.0 too.
        lost = np.full(numel, -0.0, dtype=np.float32) if owed is None else owed
        levels = np.empty(BLOCK, dtype=np.uint8)
        num_done = blocks.encode(self.kind, values, lost, scales, codes, levels)
        if num_done < num_blocks:
            return as_it_is(
                values if owed is None else self._meant(values, owed, body, num_done), owed
            )
        frame = self._compressed(body)
        return Encoded(payload.data if frame is None else frame, self._part_of(body, numel))

    def _meant(self, values: Floats, owed: Floats, body: Octets, num_done: int) -> Floats:
        """Return the sums of values and what was owed, after the first blocks have been quantised.

        Of these, what they decode to and what that lost add up to it, but for the sign of a zero: a
        level times a scale has 16 significant bits at most, and what lies between it and the number
        that it is nearest to is a float32.
        """
        meant = owed.copy()
        done = num_done * BLOCK
        scales, codes = body[: 2 * num_done], body[2 * _num_blocks(len(values)) :]
        blocks.add(self.kind, scales, codes, meant[:done], np.float32(1))
        rest = slice(done + BLOCK, None)
        with np.errstate(over="ignore", invalid="ignore"):
            meant[rest] += values[rest]
        np.copyto(
            meant[rest].view(np.uint32), values[rest].view(np.uint32), where=np.isnan(values[rest])
        )
        return meant

    def body_bytes(self, numel: int) -> int:
        """Return the bytes of the scales and the codes."""
        return 2 * _num_blocks(numel) - (-numel // self.codes_per_byte)

    def seal(self, body: memoryview, numel: int) -> Encoded:
        """Compress where that pays; say before it what follows."""
        part = self._part(body, numel, is_compressed=False)
        frame = self._compressed(np.frombuffer(body, dtype=np.uint8))
        return Encoded(b"".join((bytes((QUANTISED,)), body)) if frame is None else frame, part)

    def _compressed(self, body: Octets) -> bytes | None:
        """Return a payload under zstd, or None where there is to be none."""
        frame = zstd_guard.compress_if_skewed(body) if self.compresses else None
        return None if frame is None else b"".join((bytes((COMPRESSED,)), frame))

    def _part(self, body: memoryview, numel: int, *, is_compressed: bool) -> Part:
        size = self.body_bytes(numel)
        if is_compressed:
            if not self.compresses:
                raise CorruptDataError(f"a compressed payload of {self.name}")
            body = memoryview(zstd_guard.decompress(body, size))
        expect_size(body, size)
        scales = np.frombuffer(body[: 2 * _num_blocks(numel)], dtype="<u2")
        if len(scales) and scales.max() > self._scale_max:
            raise CorruptDataError(f"a scale that {self.name} never has")
        return self._part_of(np.frombuffer(body, dtype=np.uint8), numel)

    def _part_of(self, body: Octets, numel: int) -> Part:
        return BlockPart(self.kind, body, _num_blocks(numel))

    @property
    def _scale_max(self) -> int:
        """The scale, as bfloat16 rounded up, of a block whose peak is just too large."""
        exact = TOO_LARGE.view(np.float32) / np.float32(self.level_max)
        return int(exact.view(np.uint32)) + 0xFFFF >> 16


class Int8(BlockCodec):
    """A byte an element; -127 to 127, so that a sum of roundings has no drift to one side."""

    name = "int8"
    number = 5
    kind = blocks.INT8
    level_max = 127.0


class Int8Zstd(Int8):
    """The same under zstd, where that pays."""

    name = "int8-zstd"
    number = 6
    compresses = True


class Int4(BlockCodec):
    """Half a byte an element, -7 to 7; the first of two in the lower half."""

    name = "int4"
    number = 7
    kind = blocks.INT4
    level_max = 7.0
    codes_per_byte = 2


class Int4Zstd(Int4):
    """The same under zstd, where that pays."""

    name = "int4-zstd"
    number = 8
    compresses = True


class Fp8(BlockCodec):
    """A byte an element, with the same relative error for small and large ones: e4m3."""

    name = "fp8"
    number = 9
    kind = blocks.FP8
    level_max = 448.0


class Fp8Zstd(Fp8):
    """The same under zstd, where that pays."""

    name = "fp8-zstd"
    number = 10
    compresses = True


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)
