"""Adds up what sites sent for a chunk, tile by tile, so that numbers stay in a core's own cache.

Element by element in the order of the parts: the same bits at every site that adds the same parts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from sites.codecs.codec import TILE, Floats, Read, tiles


class _Scratch(threading.local):
    """Memory that every call of a thread uses again."""

    def __init__(self) -> None:
        self.total = np.empty(TILE, dtype=np.float32)
        self.part = np.empty(TILE, dtype=np.float32)


_scratch = _Scratch()


def add_up(parts: Sequence[Read], out: Floats, divisor: np.float32 | None) -> None:
    """Write the sum of all parts to `out`, divided if there is a divisor.

    Args:
        parts: one at least; each gives float32, shape (n,), and may give what lies in `out`.
        out: float32, shape (n,).
        divisor: not 0.
    """
    for start, tile in tiles(out):
        sums, part = _scratch.total[: len(tile)], _scratch.part[: len(tile)]
        total = parts[0](start, sums)
        for read in parts[1:]:
            total = np.add(total, read(start, part), out=sums)
        if divisor is None:
            tile[:] = total
        else:
            np.divide(total, divisor, out=tile)
