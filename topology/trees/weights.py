"""From what trees carry in the best packing to whole weights that are small and nearly as good."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from topology.trees.packing import Packing
from topology.trees.pairs import Edge, Pairs
from topology.trees.trees import TREES_MAX, WEIGHT_MAX

PERIOD_MAX = 256
"""Of all weights together. Few, so that few chunks are already shared out right."""
NEAR_ENOUGH = Fraction(101, 100)
"""Of the busiest link's time."""


def small_weights(packing: Packing, pairs: Pairs, near_enough: Fraction = NEAR_ENOUGH) -> list[int]:
    """Return a weight for each tree, 0 to WEIGHT_MAX: of the least total that is near enough.

    That is a busiest link that takes at most so many times as long as in the packing. Where no
    total up to PERIOD_MAX is, the one whose busiest link is least busy.
    """
    carried = [part for _, part in packing.trees]
    total = sum(carried, Fraction(0))
    best: tuple[Fraction, list[int]] | None = None
    for period in range(1, PERIOD_MAX + 1):
        weights = _apportioned([part / total for part in carried], period)
        if max(weights) > WEIGHT_MAX and len(carried) > 1:
            continue
        busiest = _busiest(packing, weights, pairs) / period
        if best is None or busiest < best[0]:
            best = busiest, weights
        if busiest * packing.bytes_per_s <= near_enough:
            break
    assert best is not None
    assert len(best[1]) <= TREES_MAX
    return best[1]


def _apportioned(shares: Sequence[Fraction], period: int) -> list[int]:
    """Return the shares of `period` in whole numbers, by the largest remainders."""
    exact = [share * period for share in shares]
    weights = [int(each) for each in exact]
    by_rest = sorted(range(len(shares)), key=lambda index: (weights[index] - exact[index], index))
    for index in by_rest[: period - sum(weights)]:
        weights[index] += 1
    return weights


def _busiest(packing: Packing, weights: Sequence[int], pairs: Pairs) -> Fraction:
    """Return how long the busiest edge takes for as many chunks as the weights say."""
    loads: dict[Edge, int] = {}
    for (edges, _), weight in zip(packing.trees, weights, strict=True):
        load = weight * pairs.load(edges)
        for each in edges:
            loads[each] = loads.get(each, 0) + load
    return max(Fraction(load, pairs.bytes_per_s[each]) for each, load in loads.items())
