"""Chooses the codec of each tree if links have different codecs. Pure.

A result has the same bytes on all edges of its tree, and all sites decode a gather's parts, so that
all results are bit-identical. So a codec belongs to a tree, not to a hop: the smallest of the
codecs of the tree's links, or in a gather of all links. Trees over fast links keep larger codecs,
and a tree with a narrow link is small everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from math import gcd

from isthmus.topology.spec.codec_names import CODECS
from isthmus.topology.spec.job import Exchange, Job
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.suggest import did_you_mean
from isthmus.topology.spec.world import Topology
from isthmus.topology.text.yaml_document import Path
from isthmus.topology.trees.codec_costs import usual_ratio

_WHOLE = 1 << 12
"""Size of a float32 chunk in the units of `loads_of`, in which exact ratios are integers."""


def codec_between(exchange: Exchange, one: str, other: str) -> str:
    """Return the codec name of the link between two sites, equal in both directions."""
    for each in exchange.codecs:
        if set(each.between) == {one, other}:
            return each.codec
    return exchange.codec


def plan_codecs(job: Job, topology: Topology, plan: ReductionPlan) -> tuple[str, ...]:
    """Return the codec of each tree of a plan, in order; a gather has one."""
    exchange, names = job.exchange, [site.name for site in topology.sites]
    if not exchange.codecs:
        return (exchange.codec,) * max(1, len(plan.trees))
    index = {name: site for site, name in enumerate(names)}
    own = {
        frozenset(index[name] for name in each.between): each.codec
        for each in reversed(exchange.codecs)
        if set(each.between) <= index.keys()
    }
    crossed = [
        {own.get(frozenset(hop), exchange.codec) for hop in plan.hops(tree)}
        for tree in range(max(1, len(plan.trees)))
    ]
    return tuple(smallest(codecs) if codecs else exchange.codec for codecs in crossed)


def smallest(codecs: Iterable[str]) -> str:
    """Return the codec with the fewest bytes; ties by the order of CODECS."""
    return min(set(codecs), key=lambda codec: (usual_ratio(codec), CODECS.index(codec)))


def loads_of(exchange: Exchange, names: Sequence[str]) -> Mapping[tuple[int, int], int]:
    """Return the size of a chunk by the codec of each pair's link, in a common integer unit.

    Integers, because sites must plan alike. Pairs are indices, the lower one first. Empty if all
    links have the same codec, which then does not affect the choice of links.
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
    """Return problems with a job's codecs of links; `topology` has all sites."""
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
