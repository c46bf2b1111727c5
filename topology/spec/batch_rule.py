"""Adapts the global batch of a run that goes on with fewer ranks than it began with."""

from __future__ import annotations

from dataclasses import dataclass

ON_FEWER_SITES = ("keep", "shrink")
"""The rules. `keep`: the batch stays, and ranks take more of it, in more micro-batches. `shrink`:
ranks take the same share, and the learning rate shrinks with the batch (Goyal et al., "Accurate,
Large Minibatch SGD", 2017: the linear rule)."""


@dataclass(frozen=True, slots=True)
class FullBatch:
    """The initial ranks and batch of a run."""

    samples: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The current batch of a run."""

    samples: int
    """Samples of a step, over all ranks; at least one for each."""
    learning_rate_scale: float
    """Factor on the learning rates of the full batch."""


def batch_with(full: FullBatch, ranks: int, rule: str) -> Batch:
    """Return the global batch for `ranks` ranks; the full one for at least as many as initially.

    Args:
        full: The initial batch.
        ranks: Ranks that take part now, at least one.
        rule: One of ON_FEWER_SITES.
    """
    if rule == "keep" or ranks >= full.ranks:
        return Batch(full.samples, 1.0)
    samples = max(ranks, round(full.samples * ranks / full.ranks))
    return Batch(samples, samples / full.samples)
