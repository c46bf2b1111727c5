"""How long the chunks of a plan take from site to site. Pure.

n chunks, c bytes each once encoded and framed (a tree's own c, where trees have codecs of their own),
cross links of rate r and round trip t:

- Gather: every site sends everything to every other, all links at once. The slowest link decides:
  max over links of (n c / r + t / 2).
- Trees: chunks go up to the root and come back down, as through a pipeline. A link's g channels carry
  one chunk each side by side, so that g of them arrive together. These take the sum over the links
  of their way of (g c / r + t / 2); each further chunk is behind them by its time on the slowest
  of them. The slowest way, from any leaf up and down to any other, decides:
  max over ways of (sum of (g c / r + t / 2) + max over its links of (m - g) c / r).
  m counts the chunks of all trees on that link, those that go up and those that come down; c is the
  mean of these.

TCP starts slowly, after compute's pause as on its first day (topology/slow_start.py): g connections send
10 packets each, and twice as many each round trip, until they fill the link. What that leaves unused of
a link comes on top, of its first chunks and of its further ones each as it falls on them: the links of a
way open their windows at the same time, for chunks follow each other through them. The relay knows
neither packets nor slow start.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from topology.slow_start import unused_s
from topology.tree_shapes import way_up
from topology.trees import ReductionPlan
from topology.world import Link, Topology

Hop = tuple[int, int]
"""A directed link, by the indices of its sites."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is reduced."""

    num_chunks: int
    num_abreast: int
    """Chunks that are on a link side by side, at most."""
    chunk_bytes: tuple[float, ...]
    """On the wire, of each tree's chunks; of a gather's, one."""
    first_window_bytes: float | None
    """Of all connections of a link together; None: there is no slow start."""

    def sending_s(self, link: Link, num_bytes: float) -> float:
        """Return how long the first `num_bytes` take to leave, windows waited for included."""
        plain_s = num_bytes / link.bytes_per_s
        if self.first_window_bytes is None:
            return plain_s
        return plain_s + unused_s(num_bytes, link.bytes_per_s, link.rtt_s, self.first_window_bytes)


def plan_times_s(
    plan: ReductionPlan, topology: Topology, load: Load
) -> dict[tuple[int, int], float]:
    """Return by which time after one site's start another is done, as far as the first decides.

    Returns:
        Seconds from the first site's having its part to the second's having the last of the sum
        that depends on it, by their indices. Pairs whose sites do not wait for each other are
        missing; in a tree, a site other than the root waits for its own.
    """
    return (_gather_times_s if plan.is_gather else _tree_times_s)(plan, topology, load)


def shares_of_hops(plan: ReductionPlan) -> dict[Hop, Fraction]:
    """Return which share of all chunks crosses each directed link, in the long run."""
    if plan.is_gather:
        return dict.fromkeys(itertools.permutations(range(plan.num_sites), 2), Fraction(1))
    total = sum(tree.weight for tree in plan.trees)
    weights: Counter[Hop] = Counter()
    for tree in plan.trees:
        for child, parent in tree.parent.items():
            weights[child, parent] += tree.weight
            weights[parent, child] += tree.weight
    return {hop: Fraction(weight, total) for hop, weight in weights.items()}


def bytes_of_hops(plan: ReductionPlan, load: Load) -> dict[Hop, float]:
    """Return what a load puts on each directed link, in the long run."""
    return _carried(plan, [load.num_chunks * each for each in load.chunk_bytes])


def seconds_per_byte(
    plan: ReductionPlan, topology: Topology, ratios: Sequence[float] = (1.0,)
) -> dict[Hop, float]:
    """Return how long each directed link is busy for one byte of float32 that all sites sum up.

    The largest is the time that the plan cannot beat, however well it is pipelined.

    Args:
        plan: Over the topology's sites.
        topology: Gives the rates.
        ratios: Encoded bytes for each of float32, by tree; one is of all of them.
    """
    return {
        hop: num_bytes / rate_of(topology, hop) for hop, num_bytes in _carried(plan, ratios).items()
    }


