"""The interfaces of codecs and of the numbers that they decode.

`Codec` encodes a chunk of float32 as a payload. `Part` holds a payload's numbers, not decoded yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from isthmus.protos.errors import CorruptDataError
from isthmus.sites.codecs.kernels import loops

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Octets = npt.NDArray[np.uint8]
Payload = bytes | memoryview


class Part(ABC):
    """A site's numbers for a chunk, kept encoded and decoded while they are added up.

    So a sum reads the encoded bytes, one per element or less, and writes each result once. A NaN in
    a sum is always 0x7FC00000, because processors differ in the NaN that they make of two others.

    A part has been checked: its length equals that of every array it is written to.
    """

    def __init__(self, data: npt.NDArray[Any]) -> None:
        """Refer to the encoded numbers: an array of one dimension, at any alignment."""
        self._data = data

    @abstractmethod
    def write(self, out: Floats) -> None:
        """Write the numbers to `out`, bit for bit: float32, shape (n,)."""

    @abstractmethod
    def add(self, out: Floats, divisor: np.float32) -> None:
        """Add the numbers to `out`, and divide the sums by `divisor` (1: no change)."""

    def write_sum(self, other: Part, out: Floats, divisor: np.float32) -> None:
        """Write the sums of these numbers and of another part's, divided."""
        other.write(out)
        self.add(out, divisor)

    def fills(self, out: Floats) -> bool:
        """Whether the numbers are stored in `out` itself."""
        del out
        return False

    def apart_from(self, out: Floats) -> Self:
        """Return the same part, copied if writing to `out` would change it."""
        return self._made_of(self._data.copy()) if np.may_share_memory(self._data, out) else self

    def _made_of(self, data: npt.NDArray[Any]) -> Self:
        """Return a part of the same kind."""
        return type(self)(data)


class FloatPart(Part):
    """Numbers sent as float32, shape (n,)."""

    def write(self, out: Floats) -> None:
        """Copy, as integers: a float copy may quieten a signalling NaN on some machines."""
        if not self.fills(out):
            np.copyto(out.view(np.uint32), self._data.view(np.uint32))

    def add(self, out: Floats, divisor: np.float32) -> None:
        """Add and divide."""
        loops.add_floats(self._data, out, divisor)

    def fills(self, out: Floats) -> bool:
        """Whether the numbers are stored in `out`: if one is, all are."""
        return np.may_share_memory(self._data, out)


class HalfPart(Part):
    """Numbers sent as bfloat16, the upper halves of float32: uint16, shape (n,)."""

    def write(self, out: Floats) -> None:
        """Widen the numbers to float32."""
        loops.write_halves(self._data, out)

    def add(self, out: Floats, divisor: np.float32) -> None:
        """Widen, add and divide."""
        loops.add_halves(self._data, out, divisor)

    def write_sum(self, other: Part, out: Floats, divisor: np.float32) -> None:
        """Widen both, add and divide."""
        if isinstance(other, HalfPart):
            loops.write_sum_of_halves(self._data, other._data, out, divisor)
        else:
            super().write_sum(other, out, divisor)


class BlockPart(Part):
    """Numbers sent as codes with a scale per block: uint8, two bytes per scale, then the codes."""

    def __init__(self, body: Octets, kind: int, num_blocks: int) -> None:
        """Refer to a body of `num_blocks` blocks. `kind` is INT8, INT4 or FP8 of the kernels."""
        super().__init__(body)
        self._kind = kind
        self._num_blocks = num_blocks
        self._scales = body[: 2 * num_blocks]
        self._codes = body[2 * num_blocks :]

    def write(self, out: Floats) -> None:
        """Multiply codes by their scales."""
        loops.write_blocks(self._kind, self._scales, self._codes, out)

    def add(self, out: Floats, divisor: np.float32) -> None:
        """Multiply, add and divide."""
        loops.add_blocks(self._kind, self._scales, self._codes, out, divisor)

    def write_sum(self, other: Part, out: Floats, divisor: np.float32) -> None:
        """Multiply both, add and divide."""
        if isinstance(other, BlockPart) and other._kind == self._kind:
            theirs = (other._scales, other._codes)
            loops.write_sum_of_blocks(self._kind, self._scales, self._codes, *theirs, out, divisor)
        else:
            super().write_sum(other, out, divisor)

    def _made_of(self, data: npt.NDArray[Any]) -> Self:
        return type(self)(data, self._kind, self._num_blocks)


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded chunk."""

    payload: Payload
    """Bytes to send; possibly a view of the values, to be used before they change."""
    part: Part
    """The numbers that every receiver decodes; possibly a view of the values."""


class Codec(ABC):
    """Turns a chunk into bytes and back. Stateless; may be called from any thread."""

    name: str
    """Name in job files: isthmus.topology.spec.job.CODECS."""
    number: int
    """Number in frames. Never reused for another codec."""
    lossless: bool
    """Whether decoding gives back every bit."""

    @abstractmethod
    def max_bytes(self, numel: int) -> int:
        """Return the largest payload of `numel` elements; a longer one is corrupt."""

    @abstractmethod
    def encode_with_residual(self, values: Floats, residual: Floats | None) -> Encoded:
        """Encode `values`, float32 (n,) and contiguous, plus the residual. They are not modified.

        `residual`, float32 (n,), is replaced by the new residual, zero where that is not finite. A
        NaN in `values` crosses unchanged. None: no residual is used or kept, as for lossless
        codecs.
        """

    @abstractmethod
    def part(self, payload: Payload, numel: int) -> Part:
        """Check an untrusted payload, and return its numbers.

        Raises:
            CorruptDataError: the payload does not hold exactly `numel` elements. No more memory
                than their size was allocated.
        """

    def encode(self, values: Floats) -> Payload:
        """Return the payload of `values` without a residual."""
        return self.encode_with_residual(values, None).payload

    def decode(self, payload: Payload, numel: int, out: Floats | None = None) -> Floats:
        """Return the elements of a payload, in `out` (float32, shape (numel,)) if it is given.

        Raises:
            CorruptDataError: as in `part`; `out` is unchanged.
        """
        part = self.part(payload, numel)
        target = np.empty(numel, dtype=np.float32) if out is None else out
        assert target.shape == (numel,)
        assert target.dtype == np.float32
        part.write(target)
        return target

    def quantize(self, values: Floats) -> Floats:
        """Return `decode(encode(values))`, bit for bit, as a fresh array."""
        out = np.empty(len(values), dtype=np.float32)
        self.encode_with_residual(values, None).part.write(out)
        return out


class BodyCodec(Codec):
    """A codec whose payload another process may prepare: a body of known size.

    So ranks encode bodies on their accelerator (sites/worker/exchange/device_codecs.py), and a
    gateway only seals them.
    """

    @abstractmethod
    def body_bytes(self, numel: int) -> int:
        """Return the size of a body, at most 4 bytes per element."""

    @abstractmethod
    def seal(self, body: memoryview, numel: int) -> Encoded:
        """Return the encoded chunk for a body of `numel` elements.

        The payload equals that of `encode` for the same values, which were all finite. The part is
        a view of the body; the payload is not.

        Raises:
            CorruptDataError: the body has another size, or no encoder makes it.
        """


def expect_size(payload: Payload, expected_bytes: int) -> None:
    """Check a payload's size.

    Raises:
        CorruptDataError: the size differs.
    """
    if len(payload) != expected_bytes:
        raise CorruptDataError(f"a payload of {len(payload)} bytes where {expected_bytes} belong")
