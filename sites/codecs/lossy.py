"""What the quantising codecs share: numbers that they cannot hold cross as they are.

A payload starts with one byte that says what follows: quantised numbers, quantised numbers under
zstd, or the float32 themselves. The last is for chunks with a NaN, an infinity or a number of
2**127 and more: such a chunk crosses bit for bit, so that nothing is ever saturated in silence.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np

from protos.errors import CorruptDataError
from sites.codecs.codec import Codec, Encoded, Payload, expect_size
from sites.codecs.parts import FloatPart, Floats, Part

QUANTISED: Final = 0
COMPRESSED: Final = 1
AS_IT_IS: Final = 2

MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
"""The bits of a float32 without its sign. As integers they are in the order of the magnitudes,
infinity above all numbers and NaN above infinity."""


class Lossy(Codec):
    """A codec that quantises finite chunks, and passes others on as they are."""

    lossless = False

    def max_bytes(self, numel: int) -> int:
        """Return 4 bytes an element and the first one: what a chunk that is not finite takes."""
        return 1 + 4 * numel

    def part(self, payload: Payload, numel: int) -> Part:
        """Undo what the first byte says was done."""
        if not payload:
            raise CorruptDataError("a payload of 0 bytes, without the one that says what it holds")
        kind, body = payload[0], memoryview(payload)[1:]
        if kind == AS_IT_IS:
            expect_size(body, 4 * numel)
            return FloatPart(np.frombuffer(body, dtype=np.float32))
        if kind in (QUANTISED, COMPRESSED):
            return self._part(body, numel, is_compressed=kind == COMPRESSED)
        raise CorruptDataError(f"a payload that starts with {kind}")

    @abstractmethod
    def _part(self, body: memoryview, numel: int, *, is_compressed: bool) -> Part:
        """Return the numbers that `body` holds.

        Raises:
            CorruptDataError: it does not hold `numel` elements, or what no encoder sends.
        """


def as_it_is(meant: Floats, owed: Floats | None) -> Encoded:
    """Return what a chunk becomes that has a number which cannot be quantised.

    Nothing of it is lost.
    """
    payload = bytes((AS_IT_IS,)) + meant.tobytes()
    if owed is not None:
        owed.fill(0)
    return Encoded(payload, FloatPart(np.frombuffer(payload, dtype=np.float32, offset=1)))
