"""The codecs that quantise: blocks of 128 elements with one scale; and what all lossy ones share.

A payload starts with one byte for its format: quantised numbers, quantised numbers under zstd, or
plain float32. The last is for chunks with a NaN, an infinity or a number of 2**127 and more: such a
chunk crosses bit for bit, so no number is ever silently saturated.

*Blocks.* A payload's body holds one bfloat16 scale per block, then the elements' codes. The scale
is the block's largest magnitude divided by the codec's largest level, rounded up, so that no
element overflows; and at least 2**-126, so that its inverse is finite. An element times the inverse
(both rounded to nearest, as IEEE 754 says) is rounded to the nearest level, ties to the even one. A
maximum does not depend on the order, and all else is elementwise, so the bytes do not depend on the
machine. Why 128 elements share a scale: docs/measurements/codecs.md.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np

from isthmus.protos.errors import CorruptDataError
from isthmus.sites.codecs import zstd_guard
from isthmus.sites.codecs.codec import (
    BlockPart,
    BodyCodec,
    Codec,
    Encoded,
    FloatPart,
    Floats,
    Octets,
    Part,
    Payload,
    expect_size,
)
from isthmus.sites.codecs.kernels import loops
from isthmus.topology.trees.codec_costs import BLOCK

assert loops.BLOCK == BLOCK

QUANTISED: Final = 0
COMPRESSED: Final = 1
AS_IT_IS: Final = 2


class Lossy(Codec):
    """A codec that quantises finite chunks, and sends others as float32."""

    lossless = False

    def __init__(self, name: str, number: int, *, compresses: bool = False) -> None:
        """`compresses`: apply zstd where it pays. `name` and `number` as in `Codec`."""
        self.name = name
        self.number = number
        self._compresses = compresses

    def max_bytes(self, numel: int) -> int:
        """Return 4 bytes per element plus the format byte: the size of a plain chunk."""
        return 1 + 4 * numel

    def part(self, payload: Payload, numel: int) -> Part:
        """Return the payload's numbers, by its format byte."""
        if not payload:
            raise CorruptDataError("a payload of 0 bytes, without the one that says what it holds")
        kind, body = payload[0], memoryview(payload)[1:]
        if kind == AS_IT_IS:
            expect_size(body, 4 * numel)
            return FloatPart(np.frombuffer(body, dtype=np.float32))
        if kind not in (QUANTISED, COMPRESSED):
            raise CorruptDataError(f"a payload that starts with {kind}")
        if kind == COMPRESSED and not self._compresses:
            raise CorruptDataError(f"a compressed payload of {self.name}")
        least, most = self._body_bounds(numel)
        size = zstd_guard.content_bytes(body) if kind == COMPRESSED else len(body)
        if not least <= size <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            raise CorruptDataError(f"a payload of {size} bytes where {wanted} belong")
        if kind == COMPRESSED:
            body = memoryview(zstd_guard.decompress(body, size))
        return self._part(np.frombuffer(body, dtype=np.uint8), numel)

    def _compressed(self, body: Octets) -> bytes | None:
        """Return a payload under zstd; None if it is off or does not pay."""
        frame = zstd_guard.compress_if_skewed(body) if self._compresses else None
        return None if frame is None else b"".join((bytes((COMPRESSED,)), frame))

    @abstractmethod
    def _body_bounds(self, numel: int) -> tuple[int, int]:
        """Return the smallest and largest size in bytes of a chunk's body."""

    @abstractmethod
    def _part(self, body: Octets, numel: int) -> Part:
        """Return the numbers in a body whose size has been checked.

        Raises:
            CorruptDataError: no encoder makes such a body.
        """


def as_it_is(meant: Floats, residual: Floats | None) -> Encoded:
    """Encode a chunk with a number that cannot be quantised as float32.

    The residual becomes 0.
    """
    payload = bytes((AS_IT_IS,)) + meant.tobytes()
    if residual is not None:
        residual.fill(0)
    return Encoded(payload, FloatPart(np.frombuffer(payload, dtype=np.float32, offset=1)))


