"""Only the largest: one element in a hundred, by magnitude; all others count as zero.

A payload holds the k values as bfloat16, in the order of their places, then the places: the number
of elements skipped before each, in base 255 with a digit of 255 for each carry, so that a place
takes one byte up to 254 skipped ones, and one more for each further 255. k follows from the size of
the chunk. Of equal magnitudes at the threshold, the first ones go.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from protos.errors import CorruptDataError
from sites.codecs import zstd_guard
from sites.codecs.codec import Encoded
from sites.codecs.kernels import floats, halves
from sites.codecs.kernels.numbers import TOO_LARGE
from sites.codecs.lossy import COMPRESSED, MAGNITUDE, QUANTISED, Lossy, as_it_is
from sites.codecs.parts import FloatPart, Floats, Part
from sites.codecs.plain import Halves, round_to_bf16

SHARE: Final = 0.01
_CARRY: Final = 255

Places = npt.NDArray[np.int64]


class TopK(Lossy):
    """The largest elements of a chunk."""

    name = "topk"
    number = 11
    compresses: ClassVar[bool] = False
    """Whether zstd follows, where it pays."""

    def encode_owed(self, values: Floats, owed: Floats | None) -> Encoded:
        """Find the largest, and round them; or copy, where a number is too large."""
        meant = values
        if owed is not None:
            meant = owed
            floats.owe(values, owed)
        magnitudes = meant.view(np.uint32) & MAGNITUDE
        if len(meant) and magnitudes.max() >= TOO_LARGE:
            return as_it_is(meant, owed)
        places = _largest(magnitudes, num_kept(len(meant)))
        kept = round_to_bf16(meant[places])
        decoded = _spread(kept, places, len(meant))
        if owed is not None:
            owed -= decoded
        body = np.concatenate((kept.view(np.uint8), _pack_places(places)))
        frame = zstd_guard.compress_if_skewed(body) if self.compresses else None
        kind, rest = (QUANTISED, body.tobytes()) if frame is None else (COMPRESSED, frame)
        return Encoded(bytes((kind,)) + rest, FloatPart(decoded))

    def _part(self, body: memoryview, numel: int, *, is_compressed: bool) -> Part:
        count = num_kept(numel)
        most_bytes = 3 * count + numel // _CARRY
        size = zstd_guard.content_bytes(body) if is_compressed else len(body)
        if not 3 * count <= size <= most_bytes:
            raise CorruptDataError(f"{size} bytes cannot be {count} values and their places")
        if is_compressed:
            if not self.compresses:
                raise CorruptDataError(f"a compressed payload of {self.name}")
            body = memoryview(zstd_guard.decompress(body, size))
        places = _unpack_places(np.frombuffer(body[2 * count :], dtype=np.uint8), count, numel)
        kept = np.frombuffer(body[: 2 * count], dtype=np.uint16)
        return FloatPart(_spread(kept, places, numel))


class TopKZstd(TopK):
    """The same under zstd, where that pays."""

    name = "topk-zstd"
    number = 12
    compresses = True


def num_kept(numel: int) -> int:
    """Return how many elements of a chunk are sent: one at least, unless it is empty."""
    return min(numel, max(1, round(numel * SHARE)))


def _spread(kept: Halves, places: Places, numel: int) -> Floats:
    """Return the kept values in their places, and zeros elsewhere: float32, shape (numel,)."""
    widened = np.empty(len(kept), dtype=np.float32)
    halves.write(kept, widened)
    values = np.zeros(numel, dtype=np.float32)
    values[places] = widened
    return values


def _largest(magnitudes: npt.NDArray[np.uint32], count: int) -> Places:
    """Return the places of the `count` largest, ascending."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(magnitudes, len(magnitudes) - count)[len(magnitudes) - count]
    above = np.flatnonzero(magnitudes > threshold)
    equal = np.flatnonzero(magnitudes == threshold)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _pack_places(places: Places) -> npt.NDArray[np.uint8]:
    skipped = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(skipped // _CARRY + 1) - 1
    digits = np.full(ends[-1] + 1 if len(ends) else 0, _CARRY, dtype=np.uint8)
    digits[ends] = skipped % _CARRY
    return digits


def _unpack_places(digits: npt.NDArray[np.uint8], count: int, numel: int) -> Places:
    """Return `count` ascending places below `numel`.

    Raises:
        CorruptDataError: these are not there, or something else is.
    """
    ends = np.flatnonzero(digits != _CARRY)
    if len(ends) != count or (count and ends[-1] != len(digits) - 1) or (not count and len(digits)):
        raise CorruptDataError(f"{len(ends)} places in {len(digits)} bytes, where {count} belong")
    places = np.cumsum(digits, dtype=np.int64)[ends] + np.arange(count)
    if count and places[-1] >= numel:
        raise CorruptDataError(f"a value for place {places[-1]} of {numel}")
    return places
