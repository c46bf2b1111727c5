"""Adapts the global batch of a run that goes on with fewer ranks than it began with."""

from __future__ import annotations

import math
from dataclasses import dataclass

ON_FEWER_SITES = ("keep", "shrink")
"""The rules. `keep`: the batch stays, and ranks take more of it, in more micro-batches. `shrink`:
ranks take the same share, and the learning rate follows the batch."""
RATES = ("linear", "sqrt", "none")
"""The ways in which the learning rate follows the batch. `linear`: it is multiplied by the same
share (Goyal et al., "Accurate, Large Minibatch SGD", arXiv 1706.02677, for SGD). `sqrt`: by its
square root (Malladi et al., arXiv 2205.10287, for Adam, whose steps do not grow with gradients).
`none`: it stays."""


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


def batch_with(full: FullBatch, ranks: int, rule: str, rate: str = "linear") -> Batch:
    """Return the global batch for `ranks` ranks; the full one for at least as many as initially.

    Args:
        full: The initial batch.
        ranks: Ranks that take part now, at least one.
        rule: One of ON_FEWER_SITES.
        rate: One of RATES.
    """
    if rule == "keep" or ranks >= full.ranks:
        return Batch(full.samples, 1.0)
    samples = max(ranks, round(full.samples * ranks / full.ranks))
    share = samples / full.samples
    return Batch(samples, {"linear": share, "sqrt": math.sqrt(share), "none": 1.0}[rate])
