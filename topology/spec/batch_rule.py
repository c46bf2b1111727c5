"""What becomes of the global batch where a run goes on with fewer ranks than it began with."""

from __future__ import annotations

from dataclasses import dataclass

ON_FEWER_SITES = ("keep", "shrink")
"""The rules. `keep`: the batch stays, and each rank takes more of it, in more micro-batches.
`shrink`: each rank takes what it took, and the learning rate shrinks as the batch does (Goyal et
al., "Accurate, Large Minibatch SGD", 2017: the linear rule)."""


@dataclass(frozen=True, slots=True)
class FullBatch:
    """What a run began with, which counts are compared with."""

    samples: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What a run goes on with."""

    samples: int
    """Samples of a step, over all ranks; at least one for each."""
    learning_rate_scale: float
    """By which the learning rates of the full batch are multiplied."""


def batch_with(full: FullBatch, ranks: int, rule: str) -> Batch:
    """Return the global batch for so many ranks; as many as in the beginning, or more: the full.

    Args:
        full: Of the beginning.
        ranks: That take part now, at least one.
        rule: One of ON_FEWER_SITES.
    """
    if rule == "keep" or ranks >= full.ranks:
        return Batch(full.samples, 1.0)
    samples = max(ranks, round(full.samples * ranks / full.ranks))
    return Batch(samples, samples / full.samples)
