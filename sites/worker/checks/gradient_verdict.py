"""Whose micro-batch all ranks compute, and which of them compute it wrongly. Pure.

All ranks have the same parameters, inputs, buffers and random numbers, so their gradients are equal
bit for bit where hardware and versions are the same: where they are not, the fewer are wrong. Ranks
of unlike kinds round otherwise. How far they are apart, for each tensor, is learnt from the first
differences; what is much further apart later is wrong.

Of a gradient a rank tells a hash, and a sketch: a few sums of its elements with signs drawn alike
everywhere. The difference of two sketches is about as long as that of the gradients.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SKETCH_NUMEL = 8
"""Sums of a tensor's sketch."""
LEARNT = 4
"""So many differences between unlike kinds of ranks are taken for rounding before any is judged."""
MARGIN = 32.0
"""What is further apart than this times the largest of them is wrong."""
_FLOOR = 2.0**-20
"""Less than this is rounding, whatever was seen."""

Floats = npt.NDArray[np.float32]


def whose_turn(number: int, ranks_per_site: Sequence[int], gone: Collection[int] = ()) -> int:
    """Return the rank whose micro-batch is computed, by its place among the ranks of all sites.

    Sites that are not gone in turn, and of each its ranks in turn: so over time every rank's.
    """
    sites = [at for at in range(len(ranks_per_site)) if at not in gone] or [0]
    site, before = sites[number % len(sites)], number // len(sites)
    return sum(ranks_per_site[:site]) + before % ranks_per_site[site]


@dataclass(frozen=True, slots=True)
class Spread:
    """How far gradients of unlike kinds of ranks have been apart, relative to their lengths."""

    largest: Floats
    """By tensor."""
    count: int = 0
    """Number of differences that the spread is from; few of them say nothing yet."""

    @property
    def limits(self) -> Floats:
        """What is further apart is wrong: float32, by tensor."""
        if self.count < LEARNT:
            return np.full_like(self.largest, np.inf)
        limits: Floats = np.maximum(self.largest * np.float32(MARGIN), np.float32(_FLOOR))
        return limits

    @classmethod
    def of_all(cls, told: Iterable[Spread]) -> Spread:
        """Return what ranks know together: one that has come back may know less."""
        known = [*told]
        largest = np.maximum.reduce([each.largest for each in known])
        return cls(largest, max(each.count for each in known))

    def with_(self, distances: Floats) -> Spread:
        """Return the spread with one more difference that was taken for rounding."""
        return Spread(np.maximum(self.largest, distances), self.count + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What one rank has computed twice, and tells all others."""

    kind: str
    """Its hardware and versions: of one kind, the same bits are wanted."""
    place: str
    """Where it computes, for people."""
    repeats: bool
    """Its kernels give the same bits each time."""
    hashes: tuple[tuple[int, ...], tuple[int, ...]]
    """xxh3-64 of each tensor's gradient, each time; 0: it has none."""
    sketch: Floats
    """Sketches of the second computation: float32[tensors, SKETCH_NUMEL]."""
    spread: Spread

    @property
    def is_steady(self) -> bool:
        """Whether it has computed the same bits each time."""
        return self.hashes[0] == self.hashes[1]

    def to_bytes(self) -> bytes:
        """Return it for the wire."""
        fields = [self.kind, self.place, self.repeats, self.spread.count, len(self.hashes[0])]
        head = json.dumps(fields).encode() + b"\n"
        hashes = np.array(self.hashes, dtype="<u8")
        parts = [hashes, self.sketch.astype("<f4"), self.spread.largest.astype("<f4")]
        return head + b"".join(each.tobytes() for each in parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Computed:
        """Return what another rank's `to_bytes` made."""
        head, _, body = data.partition(b"\n")
        kind, place, repeats, count, tensors = json.loads(head)
        first, again = np.frombuffer(body, "<u8", 2 * tensors).reshape(2, tensors).tolist()
        floats = np.frombuffer(body, "<f4", offset=2 * 8 * tensors).astype(np.float32)
        size = tensors * SKETCH_NUMEL
        return cls(
            kind=kind,
            place=place,
            repeats=repeats,
            hashes=(tuple(first), tuple(again)),
            sketch=floats[:size].reshape(tensors, SKETCH_NUMEL),
            spread=Spread(floats[size:], count),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who has computed wrongly."""

    wrong: Mapping[int, int]
    """By rank, the first tensor that is wrong; nobody: all differences are rounding."""
    is_tied: bool = False
    """One of them has, and nothing tells which."""
    spread: Spread | None = None
    """What has been learnt, where nobody is wrong."""


def judge(ranks: Mapping[int, Computed]) -> Verdict:
    """Return which of these ranks, at least one, have computed wrongly."""
    spread = Spread.of_all(each.spread for each in ranks.values())
    apart = _distances({rank: each.sketch for rank, each in ranks.items()})
    unsteady = {rank for rank, each in ranks.items() if not each.is_steady}
    wrong: dict[int, int] = {}
    if 2 * len(unsteady) <= len(ranks):  # else the script itself does not repeat its bits
        for rank in unsteady:
            if ranks[rank].repeats:
                wrong[rank] = _first_unlike(*ranks[rank].hashes)
    tied: dict[int, int] = {}
    for kind in {each.kind for each in ranks.values()}:
        told = {r: c.hashes[1] for r, c in ranks.items() if c.kind == kind and c.is_steady}
        (usual, count), *others = Counter(told.values()).most_common() or [((), 0)]
        unlike = {r: _first_unlike(each, usual) for r, each in told.items() if each != usual}
        if 2 * count > len(told):
            wrong |= unlike
        elif others:
            tied |= unlike | {
                r: _first_unlike(each, others[0][0]) for r, each in told.items() if each == usual
            }
    for rank, far in apart.items():
        beyond = np.flatnonzero(~(far <= spread.limits))
        if rank not in wrong and beyond.size and (rank in tied or _rounds(rank, ranks)):
            wrong[rank] = int(beyond[0])
    if not wrong and tied:
        return Verdict(tied, is_tied=True)
    if wrong:
        return Verdict(wrong)
    largest: Floats = np.maximum.reduce([*apart.values()])
    return Verdict({}, spread=spread.with_(largest))


def _rounds(rank: int, ranks: Mapping[int, Computed]) -> bool:
    """Whether what a rank has computed may differ from what others have by rounding."""
    own = ranks[rank]
    return not own.is_steady or any(each.kind != own.kind for each in ranks.values())


def _first_unlike(one: Sequence[int], other: Sequence[int]) -> int:
    return next(at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])


def _distances(sketches: Mapping[int, Floats]) -> dict[int, Floats]:
    """Return how far each rank's tensors are from what is in the middle, relative to its length."""
    all_ = np.stack([*sketches.values()]).astype(np.float64)
    ordered = np.sort(all_, axis=0)  # what is not a number comes last
    with np.errstate(invalid="ignore", over="ignore"):
        middle = (ordered[(len(all_) - 1) // 2] + ordered[len(all_) // 2]) / 2
        length = np.linalg.norm(middle, axis=1)
        away = np.linalg.norm(all_ - middle, axis=2)
        found = away / np.maximum(length, np.finfo(np.float32).tiny)
    found = np.where(np.isnan(found), np.inf, found)
    found[:, ~np.isfinite(length)] = 0.0  # it tells nothing
    return dict(zip(sketches, found.astype(np.float32), strict=True))
