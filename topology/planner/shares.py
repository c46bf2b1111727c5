"""How many sequences of a step each site takes.

A site's time follows its busiest rank, which has ceil(n / ranks) of its n sequences.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

EVERY_SPLIT_MAX = 300
"""Of the batch over the sites, that are all tried; of more, only what single moves lead to."""
_MOVES_MAX = 400

Split = tuple[int, ...]
"""Sequences of each site."""


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


def improved(
    begin: Split,
    ranks: Sequence[int],
    micro_batch: int,
    steps_s: Callable[[Sequence[Split]], Sequence[float]],
) -> tuple[Split, float]:
    """Return a split that is at least as fast as `begin`, and its seconds.

    Where there are at most EVERY_SPLIT_MAX, the fastest of all. Else as far as moving sequences
    from one site to another leads: so many that the giver's busiest rank has one less, or full
    micro-batches only, for the last one's length is the time that hides the exchange.

    Args:
        begin: To look from.
        ranks: Of each site.
        micro_batch: Sequences of a full one.
        steps_s: Returns the steps of many splits, which is faster than one by one.
    """
    every = every_split(ranks, sum(begin))
    if every is not None:
        return _fastest([begin, *every], steps_s)
    best, best_s = _fastest([begin], steps_s)
    for _ in range(_MOVES_MAX):
        moved = sorted(_moves(best, ranks, micro_batch))
        if not moved:
            break
        least, least_s = _fastest(moved, steps_s)
        if least_s >= best_s:
            break
        best, best_s = least, least_s
    return best, best_s


def _fastest(
    splits: Sequence[Split], steps_s: Callable[[Sequence[Split]], Sequence[float]]
) -> tuple[Split, float]:
    """Return the first of the fastest splits, and its seconds."""
    timed = steps_s(splits)
    index = min(range(len(splits)), key=timed.__getitem__)
    return splits[index], timed[index]


def every_split(ranks: Sequence[int], batch: int) -> list[Split] | None:
    """Return all splits that give every rank a sequence; None: more than EVERY_SPLIT_MAX."""
    if math.comb(batch - sum(ranks) + len(ranks) - 1, len(ranks) - 1) > EVERY_SPLIT_MAX:
        return None
    return [*_every(ranks, batch)]


def _every(ranks: Sequence[int], batch: int) -> Iterator[Split]:
    """Yield each split that gives every rank a sequence."""
    if len(ranks) == 1:
        yield (batch,)
        return
    rest = sum(ranks[1:])
    for first in range(ranks[0], batch - rest + 1):
        for others in _every(ranks[1:], batch - first):
            yield (first, *others)


def _moves(split: Split, ranks: Sequence[int], micro_batch: int) -> Iterator[Split]:
    for giver, count in enumerate(split):
        most = -(-count // ranks[giver])
        full = (most - 1) // micro_batch * micro_batch
        for left in {ranks[giver] * (most - 1), ranks[giver] * full}:
            if left < ranks[giver]:
                continue
            for taker in range(len(split)):
                if taker != giver:
                    moved = list(split)
                    moved[giver] = left
                    moved[taker] += count - left
                    yield tuple(moved)
