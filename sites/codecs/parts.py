"""The numbers that one site sent for a chunk, as they came: decoded while they are added up.

So a sum reads what crossed the WAN, a byte an element or less, and writes each result once. A sum
that is not a number is the one NaN 0x7FC00000, whatever its operands were: left to themselves,
processors differ in what they make of two of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from sites.codecs.kernels import blocks, floats, halves

Floats = npt.NDArray[np.float32]
Octets = npt.NDArray[np.uint8]


class Part(ABC):
    """Checked: it has as many numbers as every array that it is asked to write to."""

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

    @abstractmethod
    def moved_to(self, memory: Floats) -> Part:
        """Return the same part, kept in `memory` instead: float32, shape (n,)."""

    @abstractmethod
    def apart_from(self, out: Floats) -> Part:
        """Return the same part, which no writing to `out` changes."""


class FloatPart(Part):
    """float32, as they are."""

    def __init__(self, values: Floats) -> None:
        """Refer to the numbers: float32, shape (n,), from any place in memory."""
        self._values = values

    def write(self, out: Floats) -> None:
        """Copy, as integers: a float copy may quieten a signalling NaN on some machines."""
        if not self.fills(out):
            np.copyto(out.view(np.uint32), self._values.view(np.uint32))

    def add(self, out: Floats, divisor: np.float32) -> None:
        """Add and divide."""
        floats.add(self._values, out, divisor)

    def fills(self, out: Floats) -> bool:
        """Whether they lie in `out`: all of them, if one does."""
        return np.may_share_memory(self._values, out)

    def moved_to(self, memory: Floats) -> Part:
        """Copy."""
        self.write(memory)
        return FloatPart(memory)

    def apart_from(self, out: Floats) -> Part:
        """Copy, if they lie there."""
        return FloatPart(self._values.copy()) if self.fills(out) else self


class HalfPart(Part):
    """bfloat16."""

    def __init__(self, upper: npt.NDArray[np.uint16]) -> None:
        """Refer to the upper halves: uint16, shape (n,), from any place in memory."""
        self._upper = upper

    def write(self, out: Floats) -> None:
        """Widen."""
        halves.write(self._upper, out)

    def add(self, out: Floats, divisor: np.float32) -> None:
        """Widen, add and divide."""
        halves.add(self._upper, out, divisor)

    def write_sum(self, other: Part, out: Floats, divisor: np.float32) -> None:
        """Widen both, add and divide."""
        if isinstance(other, HalfPart):
            halves.write_sum(self._upper, other._upper, out, divisor)
        else:
            super().write_sum(other, out, divisor)

    def moved_to(self, memory: Floats) -> Part:
        """Copy, unless they lie there already."""
        if np.may_share_memory(self._upper, memory):
            return self
        kept = memory.view(np.uint16)[: len(self._upper)]
        np.copyto(kept, self._upper)
        return HalfPart(kept)

    def apart_from(self, out: Floats) -> Part:
        """Copy, if they lie there."""
        return HalfPart(self._upper.copy()) if np.may_share_memory(self._upper, out) else self


class BlockPart(Part):
    """Levels, and a scale for each block of them."""

    def __init__(self, kind: int, body: Octets, num_blocks: int) -> None:
        """Refer to scales and codes.

        Args:
            kind: of sites.codecs.kernels.blocks.
            body: uint8: two of each scale, then the codes.
            num_blocks: of these.
        """
        self._kind = kind
        self._body = body
        self._num_blocks = num_blocks
        self._scales = body[: 2 * num_blocks]
        self._codes = body[2 * num_blocks :]

    def write(self, out: Floats) -> None:
        """Multiply."""
        blocks.write(self._kind, self._scales, self._codes, out)

    def add(self, out: Floats, divisor: np.float32) -> None:
        """Multiply, add and divide."""
        blocks.add(self._kind, self._scales, self._codes, out, divisor)

    def write_sum(self, other: Part, out: Floats, divisor: np.float32) -> None:
        """Multiply both, add and divide."""
        if isinstance(other, BlockPart) and other._kind == self._kind:
            blocks.write_sum(
                self._kind,
                self._scales,
                self._codes,
                other._scales,
                other._codes,
                out,
                divisor,
            )
        else:
            super().write_sum(other, out, divisor)

    def moved_to(self, memory: Floats) -> Part:
        """Copy, unless they lie there already."""
        if np.may_share_memory(self._body, memory):
            return self
        kept = memory.view(np.uint8)[: len(self._body)]
        np.copyto(kept, self._body)
        return BlockPart(self._kind, kept, self._num_blocks)

    def apart_from(self, out: Floats) -> Part:
        """Copy, if they lie there."""
        if np.may_share_memory(self._body, out):
            return BlockPart(self._kind, self._body.copy(), self._num_blocks)
        return self
