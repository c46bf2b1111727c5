"""What every codec can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from protos.errors import CorruptDataError

Floats = npt.NDArray[np.float32]
Payload = bytes | memoryview
Read = Callable[[int, Floats], Floats]
"""Returns a tile's elements, from the given one on, as many as the array that it may write them to has.
What it returns may be another array, and is not to be modified."""

TILE: Final = 1 << 16
"""Elements that are taken through all stages at once: 256 KiB of float32, for a core's own cache."""


class Codec(ABC):
    """Turns a chunk into bytes and back. Stateless; may be called from any thread."""

    name: ClassVar[str]
    """As a job file names it: topology.job.CODECS."""
    number: ClassVar[int]
    """As a frame names it. Never given to another codec."""
    lossless: ClassVar[bool]
    """Whether decoding gives back every bit."""

    @abstractmethod
    def max_bytes(self, numel: int) -> int:
        """Return the most bytes that `numel` elements can take; a longer payload is corrupt."""

    @abstractmethod
    def encode(self, values: Floats) -> Payload:
        """Return the payload; it may be a view of `values`, to be used before they change.

        Args:
            values: float32, shape (n,), contiguous. Not modified.
        """

    @abstractmethod
    def reader(self, payload: Payload, numel: int) -> Read:
        """Check a payload, and return what gives its elements, tile by tile.

        Args:
            payload: from `encode`, or from a peer that may send anything.
            numel: elements that it must hold, by the receiver's own plan.

        Raises:
            CorruptDataError: it does not hold exactly `numel` elements. Nothing beyond their size
                was allocated.
        """

    def decode(self, payload: Payload, numel: int, out: Floats | None = None) -> Floats:
        """Return the elements of a payload.

        Args:
            payload: as of `reader`.
            numel: as of `reader`.
            out: float32, shape (numel,); a fresh array when absent.

        Returns:
            `out`, or the fresh array.

        Raises:
            CorruptDataError: as of `reader`; `out` is as it was.
        """
        read = self.reader(payload, numel)
        target = destination(numel, out)
        for start, tile in tiles(target):
            read_into(read, start, tile)
        return target

    def quantize(self, values: Floats) -> Floats:
        """Return `decode(encode(values))`, bit for bit, as a fresh array."""
        return self.decode(self.encode(values), len(values))


class BodyCodec(Codec):
    """A codec whose payload another process may half make: its body, of a size that follows from the elements.

    So ranks encode on their accelerator what a gateway only seals: sites/worker/device_codecs.py.
    """

    @abstractmethod
    def body_bytes(self, numel: int) -> int:
        """Return the size of a body; at most 4 bytes an element."""

    @abstractmethod
    def seal(self, body: memoryview, numel: int) -> bytes:
        """Return the payload of a body: that of `encode` for the same values, which were all finite.

        Args:
            body: shape (n,), contiguous; may be overwritten afterwards.
            numel: elements that it must hold.

        Raises:
            CorruptDataError: it does not, or holds what no encoder makes.
        """


def tiles(values: Floats) -> Iterator[tuple[int, Floats]]:
    """Return the tiles of an array, as views, each with the place of its first element."""
    return ((start, values[start : start + TILE]) for start in range(0, len(values), TILE))


def read_into(read: Read, start: int, out: Floats) -> None:
    """Write a tile's elements to `out`, bit for bit."""
    piece = read(start, out)
    if piece is not out:
        # Copied as integers: a float copy may quieten a signalling NaN on some machines.
        np.copyto(out.view(np.uint32), piece.view(np.uint32))


def reader_of(values: Floats) -> Read:
    """Return what gives the elements of an array: its own memory."""
    return lambda start, out: values[start : start + len(out)]


def destination(numel: int, out: Floats | None) -> Floats:
    """Return `out` once it is known to fit, or a fresh array."""
    if out is None:
        return np.empty(numel, dtype=np.float32)
    assert out.shape == (numel,)
    assert out.dtype == np.float32
    return out


def expect_size(payload: Payload, expected_bytes: int) -> None:
    """Check a payload's size.

    Raises:
        CorruptDataError: it is another.
    """
    if len(payload) != expected_bytes:
        raise CorruptDataError(f"a payload of {len(payload)} bytes where {expected_bytes} belong")
