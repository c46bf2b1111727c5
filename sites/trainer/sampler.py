"""Which text stands in which step. Pure: no state, so resuming needs the step's number only.

The global batch of a step holds the samples [step * B, (step + 1) * B). Where sample i begins in
the text is a function of (seed, i) alone, so however many sites and ranks share a step, together
they take the same sequences, and each exactly once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from topology.cost.compute import share

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def samples_of(step: int, global_batch: int, ranks: int, rank: int) -> range:
    """Return the global sample indices that `rank` takes at `step`, which counts from 0."""
    return samples_in(step, global_batch, share(global_batch, ranks, rank))


def samples_in(step: int, global_batch: int, part: range) -> range:
    """Return the global sample indices at `part`'s places in the batch of `step`."""
    return range(step * global_batch + part.start, step * global_batch + part.stop)


def micro_batches(samples: range, micro_batch: int) -> list[range]:
    """Cut `samples` into runs of at most `micro_batch`, in order; the last may be shorter."""
    return [samples[first : first + micro_batch] for first in range(0, len(samples), micro_batch)]


def random_starts(seed: int, samples: range, num_starts: int) -> npt.NDArray[np.int64]:
    """Return where in the text each sample begins: int64, shape (len(samples),).

    Args:
        seed: Any integer; names the order.
        samples: Global sample indices.
        num_starts: Places at which a window may begin; the results are in [0, num_starts).
    """
    index = np.arange(samples.start, samples.stop, dtype=np.uint64)
    # Two rounds, the seed between them: neighbouring seeds must not give shifted orders.
    key = _splitmix64(np.array([seed % (1 << 64)], dtype=np.uint64))
    mixed = _splitmix64(_splitmix64(index) ^ key)
    # The modulo's bias is below num_starts / 2^64.
    return (mixed % np.uint64(num_starts)).astype(np.int64)


def even_starts(count: int, num_starts: int) -> npt.NDArray[np.int64]:
    """Return `count` starts spread evenly over the text, first and last included.

    For evaluation.
    """
    return np.arange(count, dtype=np.int64) * (num_starts - 1) // max(1, count - 1)


def windows(
    text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], context: int
) -> npt.NDArray[np.int64]:
    """Return the `context` + 1 bytes from each start: int64, shape (len(starts), context + 1)."""
    places = starts[:, None] + np.arange(context + 1)
    return np.take(text, places).astype(np.int64)


def _splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix each 64-bit value: the finalizer of Steele, Lea and Flood, "Fast splittable PRNGs"."""
    mixed = values + _GOLDEN  # arrays of unsigned integers wrap, which is what is meant
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))
