"""The parts of the global batch that sites get, decided again while a run goes on. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.topology.spec.batch_rule import FullBatch, batch_with

if TYPE_CHECKING:
    from isthmus.topology.spec.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class Shares:
    """A division of the global batch, once it is not the one that the run began with."""

    number: int = 0
    """The epoch that decided it; 0: the run has the division that it began with."""
    parts: tuple[int, ...] = ()
    """Samples of each site, in the run's order. Those who take part now get exactly these; with
    others, the batch is divided in proportion to them."""


AS_BEGUN = Shares()


def place_of(samples: int, weights: Sequence[int], site: int) -> range:
    """Return a site's places in a batch that is divided in proportion to weights."""
    before, total = sum(weights[:site]), sum(weights)
    return range(samples * before // total, samples * (before + weights[site]) // total)


def whole_units(parts: Sequence[int], readers: Sequence[int], micro_batch: int) -> tuple[int, ...]:
    """Return by how many samples each site's part may change.

    What ranks have stays as whole as in the beginning: whole micro-batches, or the largest pieces
    of one that all ranks had whole; as many for each rank of a site, unless they differed there.

    Args:
        parts: What sites began with.
        readers: How many ranks of each divide it among themselves.
        micro_batch: Samples that a rank takes at once, at most.
    """
    even = [part // each for part, each in zip(parts, readers, strict=True) if not part % each]
    piece = math.gcd(micro_batch, *even)
    return tuple(
        1 if part % each else piece * each for part, each in zip(parts, readers, strict=True)
    )


def divided_by_speed(
    samples: int, sample_s: Sequence[float], units: Sequence[int], readers: Sequence[int]
) -> tuple[int, ...]:
    """Return the division of a batch whose slowest site computes for the shortest time.

    Greedy: each unit goes to the site that is done first with it. Empty: whole units do not add up
    to the batch.

    Args:
        samples: Of the batch.
        sample_s: Seconds that each site computes for a sample.
        units: What a part consists of (`whole_units`).
        readers: The fewest samples of each site.
    """
    split = [max(each) for each in zip(units, readers, strict=True)]
    left = samples - sum(split)
    ready = [((part + units[at]) * sample_s[at], at) for at, part in enumerate(split)]
    heapq.heapify(ready)
    while left > 0 and ready:
        _, site = heapq.heappop(ready)
        if units[site] > left:
            continue  # nothing is left that this site could have
        split[site] += units[site]
        left -= units[site]
        heapq.heappush(ready, ((split[site] + units[site]) * sample_s[site], site))
    return () if left else tuple(split)


def parts_of(spec: RunSpec, members: Sequence[str], shares: Shares) -> tuple[int, ...]:
    """Return how many samples of a step each of a run's members gets, in their order."""
    job = spec.job
    placed = {each.site: each.sequences for each in job.placement}
    began = {each.name: placed.get(each.name, each.num_ranks) for each in spec.topology.sites}
    first, left = (sum(began[name] for name in names) for names in (spec.first_sites, members))
    samples = batch_with(FullBatch(job.global_batch, first), left, job.on_fewer_sites).samples
    weights = dict(zip(spec.site_names, shares.parts, strict=True)) if shares.parts else began
    present = [weights[name] for name in members]
    return tuple(len(place_of(samples, present, at)) for at in range(len(members)))
