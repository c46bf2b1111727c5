"""How long one exchange takes on the wire, if nothing hides it. Pure.

A gradient of n chunks, c bytes each once encoded and framed, crosses links of rate r and round trip t:

- Gather: every site sends everything to every other, all links at once. The slowest link decides:
  max over links of (n c / r + t / 2).
- Tree: chunks go up to the root and come back down, as through a pipeline. A link's g channels carry
  one chunk each side by side, so that g of them arrive together. These take the sum over the links
  of their way of (g c / r + t / 2); each further chunk is behind them by its time on the slowest
  of them. The slowest way, from any leaf up and down to any other, decides:
  max over ways of (sum of (g c / r + t / 2) + (n - g) c / min r).

Where several trees share a link, its chunks of all trees count for "each further one".

TCP starts slowly, after compute's pause as on its first day (RFC 5681, 4.1): g connections send 10
packets each, and twice as many each round trip, until they fill the link. What that leaves unused
comes on top, on each link of a way: the sum of (t - w / r) over the windows w that are smaller than
r t and not the last. The relay knows neither packets nor slow start.

Left out: what sites do to encode and sum, loss, and a receiver's window that is too small.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from topology.job import Job
from topology.trees import ReductionPlan, Tree, plan_reduction
from topology.world import Link, Topology

Hop = tuple[int, int]
"""A directed link, by the indices of its sites."""

FRAME_BYTES = 64 + 5
"""Of a chunk beside its payload: protos/frame.py's header, and gRPC's before each message."""
PACKET_BYTES = 1500
PACKET_FACTOR = PACKET_BYTES / 1448
"""IP and TCP headers with time stamps, in full packets."""
FIRST_WINDOW_PACKETS = 10
"""RFC 6928; Linux starts again from it once a connection was idle for longer than its time-out."""
_SCALE_BYTES = 2 / 128
"""Of an element, where a block has a scale: sites/codecs/blocks.py."""
RATIOS = {
    "fp32": 1.0,
    "bf16": 0.5,
    "int8": (1 + _SCALE_BYTES) / 4,
    "fp8": (1 + _SCALE_BYTES) / 4,
    "int4": (0.5 + _SCALE_BYTES) / 4,
}
"""Encoded bytes for each byte of float32, where the values do not matter."""


def exchange_time_s(
    job: Job, topology: Topology, raw_bytes: int, ratio: float | None = None
) -> float:
    """Return the seconds from all sites' having `raw_bytes` to all sites' having the sum.

    Args:
        job: gives plan, codec, chunk size.
        topology: gives the links; its `emulator`, whether there are packets and slow start (`auto`
            counts as netns, and so does a WAN that is not emulated).
        raw_bytes: float32 bytes of the whole gradient.
        ratio: encoded bytes for each of them; needed for codecs that compress.

    Raises:
        ValueError: no ratio for a codec that compresses.
        ConfigError: the job's tree does not fit the topology.
    """
    return max(crossing_times_s(job, topology, raw_bytes, ratio).values(), default=0.0)


def crossing_times_s(
    job: Job, topology: Topology, raw_bytes: int, ratio: float | None = None
) -> dict[tuple[int, int], float]:
    """Return by which time after one site's start another is done, as far as the first decides.

    Arguments and errors are those of `exchange_time_s`.

    Returns:
        Seconds from the first site's having its gradient to the second's having the last of the sum
        that depends on it, by their indices. Pairs whose sites do not wait for each other are
        missing; in a tree, a site other than the root waits for its own.
    """
    plan = plan_reduction(job, topology)
    if raw_bytes == 0 or plan.num_sites == 1:
        return {}
    num_chunks = math.ceil(raw_bytes / job.exchange.chunk_bytes)
    chunk_bytes = raw_bytes * _ratio(job, ratio) / num_chunks + FRAME_BYTES
    num_abreast = min(job.exchange.channels_per_link, num_chunks)
    first_window_bytes = None
    if not (topology.emulate and topology.emulator == "relay"):
        chunk_bytes *= PACKET_FACTOR
        first_window_bytes = num_abreast * FIRST_WINDOW_PACKETS * PACKET_BYTES
    load = _Load(num_chunks, num_abreast, chunk_bytes, first_window_bytes)
    if plan.is_gather:
        return _gather_times_s(topology, load)
    return _tree_times_s(plan, topology, load)


@dataclass(frozen=True, slots=True)
class _Load:
    """What crosses the links."""

    num_chunks: int
    num_abreast: int
    """Chunks that are on a link side by side."""
    chunk_bytes: float
    """On the wire."""
    first_window_bytes: float | None
    """Of all connections of a link together; None: there is no slow start."""

    def delay_s(self, link: Link) -> float:
        """Return what a link takes beside the time for the bytes."""
        return link.rtt_s / 2 + self._slow_start_s(link)

    def _slow_start_s(self, link: Link) -> float:
        if self.first_window_bytes is None:
            return 0.0
        unused_s, sent_bytes, window_bytes = 0.0, 0.0, self.first_window_bytes
        all_bytes = self.num_chunks * self.chunk_bytes
        while (
            window_bytes < link.bytes_per_s * link.rtt_s and sent_bytes + window_bytes < all_bytes
        ):
            unused_s += link.rtt_s - window_bytes / link.bytes_per_s
            sent_bytes += window_bytes
            window_bytes *= 2
        return unused_s


def _ratio(job: Job, ratio: float | None) -> float:
    codec = job.exchange.codec
    known = RATIOS.get(codec) if ratio is None else ratio
    if known is None:
        raise ValueError(f"codec {codec} compresses by what gradients hold: measure its ratio")
    return known


def _gather_times_s(topology: Topology, load: _Load) -> dict[tuple[int, int], float]:
    times_s = {}
    for pair in itertools.permutations(range(len(topology.sites)), 2):
        link = _link(topology, *pair)
        times_s[pair] = load.num_chunks * load.chunk_bytes / link.bytes_per_s + load.delay_s(link)
    return times_s


def _link(topology: Topology, source: int, target: int) -> Link:
    link = topology.link(topology.sites[source].name, topology.sites[target].name)
    assert link is not None, "the plan uses links that are there"
    return link


def _tree_times_s(
    plan: ReductionPlan, topology: Topology, load: _Load
) -> dict[tuple[int, int], float]:
    chunks_of_tree = Counter(plan.tree_index(chunk) for chunk in range(load.num_chunks))
    chunks_of_hop: Counter[Hop] = Counter()
    for index, count in chunks_of_tree.items():
        for child, parent in plan.trees[index].parent.items():
            chunks_of_hop[child, parent] += count
            chunks_of_hop[parent, child] += count
    sites = range(plan.num_sites)
    times_s: dict[tuple[int, int], float] = {}
    for index in chunks_of_tree:
        for pair in itertools.product(sites, sites):
            way = _way(plan.trees[index], *pair)
            if way:
                way_s = _way_time_s(way, topology, load, chunks_of_hop)
                times_s[pair] = max(way_s, times_s.get(pair, 0.0))
    return times_s


def _way_time_s(
    way: list[Hop], topology: Topology, load: _Load, chunks_of_hop: Counter[Hop]
) -> float:
    """Return the seconds from the first chunk's leaving to the last one's arriving."""
    first_s = further_s = 0.0
    for hop in way:
        link = _link(topology, *hop)
        chunk_s = load.chunk_bytes / link.bytes_per_s
        first_s += load.num_abreast * chunk_s + load.delay_s(link)
        further_s = max(further_s, (chunks_of_hop[hop] - load.num_abreast) * chunk_s)
    return first_s + further_s


def _way(tree: Tree, source: int, target: int) -> list[Hop]:
    """Return the hops from a site up to the root and down to another."""
    return [*_up(tree, source), *(hop[::-1] for hop in reversed(_up(tree, target)))]


def _up(tree: Tree, site: int) -> list[Hop]:
    hops = []
    while site != tree.root:
        hops.append((site, tree.parent[site]))
        site = tree.parent[site]
    return hops
