"""How a bucket gets from the ranks that hold it to those that hand it over, and back.

Over sites, a bucket is elements of whole tensors, one after another. Those ranks of a site that
hold any of it share it: the j-th of them, its participants, hands over the elements [j s, (j+1) s),
s = ceil(numel / participants). An all-to-all brings each element there, and another one brings it
back to every rank that holds it: twice a shard's size, where the fabric is fast.

Where the ranks of all sites hold a tensor alike, and each element once, its buckets are in
rank-major order: first what the first participant holds, and so on. Then nothing moves.

Where several ranks hold the same, all of them have the same bits: whoever hands an element over
takes its own copy if it has one, and else all give in turn. Of a tensor that parts of a pipeline
share, each part gives, and gradients are added up.

Pure: no collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.sites.worker.exchange.holdings import Block, Holding, Runs, Span, blocks_of

_MOST_PADDING = 1 / 64
"""Zeros that cross with a tensor in rank-major order, at most, to its elements."""


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds a tensor in one site: unlike holdings, and the ranks of each, ascending."""

    groups: tuple[tuple[Holding, tuple[int, ...]], ...]
    is_tied: bool = False
    """Parts of a pipeline share it: groups of each hold all, and have some of its gradient."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold any of the tensor, ascending."""
        return tuple(sorted(rank for _, ranks in self.groups for rank in ranks))

    @property
    def shard_numel(self) -> int:
        """Elements of the largest shard."""
        return max(holding.numel for holding, _ in self.groups)

    @property
    def is_rank_major(self) -> bool:
        """Whether a bucket may have it in rank-major order: ranks hold almost equally many.

        Each element is held once, then. What is lacking to a full shard crosses as zeros.
        """
        is_held_once = all(len(ranks) == 1 for _, ranks in self.groups) and not self.is_tied
        if len(self.groups) == 1 or not is_held_once:
            return False
        numel = sum(holding.numel for holding, _ in self.groups)
        return len(self.groups) * self.shard_numel - numel <= _MOST_PADDING * numel

    def group_of(self, rank: int) -> tuple[Holding, tuple[int, ...]] | None:
        """Return what a rank holds, and which ranks hold the same; None: nothing."""
        return next((each for each in self.groups if rank in each[1]), None)


@dataclass(frozen=True, slots=True)
class Part:
    """The elements [start, stop) of a tensor, in a bucket: in rank-major order, of each shard."""

    holders: Holders
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Way:
    """One all-to-all, as one rank sees it. Counts are elements by participant."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    spans: tuple[Span, ...]
    """Where in what this rank holds they lie, by the other end."""
    blocks: tuple[Block, ...]
    """Where in its shard of the bucket they belong, by the other end."""


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's view of a bucket's way in and back."""

    numel: int
    """Elements of the bucket."""
    held_numel: int
    """Elements of the bucket that this rank holds."""
    ranks: tuple[int, ...]
    """The participants."""
    index: int
    """This rank among them."""
    held: tuple[Span, ...]
    """What this rank holds of each part, in its memory of the part's tensor; (0, 0): nothing."""
    there: Way | None
    """None: what this rank holds is its shard of the bucket, but for padding."""
    back: Way | None
    """None where `there` is."""
    adds: bool = False
    """What several participants send of one element is added, in their order; else it is equal."""

    @property
    def shard_numel(self) -> int:
        """Elements of a full shard."""
        return shard_numel(self.numel, len(self.ranks))


