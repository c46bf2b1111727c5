"""What of a bucket crosses together: flows of consecutive chunks that are one tree's. Pure.

A flow is what the simulation moves at once over a link. It has at least as many chunks as the link
has connections, and where a step would have more than FLOWS_PER_STEP hops, more: then a tree's turn
is that many chunks long. Of what a flow does on links that it shares with nobody meanwhile, nothing
is lost by it (topology/simulator/servers.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from topology.model.buckets import Bucket
from topology.model.wire_load import Load
from topology.trees.trees import ReductionPlan

FLOWS_PER_STEP = 10_000
"""Hops of flows in a step, about: a tenth of a second of simulating."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bucket that crosses as one flow."""

    tree: int
    """By its index in the plan; 0 in a gather."""
    raw_bytes: float
    wire_bytes: float
    granule: float
    """What crosses before the next site can go on, of the segment: 0 to 1."""
    codec: str
    """Of its tree."""


def segments_of(
    plan: ReductionPlan,
    codecs: tuple[str, ...],
    buckets: Sequence[Bucket],
    loads: Sequence[Load],
    *,
    is_fair: bool,
) -> tuple[tuple[Segment, ...], ...]:
    """Cut each bucket into what its trees carry at once.

    Args:
        plan: the trees.
        codecs: of each.
        buckets: float32, all that crosses.
        loads: of each bucket.
        is_fair: flows share links.
    """
    sites = plan.num_sites
    hops = sites * (sites - 1) if plan.is_gather else 2 * (sites - 1)
    num_chunks = sum(each.num_chunks for each in loads)
    turn_chunks = max(1.0, num_chunks * hops / FLOWS_PER_STEP)
    turns = (plan.tree_index(turn) for turn in itertools.count())
    found = []
    for bucket, load in zip(buckets, loads, strict=True):
        # Flows that share a link leave as a whole, so there each chunk is one.
        abreast = 1 if is_fair else load.num_abreast
        most = 1 if is_fair else load.most_abreast
        num_turns = max(1, round(load.num_chunks / turn_chunks))
        cuts = [load.num_chunks * turn // num_turns for turn in range(num_turns + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(cuts)]
        found.append(
            tuple(
                Segment(
                    tree,
                    bucket.raw_bytes * count / load.num_chunks,
                    load.chunk_bytes[tree] * count,
                    min(abreast, count) / count,
                    codecs[tree],
                )
                for tree, count in _flows(zip(sizes, turns, strict=False), most)
            )
        )
    return tuple(found)


def _flows(turns: Iterable[tuple[int, int]], abreast: int) -> Iterator[tuple[int, int]]:
    """Yield trees and numbers of chunks: a tree's turns together, at least `abreast` of them."""
    waiting: dict[int, int] = {}
    for num_chunks, tree in turns:
        waiting[tree] = waiting.get(tree, 0) + num_chunks
        if waiting[tree] >= abreast:
            yield tree, waiting.pop(tree)
    yield from waiting.items()
