"""What every codec can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from protos.errors import CorruptDataError
from sites.codecs.parts import Floats, Part

Payload = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a chunk has become."""

    payload: Payload
    """What is sent; it may be a view of the values, to be used before they change."""
    part: Part
    """What everybody decodes from it; it may lie in the values, too."""


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
    def encode_owed(self, values: Floats, owed: Floats | None) -> Encoded:
        """Encode values and what is owed.

        Args:
            values: float32, shape (n,), contiguous. Not modified.
            owed: float32, shape (n,): what was lost before; takes what this one loses, zero where
                that is not finite. A NaN in `values` crosses as it is. None: nothing is owed, nor
                kept. Always for a codec that is lossless.
        """

    @abstractmethod
    def part(self, payload: Payload, numel: int) -> Part:
        """Check a payload, and return the numbers that it holds.

        Args:
            payload: from `encode`, or from a peer that may send anything.
            numel: elements that it must hold, by the receiver's own plan.

        Raises:
            CorruptDataError: it does not hold exactly `numel` elements. Nothing beyond their size
                was allocated.
        """

    def encode(self, values: Floats) -> Payload:
        """Return the payload of values alone, as `encode_owed` does."""
        return self.encode_owed(values, None).payload

    def decode(self, payload: Payload, numel: int, out: Floats | None = None) -> Floats:
        """Return the elements of a payload.

        Args:
            payload: as of `part`.
            numel: as of `part`.
            out: float32, shape (numel,); a fresh array when absent.

        Returns:
            `out`, or the fresh array.

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
        self.encode_owed(values, None).part.write(out)
        return out


class BodyCodec(Codec):
    """A codec whose payload another process may half make.

    Its body, of a size that follows from the elements.

    So ranks encode on their accelerator what a gateway only seals: sites/worker/device_codecs.py.
    """

    @abstractmethod
    def body_bytes(self, numel: int) -> int:
        """Return the size of a body; at most 4 bytes an element."""

    @abstractmethod
    def seal(self, body: memoryview, numel: int) -> Encoded:
        """Return what a body becomes.

        The payload is that of `encode` for the same values, which were all finite.

        Args:
            body: shape (n,), contiguous. The part lies in it; the payload does not.
            numel: elements that it must hold.

        Raises:
            CorruptDataError: it does not, or holds what no encoder makes.
        """


def expect_size(payload: Payload, expected_bytes: int) -> None:
    """Check a payload's size.

    Raises:
        CorruptDataError: it is another.
    """
    if len(payload) != expected_bytes:
        raise CorruptDataError(f"a payload of {len(payload)} bytes where {expected_bytes} belong")