class BlockCodec(Lossy, BodyCodec):
    """A codec that scales blocks, and sends the nearest level of each element."""

    def __init__(
        self,
        name: str,
        number: int,
        kind: int,
        level_max: float,
        *,
        codes_per_byte: int = 1,
        compresses: bool = False,
    ) -> None:
        """`kind` is INT8, INT4 or FP8 of the kernels.

        `level_max` is the largest level, to which a block's largest magnitude is scaled.
        """
        super().__init__(name, number, compresses=compresses)
        self.level_max = level_max
        self._kind = kind
        self._codes_per_byte = codes_per_byte

    def encode_with_residual(self, values: Floats, residual: Floats | None) -> Encoded:
        """Quantise block by block, or copy all if a block cannot be quantised."""
        numel = len(values)
        num_blocks = _num_blocks(numel)
        payload = np.empty(1 + self.body_bytes(numel), dtype=np.uint8)
        payload[0] = QUANTISED
        body = payload[1:]
        scales, codes = body[: 2 * num_blocks], body[2 * num_blocks :]
        # Adding -0.0 changes no number, not even -0.0.
        lost = np.full(numel, -0.0, dtype=np.float32) if residual is None else residual
        levels = np.empty(BLOCK, dtype=np.uint8)
        num_done = loops.encode_blocks(self._kind, values, lost, scales, codes, levels)
        if num_done < num_blocks:
            return as_it_is(
                values if residual is None else self._meant(values, residual, body, num_done),
                residual,
            )
        frame = self._compressed(body)
        return Encoded(payload.data if frame is None else frame, self._blocks(body, numel))

    def _meant(self, values: Floats, residual: Floats, body: Octets, num_done: int) -> Floats:
        """Restore the sums of values and residual after the first blocks were quantised.

        For these blocks, the decoded number plus its residual is exactly the sum, but for the sign
            of a zero: a level times a scale has at most 16 significant bits, and its distance to
            the sum is a float32.
        """
        meant = residual.copy()
        done = num_done * BLOCK
        scales, codes = body[: 2 * num_done], body[2 * _num_blocks(len(values)) :]
        loops.add_blocks(self._kind, scales, codes, meant[:done], np.float32(1))
        rest = slice(done + BLOCK, None)
        with np.errstate(over="ignore", invalid="ignore"):
            meant[rest] += values[rest]
        np.copyto(
            meant[rest].view(np.uint32), values[rest].view(np.uint32), where=np.isnan(values[rest])
        )
        return meant

    def body_bytes(self, numel: int) -> int:
        """Return the bytes of the scales and the codes."""
        return 2 * _num_blocks(numel) - (-numel // self._codes_per_byte)

    def seal(self, body: memoryview, numel: int) -> Encoded:
        """Add the format byte, and compress where that pays."""
        expect_size(body, self.body_bytes(numel))
        octets = np.frombuffer(body, dtype=np.uint8)
        part = self._part(octets, numel)
        frame = self._compressed(octets)
        return Encoded(b"".join((bytes((QUANTISED,)), body)) if frame is None else frame, part)

    def _body_bounds(self, numel: int) -> tuple[int, int]:
        size = self.body_bytes(numel)
        return size, size

    def _part(self, body: Octets, numel: int) -> Part:
        scales = np.frombuffer(body[: 2 * _num_blocks(numel)], dtype="<u2")
        # The scale, rounded up to bfloat16, of a block whose peak is just too large.
        exact = loops.TOO_LARGE.view(np.float32) / np.float32(self.level_max)
        if len(scales) and scales.max() > int(exact.view(np.uint32)) + 0xFFFF >> 16:
            raise CorruptDataError(f"a scale that {self.name} never has")
        return self._blocks(body, numel)

    def _blocks(self, body: Octets, numel: int) -> Part:
        return BlockPart(body, self._kind, _num_blocks(numel))


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)
