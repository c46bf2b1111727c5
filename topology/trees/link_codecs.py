"""The codec of each tree's chunks, where links have codecs of their own. Pure.

A result's bytes are one and the same on all edges of its tree, and a gather's part is decoded by
all: that is what makes all sites' results bit-identical. So a codec belongs to a tree, not to a
hop. It is the one with the fewest bytes among those of the links that the tree crosses; in a
gather, of all links. Trees over fast links only stay as they are, and what crosses a narrow one is
small everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from math import gcd

from isthmus.topology.spec.job import CODECS, Exchange, Job
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.suggest import did_you_mean
from isthmus.topology.spec.world import Topology
from isthmus.topology.text.yaml_document import Path
from isthmus.topology.trees.codec_costs import usual_ratio

_WHOLE = 1 << 12
"""The size of a float32 chunk in the units that sizes are compared in: exact ratios give whole
numbers."""


def codec_between(exchange: Exchange, one: str, other: str) -> str:
    """Return the codec of the link between two sites, by name: both ways alike."""
    for each in exchange.codecs:
        if set(each.between) == {one, other}:
            return each.codec
    return exchange.codec


def plan_codecs(job: Job, topology: Topology, plan: ReductionPlan) -> tuple[str, ...]:
    """Return the codec of each tree of a plan, in their order; of a gather, of its one."""
    exchange, names = job.exchange, [site.name for site in topology.sites]
    if not exchange.codecs:
        return (exchange.codec,) * max(1, len(plan.trees))
    crossed = [[*plan.hops(tree)] for tree in range(max(1, len(plan.trees)))]
    return tuple(
        smallest([codec_between(exchange, names[one], names[other]) for one, other in hops])
        if hops
        else exchange.codec
        for hops in crossed
    )


def smallest(codecs: Iterable[str]) -> str:
    """Return the codec with the fewest bytes; of equal ones that which CODECS has first."""
    return min(set(codecs), key=lambda codec: (usual_ratio(codec), CODECS.index(codec)))


def loads_of(exchange: Exchange, names: Sequence[str]) -> Mapping[tuple[int, int], int]:
    """Return how many bytes a chunk is on each pair's link by its codec, in a unit of all of them.

    Integers, for sites must plan alike. Pairs are by index, the lower one first. Where all links
    have the same codec, empty: then it makes no difference to which links are used.
    """
    if not exchange.codecs:
        return {}
    loads = {
        (one, other): max(
            1, round(_WHOLE * usual_ratio(codec_between(exchange, names[one], names[other])))
        )
        for one, other in itertools.combinations(range(len(names)), 2)
    }
    if len(set(loads.values())) < 2:
        return {}
    unit = gcd(*loads.values())
    return {pair: load // unit for pair, load in loads.items()}


def problems_of(job: Job, topology: Topology) -> list[tuple[Path, str]]:
    """Return what is wrong with a job's codecs of links, on a topology that is fully described."""
    names = [site.name for site in topology.sites]
    problems: list[tuple[Path, str]] = []
    first: dict[frozenset[str], int] = {}
    for index, each in enumerate(job.exchange.codecs):
        path: Path = ("exchange", "codecs", index, "between")
        pair, (one, other) = frozenset(each.between), each.between
        unknown = [place for place, name in enumerate(each.between) if name not in names]
        problems += [
            (
                (*path, place),
                f"unknown site {each.between[place]!r}{did_you_mean(each.between[place], names)}",
            )
            for place in unknown
        ]
        if unknown:
            continue
        if one == other:
            problems.append((path, f"want two different sites, got {one!r} twice"))
        elif topology.link(one, other) is None and topology.link(other, one) is None:
            problems.append((path, f"there is no link between {one!r} and {other!r}"))
        elif pair in first:
            message = f"the link between {one!r} and {other!r} is there twice"
            problems.append((path, f"{message} (first as exchange.codecs.{first[pair]})"))
        first.setdefault(pair, index)
    return problems
