"""Spreads a batch: chooses the number of sequences of each site.

A site's time follows its busiest rank, which has ceil(n / ranks) of its n sequences.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

_EVERY_PAIR_SITES = 6
"""Number of sites up to which every pair exchanges sequences; beyond, the slowest gives to the
fastest."""
_TAKERS = 3

Split = tuple[int, ...]
"""The sequences of each site."""


def busiest(split: Split, ranks: Sequence[int]) -> list[int]:
    """Return the sequences of each site's busiest rank."""
    return [-(-count // each) for count, each in zip(split, ranks, strict=True)]


def balanced(ranks: Sequence[int], sequence_s: Sequence[float], batch: int) -> Split | None:
    """Return the split whose slowest site is fastest; None: some rank would have no sequence.

    Greedy: each sequence goes to the site that finishes first with it, which is optimal for times
    that grow with the sequences.

    Args:
        ranks: Number of ranks of each site.
        sequence_s: Seconds of one sequence on one rank, by site.
        batch: Total number of sequences.
    """
    split = list(ranks)
    if sum(split) > batch:
        return None
    done = [(_next_s(site, split, ranks, sequence_s), site) for site in range(len(split))]
    heapq.heapify(done)
    for _ in range(batch - sum(split)):
        site = done[0][1]
        split[site] += 1
        heapq.heapreplace(done, (_next_s(site, split, ranks, sequence_s), site))
    return tuple(split)


def _next_s(
    site: int, split: Sequence[int], ranks: Sequence[int], sequence_s: Sequence[float]
) -> float:
    return -(-(split[site] + 1) // ranks[site]) * sequence_s[site]


def moves(
    split: Split, least: Sequence[int], unit: int, times_s: Sequence[float]
) -> Iterator[Split]:
    """Yield splits with sequences moved from one site to another: a few, twice as many, and so on.

    Args:
        split: The initial split.
        least: Smallest number of sequences by site.
        unit: Further number of sequences to move, beside one and a site's full ranks.
        times_s: Step of each site alone; with many sites the slowest ones give.
    """
    givers: Sequence[int] = range(len(split))
    takers = givers
    if len(split) > _EVERY_PAIR_SITES:
        order = sorted(givers, key=times_s.__getitem__)
        givers, takers = order[-_TAKERS:], order[:_TAKERS]
    for giver, taker in itertools.product(givers, takers):
        if giver == taker:
            continue
        # As many as reduce the giver's busiest rank by one, and raise the taker's by one.
        whole = (split[giver] - 1) % least[giver] + 1
        counts = {
            each << power
            for each in (1, unit, whole, least[giver], least[taker])
            for power in range((split[giver] // each).bit_length())
        }
        for count in sorted(counts):
            if split[giver] - count >= least[giver]:
                moved = list(split)
                moved[giver] -= count
                moved[taker] += count
                yield tuple(moved)
