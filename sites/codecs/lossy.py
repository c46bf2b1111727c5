"""What the quantising codecs share: numbers that they cannot hold cross as they are.

A payload starts with one byte that says what follows: quantised numbers, quantised numbers under
zstd, or the float32 themselves. The last is for chunks with a NaN, an infinity or a number of 2**127
and more: such a chunk crosses bit for bit, so that nothing is ever saturated in silence.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np

from protos.errors import CorruptDataError
from sites.codecs.codec import Codec, Floats, Payload, Read, expect_size, reader_of

QUANTISED: Final = 0
COMPRESSED: Final = 1
AS_IT_IS: Final = 2

MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
"""The bits of a float32 without its sign. As integers they are in the order of the magnitudes,
infinity above all numbers and NaN above infinity."""
TOO_LARGE: Final = 0x7F000000
"""The bits of 2**127. Below it, a scale that is rounded up cannot push a decoded number over the
end of float32."""


class Lossy(Codec):
    """A codec that quantises finite chunks, and passes others on as they are."""

    lossless = False

    def max_bytes(self, numel: int) -> int:
        """Return 4 bytes an element and the first one: what a chunk that is not finite takes."""
        return 1 + 4 * numel

    def encode(self, values: Floats) -> bytes:
        """Quantise; or copy, where that is impossible."""
        quantised = self._quantise(values)
        return bytes((AS_IT_IS,)) + values.tobytes() if quantised is None else quantised

    def reader(self, payload: Payload, numel: int) -> Read:
        """Undo what the first byte says was done."""
        if not payload:
            raise CorruptDataError("a payload of 0 bytes, without the one that says what it holds")
        kind, body = payload[0], memoryview(payload)[1:]
        if kind == AS_IT_IS:
            expect_size(body, 4 * numel)
            return reader_of(np.frombuffer(bytes(body), dtype="<f4"))  # a copy is aligned
        if kind in (QUANTISED, COMPRESSED):
            return self._reader(body, numel, is_compressed=kind == COMPRESSED)
        raise CorruptDataError(f"a payload that starts with {kind}")

    @abstractmethod
    def _quantise(self, values: Floats) -> bytes | None:
        """Return the payload, or None where a number is not below 2**127."""

    @abstractmethod
    def _reader(self, body: memoryview, numel: int, *, is_compressed: bool) -> Read:
        """Return what gives the elements that `body` holds.

        Raises:
            CorruptDataError: it does not hold `numel` elements, or what no encoder sends.
        """
