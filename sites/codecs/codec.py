"""What every codec can do, and the numbers that it gives back: parts of a sum.

`Codec` turns a chunk of float32 into a payload. `Part` is what a payload holds, not yet decoded.
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
    """The numbers that one site sent for a chunk, as they came: decoded while they are added up.

    So a sum reads what crossed the WAN, a byte an element or less, and writes each result once. A
    sum that is not a number is the one NaN 0x7FC00000, whatever its operands were: left to
    themselves, processors differ in what they make of two of them.

    A part is checked: it has as many numbers as every array that it is asked to write to.
    """

    def __init__(self, data: npt.NDArray[Any]) -> None:
        """Refer to what the numbers are made of: from any place in memory, one dimension."""
        self._data = data

    @abstractmethod
    def write(self, out: Floats) -> None:
        """Write the numbers to `out`, bit for bit: float32, shape (n,)."""

    @abstractmethod
    def add(self, out: Floats, divisor: np.float32) -> None:
        """Add the numbers to `out`, and divide the sums; by 1, that changes nothing."""

    def write_sum(self, other: Part, out: Floats, divisor: np.float32) -> None:
        """Write the sums of these numbers and of another part's, divided."""
        other.write(out)
        self.add(out, divisor)

    def fills(self, out: Floats) -> bool:
        """Whether the numbers are those that lie in `out`."""
        del out
        return False

    def apart_from(self, out: Floats) -> Self:
        """Return the same part, which no writing to `out` changes."""
        return self._made_of(self._data.copy()) if np.may_share_memory(self._data, out) else self

    def _made_of(self, data: npt.NDArray[Any]) -> Self:
        """Return a part of the same kind."""
        return type(self)(data)


class FloatPart(Part):
    """float32, shape (n,), as they are."""

    def write(self, out: Floats) -> None:
        """Copy, as integers: a float copy may quieten a signalling NaN on some machines."""
        if not self.fills(out):
            np.copyto(out.view(np.uint32), self._data.view(np.uint32))

    def add(self, out: Floats, divisor: np.float32) -> None:
        """Add and divide."""
        loops.add_floats(self._data, out, divisor)

    def fills(self, out: Floats) -> bool:
        """Whether they lie in `out`: all of them, if one does."""
        return np.may_share_memory(self._data, out)


class HalfPart(Part):
    """bfloat16: the upper halves of float32, as uint16, shape (n,)."""

    def write(self, out: Floats) -> None:
        """Widen."""
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
    """Codes, and a scale for each block of them: uint8, two of each scale, then the codes."""

    def __init__(self, body: Octets, kind: int, num_blocks: int) -> None:
        """Refer to a body of so many blocks. `kind` is INT8, INT4 or FP8 of the kernels."""
        super().__init__(body)
        self._kind = kind
        self._num_blocks = num_blocks
        self._scales = body[: 2 * num_blocks]
        self._codes = body[2 * num_blocks :]

    def write(self, out: Floats) -> None:
        """Multiply."""
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
    """What a chunk has become."""

    payload: Payload
    """What is sent; it may be a view of the values, to be used before they change."""
    part: Part
    """What everybody decodes from it; it may lie in the values, too."""


class Codec(ABC):
    """Turns a chunk into bytes and back. Stateless; may be called from any thread."""

    name: str
    """As a job file names it: isthmus.topology.spec.job.CODECS."""
    number: int
    """As a frame names it. Never given to another codec."""
    lossless: bool
    """Whether decoding gives back every bit."""

    @abstractmethod
    def max_bytes(self, numel: int) -> int:
        """Return the most bytes that `numel` elements can take; a longer payload is corrupt."""

    @abstractmethod
    def encode_with_residual(self, values: Floats, residual: Floats | None) -> Encoded:
        """Encode `values`, float32 (n,) and contiguous, plus the residual. They are not modified.

        `residual`, float32 (n,), is what was lost before, and takes what this one loses, zero where
        that is not finite. A NaN in `values` crosses as it is. None: there is no residual, and none
        is kept; always for a codec that is lossless.
        """

    @abstractmethod
    def part(self, payload: Payload, numel: int) -> Part:
        """Check a payload, which may be anything that a peer sent, and return what it holds.

        Raises:
            CorruptDataError: it does not hold exactly `numel` elements. Nothing beyond their size
                was allocated.
        """

    def encode(self, values: Floats) -> Payload:
        """Return the payload of values alone, as `encode_owed` does."""
        return self.encode_with_residual(values, None).payload

    def decode(self, payload: Payload, numel: int, out: Floats | None = None) -> Floats:
        """Return the elements of a payload, in `out` (float32, shape (numel,)) if it is given.

        Raises:
            CorruptDataError: as of `part`; `out` is as it was.
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
    """A codec whose payload another process may half make: its body, of a size that is known.

    So ranks encode on their accelerator what a gateway only seals:
    sites/worker/exchange/device_codecs.py.
    """

    @abstractmethod
    def body_bytes(self, numel: int) -> int:
        """Return the size of a body; at most 4 bytes an element."""

    @abstractmethod
    def seal(self, body: memoryview, numel: int) -> Encoded:
        """Return what a body of `numel` elements becomes.

        The payload is that of `encode` for the same values, which were all finite. The part lies in
        the body; the payload does not.

        Raises:
            CorruptDataError: it has another size, or holds what no encoder makes.
        """


def expect_size(payload: Payload, expected_bytes: int) -> None:
    """Check a payload's size.

    Raises:
        CorruptDataError: it is another.
    """
    if len(payload) != expected_bytes:
        raise CorruptDataError(f"a payload of {len(payload)} bytes where {expected_bytes} belong")
