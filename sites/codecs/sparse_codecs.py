"""The codecs that send a chunk's largest elements and their places: all others count as zero.

Chunks with a number that cannot be quantised cross as float32, as in quantising_codecs.py, and so
do those of an element or two that would be longer encoded. Of equal magnitudes at the threshold,
the first ones are sent. How many are sent follows from the size of the chunk.

*Places*, in ascending order: each as the number of elements skipped before it, one byte up to 254,
preceded by a byte of 255 for each further 255.

`topk` sends one element in a hundred of the chunk. A body holds their values as bfloat16, in the
order of their places, and then the places.

`topk2` sends 64 of each row of 4096 elements (of a shorter last row, one for each 64), each as two
bits: whether it is negative, and whether its magnitude is the row's large or its small one. Both
are means, of the magnitudes from a threshold on and of those below it. The threshold is the one
that leaves the least squared error. A body holds two bfloat16 a row, small and large; then four
elements a byte, the first in the lowest bits: the lower one of two is set if it is large, the upper
one if it is negative; then the places. After SparseLoCo (arXiv 2508.15706), which has rows of 4096
elements and 2-bit values, too.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np
import numpy.typing as npt

from isthmus.protos.errors import CorruptDataError
from isthmus.sites.codecs.codec import Encoded, FloatPart, Floats, Halves, Octets, Part
from isthmus.sites.codecs.float_codecs import round_to_bf16
from isthmus.sites.codecs.kernels import loops
from isthmus.sites.codecs.quantising_codecs import QUANTISED, Lossy, as_it_is

SHARE: Final = 0.01
"""The share of a chunk's elements that `topk` sends."""
ROW: Final = 4096
"""Elements of a row of `topk2`, which share two magnitudes."""
ROW_KEPT: Final = 64
"""Elements of a row that `topk2` sends."""
_CARRY: Final = 255

Magnitudes = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Sparse(Lossy):
    """A codec that sends some of a chunk's elements."""

    def encode_with_residual(self, values: Floats, residual: Floats | None) -> Encoded:
        """Send the largest elements; copy all if a number is too large, or that takes no more."""
        meant = values
        if residual is not None:
            meant = residual
            loops.add_to_residual(values, residual)
        magnitudes = meant.view(np.uint32) & loops.MAGNITUDE
        if len(meant) and magnitudes.max() >= loops.TOO_LARGE:
            return as_it_is(meant, residual)
        places = self._places(magnitudes)
        body = np.concatenate((self._codes(meant[places], len(meant)), _pack_places(places)))
        if len(body) > meant.nbytes:
            return as_it_is(meant, residual)
        decoded = self._decoded(body, places, len(meant))
        if residual is not None:
            residual -= decoded
        payload = self._compressed(body) or bytes((QUANTISED,)) + body.tobytes()
        return Encoded(payload, FloatPart(decoded))

    def _body_bounds(self, numel: int) -> tuple[int, int]:
        least = self._code_bytes(numel) + self._num_kept(numel)
        return least, least + numel // _CARRY

    def _part(self, body: Octets, numel: int) -> Part:
        places = _unpack_places(body[self._code_bytes(numel) :], self._num_kept(numel), numel)
        self._check(body, places, numel)
        return FloatPart(self._decoded(body, places, numel))

    def _decoded(self, body: Octets, places: Places, numel: int) -> Floats:
        """Return the values in their places, and zeros elsewhere: float32, shape (numel,)."""
        values = np.zeros(numel, dtype=np.float32)
        values[places] = self._values(body, numel)
        return values

    @abstractmethod
    def _num_kept(self, numel: int) -> int:
        """Return the number of elements sent of a chunk."""

    @abstractmethod
    def _places(self, magnitudes: Magnitudes) -> Places:
        """Return the places of the elements to send, ascending."""

    @abstractmethod
    def _code_bytes(self, numel: int) -> int:
        """Return the bytes of the codes, which are in front of the places."""

    @abstractmethod
    def _codes(self, kept: Floats, numel: int) -> Octets:
        """Return the codes of the elements to send, of a chunk of `numel`."""

    @abstractmethod
    def _values(self, body: Octets, numel: int) -> Floats:
        """Return the numbers that the codes of a body mean."""

    @abstractmethod
    def _check(self, body: Octets, places: Places, numel: int) -> None:
        """Check an untrusted body of the right size, whose places are ascending.

        Raises:
            CorruptDataError: no encoder makes it.
        """


