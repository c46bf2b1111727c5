"""A job on a topology, cut into what is simulated: each site's step in time, each bucket in flows. Pure.

The ranks of a site are alike, and wait for each other in its collectives: the busiest one stands for all. The
gateways of a site are one, as fast as all of them together.

**Flows.** A flow is what the simulation moves at once over a link: consecutive chunks of one bucket that
are one tree's. At least as many as the link has connections, and where a step would have more than
FLOWS_PER_STEP hops, more: then a tree's turn is that many chunks long. Of what a flow does on links that
it shares with nobody meanwhile, nothing is lost by it (topology/simulator/servers.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from topology.codec_costs import COSTS, GATEWAY_BYTES_PER_S, usual_ratio
from topology.compute import layer_times, site_shares
from topology.fabric import reduce_scatter_s
from topology.job import Job
from topology.link_codecs import plan_codecs
from topology.reduction_plans import plan_reduction
from topology.simulator.buckets import Bucket, buckets_of
from topology.simulator.settings import Settings
from topology.tree_times import Load
from topology.trees import ReductionPlan
from topology.wire_load import PACKET_FACTOR, wire_loads
from topology.world import Site, Topology

FLOWS_PER_STEP = 10_000
"""Hops of flows in a step, about: a tenth of a second of simulating."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bucket that crosses as one flow."""

    tree: int
    """By its index in the plan; 0 in a gather."""
    raw_bytes: float
    wire_bytes: float
    granule: float
    """What crosses before the next site can go on, of the segment: 0 to 1."""
    codec: str
    """Of its tree."""


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """What a site's gateways take, all together, each with a core for its codecs."""

    num_gateways: int
    """0: they take no time."""

    def coding_s(self, segment: Segment, encoded: float, decoded: float) -> tuple[float, float]:
        """Return the CPU seconds to encode and decode a segment so many times."""
        if not self.num_gateways:
            return 0.0, 0.0
        cost, share = COSTS[segment.codec], segment.raw_bytes / self.num_gateways
        return encoded * share / cost.encode_bytes_per_s, decoded * share / cost.decode_bytes_per_s

    def sending_s(self, segment: Segment, sent: float) -> float:
        """Return what it takes to send a segment so many times, its arrival elsewhere included."""
        if not self.num_gateways:
            return 0.0
        return sent * segment.wire_bytes / GATEWAY_BYTES_PER_S / self.num_gateways


@dataclass(frozen=True, slots=True)
class SiteWork:
    """What one site does in a step."""

    name: str
    ready_s: tuple[float, ...]
    """Of each bucket: since the step began, without stragglers."""
    compute_s: float
    collective_s: tuple[float, ...]
    """Of each bucket: its reduce-scatter inside the site, and as long again its all-gather."""
    num_ranks: int
    tokens: float
    """A step."""
    gateway: GatewayCost


@dataclass(frozen=True, slots=True)
class StepWork:
    """All that a step is."""

    topology: Topology
    plan: ReductionPlan
    schedule: str
    """One of topology.job.SCHEDULES."""
    sites: tuple[SiteWork, ...]
    buckets: tuple[Bucket, ...]
    segments: tuple[tuple[Segment, ...], ...]
    """Of each bucket."""
    has_packets: bool
    first_window_bytes: float | None
    num_abreast: int

    @property
    def frame_share(self) -> float:
        """Of the bytes on the wire: those that gateways count, frames without headers of packets."""
        return 1 / PACKET_FACTOR if self.has_packets else 1.0


