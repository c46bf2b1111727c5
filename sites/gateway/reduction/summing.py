"""Adds up what sites sent for a chunk.

Element by element in the order of the parts: the same bits at every site that adds the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sites.codecs.kernels import floats
from sites.codecs.parts import Floats, Part

_ONE = np.float32(1)


def add_up(parts: Sequence[Part], out: Floats, divisor: np.float32 | None) -> None:
    """Write the sum of all parts to `out`, divided if there is a divisor.

    A sum that is not a number is the NaN 0x7FC00000; a single part's NaN is what it was.

    Args:
        parts: one at least; they may lie in `out`.
        out: float32, shape (n,).
        divisor: above 0.
    """
    first, *others = parts
    last_divisor = _ONE if divisor is None else divisor
    if not others:
        if not first.fills(out):
            first.apart_from(out).write(out)
        if divisor is not None:
            floats.divide(out, divisor)
        return
    if others[0].fills(out):  # of two, the order changes no bit, and this one need not be moved
        first, others[0] = others[0], first
    others = [part.apart_from(out) for part in others]
    divisors = [_ONE] * (len(others) - 1) + [last_divisor]
    if first.fills(out):
        others[0].add(out, divisors[0])
    else:
        others[0].write_sum(first.apart_from(out), out, divisors[0])
    for part, each in zip(others[1:], divisors[1:], strict=True):
        part.add(out, each)
