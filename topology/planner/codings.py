"""Which codecs the links of a reduction may have: one for all, or one for each link. Pure.

A tree's chunks travel as the smallest codec of its links (topology/trees/link_codecs.py), so what
links' codecs come to is a codec for each tree. Of all assignments that come to the same, one is
looked at: each link has the largest codec that crosses it, and `exchange.codec` is that of most
links. Not every choice of codecs for the trees can be had: each tree needs a link on which its own
is the largest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from topology.codec_costs import RELATIVE_ERRORS, usual_ratio
from topology.job import CODECS, Exchange, LinkCodec
from topology.trees.pairs import Edge, Pairs, edge
from topology.trees.trees import ReductionPlan

EVERY_CODING_MAX = 3**6
"""Assignments of codecs to links that are all looked at: those of four sites and three codecs."""
_TOLD = 3
"""Links whose codecs are named to people."""
_PARTS = 4
"""Of more links: where they are parted, by their rates, into narrow and wide ones."""

Vector = tuple[str, ...]
"""A codec for each tree."""


@dataclasses.dataclass(frozen=True, slots=True)
class Coding:
    """The codecs of all links, for one reduction."""

    codec: str
    """Of the links that are not listed."""
    links: tuple[LinkCodec, ...]
    loss: float
    """The mean square of the chunks' relative errors: what decides between equally fast ones."""

    @property
    def codecs(self) -> tuple[str, ...]:
        """All that there are, each once, the usual one first."""
        return tuple(dict.fromkeys((self.codec, *(each.codec for each in self.links))))

    def __str__(self) -> str:
        """Return it for people: `fp32, and int8 between a and b`."""
        told = [f"{each.codec} between {' and '.join(each.between)}" for each in self.links]
        more = [f"others on {len(told) - _TOLD} more links"] if len(told) > _TOLD else []
        return ", and ".join((self.codec, *told[:_TOLD], *more))

    def of(self, exchange: Exchange) -> Exchange:
        """Return an exchange with these codecs."""
        return dataclasses.replace(exchange, codec=self.codec, codecs=self.links)


def one_for_all(codecs: Sequence[str], exchange: Exchange) -> list[Coding]:
    """Return each permitted codec for all links, but for those that the job itself gives one."""
    return [Coding(each, exchange.codecs, _loss([each], [1])) for each in codecs]


def by_link(
    plan: ReductionPlan, pairs: Pairs, codecs: Sequence[str], exchange: Exchange
) -> list[Coding]:
    """Return codecs of single links, where several trees make a difference of them.

    All that there are, if they are at most EVERY_CODING_MAX; else the smaller of two on the narrow
    links and the larger on the wide ones. None where the job gives links codecs itself: it is asked
    for no others.

    Args:
        plan: Over the sites.
        pairs: Of them.
        codecs: That are permitted.
        exchange: Of the job.
    """
    if exchange.codecs or len(plan.trees) < 2:
        return []
    links = sorted({edge(*hop) for tree in plan.trees for hop in tree.parent.items()})
    ordered = sorted(codecs, key=_size)
    if len(codecs) ** len(links) <= EVERY_CODING_MAX:
        assigned: Iterable[tuple[int, ...]] = itertools.product(
            range(len(codecs)), repeat=len(links)
        )
    else:
        assigned = _narrow_and_wide(pairs, links, len(codecs))
    return [
        _coding(plan, pairs.names, tuple(ordered[index] for index in vector))
        for vector in _vectors(plan, links, assigned)
        if len(set(vector)) > 1
    ]


def _narrow_and_wide(pairs: Pairs, links: Sequence[Edge], count: int) -> Iterator[tuple[int, ...]]:
    """Yield a codec, by its place in the order of sizes, for each link."""
    rates = [pairs.rate(*each) for each in links]
    steps = sorted(set(rates))[1:]
    for wide in dict.fromkeys(
        steps[len(steps) * part // _PARTS] for part in range(_PARTS if steps else 0)
    ):
        for small, large in itertools.combinations(range(count), 2):
            yield tuple(large if rate >= wide else small for rate in rates)


def _vectors(
    plan: ReductionPlan, links: Sequence[Edge], assigned: Iterable[tuple[int, ...]]
) -> Iterable[tuple[int, ...]]:
    """Return what links' codecs come to for trees, each once: the least of each tree's links."""
    place = {each: index for index, each in enumerate(links)}
    trees = [[place[edge(*hop)] for hop in tree.parent.items()] for tree in plan.trees]
    return dict.fromkeys(
        tuple([min([codecs[link] for link in tree]) for tree in trees]) for codecs in assigned
    )


def _coding(plan: ReductionPlan, names: Sequence[str], vector: Vector) -> Coding:
    """Return the links' codecs that give each tree its own."""
    largest: dict[Edge, str] = {}
    for tree, codec in zip(plan.trees, vector, strict=True):
        for hop in tree.parent.items():
            largest[edge(*hop)] = max(largest.get(edge(*hop), codec), codec, key=_size)
    counts = Counter(largest.values())
    usual = max(counts, key=lambda codec: (counts[codec], _size(codec)))
    links = tuple(
        LinkCodec(between=(names[one], names[other]), codec=codec)
        for (one, other), codec in sorted(largest.items())
        if codec != usual
    )
    return Coding(usual, links, _loss(vector, [tree.weight for tree in plan.trees]))


def _size(codec: str) -> tuple[float, int]:
    """Return what orders codecs by their bytes, as `link_codecs.smallest` does."""
    return usual_ratio(codec), CODECS.index(codec)


def _loss(vector: Sequence[str], weights: Sequence[int]) -> float:
    squares = [RELATIVE_ERRORS[codec] ** 2 for codec in vector]
    weighted = sum(square * weight for square, weight in zip(squares, weights, strict=True))
    return weighted / sum(weights)