def step_work(job: Job, topology: Topology, settings: Settings) -> StepWork:
    """Return what a step of a job is on a topology.

    Raises:
        ConfigError: the job's tree does not fit the topology.
    """
    plan = plan_reduction(job, topology)
    ratio = usual_ratio(job.exchange.codec) if settings.ratio is None else settings.ratio
    buckets = buckets_of(job.trainer.model, job.exchange.bucket_bytes)
    sizes = [each.raw_bytes for each in buckets]
    loads = wire_loads(job, topology, plan, sizes, ratio)
    has_slow_start = settings.slow_start
    if has_slow_start is None:
        has_slow_start = loads[0].first_window_bytes is not None
    has_packets = loads[0].first_window_bytes is not None
    windows = [each.first_window_bytes or 0.0 for each in loads]
    if has_slow_start and not has_packets:
        packeted = dataclasses.replace(topology, emulate=False)
        packets = wire_loads(job, packeted, plan, sizes, ratio)
        windows = [each.first_window_bytes or 0.0 for each in packets]
    return StepWork(
        topology=topology,
        plan=plan,
        schedule="off" if plan.num_sites == 1 else job.exchange.schedule,
        sites=tuple(_site(job, topology, site, buckets, settings) for site in topology.sites),
        buckets=buckets,
        segments=_segments(plan, plan_codecs(job, topology, plan), buckets, loads, settings),
        has_packets=has_packets,
        first_window_bytes=max(windows) if has_slow_start else None,
        num_abreast=max(each.num_abreast for each in loads),
    )


def _site(
    job: Job, topology: Topology, site: Site, buckets: tuple[Bucket, ...], settings: Settings
) -> SiteWork:
    shares = site_shares(job, topology, site)
    most, micro_batch = max(shares), job.trainer.micro_batch
    # Only the last micro-batch's backward pass hands over: those before it are summed first.
    last = (most - 1) % micro_batch + 1
    whole = layer_times(job, site, most - last)
    times = layer_times(job, site, last)
    at_s = math.fsum(each.forward_s + each.backward_s for each in whole)
    at_s += math.fsum(each.forward_s for each in times)
    done_s = [0.0] * len(times)
    for layer in reversed(range(len(times))):
        at_s += times[layer].backward_s
        done_s[layer] = at_s
    return SiteWork(
        name=site.name,
        ready_s=tuple(done_s[each.last_layer] for each in buckets),
        compute_s=at_s,
        collective_s=tuple(reduce_scatter_s(site, each.raw_bytes) for each in buckets),
        num_ranks=site.num_ranks,
        tokens=float(sum(shares) * job.trainer.model.context),
        gateway=GatewayCost(site.nodes if settings.gateways_take_time else 0),
    )


def _segments(
    plan: ReductionPlan,
    codecs: tuple[str, ...],
    buckets: tuple[Bucket, ...],
    loads: list[Load],
    settings: Settings,
) -> tuple[tuple[Segment, ...], ...]:
    """Cut each bucket into what its trees carry at once."""
    sites = plan.num_sites
    hops = sites * (sites - 1) if plan.is_gather else 2 * (sites - 1)
    num_chunks = sum(each.num_chunks for each in loads)
    turn_chunks = max(1.0, num_chunks * hops / FLOWS_PER_STEP)
    turns = (plan.tree_index(turn) for turn in itertools.count())
    found = []
    for bucket, load in zip(buckets, loads, strict=True):
        # Flows that share a link leave as a whole, so there each chunk is one.
        abreast = 1 if settings.sharing == "fair" else load.num_abreast
        num_turns = max(1, round(load.num_chunks / turn_chunks))
        cuts = [load.num_chunks * turn // num_turns for turn in range(num_turns + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(cuts)]
        found.append(
            tuple(
                Segment(
                    tree,
                    bucket.raw_bytes * count / load.num_chunks,
                    load.chunk_bytes[tree] * count,
                    min(abreast, count) / count,
                    codecs[tree],
                )
                for tree, count in _flows(zip(sizes, turns, strict=False), abreast)
            )
        )
    return tuple(found)


def _flows(turns: Iterable[tuple[int, int]], abreast: int) -> Iterator[tuple[int, int]]:
    """Yield trees and numbers of chunks: turns of a tree together, until they are `abreast` at least."""
    waiting: dict[int, int] = {}
    for num_chunks, tree in turns:
        waiting[tree] = waiting.get(tree, 0) + num_chunks
        if waiting[tree] >= abreast:
            yield tree, waiting.pop(tree)
    yield from waiting.items()
