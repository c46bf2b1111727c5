"""Where in the text each sample begins. Pure: a function of the seed and the sample's position.

Positions count the samples of the run (sites/worker/data/data_positions.py); undisturbed, the
global batch of a step holds [step * B, (step + 1) * B). However many sites and ranks share a step,
together they take the same sequences, and each exactly once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isthmus.sites.worker.data.data_positions import Positions
from isthmus.sites.worker.data.shuffling import key_of, splitmix64
from isthmus.topology.spec.compute import share


def samples_of(step: int, global_batch: int, ranks: int, rank: int) -> Positions:
    """Return the positions that `rank` takes at `step`, from 0, of an undisturbed run."""
    part = share(global_batch, ranks, rank)
    return step * global_batch + np.arange(part.start, part.stop)


def micro_batches(samples: Positions, micro_batch: int, rows: int = 0) -> list[Positions]:
    """Cut `samples` into runs of at most `micro_batch`, in order; the last may be shorter.

    As many as `rows` samples would take, if these are more: then the last are empty.
    """
    firsts = range(0, max(len(samples), rows), micro_batch)
    return [samples[first : first + micro_batch] for first in firsts]


def random_starts(seed: int, samples: Positions, num_starts: int) -> npt.NDArray[np.int64]:
    """Return where in the text each sample begins: int64, shape (len(samples),).

    Args:
        seed: Any integer; names the order.
        samples: Positions in the run.
        num_starts: Places at which a window may begin; the results are in [0, num_starts).
    """
    # Two rounds, the seed between them: neighbouring seeds must not give shifted orders.
    mixed = splitmix64(splitmix64(samples.astype(np.uint64)) ^ key_of(seed))
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
