"""The spread of a batch: how many sequences of a step each site takes.

A site's time follows its busiest rank, which has ceil(n / ranks) of its n sequences.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

EVERY_SPLIT_MAX = 300
"""The most splits of the batch that are all tried; of more, only those that single moves lead
to."""
_MOVES_MAX = 60
_GAIN = 1e-4
"""Share of a step that moving sequences has to save."""
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


def in_proportion(weights: Sequence[float], batch: int, unit: int) -> Split:
    """Return a batch spread by weight in multiples of `unit`; the heaviest has the rest."""
    total = math.fsum(weights)
    split = [max(1, int(batch * weight / total / unit) * unit) for weight in weights]
    split[weights.index(max(weights))] += batch - sum(split)
    return tuple(split)


def improved(
    begin: Split,
    least: Sequence[int],
    units: Sequence[int],
    steps_s: Callable[[Sequence[Split]], Sequence[float]],
    order_s: Callable[[Split], Sequence[float]],
) -> Split:
    """Return a split that is at least as fast as `begin`.

    Where there are at most EVERY_SPLIT_MAX, the fastest of all. Else as far as moving sequences
    from one site to another leads.

    Args:
        begin: To look from.
        least: Sequences that each site has at least.
        units: Of sequences that are moved, the twofold, fourfold ... of each.
        steps_s: Returns the steps of many splits, which is faster than one by one.
        order_s: Returns what each site takes by itself: the slowest ones give.
    """
    every = every_split(least, sum(begin))
    if every is not None:
        timed = steps_s([begin, *every])
        return [begin, *every][min(range(len(timed)), key=timed.__getitem__)]
    best, [best_s] = begin, steps_s([begin])
    for _ in range(_MOVES_MAX):
        moved = sorted(set(_moves(best, least, units, order_s(best))))
        if not moved:
            break
        timed = steps_s(moved)
        place = min(range(len(timed)), key=timed.__getitem__)
        if timed[place] >= (1 - _GAIN) * best_s:
            break
        best, best_s = moved[place], timed[place]
    return best


def every_split(least: Sequence[int], batch: int) -> list[Split] | None:
    """Return all splits that give each site its least; None: more than EVERY_SPLIT_MAX."""
    rest = batch - sum(least)
    if rest < 0 or math.comb(rest + len(least) - 1, len(least) - 1) > EVERY_SPLIT_MAX:
        return None
    bars = itertools.combinations(range(rest + len(least) - 1), len(least) - 1)
    return [
        tuple(
            more - 1 - before + each
            for (before, more), each in zip(
                itertools.pairwise((-1, *chosen, rest + len(least) - 1)), least, strict=True
            )
        )
        for chosen in bars
    ]


def _moves(
    split: Split, least: Sequence[int], units: Sequence[int], times_s: Sequence[float]
) -> Iterator[Split]:
    """Yield splits with sequences moved from one site to another."""
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
        for unit in {whole, *units, least[giver], least[taker]}:
            count = unit
            while split[giver] - count >= least[giver]:
                moved = list(split)
                moved[giver] -= count
                moved[taker] += count
                yield tuple(moved)
                count *= 2


def neighbours(split: Split, least: Sequence[int]) -> Iterator[Split]:
    """Yield splits with a few sequences moved: as many as some site has at least."""
    for giver, taker in itertools.permutations(range(len(split)), 2):
        for count in {least[giver], least[taker]}:
            if split[giver] - count >= least[giver]:
                moved = list(split)
                moved[giver] -= count
                moved[taker] += count
                yield tuple(moved)
