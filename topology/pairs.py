"""The WAN as trees see it: pairs of sites that reach each other, and what both directions can do.

A tree uses an edge both ways alike: as many bytes as go up come down. So the slower direction is
what counts. All figures are integers, because every site plans for itself and all must come to the
same plan: sums of floats may differ between Python's versions, sums of integers do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topology.world import Topology

Edge = tuple[int, int]
"""Two sites, the lower index first."""


def edge(one: int, other: int) -> Edge:
    """Return the edge between two sites."""
    return (one, other) if one < other else (other, one)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The edges between `names`; missing where there are not links both ways."""

    names: tuple[str, ...]
    bytes_per_s: Mapping[Edge, int]
    """Of the slower direction, 1 at least; in ascending order of the edges."""
    rtt_ns: Mapping[Edge, int]
    """There and back again."""

    @property
    def num_sites(self) -> int:
        """Sites of the topology."""
        return len(self.names)

    def rate(self, one: int, other: int) -> int:
        """Return the bytes per second between two sites; 0 where there is no edge."""
        return self.bytes_per_s.get(edge(one, other), 0)

    def delay_ns(self, one: int, other: int) -> int:
        """Return the round trip between two sites that have an edge."""
        return self.rtt_ns[edge(one, other)]

    def at_least(self, bytes_per_s: int) -> Pairs:
        """Return the same without the edges that are slower."""
        kept = {each: rate for each, rate in self.bytes_per_s.items() if rate >= bytes_per_s}
        return Pairs(self.names, kept, {each: self.rtt_ns[each] for each in kept})

    def missing(self, site: int) -> list[str]:
        """Return the names of the sites that `site` has no edge with."""
        return [
            name
            for other, name in enumerate(self.names)
            if other != site and not self.rate(site, other)
        ]


def pairs_of(topology: Topology) -> Pairs:
    """Return the pairs of a topology's sites."""
    names = tuple(site.name for site in topology.sites)
    rates, rtts = {}, {}
    for one, first in enumerate(names):
        for other in range(one + 1, len(names)):
            there, back = topology.link(first, names[other]), topology.link(names[other], first)
            if there is not None and back is not None:
                rates[one, other] = max(1, round(min(there.bytes_per_s, back.bytes_per_s)))
                rtts[one, other] = (round(there.rtt_s * 1e9) + round(back.rtt_s * 1e9)) // 2
    return Pairs(names, rates, rtts)