def shard_numel(numel: int, participants: int) -> int:
    """Return the elements of a full shard."""
    return -(-numel // participants)


def route(parts: tuple[Part, ...], rank: int, *, is_gradient: bool = False) -> Route:
    """Return a participant's route of a bucket that consists of `parts`, one after another.

    `is_gradient`: what parts of a pipeline that share a tensor send of it is added.
    """
    ranks = participants(parts)
    is_alone = len(ranks) == 1
    numel = sum(each.stop - each.start for each in parts)
    size = shard_numel(numel, len(ranks))
    own = ranks.index(rank)
    outgoing = [_pieces(parts, rank, index, size) for index in range(len(ranks))]
    incoming = [_pieces(parts, source, own, size) for source in ranks]
    given = [_given(each, rank, ranks, index) for index, each in enumerate(outgoing)]
    taken = [_given(each, source, ranks, own) for source, each in zip(ranks, incoming, strict=True)]
    held = []
    for each in parts:
        group = each.holders.group_of(rank)
        held.append((0, 0) if group is None else group[0].runs.within(each.start, each.stop).memory)
    return Route(
        numel=numel,
        held_numel=sum(stop - start for start, stop in held),
        ranks=ranks,
        index=own,
        held=tuple(held),
        there=None if is_alone else _way(given, taken),
        back=None if is_alone else _way(outgoing, incoming),
        adds=is_gradient and any(each.holders.is_tied for each in parts),
    )


def rank_major_route(parts: tuple[Part, ...], rank: int) -> Route:
    """Return a participant's route of a bucket in rank-major order."""
    ranks = participants(parts)
    held = []
    for each in parts:
        group = each.holders.group_of(rank)
        assert group is not None, "all participants hold a shard"
        held.append((min(each.start, group[0].numel), min(each.stop, group[0].numel)))
    return Route(
        numel=len(ranks) * sum(each.stop - each.start for each in parts),
        held_numel=sum(stop - start for start, stop in held),
        ranks=ranks,
        index=ranks.index(rank),
        held=tuple(held),
        there=None,
        back=None,
    )


def participants(parts: tuple[Part, ...]) -> tuple[int, ...]:
    """Return the ranks that hold any of these tensors, ascending."""
    return tuple(sorted({rank for each in parts for rank in each.holders.ranks}))


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one rank holds of one part in one participant's window of the bucket."""

    span: Span
    """In what the rank holds of the bucket."""
    runs: Runs
    place: int
    """Where the runs count from, in the window."""
    ranks: tuple[int, ...]
    """Who holds the same."""


def _pieces(parts: tuple[Part, ...], rank: int, index: int, size: int) -> list[_Piece]:
    """Return what a rank holds in the window of the participant of that index."""
    low, high = index * size, (index + 1) * size
    return [each for each in _held_in(parts, rank, low, high) if each.span[0] < each.span[1]]


def _held_in(parts: tuple[Part, ...], rank: int, low: int, high: int) -> Iterator[_Piece]:
    part_start = held_start = 0
    for part in parts:
        numel = part.stop - part.start
        group = part.holders.group_of(rank)
        if group is not None:
            runs, ranks = group[0].runs, group[1]
            first, last = runs.within(part.start, part.stop).memory
            start, stop = max(low - part_start, 0), min(high - part_start, numel)
            if start < stop:
                found = runs.within(part.start + start, part.start + stop)
                begin, end = (held_start + each - first for each in found.memory)
                if found.numel:
                    yield _Piece((begin, end), found, part_start + start - low, ranks)
            held_start += last - first
        part_start += numel


def _given(pieces: list[_Piece], rank: int, ranks: tuple[int, ...], index: int) -> list[_Piece]:
    """Return those pieces that `rank` gives to the participant of that index."""
    receiver = ranks[index]
    return [
        each
        for each in pieces
        if rank == (receiver if receiver in each.ranks else each.ranks[index % len(each.ranks)])
    ]


def _way(held: list[list[_Piece]], placed: list[list[_Piece]]) -> Way:
    """Return a way of what one rank holds, by window, and what lies in its window, by holder."""
    return Way(
        sent=tuple(sum(piece.span[1] - piece.span[0] for piece in each) for each in held),
        received=tuple(sum(piece.runs.numel for piece in each) for each in placed),
        spans=_joined(piece.span for each in held for piece in each),
        blocks=tuple(
            block.moved(piece.place)
            for each in placed
            for piece in each
            for block in blocks_of(piece.runs)
        ),
    )


def _joined(spans: Iterator[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)
