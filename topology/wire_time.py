"""How long one exchange takes on the wire, if nothing hides it. Pure.

A gradient of n chunks, c bytes each once encoded and framed, crosses links of rate r and round trip t:

- Gather: every site sends everything to every other, all links at once. The slowest link decides:
  max over links of (n c / r + t / 2).
- Tree: chunks go up to the root and come back down, as through a pipeline. A link's g channels carry
  one chunk each side by side, so that g of them arrive together. These take the sum over the links
  of their way of (g c / r + t / 2); each further chunk is behind them by its time on the slowest
  of them. The slowest way, from any leaf up and down to any other, decides:
  max over ways of (sum of (g c / r + t / 2) + (n - g) c / min r).

Where several trees share a link, its chunks of all trees count for "each further one". Left out:
what sites do to encode and sum, slow start, and loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from topology.job import Job
from topology.trees import ReductionPlan, Tree, plan_reduction
from topology.world import Link, Topology

FRAME_BYTES = 64 + 5
"""Of a chunk beside its payload: protos/frame.py's header, and gRPC's before each message."""
PACKET_FACTOR = 1500 / 1448
"""IP and TCP headers with time stamps, in full packets of 1500 bytes. The relay has no packets."""
RATIOS = {"fp32": 1.0, "bf16": 0.5}
"""Encoded bytes for each byte of float32, where the values do not matter."""


def exchange_time_s(
    job: Job, topology: Topology, raw_bytes: int, ratio: float | None = None
) -> float:
    """Return the seconds from all sites' having `raw_bytes` to all sites' having the sum.

    Args:
        job: gives plan, codec, chunk size.
        topology: gives the links; its `emulator`, whether there are packets (`auto` counts as
            netns, and so does a WAN that is not emulated).
        raw_bytes: float32 bytes of the whole gradient.
        ratio: encoded bytes for each of them; needed for codecs that compress.

    Raises:
        ValueError: no ratio for a codec that compresses.
        ConfigError: the job's tree does not fit the topology.
    """
    plan = plan_reduction(job, topology)
    if raw_bytes == 0 or plan.num_sites == 1:
        return 0.0
    num_chunks = math.ceil(raw_bytes / job.exchange.chunk_bytes)
    chunk_bytes = raw_bytes * _ratio(job, ratio) / num_chunks + FRAME_BYTES
    if not (topology.emulate and topology.emulator == "relay"):
        chunk_bytes *= PACKET_FACTOR
    if plan.is_gather:
        return max(
            num_chunks * chunk_bytes / link.bytes_per_s + link.rtt_s / 2
            for link in _all_links(topology)
        )
    num_abreast = min(job.exchange.channels_per_link, num_chunks)
    return _tree_time_s(plan, topology, num_chunks, num_abreast, chunk_bytes)


def _ratio(job: Job, ratio: float | None) -> float:
    codec = job.exchange.codec
    known = RATIOS.get(codec) if ratio is None else ratio
    if known is None:
        raise ValueError(f"codec {codec} compresses by what gradients hold: measure its ratio")
    return known


def _all_links(topology: Topology) -> Iterator[Link]:
    for one in range(len(topology.sites)):
        for other in range(len(topology.sites)):
            if one != other:
                yield _link(topology, one, other)


def _link(topology: Topology, source: int, target: int) -> Link:
    link = topology.link(topology.sites[source].name, topology.sites[target].name)
    assert link is not None, "the plan uses links that are there"
    return link


def _tree_time_s(
    plan: ReductionPlan,
    topology: Topology,
    num_chunks: int,
    num_abreast: int,
    chunk_bytes: float,
) -> float:
    chunks_of_tree = Counter(plan.tree_index(chunk) for chunk in range(num_chunks))
    ways = [
        [_link(topology, *hop) for hop in way]
        for index in chunks_of_tree
        for way in _ways(plan.trees[index])
    ]
    chunks_of_link: Counter[tuple[str, str]] = Counter()
    for index, count in chunks_of_tree.items():
        hops = {hop for way in _ways(plan.trees[index]) for hop in way}
        for hop in hops:
            link = _link(topology, *hop)
            chunks_of_link[link.source, link.target] += count
    return max(
        sum(num_abreast * chunk_bytes / link.bytes_per_s + link.rtt_s / 2 for link in way)
        + max(
            max(0, chunks_of_link[link.source, link.target] - num_abreast)
            * chunk_bytes
            / link.bytes_per_s
            for link in way
        )
        for way in ways
    )


def _ways(tree: Tree) -> Iterator[list[tuple[int, int]]]:
    """Yield the hops from each leaf up to the root and down to each leaf."""
    ups = [_up(tree, site) for site in tree.parent if not tree.children(site)]
    for up in ups:
        for other in ups:
            yield [*up, *((target, source) for source, target in reversed(other))]


def _up(tree: Tree, site: int) -> list[tuple[int, int]]:
    hops = []
    while site != tree.root:
        hops.append((site, tree.parent[site]))
        site = tree.parent[site]
    return hops
