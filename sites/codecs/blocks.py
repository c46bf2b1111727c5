"""Codecs that give each block of 128 elements a scale of its own.

A payload's body holds one bfloat16 scale a block, then the elements' codes. The scale is the block's largest
magnitude divided by the codec's largest level, rounded up, so that no element falls off the end; and
at least 2**-126, so that its inverse is finite. An element times the inverse (both rounded to
nearest, as IEEE 754 says) is rounded to the nearest level, ties to the even one. A maximum is the same
in any order and all else is element by element: the bytes do not depend on the machine.

128: with 64, int4 is only 7.53 times smaller than float32; with 256 its error on real gradients is
15 % instead of 13 % (docs/codecs.md). Work is done in tiles that stay in a core's own cache.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from protos.errors import CorruptDataError
from sites.codecs import zstd_guard
from sites.codecs.codec import TILE, BodyCodec, Floats, Read, expect_size, tiles
from sites.codecs.lossy import COMPRESSED, MAGNITUDE, QUANTISED, TOO_LARGE, Lossy
from sites.codecs.plain import widen_bf16

Codes = npt.NDArray[np.uint8]

BLOCK: Final = 128
"""Elements that share a scale."""
_SCALE_MIN: Final = np.uint16(0x0080)
"""2**-126 as bfloat16: the smallest normal number, and the largest with a finite inverse."""
_BLOCK_STARTS: Final = np.arange(0, TILE, BLOCK)


class _Scratch(threading.local):
    """Memory that every call of a thread uses again; fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.floats = np.empty(TILE, dtype=np.float32)
        self._body = np.empty(0, dtype=np.uint8)

    def body(self, num_bytes: int) -> Codes:
        """Return that many bytes, which hold anything."""
        if len(self._body) < num_bytes:
            self._body = np.empty(num_bytes, dtype=np.uint8)
        return self._body[:num_bytes]


_scratch = _Scratch()


class BlockCodec(Lossy, BodyCodec):
    """Scales a block, and leaves the levels to its subclasses."""

    level_max: ClassVar[float]
    """The largest level: what a block's largest magnitude becomes."""
    codes_per_byte: ClassVar[int]
    compresses: ClassVar[bool] = False
    """Whether zstd follows, where it pays."""

    @abstractmethod
    def _to_codes(self, scaled: Floats, codes: Codes) -> None:
        """Round to levels and write their codes.

        Args:
            scaled: float32, shape (n,), n up to TILE, magnitudes up to `level_max` and a rounding
                error. May be overwritten.
            codes: uint8, shape (ceil(n / codes_per_byte),).
        """

    @abstractmethod
    def _to_levels(self, codes: Codes, numel: int) -> npt.NDArray[Any]:
        """Return the levels: float32 or int8, shape (numel,), valid until the next call."""

    def _quantise(self, values: Floats) -> bytes | None:
        peaks = _peaks(values)
        if len(peaks) and peaks.max() >= TOO_LARGE:
            return None
        scales = self._scales(peaks)
        inverses = np.float32(1) / _widen(scales)
        body = _scratch.body(self.body_bytes(len(values)))
        body[: scales.nbytes] = scales.view(np.uint8)
        codes = body[scales.nbytes :]
        for start, tile in tiles(values):
            scaled = _scratch.floats[: len(tile)]
            _multiply(tile, inverses[start // BLOCK :], scaled)
            self._to_codes(scaled, self._of_tile(codes, start, len(tile)))
        return self._closed(body)

    def body_bytes(self, numel: int) -> int:
        """Return the bytes of the scales and the codes."""
        return 2 * _num_blocks(numel) - (-numel // self.codes_per_byte)

    def seal(self, body: memoryview, numel: int) -> bytes:
        """Compress where that pays; say before it what follows."""
        self._reader(body, numel, is_compressed=False)
        return self._closed(np.frombuffer(body, dtype=np.uint8))

    def _closed(self, body: Codes) -> bytes:
        frame = zstd_guard.compress_if_skewed(body) if self.compresses else None
        kind, rest = (QUANTISED, body.data) if frame is None else (COMPRESSED, frame)
        return b"".join((bytes((kind,)), rest))

    def _reader(self, body: memoryview, numel: int, *, is_compressed: bool) -> Read:
        size = self.body_bytes(numel)
        if is_compressed:
            if not self.compresses:
                raise CorruptDataError(f"a compressed payload of {self.name}")
            body = memoryview(zstd_guard.decompress(body, size))
        expect_size(body, size)
        scales_bytes = 2 * _num_blocks(numel)
        encoded = np.frombuffer(body[:scales_bytes], dtype="<u2")
        if len(encoded) and encoded.max() > self._scales(np.array([TOO_LARGE], np.uint32))[0]:
            raise CorruptDataError(f"a scale that {self.name} never has")
        scales = _widen(encoded)
        codes = np.frombuffer(body[scales_bytes:], dtype=np.uint8)

        def read(start: int, out: Floats) -> Floats:
            levels = self._to_levels(self._of_tile(codes, start, len(out)), len(out))
            _multiply(levels, scales[start // BLOCK :], out)
            return out

        return read

    def _scales(self, peaks: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
        """Return each block's scale as bfloat16, rounded up."""
        exact = (peaks.view(np.float32) / np.float32(self.level_max)).view(np.uint32)
        exact += np.uint32(0xFFFF)
        exact >>= np.uint32(16)
        rounded = exact.astype("<u2")
        np.maximum(rounded, _SCALE_MIN, out=rounded)
        return rounded

    def _of_tile(self, codes: Codes, start: int, numel: int) -> Codes:
        first = start // self.codes_per_byte
        return codes[first : first - (-numel // self.codes_per_byte)]


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _widen(scales: npt.NDArray[np.uint16]) -> Floats:
    return widen_bf16(scales, np.empty(len(scales), dtype=np.float32))


def _peaks(values: Floats) -> npt.NDArray[np.uint32]:
    """Return the bits of each block's largest magnitude.

    `reduceat` over integers is the fastest of numpy's ways: 27 GB/s, where `max(axis=1)` of floats
    reaches 7.
    """
    peaks = np.empty(_num_blocks(len(values)), dtype=np.uint32)
    bits = values.view(np.uint32)
    for start in range(0, len(values), TILE):
        tile = bits[start : start + TILE]
        magnitudes = _scratch.floats.view(np.uint32)[: len(tile)]
        np.bitwise_and(tile, MAGNITUDE, out=magnitudes)
        starts = _BLOCK_STARTS[: _num_blocks(len(tile))]
        first = start // BLOCK
        np.maximum.reduceat(magnitudes, starts, out=peaks[first : first + len(starts)])
    return peaks


def _multiply(numbers: npt.NDArray[Any], factors: Floats, out: Floats) -> None:
    """Multiply each block by its factor; of these, more may be given."""
    whole = len(out) // BLOCK
    cut = whole * BLOCK
    np.multiply(
        numbers[:cut].reshape(whole, BLOCK), factors[:whole, None], out=out[:cut].reshape(-1, BLOCK)
    )
    if cut < len(out):
        np.multiply(numbers[cut:], factors[whole], out=out[cut:])
