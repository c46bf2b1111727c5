"""The codecs without compression: float32 as it is, and bfloat16."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sites.codecs.codec import BodyCodec, Codec, Encoded, Payload, expect_size
from sites.codecs.kernels import halves
from sites.codecs.parts import FloatPart, Floats, HalfPart, Part

Halves = npt.NDArray[np.uint16]


class Fp32(Codec):
    """float32, little-endian."""

    name = "fp32"
    number = 1
    lossless = True

    def max_bytes(self, numel: int) -> int:
        """Return 4 bytes an element."""
        return 4 * numel

    def encode_owed(self, values: Floats, owed: Floats | None) -> Encoded:
        """Return the bytes where they are."""
        assert owed is None
        return Encoded(values.view(np.uint8).data, FloatPart(values))

    def part(self, payload: Payload, numel: int) -> Part:
        """Give the elements where they are."""
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

    def encode_owed(self, values: Floats, owed: Floats | None) -> Encoded:
        """Round; NaN stays NaN, and infinity infinity."""
        upper = round_to_bf16(values, owed)
        return Encoded(upper.view(np.uint8).data, HalfPart(upper))

    def part(self, payload: Payload, numel: int) -> Part:
        """Widen, exactly."""
        expect_size(payload, 2 * numel)
        return HalfPart(np.frombuffer(payload, dtype=np.uint16))

    def body_bytes(self, numel: int) -> int:
        """Return the payload's size."""
        return 2 * numel

    def seal(self, body: memoryview, numel: int) -> Encoded:
        """Copy: a body is a payload."""
        return Encoded(bytes(body), self.part(body, numel))


def round_to_bf16(values: Floats, owed: Floats | None = None) -> Halves:
    """Return the bits of `values`, and of what is owed, as bfloat16.

    `Codec.encode_owed` says how.
    """
    upper = np.empty(len(values), dtype=np.uint16)
    if owed is None:
        halves.round_to(values, upper)
    else:
        halves.round_owed(values, owed, upper)
    return upper
