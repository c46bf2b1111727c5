"""The WAN as trees see it: pairs of sites that reach each other, with the slower direction's rate.

A tree uses an edge both ways alike: as many bytes as go up come down. So the slower direction is
what counts. All figures are integers: sums of floats may differ between Python's versions, sums of
integers do not. So the same topology gives the same trees everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from topology.job import Exchange
from topology.trees.link_codecs import loads_of
from topology.world import Topology

Edge = tuple[int, int]
"""The indices of two sites, the lower one first."""


def edge(one: int, other: int) -> Edge:
    """Return the edge between two sites."""
    return (one, other) if one < other else (other, one)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The edges between the sites `names`; missing where there are not links both ways."""

    names: tuple[str, ...]
    bytes_per_s: Mapping[Edge, int]
    """Bytes per second of the slower direction, 1 at least; in ascending order of the edges."""
    rtt_ns: Mapping[Edge, int]
    """Nanoseconds there and back again."""
    loads: Mapping[Edge, int] = field(default_factory=dict)
    """Bytes of a chunk by the edge's codec, in some unit. A tree has the least of its edges'
    (topology.trees.link_codecs). Empty: all are alike, and the unit is that of `bytes_per_s`."""

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
        """Return the chunks per second, in `loads`' unit, that a tree over these edges carries.

        0 where there is no such edge.
        """
        edges = tuple(edges)
        return Fraction(min(self.rate(*each) for each in edges), self.load(edges))

    def at_least(self, bytes_per_s: int) -> Pairs:
        """Return the same without the edges that are slower."""
        kept = {each: rate for each, rate in self.bytes_per_s.items() if rate >= bytes_per_s}
        return Pairs(self.names, kept, {each: self.rtt_ns[each] for each in kept}, self.loads)

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
    rates, rtts = {}, {}
    for one, first in enumerate(names):
        for other in range(one + 1, len(names)):
            there, back = topology.link(first, names[other]), topology.link(names[other], first)
            if there is not None and back is not None:
                rates[one, other] = max(1, round(min(there.bytes_per_s, back.bytes_per_s)))
                rtts[one, other] = (round(there.rtt_s * 1e9) + round(back.rtt_s * 1e9)) // 2
    return Pairs(names, rates, rtts, loads_of(exchange, names))
