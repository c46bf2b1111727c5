"""Weighted stars of three sites: a menu that is the same whatever their links carry. Pure, by arrays.

A spanning tree of three sites is a star, so what several of them can differ in are three weights (and their
roots; a star's centre serves). A linear program would give those that fit the rates, but has to be rounded,
and what it gives for a wider link may then be worse than what it gave before. What was best of a menu that
is always the same is still there.

Legend of shapes: N mixes, K stars, that at the first site first, T turns.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from topology.trees.trees import ReductionPlan, star

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]

NUM_SITES = 3
_TOTALS = (*range(5, 25), 48)
"""What all weights together are. Small ones share out few chunks well; what adds up to less than these is among
topology.planner.ways. The last is a grid over all shares, for many chunks; with it, of 160 random topologies two lost
up to 0.4 % against the program's weights, and 69 gained 0.8 %, the median of them (docs/planner.md)."""
_TIMES = range(24, 41)
"""How many times as much the wide one of two stars may carry, beyond that: for narrow links."""


@functools.cache
def weights_nk() -> Counts:
    """Return the stars' weights without common divisors, 0 for none; shape (N, K), the least totals first."""
    found = set()
    for total in _TOTALS:
        for weights in _weights(total):
            shared = math.gcd(*weights)
            found.add((total // shared, *(each // shared for each in weights)))
    for times in _TIMES:
        found.update((1 + times, *weights) for weights in itertools.permutations((0, 1, times)))
    ordered = sorted(each for each in found if each[0] >= min(_TOTALS))
    return np.array([weights for _, *weights in ordered], dtype=np.int64)


def _weights(total: int) -> Iterator[tuple[int, ...]]:
    """Yield three weights with that sum, of which two at least are not 0."""
    for first, second in itertools.product(range(total), repeat=2):
        if first + second <= total and (first or second):
            yield first, second, total - first - second


def chunks_nk(num_chunks: int) -> Counts:
    """Return how many of the first chunks each star of each mix carries; shape (N, K)."""
    weights = weights_nk()
    periods, rest = np.divmod(num_chunks, weights.sum(axis=1))
    begun = _begun_nkt()[np.arange(len(weights)), :, rest]
    found: Counts = periods[:, None] * weights + begun
    return found


@functools.cache
def _begun_nkt() -> Counts:
    """Return how many chunks stars have before each turn of a period; shape (N, K, T).

    By the rule of topology.trees.trees, for all mixes side by side.
    """
    weights = weights_nk()
    totals = weights.sum(axis=1, keepdims=True)
    taken = np.zeros_like(weights)
    found = np.zeros((*weights.shape, int(totals.max())), dtype=np.int64)
    for turn in range(found.shape[-1]):
        found[..., turn] = taken
        may_from = taken * totals // np.maximum(weights, 1)
        must_before = -(-(taken + 1) * totals // np.maximum(weights, 1))
        order = (must_before * (totals + 1) + may_from) * NUM_SITES + np.arange(NUM_SITES)
        order[(may_from > turn) | (weights == 0)] = np.iinfo(np.int64).max
        taken[np.arange(len(taken)), order.argmin(axis=1)] += 1
    return found


@functools.lru_cache(maxsize=1024)
def mix_plan(mix: int) -> ReductionPlan:
    """Return the reduction of one mix."""
    weights = weights_nk()[mix].tolist()
    trees = tuple(star(NUM_SITES, hub, weight) for hub, weight in enumerate(weights) if weight)
    return ReductionPlan(NUM_SITES, trees, f"{len(trees)} weighted trees")
