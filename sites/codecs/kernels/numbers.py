"""What all kernels do with single float32: sums, what is owed, magnitudes."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sites.codecs.kernels.compiling import inlined

Floats = npt.NDArray[np.float32]

MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
"""The bits without the sign: of two numbers, the larger one has the larger ones."""
INFINITE: Final = np.uint32(0x7F800000)
"""From here on a magnitude is not of a finite number."""
TOO_LARGE: Final = np.uint32(0x7F000000)
"""The bits of 2**127. Below it, a scale that is rounded up cannot push a decoded number over the
end of float32."""
_NAN: Final = np.float32(np.nan)
"""0x7FC00000: what a sum is that is not a number.

Of its own accord, a processor would choose one of the operands.
"""


@inlined
def magnitude(value: np.float32) -> np.uint32:
    """Return the bits without the sign."""
    return np.uint32(np.float32(value).view(np.uint32) & MAGNITUDE)


@inlined
def with_owed(value: np.float32, owed: np.float32) -> np.float32:
    """Return the sum; a NaN stays as it is, bit for bit."""
    return np.float32(value + owed if value == value else value)


@inlined
def mean(left: np.float32, right: np.float32, divisor: np.float32) -> np.float32:
    """Return the divided sum; the one NaN where it is not a number."""
    quotient = np.float32((left + right) / divisor)
    return quotient if quotient == quotient else _NAN
