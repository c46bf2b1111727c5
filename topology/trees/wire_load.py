"""Computes the load of an exchange on the wire: chunk sizes, codecs, framing and packets. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.topology.spec.job import Job
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.tcp_constants import FIRST_WINDOW_PACKETS, MTU_BYTES, PAYLOAD_SHARE
from isthmus.topology.spec.world import Link, Topology
from isthmus.topology.trees.channels import (
    FLOWS_MAX,
    SEND_BUFFER_BYTES,
    chunks_in_flight,
    first_channels,
)
from isthmus.topology.trees.codec_costs import COSTS, GATEWAY_BYTES_PER_S, RATIOS, usual_ratio
from isthmus.topology.trees.link_codecs import plan_codecs
from isthmus.topology.trees.slow_start import is_rested_slow, unused_s

Hop = tuple[int, int]
"""A directed link, by the indices of its sites."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load that one exchange puts on the wire."""

    num_chunks: int
    num_in_flight: int
    """Largest number of chunks in flight on a link."""
    chunk_bytes: tuple[float, ...]
    """Bytes on the wire of a chunk, by tree; a gather has one entry."""
    first_window_bytes: float | None
    """Bytes of the first window of all connections of a link; None: there is no slow start."""
    in_flight_of_links: Mapping[Hop, float] | None = None
    """Mean number of chunks in flight on each directed link, by one gateway of a site; None:
    `num_in_flight` on all."""
    num_gateways: int = 1
    """Gateways of a site, all of which send."""

    def window_of(self, link: Link) -> float:
        """Return the first window of a link's connections; infinite if they do not start slowly."""
        if self.first_window_bytes is None or not is_rested_slow(link.assumed_congestion):
            return math.inf
        return self.first_window_bytes

    def of_gateways(self, count: int) -> Load:
        """Return this load divided among `count` gateways per site."""
        window_bytes = self.first_window_bytes
        return dataclasses.replace(
            self,
            num_in_flight=min(count * self.num_in_flight, self.num_chunks),
            first_window_bytes=None if window_bytes is None else count * window_bytes,
            num_gateways=count,
        )

    def sending_s(self, link: Link, num_bytes: float) -> float:
        """Return the seconds to send a burst's first `num_bytes`, with waits for windows."""
        waited_s = unused_s(num_bytes, link.bytes_per_s, link.rtt_s, self.window_of(link))
        return num_bytes / link.bytes_per_s + waited_s


FRAME_HEADER_BYTES = 64 + 5
"""Overhead bytes of a chunk: protos/frame.py's header, and gRPC's message prefix."""
_CHUNKS_ON_THE_WAY = 4
_ROUND_TRIP_MIN_S = 0.01
_FRAME_MIN_S = 0.01
"""Shortest duration of a frame on the slowest link: smaller ones cost more processor time than they
gain."""
_GATHER_FRAME_S = 0.04
"""Duration of a frame in a gather. A later frame of higher priority waits for it, and each costs a
gateway about a millisecond of processor time whatever its size."""
_CHUNK_BYTES_MIN = 64 << 10
_CHUNK_BYTES_ENOUGH = 256 << 10
"""Chunk size above which a message's fixed cost is negligible: four sites whose links differ take
11 CPU seconds a GB with 64 KiB and 6 with this (docs/measurements/allreduce.md)."""
_RESULT_ROUND_TRIPS = 3


def chunk_bytes_of(job: Job, topology: Topology, plan: ReductionPlan) -> int:
    """Return a plan's chunk size in float32 bytes, for all sites and for predictions.

    Each link of the plan prefers a size, by the tree's codec. The plan takes the mean on a
    logarithmic scale, weighted by the links' busy times. So a narrow link that carries little does
    not make all chunks small.
    """
    exchange = job.exchange
    if exchange.is_cut:
        return exchange.chunk_bytes
    names = [site.name for site in topology.sites]
    carried: defaultdict[tuple[Hop, str], float] = defaultdict(float)
    for tree, codec in enumerate(plan_codecs(job, topology, plan)):
        part = usual_ratio(codec) * (1 if plan.is_gather else plan.trees[tree].weight)
        for hop in plan.hops(tree):
            carried[hop, codec] += part
    powers, busy = 0.0, 0.0
    for ((source, target), codec), part in carried.items():
        link = topology.link(names[source], names[target])
        assert link is not None, "the plan uses links that are there"
        size = chunk_bytes_for(
            exchange.chunk_bytes,
            codec,
            link.bytes_per_s,
            link.rtt_s,
            is_gather=plan.is_gather,
        )
        powers += part / link.bytes_per_s * math.log2(size / exchange.chunk_bytes)
        busy += part / link.bytes_per_s
    if not powers:
        return exchange.chunk_bytes
    size = round(math.log2(exchange.chunk_bytes) + powers / busy)
    return min(exchange.chunk_bytes, 1 << size)


