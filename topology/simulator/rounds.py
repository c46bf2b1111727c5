"""Rounds of local steps: which part of the model crosses after which step, and is back when. Pure.

DiLoCo and Streaming DiLoCo (Douillard et al., arXiv 2311.08105 and 2501.18512): sites train by
themselves for H steps and exchange how far their parameters have moved. Of P fragments, each is
sent once a round, evenly spread over it, at the end of a step; a site does not begin its step
tau + 1 after that one before the result is there. DiLoCo itself is P = 1, tau = 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from topology.model.buckets import FLOAT32_BYTES, Bucket

BUCKETS_MAX = 256
"""Of a model, about: more of them tell nothing that a picture could show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How seldom sites exchange."""

    steps: int
    """H, between two exchanges of the same fragment."""
    fragments: int = 1
    """P, of equal size."""
    overlap_steps: int = 0
    """tau, that a result may come later."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: want 1 at least, got {self.steps}")
        if not 1 <= self.fragments <= self.steps:
            raise ValueError(
                f"fragments: want 1 to {self.steps}, the steps of a round; got {self.fragments}"
            )
        if not 0 <= self.overlap_steps <= self.steps:
            raise ValueError(
                f"overlap_steps: want 0 to {self.steps}, the steps of a round; "
                f"got {self.overlap_steps}"
            )

    def sent_after(self, fragment: int) -> int:
        """Return the step of a round, from 1, at whose end a fragment is sent."""
        return self.steps * (fragment + 1) // self.fragments

    def num_sent(self, fragment: int, steps: int) -> int:
        """Return how often a fragment is sent in the first `steps` steps of a run."""
        first = self.sent_after(fragment)
        return 0 if steps < first else (steps - first) // self.steps + 1

    def in_words(self) -> str:
        """Return them for people: `rounds of 100 steps, 4 fragments, each back 1 step later`."""
        words = [f"rounds of {self.steps} steps"]
        if self.fragments > 1:
            words.append(f"{self.fragments} fragments")
        if self.overlap_steps:
            plural = "s" if self.overlap_steps > 1 else ""
            words.append(f"each back {self.overlap_steps} step{plural} later")
        return ", ".join(words)


def fragment_buckets(
    total_bytes: int, rounds: Rounds, bucket_bytes: int
) -> tuple[tuple[Bucket, ...], tuple[int, ...]]:
    """Return all buckets of a round, and which fragment each belongs to.

    Args:
        total_bytes: of float32, the model.
        rounds: its fragments.
        bucket_bytes: that a bucket has at most, but for fragments of many: a few hundred in all.
    """
    elements = total_bytes // FLOAT32_BYTES
    cuts = [elements * each // rounds.fragments for each in range(rounds.fragments + 1)]
    buckets: list[Bucket] = []
    owners: list[int] = []
    for fragment, (begin, end) in enumerate(itertools.pairwise(cuts)):
        size_bytes = FLOAT32_BYTES * (end - begin)
        count = math.ceil(size_bytes / max(bucket_bytes, total_bytes / BUCKETS_MAX))
        edges = [begin + (end - begin) * each // count for each in range(count + 1)]
        buckets += [
            Bucket(FLOAT32_BYTES * (last - first), 0) for first, last in itertools.pairwise(edges)
        ]
        owners += [fragment] * count
    return tuple(buckets), tuple(owners)


@dataclass(frozen=True, slots=True)
class RoundWork:
    """What of a step's work belongs to rounds.

    Buckets are those that cross in a round, all fragments'.
    """

    rounds: Rounds
    owners: tuple[int, ...]
    """Of each bucket: its fragment."""
    gather_s: tuple[tuple[float, ...], ...]
    """By site and bucket: what its result takes inside the site."""

    def due(self) -> dict[int, tuple[int, ...]]:
        """Return the buckets that leave at the end of a step, by its number in a round, from 0."""
        found: dict[int, tuple[int, ...]] = {}
        for bucket, fragment in enumerate(self.owners):
            step = self.rounds.sent_after(fragment) - 1
            found[step] = (*found.get(step, ()), bucket)
        return found

    def exchanged(self, buckets: Sequence[Bucket], steps: int) -> float:
        """Return what the first `steps` steps have sent, in steps' worth: their mean is 1."""
        total = sum(each.raw_bytes for each in buckets)
        sent = sum(
            each.raw_bytes * self.rounds.num_sent(fragment, steps)
            for each, fragment in zip(buckets, self.owners, strict=True)
        )
        return self.rounds.steps * sent / total
