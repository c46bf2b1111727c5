"""The codecs without compression: float32 as it is, and bfloat16."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sites.codecs.codec import (
    BodyCodec,
    Codec,
    Floats,
    Payload,
    Read,
    destination,
    expect_size,
    reader_of,
)


class Fp32(Codec):
    """float32, little-endian."""

    name = "fp32"
    number = 1
    lossless = True

    def max_bytes(self, numel: int) -> int:
        """Return 4 bytes an element."""
        return 4 * numel

    def encode(self, values: Floats) -> Payload:
        """Return the bytes where they are."""
        return values.astype("<f4", copy=False).view(np.uint8).data

    def reader(self, payload: Payload, numel: int) -> Read:
        """Give the elements where they are."""
        expect_size(payload, 4 * numel)
        return reader_of(np.frombuffer(payload, dtype="<f4"))


class Bf16(BodyCodec):
    """bfloat16: the upper half of a float32, rounded to nearest even."""

    name = "bf16"
    number = 2
    lossless = False

    def max_bytes(self, numel: int) -> int:
        """Return 2 bytes an element."""
        return 2 * numel

    def encode(self, values: Floats) -> bytes:
        """Round; NaN stays NaN, and infinity infinity."""
        return round_to_bf16(values).tobytes()

    def reader(self, payload: Payload, numel: int) -> Read:
        """Widen, exactly."""
        expect_size(payload, 2 * numel)
        upper = np.frombuffer(payload, dtype="<u2")
        return lambda start, out: widen_bf16(upper[start : start + len(out)], out)

    def body_bytes(self, numel: int) -> int:
        """Return the payload's size."""
        return 2 * numel

    def seal(self, body: memoryview, numel: int) -> bytes:
        """Copy: a body is a payload."""
        expect_size(body, 2 * numel)
        return bytes(body)

    def quantize(self, values: Floats) -> Floats:
        """Round and widen, without the bytes between."""
        return widen_bf16(round_to_bf16(values), destination(len(values), None))


def round_to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the bits of `values` rounded to bfloat16, to nearest even.

    Adding 0x7FFF, and one more where the kept part is odd, carries into the kept part exactly when
    the dropped part is above one half, or is one half and the kept part odd. The carry of a NaN
    would make another number of it, so its upper half is kept and made quiet.
    """
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    upper = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        upper[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
    return upper


def widen_bf16(upper: npt.NDArray[np.uint16], out: Floats) -> Floats:
    """Write the float32 whose upper halves are `upper` to `out`, and return it."""
    np.left_shift(upper, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    return out
