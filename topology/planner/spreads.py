"""The spread of a batch: how many sequences of a step each site takes.

A site's time follows its busiest rank, which has ceil(n / ranks) of its n sequences.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

_EVERY_PAIR_SITES = 6
"""The most sites where every two exchange sequences; of more, the slowest gives to the fastest."""
_TAKERS = 3

Split = tuple[int, ...]
"""The sequences of each site."""


def busiest(split: Split, ranks: Sequence[int]) -> list[int]:
    """Return the sequences of each site's busiest rank."""
    return [-(-count // each) for count, each in zip(split, ranks, strict=True)]


def balanced(ranks: Sequence[int], sequence_s: Sequence[float], batch: int) -> Split | None:
    """Return the split whose slowest site is fastest; None where ranks would have no sequence.

    One sequence after another goes to the site that is done first with it: for times that only
    grow with what a site has, nothing makes the slowest faster.

    Args:
        ranks: Of each site.
        sequence_s: Of one sequence on one rank of each site.
        batch: Sequences in all.
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
        split: To move from.
        least: Sequences that each site has at least.
        unit: Of sequences that are moved, beside one and what fills a site's ranks.
        times_s: Of each site by itself: of many sites the slowest ones give.
    """
    givers: Sequence[int] = range(len(split))
    takers = givers
    if len(split) > _EVERY_PAIR_SITES:
        order = sorted(givers, key=times_s.__getitem__)
        givers, takers = order[-_TAKERS:], order[:_TAKERS]
    for giver, taker in itertools.product(givers, takers):
        if giver == taker:
            continue
        # What leaves the giver's busiest rank with one less, and the taker's with one more.
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