def _carried(plan: ReductionPlan, sizes: Sequence[float]) -> dict[Hop, float]:
    """Return what crosses each directed link of `sizes`, by tree, which are those of all chunks."""
    if len(set(sizes)) == 1:
        return {hop: sizes[0] * float(share) for hop, share in shares_of_hops(plan).items()}
    total = sum(tree.weight for tree in plan.trees)
    carried: dict[Hop, float] = {}
    for tree, size in zip(plan.trees, sizes, strict=True):
        for child, parent in tree.parent.items():
            for hop in ((child, parent), (parent, child)):
                carried[hop] = carried.get(hop, 0.0) + size * tree.weight / total
    return carried


def rate_of(topology: Topology, hop: Hop) -> float:
    """Return the bytes per second of a directed link."""
    return _link(topology, *hop).bytes_per_s


def _link(topology: Topology, source: int, target: int) -> Link:
    link = topology.link(topology.sites[source].name, topology.sites[target].name)
    assert link is not None, "the plan uses links that are there"
    return link


def _gather_times_s(
    plan: ReductionPlan, topology: Topology, load: Load
) -> dict[tuple[int, int], float]:
    times_s = {}
    for pair in itertools.permutations(range(plan.num_sites), 2):
        link, num_bytes = _link(topology, *pair), load.num_chunks * load.chunk_bytes[0]
        times_s[pair] = load.sending_s(link, num_bytes) + link.rtt_s / 2
    return times_s


def _tree_times_s(
    plan: ReductionPlan, topology: Topology, load: Load
) -> dict[tuple[int, int], float]:
    chunks_of_tree = _chunks_of_trees(plan, load.num_chunks)
    chunks_of_hop: Counter[Hop] = Counter()
    bytes_of_hop: dict[Hop, float] = {}
    for index, count in chunks_of_tree.items():
        num_bytes = count * load.chunk_bytes[index]
        for child, parent in plan.trees[index].parent.items():
            for hop in ((child, parent), (parent, child)):
                chunks_of_hop[hop] += count
                bytes_of_hop[hop] = bytes_of_hop.get(hop, 0.0) + num_bytes
    legs = {
        hop: _leg(hop, topology, load, count, bytes_of_hop[hop])
        for hop, count in chunks_of_hop.items()
    }
    sites = range(plan.num_sites)
    times_s: dict[tuple[int, int], float] = {}
    for index in chunks_of_tree:
        ways = [way_up(plan.trees[index], site) for site in sites]
        up = [_joined(legs[hop] for hop in way) for way in ways]
        down = [_joined(legs[hop[::-1]] for hop in reversed(way)) for way in ways]
        for source, (first_s, further_s) in enumerate(up):
            for target, (last_s, below_s) in enumerate(down):
                if ways[source] or ways[target]:
                    # Without max(): planners come here more often than anywhere else.
                    rest_s = max(below_s, further_s)
                    way_s = first_s + last_s + rest_s
                    if way_s > times_s.get((source, target), 0.0):
                        times_s[source, target] = way_s
    return times_s


def _chunks_of_trees(plan: ReductionPlan, num_chunks: int) -> Counter[int]:
    """Return how many of the first chunks each tree carries; its cost does not grow with them."""
    periods, rest = divmod(num_chunks, len(plan.turns))
    counts = Counter(plan.turns[:rest])
    if periods:
        for index, count in Counter(plan.turns).items():
            counts[index] += periods * count
    return counts


def _leg(
    hop: Hop, topology: Topology, load: Load, num_chunks: int, num_bytes: float
) -> tuple[float, float]:
    """Return the seconds of a hop until its first chunks have arrived, and for all further ones."""
    link, num_abreast = _link(topology, *hop), min(load.num_abreast, num_chunks)
    first_s = load.sending_s(link, num_abreast * num_bytes / num_chunks)
    return first_s + link.rtt_s / 2, load.sending_s(link, num_bytes) - first_s


def _joined(legs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return hops one after another as one: the first chunks take them all, the rest the slowest."""
    first_s = further_s = 0.0
    for leg in legs:
        first_s, further_s = first_s + leg[0], max(further_s, leg[1])
    return first_s, further_s
