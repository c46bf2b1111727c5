"""What every codec can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from protos.errors import CorruptDataError

Floats = npt.NDArray[np.float32]
Payload = bytes | memoryview


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
    def encode(self, values: Floats) -> bytes:
        """Return the payload.

        Args:
            values: float32, shape (n,), contiguous. Not modified.
        """

    @abstractmethod
    def decode(self, payload: Payload, numel: int, out: Floats | None = None) -> Floats:
        """Return the elements of a payload.

        Args:
            payload: from `encode`, or from a peer that may send anything.
            numel: elements that it must hold, by the receiver's own plan.
            out: float32, shape (numel,); a fresh array when absent.

        Returns:
            `out`, or the fresh array.

        Raises:
            CorruptDataError: it does not hold exactly `numel` elements. Nothing beyond their size
                was allocated; `out` may have been written to.
        """

    def quantize(self, values: Floats) -> Floats:
        """Return `decode(encode(values))`, bit for bit, as a fresh array."""
        return self.decode(self.encode(values), len(values))


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
