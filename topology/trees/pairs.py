"""The WAN as an undirected graph for trees: pairs of sites, with the slower direction's rate.

A tree sends as many bytes down an edge as up, so the slower direction counts. If directions differ
much, trees have other ways down, and each direction counts (topology/trees/two_way_packing.py). All
figures are integers, because sums of floats may differ between Python's versions. So the same
topology gives the same trees everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from isthmus.topology.spec.job import Exchange
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.link_codecs import loads_of

Edge = tuple[int, int]
"""The indices of two sites, the lower one first."""
Hop = tuple[int, int]
"""The indices of the sites from and to which a directed link goes."""
ASYMMETRIC = 1.25
"""Ratio of an edge's two rates up to which its directions count as alike."""


def edge(one: int, other: int) -> Edge:
    """Return the edge between two sites."""
    return (one, other) if one < other else (other, one)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The edges between the sites `names`; an edge needs links in both directions."""

    names: tuple[str, ...]
    bytes_per_s: Mapping[Edge, int]
    """Bytes per second of the slower direction, 1 at least; in ascending order of the edges."""
    rtt_ns: Mapping[Edge, int]
    """Round trip in nanoseconds."""
    loads: Mapping[Edge, int] = field(default_factory=dict)
    """Size of a chunk by the edge's codec, in a common unit. A tree has the smallest of its edges
    (topology/trees/link_codecs.py). Empty: all are equal, and rates are in bytes."""
    one_way: Mapping[Hop, int] = field(default_factory=dict)
    """Bytes per second of each direction. Empty: no edge's directions differ by more than the ratio
    ASYMMETRIC."""

    @property
    def num_sites(self) -> int:
        """The number of sites of the topology."""
        return len(self.names)

    def rate(self, one: int, other: int) -> int:
        """Return the bytes per second between two sites; 0 where there is no edge."""
        return self.bytes_per_s.get(edge(one, other), 0)

    def delay_ns(self, one: int, other: int) -> int:
        """Return the round trip between two sites that have an edge."""
        return self.rtt_ns[edge(one, other)]

    def load(self, edges: Iterable[tuple[int, int]]) -> int:
        """Return the bytes, in the unit of `loads`, of a chunk of a tree over these edges."""
        return min((self.loads.get(edge(*each), 1) for each in edges), default=1)

    def speed(self, edges: Iterable[tuple[int, int]]) -> Fraction:
        """Return the chunks per second, in the unit of `loads`, of a tree over these edges.

        0 if an edge does not exist.
        """
        edges = tuple(edges)
        return Fraction(min(self.rate(*each) for each in edges), self.load(edges))

    def at_least(self, bytes_per_s: int) -> Pairs:
        """Return these pairs without edges slower than `bytes_per_s`."""
        kept = {each: rate for each, rate in self.bytes_per_s.items() if rate >= bytes_per_s}
        rtt_ns = {each: self.rtt_ns[each] for each in kept}
        return dataclasses.replace(self, bytes_per_s=kept, rtt_ns=rtt_ns)

    def missing(self, site: int) -> list[str]:
        """Return the names of the sites that `site` has no edge with."""
        return [
            name
            for other, name in enumerate(self.names)
            if other != site and not self.rate(site, other)
        ]


def pairs_of(topology: Topology, exchange: Exchange = Exchange()) -> Pairs:  # noqa: B008 - frozen
    """Return the pairs of a topology's sites, with the codecs of an exchange's links."""
    names = tuple(site.name for site in topology.sites)
    rates, rtts, one_way = {}, {}, {}
    for one, first in enumerate(names):
        for other in range(one + 1, len(names)):
            there, back = topology.link(first, names[other]), topology.link(names[other], first)
            if there is not None and back is not None:
                one_way[one, other] = max(1, round(there.bytes_per_s))
                one_way[other, one] = max(1, round(back.bytes_per_s))
                rates[one, other] = min(one_way[one, other], one_way[other, one])
                rtts[one, other] = (round(there.rtt_s * 1e9) + round(back.rtt_s * 1e9)) // 2
    if all(rate <= ASYMMETRIC * rates[edge(*hop)] for hop, rate in one_way.items()):
        one_way = {}
    return Pairs(names, rates, rtts, loads_of(exchange, names), one_way)
