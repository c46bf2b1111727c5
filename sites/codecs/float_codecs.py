"""The codecs that send floating-point numbers: float32 and bfloat16, plain or compressed.

`split` and `bf16-split` cut numbers into byte planes and compress the planes where that pays.
Numbers are first rotated left by one bit: the sign goes last, and the exponent alone fills the
highest byte. Gradients' exponents take few values, so that plane shrinks to a third; mantissas are
noise, unless there are many zeros. The payload is a table of one little-endian uint32 per plane,
lowest plane first, then the planes. An entry is the plane's size in bytes, with the highest bit set
if it is compressed.
"""

from __future__ import annotations

import struct
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from isthmus.protos.errors import CorruptDataError
from isthmus.sites.codecs import zstd_guard
from isthmus.sites.codecs.codec import (
    BodyCodec,
    Codec,
    Encoded,
    FloatPart,
    Floats,
    HalfPart,
    Halves,
    Octets,
    Part,
    Payload,
    expect_size,
)
from isthmus.sites.codecs.kernels import loops

Word = TypeVar("Word", np.uint16, np.uint32)

_COMPRESSED: Final = 1 << 31


class Fp32(Codec):
    """The codec that sends plain float32, little-endian."""

    name = "fp32"
    number = 1
    lossless = True

    def max_bytes(self, numel: int) -> int:
        """Return 4 bytes an element."""
        return 4 * numel

    def encode_with_residual(self, values: Floats, residual: Floats | None) -> Encoded:
        """Return a view of the values' bytes."""
        assert residual is None
        return Encoded(values.view(np.uint8).data, FloatPart(values))

    def part(self, payload: Payload, numel: int) -> Part:
        """Return a view of the payload."""
        expect_size(payload, 4 * numel)
        return FloatPart(np.frombuffer(payload, dtype=np.float32))


class Bf16(BodyCodec):
    """bfloat16: the upper half of a float32, rounded to nearest even."""

    name = "bf16"
    number = 2
    lossless = False

    def max_bytes(self, numel: int) -> int:
        """Return 2 bytes an element."""
        return 2 * numel

    def encode_with_residual(self, values: Floats, residual: Floats | None) -> Encoded:
        """Round to bfloat16; NaN stays NaN, and infinity infinity."""
        upper = round_to_bf16(values, residual)
        return Encoded(upper.view(np.uint8).data, HalfPart(upper))

    def part(self, payload: Payload, numel: int) -> Part:
        """Return the payload's numbers, which widen exactly."""
        expect_size(payload, 2 * numel)
        return HalfPart(np.frombuffer(payload, dtype=np.uint16))

    def body_bytes(self, numel: int) -> int:
        """Return 2 bytes per element: the body is the payload."""
        return 2 * numel

    def seal(self, body: memoryview, numel: int) -> Encoded:
        """Copy the body, which is the payload."""
        return Encoded(bytes(body), self.part(body, numel))


def round_to_bf16(values: Floats, residual: Floats | None = None) -> Halves:
    """Return the bits of `values`, and of the residual, as bfloat16.

    `Codec.encode_with_residual` defines the residual.
    """
    upper = np.empty(len(values), dtype=np.uint16)
    if residual is None:
        loops.round_to_halves(values, upper)
    else:
        loops.round_with_residual_to_halves(values, residual, upper)
    return upper


class Split(Codec):
    """The codec that sends float32 or bfloat16 in byte planes."""

    def __init__(self, name: str, number: int, *, rounds: bool) -> None:
        """`rounds`: send bfloat16. `name` and `number` as in `Codec`."""
        self.name = name
        self.number = number
        self.lossless = not rounds
        self._word = np.dtype(np.uint16 if rounds else np.uint32)

    def max_bytes(self, numel: int) -> int:
        """Return one byte per element and plane, plus the table."""
        return self._word.itemsize * (numel + 4)

    def encode_with_residual(self, values: Floats, residual: Floats | None) -> Encoded:
        """Round to nearest even if asked, then rotate, cut into planes, and compress."""
        if self.lossless:
            assert residual is None
            return Encoded(_pack(values.view(np.uint32)), FloatPart(values))
        halves = round_to_bf16(values, residual)
        return Encoded(_pack(halves), HalfPart(halves))

    def part(self, payload: Payload, numel: int) -> Part:
        """Decompress, join the planes and rotate back."""
        words = _unpack(payload, numel, self._word)
        return FloatPart(words.view(np.float32)) if self.lossless else HalfPart(words)


def _rotate(words: npt.NDArray[Word]) -> npt.NDArray[Word]:
    """Return the words with their highest bit as the lowest."""
    word = words.dtype.type
    rotated = words << word(1)
    rotated |= words >> word(8 * words.itemsize - 1)
    return rotated


def _rotate_back(rotated: npt.NDArray[Word]) -> npt.NDArray[Word]:
    """Return the words that `_rotate` was given. `rotated` is overwritten."""
    word = rotated.dtype.type
    words = rotated >> word(1)
    rotated <<= word(8 * rotated.itemsize - 1)
    words |= rotated
    return words


def _plane(words: npt.NDArray[Word], index: int) -> Octets:
    """Return byte `index` of each word, lowest first, as a contiguous array."""
    return np.ascontiguousarray(words.view(np.uint8)[index :: words.itemsize])


def _join(planes: list[Octets], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the words whose bytes are `planes`, lowest first."""
    words = np.empty(len(planes[0]), dtype=dtype)
    octets = words.view(np.uint8)
    for index, plane in enumerate(planes):
        octets[index :: words.itemsize] = plane
    return words


def _pack(words: npt.NDArray[Word]) -> bytes:
    """Rotate words, cut them into planes, and compress planes where that pays."""
    rotated = _rotate(words)
    table: list[int] = []
    parts: list[Payload] = []
    for index in range(words.itemsize):
        plane = _plane(rotated, index)
        frame = zstd_guard.compress_if_skewed(plane)
        if frame is not None:
            table.append(len(frame) | _COMPRESSED)
            parts.append(frame)
        else:
            table.append(len(plane))
            parts.append(plane.data)
    return b"".join((struct.pack(f"<{len(table)}I", *table), *parts))


def _unpack(payload: Payload, numel: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the words that a payload of `_pack` holds.

    Raises:
        CorruptDataError: the payload does not hold exactly `numel` words.
    """
    view = memoryview(payload)
    num_planes = dtype.itemsize
    position = 4 * num_planes
    if len(view) < position:
        raise CorruptDataError(f"a payload of {len(view)} bytes has no table of planes")
    table = struct.unpack_from(f"<{num_planes}I", view)
    if position + sum(entry & ~_COMPRESSED for entry in table) != len(view):
        raise CorruptDataError("the planes' sizes do not add up to the payload's")
    planes: list[Octets] = []
    for entry in table:
        taken_bytes = entry & ~_COMPRESSED
        part = view[position : position + taken_bytes]
        position += taken_bytes
        if entry & _COMPRESSED:
            planes.append(np.frombuffer(zstd_guard.decompress(part, numel), dtype=np.uint8))
        elif taken_bytes == numel:
            planes.append(np.frombuffer(part, dtype=np.uint8))
        else:
            raise CorruptDataError(f"a plane of {taken_bytes} bytes where {numel} belong")
    return _rotate_back(_join(planes, dtype))