def chunk_bytes_for(
    wanted_bytes: int, codec: str, bytes_per_s: float, rtt_s: float, *, is_gather: bool = False
) -> int:
    """Return the chunk size for one link in float32 bytes, at most the job's.

    In a tree a sum is passed on only once the whole chunk has arrived, so several must fit the
    link's BDP. Small chunks cost too much processor time: up to _CHUNK_BYTES_ENOUGH, two in flight
    must do. In a gather nothing is passed on, so a chunk may take _GATHER_FRAME_S.

    Args:
        wanted_bytes: chunk size in the job.
        codec: name of the codec; the smaller its output, the larger the chunk.
        bytes_per_s: of the link.
        rtt_s: of the link.
        is_gather: whether every site sends its part to every other.
    """
    ratio = RATIOS.get(codec, 1.0)
    held = max(bytes_per_s * max(rtt_s, _ROUND_TRIP_MIN_S) / ratio, 1.0)
    best = int(held / _CHUNKS_ON_THE_WAY)
    if is_gather:
        best = max(best, int(bytes_per_s * _GATHER_FRAME_S / ratio))
    if best >= wanted_bytes:
        return wanted_bytes
    frame_min = max(bytes_per_s * _FRAME_MIN_S / ratio, 1.0)
    least = 1 << max(math.ceil(math.log2(frame_min)), round(math.log2(held / 2)))
    least = min(max(least, _CHUNK_BYTES_MIN), _CHUNK_BYTES_ENOUGH)
    return min(wanted_bytes, max(1 << max(best.bit_length() - 1, 0), least))


def pipeline_bytes_of(job: Job, topology: Topology, plan: ReductionPlan) -> int:
    """Return how many float32 bytes of a site's chunks may be in flight at once.

    A chunk's result takes about two round trips of the longest links, and half as much again in
    queues. The bytes sent meanwhile are limited by the fastest link, by the site with the least
    bandwidth, which every chunk has to reach, and by the encoding speed.
    """
    if not topology.links:
        return 0
    rates: dict[tuple[str, str], float] = defaultdict(float)
    for link in topology.links:
        rates["from", link.source] += link.bytes_per_s
        rates["to", link.target] += link.bytes_per_s
    bytes_per_s = min(*rates.values(), max(link.bytes_per_s for link in topology.links))
    raw_bytes_per_s = max(
        min(bytes_per_s / usual_ratio(codec), COSTS[codec].encode_bytes_per_s)
        for codec in plan_codecs(job, topology, plan)
    )
    return int(_RESULT_ROUND_TRIPS * raw_bytes_per_s * max(link.rtt_s for link in topology.links))


class Connections:
    """The connections that a topology's links begin with; worth keeping for many plans."""

    def __init__(self, topology: Topology, wanted: int | None) -> None:
        """`wanted` is the job's number of connections a link; None: as many as a link needs."""
        buffer_bytes = send_buffer_bytes_of(topology)
        index = {site.name: site.index for site in topology.sites}
        numbers, in_flight = [], {}
        for link in topology.links:
            figures = (link.max_flows or FLOWS_MAX, link.bytes_per_s, link.rtt_s, buffer_bytes)
            numbers.append(first_channels(wanted, *figures))
            hop = (index[link.source], index[link.target])
            in_flight[hop] = chunks_in_flight(wanted, *figures)
        self.num_channels = min(numbers, default=1)
        """The initial number of connections of a link; the fewest if links differ."""
        self.in_flight_of_links: Mapping[Hop, float] = in_flight
        """The mean number of chunks in flight on each directed link, by site indices."""


def send_buffer_bytes_of(topology: Topology) -> int | None:
    """Return the limit on bytes in flight per connection; None: no limit."""
    # Emulated sites have large buffers: orchestrator/emulator/site_namespaces.py.
    return None if topology.emulate and has_packets(topology) else SEND_BUFFER_BYTES