class TopK(Sparse):
    """The codec of the largest elements of a chunk, as bfloat16."""

    def _num_kept(self, numel: int) -> int:
        return num_kept(numel)

    def _places(self, magnitudes: Magnitudes) -> Places:
        return _largest(magnitudes[None], num_kept(len(magnitudes)))

    def _code_bytes(self, numel: int) -> int:
        return 2 * num_kept(numel)

    def _codes(self, kept: Floats, numel: int) -> Octets:
        del numel
        return round_to_bf16(kept).view(np.uint8)

    def _values(self, body: Octets, numel: int) -> Floats:
        return _widen(body[: 2 * num_kept(numel)].view(np.uint16))

    def _check(self, body: Octets, places: Places, numel: int) -> None:
        """Accept any values."""


def num_kept(numel: int) -> int:
    """Return the number of elements that `topk` sends: at least one, unless the chunk is empty."""
    return min(numel, max(1, round(numel * SHARE)))


class TopK2(Sparse):
    """The codec of the largest elements of each row, as a sign and one of two magnitudes."""

    def _num_kept(self, numel: int) -> int:
        return num_kept_in_rows(numel)

    def _places(self, magnitudes: Magnitudes) -> Places:
        numel = len(magnitudes)
        whole = numel - numel % ROW
        rows = _largest(magnitudes[:whole].reshape(-1, ROW), ROW_KEPT)
        rest = _largest(magnitudes[None, whole:], num_kept_in_rows(numel - whole))
        return np.concatenate((rows, whole + rest))

    def _code_bytes(self, numel: int) -> int:
        return 4 * _num_rows(numel) - (-num_kept_in_rows(numel) // 4)

    def _codes(self, kept: Floats, numel: int) -> Octets:
        whole = numel // ROW * ROW_KEPT
        levels, is_large = [], []
        for rows in (kept[:whole].reshape(-1, ROW_KEPT), kept[None, whole:]):
            if rows.size:
                of_rows, large = _two_levels(np.abs(rows))
                levels.append(of_rows.reshape(-1))
                is_large.append(large.reshape(-1))
        if not levels:
            return np.empty(0, dtype=np.uint8)
        flags = np.stack((np.concatenate(is_large), np.signbit(kept)), axis=1)
        codes = np.packbits(flags, bitorder="little")
        return np.concatenate((round_to_bf16(np.concatenate(levels)).view(np.uint8), codes))

    def _values(self, body: Octets, numel: int) -> Floats:
        count = num_kept_in_rows(numel)
        levels = _widen(_levels(body, numel)).reshape(-1, 2).repeat(ROW_KEPT, axis=0)[:count]
        flags = _flags(body, numel)[: 2 * count].reshape(-1, 2)
        values = np.where(flags[:, 0], levels[:, 1], levels[:, 0])
        return np.where(flags[:, 1], -values, values)

    def _check(self, body: Octets, places: Places, numel: int) -> None:
        rows = np.arange(len(places)) // ROW_KEPT
        if not np.array_equal(places // ROW, rows):
            raise CorruptDataError(f"{self.name} sends as many elements of each row")
        levels = _levels(body, numel).reshape(-1, 2)
        if (levels > loops.TOO_LARGE >> 16).any() or (levels[:, 0] > levels[:, 1]).any():
            raise CorruptDataError(f"magnitudes that {self.name} never has")
        if _flags(body, numel)[2 * len(places) :].any():
            raise CorruptDataError("a code behind the last element's")


def num_kept_in_rows(numel: int) -> int:
    """Return the number of elements that `topk2` sends: one for each 64 or fewer."""
    return -(-numel // (ROW // ROW_KEPT))


def _num_rows(numel: int) -> int:
    return -(-numel // ROW)


def _levels(body: Octets, numel: int) -> Halves:
    """Return the small and the large magnitude of each row, as bfloat16."""
    return body[: 4 * _num_rows(numel)].view(np.uint16)


def _flags(body: Octets, numel: int) -> Octets:
    """Return two bits an element, and those that fill the last byte: 0 or 1."""
    codes = body[4 * _num_rows(numel) : 4 * _num_rows(numel) - (-num_kept_in_rows(numel) // 4)]
    return np.unpackbits(codes, bitorder="little")


def _two_levels(magnitudes: Floats) -> tuple[Floats, Flags]:
    """Return each row's small and large magnitude, and which elements have the large one.

    Args:
        magnitudes: float32, shape (rows, k).

    Returns:
        float32, shape (rows, 2), and bool, shape (rows, k). A row of equal magnitudes has only
        large ones; its small one is 0.
    """
    count = magnitudes.shape[1]
    ordered = np.sort(magnitudes, axis=1).astype(np.float64)
    # Sums are added in order, not in pairs: the same bits on every machine.
    sums = np.cumsum(ordered, axis=1)
    below = np.zeros_like(sums)
    below[:, 1:] = sums[:, :-1]
    above = sums[:, -1:] - below
    num_below = np.arange(count)
    # The squared error is the sum of squares less this.
    explained = below**2 / np.maximum(num_below, 1) + above**2 / (count - num_below)
    split = explained.argmax(axis=1)[:, None]
    is_large: Flags = magnitudes >= np.take_along_axis(ordered, split, axis=1)
    levels = np.zeros((len(magnitudes), 2), dtype=np.float32)
    for level, is_meant in enumerate((~is_large, is_large)):
        total = np.cumsum(np.where(is_meant, magnitudes, 0), axis=1, dtype=np.float64)[:, -1]
        levels[:, level] = total / np.maximum(is_meant.sum(axis=1), 1)
    return levels, is_large


def _widen(halves: Halves) -> Floats:
    widened = np.empty(len(halves), dtype=np.float32)
    loops.write_halves(halves, widened)
    return widened


def _largest(magnitudes: Magnitudes, count: int) -> Places:
    """Return the places of the `count` largest of each row, ascending, in the flat array."""
    num_rows, width = magnitudes.shape
    if not num_rows or not count:
        return np.empty(0, dtype=np.int64)
    least = np.partition(magnitudes, width - count, axis=1)[:, width - count, None]
    is_kept = magnitudes >= least
    places = np.flatnonzero(is_kept)
    if len(places) == num_rows * count:
        return places
    surplus = np.count_nonzero(is_kept, axis=1) - count
    for row in np.flatnonzero(surplus):
        equal = np.flatnonzero(magnitudes[row] == least[row])
        is_kept[row, equal[-surplus[row] :]] = False
    return np.flatnonzero(is_kept)


def _pack_places(places: Places) -> Octets:
    skipped = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(skipped // _CARRY + 1) - 1
    digits = np.full(ends[-1] + 1 if len(ends) else 0, _CARRY, dtype=np.uint8)
    digits[ends] = skipped % _CARRY
    return digits


def _unpack_places(digits: Octets, count: int, numel: int) -> Places:
    """Return `count` ascending places below `numel`.

    Raises:
        CorruptDataError: the digits encode something else.
    """
    ends = np.flatnonzero(digits != _CARRY)
    if len(ends) != count or (count and ends[-1] != len(digits) - 1) or (not count and len(digits)):
        raise CorruptDataError(f"{len(ends)} places in {len(digits)} bytes, where {count} belong")
    places = np.cumsum(digits, dtype=np.int64)[ends] + np.arange(count)
    if count and places[-1] >= numel:
        raise CorruptDataError(f"a value for place {places[-1]} of {numel}")
    return places