def has_packets(topology: Topology) -> bool:
    """Return whether TCP packets cross the WAN end to end; the relay carries only bytes."""
    return not (topology.emulate and topology.emulator == "relay")


class Wire:
    """Computes the load of exchanges of any size over a plan."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        plan: ReductionPlan,
        ratio: float | None = None,
        connections: Connections | None = None,
    ) -> None:
        """Precompute everything that does not depend on the size.

        Args:
            job: gives codecs, chunk size, channels.
            topology: its `emulator` says whether there are packets and slow start (`auto` counts as
                netns, and so does a WAN that is not emulated).
            plan: the reduction over its sites.
            ratio: encoded bytes per byte of float32 by `exchange.codec`; needed if that compresses.
                Links' own codecs count with their usual ratios.
            connections: Of the topology's links by the job, where they are known.

        Raises:
            ValueError: no ratio for a codec that compresses.
        """
        self._connections = connections or Connections(topology, job.exchange.channels_per_link)
        self._cut_bytes = chunk_bytes_of(job, topology, plan)
        self._ratios = tree_ratios(job, topology, plan, ratio)
        self._is_packets = has_packets(topology)

    def load(self, raw_bytes: int) -> Load:
        """Return the load of an exchange of `raw_bytes` float32 bytes, at least 1."""
        factor = 1 / PAYLOAD_SHARE if self._is_packets else 1.0
        num_chunks = math.ceil(raw_bytes / self._cut_bytes)
        num_in_flight = min(self._connections.num_channels, num_chunks)
        chunk_bytes = tuple(
            (raw_bytes * ratio / num_chunks + FRAME_HEADER_BYTES) * factor for ratio in self._ratios
        )
        window_bytes = num_in_flight * FIRST_WINDOW_PACKETS * MTU_BYTES
        return Load(
            num_chunks,
            num_in_flight,
            chunk_bytes,
            window_bytes if self._is_packets else None,
            self._connections.in_flight_of_links,
        )


def tree_ratios(
    job: Job, topology: Topology, plan: ReductionPlan, ratio: float | None = None
) -> tuple[float, ...]:
    """Return the encoded bytes per byte of float32, by tree; a gather has one entry.

    Arguments and errors are those of `Wire`.
    """
    usual = job.exchange.codec
    own = RATIOS.get(usual) if ratio is None else ratio
    ratios = []
    for codec in plan_codecs(job, topology, plan):
        known = own if codec == usual else usual_ratio(codec)
        if known is None:
            raise ValueError(f"codec {codec} compresses by what gradients hold: measure its ratio")
        ratios.append(known)
    return tuple(ratios)


def gateways_s_per_byte(
    job: Job, topology: Topology, plan: ReductionPlan, ratio: float
) -> list[float]:
    """Return the busy seconds of a site's single gateway per byte of float32, by site.

    In a gather it decodes all parts, its own included. In a tree it decodes its children's sums and
    the result, and sends up and down.
    """
    codecs = plan_codecs(job, topology, plan)
    ratios = tree_ratios(job, topology, plan, ratio)
    if plan.is_gather:
        cost, others = COSTS[codecs[0]], plan.num_sites - 1
        sent_s = others * ratios[0] / GATEWAY_BYTES_PER_S
        coding_s = 1 / cost.encode_bytes_per_s + plan.num_sites / cost.decode_bytes_per_s
        return [coding_s + sent_s] * plan.num_sites
    total = sum(tree.weight for tree in plan.trees)
    seconds = [0.0] * plan.num_sites
    own_s = 0.0  # every site encodes its sum and decodes the result
    for tree, codec, each_ratio in zip(plan.trees, codecs, ratios, strict=True):
        cost, share = COSTS[codec], tree.weight / total
        own_s += share * (1 / cost.encode_bytes_per_s + 1 / cost.decode_bytes_per_s)
        sent_s = share * each_ratio / GATEWAY_BYTES_PER_S
        decoded_s = share / cost.decode_bytes_per_s
        for child, parent in tree.parent.items():
            seconds[child] += sent_s
            seconds[parent] += decoded_s
        for giver in tree.giver.values():
            seconds[giver] += sent_s
    return [own_s + each_s for each_s in seconds]
