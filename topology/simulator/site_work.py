"""What one site does in a step: when its gradients are there, and what they cost inside it. Pure.

The ranks of a site are alike, and wait for each other in its collectives: the busiest one stands
for all. The gateways of a site are one, as fast as all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from topology.codec_costs import COSTS, GATEWAY_BYTES_PER_S
from topology.cost.compute import layer_times, site_shares
from topology.job import Job
from topology.model.buckets import Bucket
from topology.model.fabric import reduce_scatter_s
from topology.simulator.segments import Segment
from topology.simulator.servers import Server
from topology.world import Site, Topology


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """What a site's gateways take, all together, each with a core for its codecs."""

    num_gateways: float
    """0: they take no time. Where the fullest one has more than its part, as many as that makes of
    them."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteWork:
    """What one site does in a step."""

    name: str
    ready_s: tuple[float, ...]
    """Of each bucket: since the step began, without stragglers."""
    compute_s: float
    """Until the last backward pass has ended."""
    scatter_s: tuple[float, ...]
    """Of each bucket: its reduction inside the site."""
    gather_s: tuple[float, ...]
    """Of each bucket: what follows inside the site once it is back."""
    lanes: tuple[int, ...]
    """Of each bucket: whose ranks' these are. Of one lane, buckets go one after another."""
    tail_s: float = 0.0
    """After all that, before the next step: the optimizer, where it takes time."""
    num_ranks: int
    tokens: float
    """A step."""
    gateway: GatewayCost

    @property
    def num_lanes(self) -> int:
        """Groups of ranks that reduce side by side."""
        return max(self.lanes) + 1

    def alone_s(self, factor: float, *, is_serial: bool) -> tuple[float, float]:
        """Return when a step's compute has ended and when the step has, if nothing crosses.

        Args:
            factor: by which compute is longer.
            is_serial: nothing is reduced before the backward pass has ended.
        """
        computed_s = factor * self.compute_s
        scatter = [Server() for _ in range(self.num_lanes)]
        gather = [Server() for _ in range(self.num_lanes)]
        done_s = computed_s
        for bucket, ready_s in enumerate(self.ready_s):
            at_s = computed_s if is_serial else factor * ready_s
            lane = self.lanes[bucket]
            for server, took_s in (
                (scatter[lane], self.scatter_s[bucket]),
                (gather[lane], self.gather_s[bucket]),
            ):
                _, at_s = server.serve(at_s, at_s, took_s, took_s)
            done_s = max(done_s, at_s)
        return computed_s, done_s + self.tail_s


def trainer_work(
    job: Job, topology: Topology, site: Site, buckets: Sequence[Bucket], gateway: GatewayCost
) -> SiteWork:
    """Return what a site does in a step of the trainer that ships.

    Args:
        job: gives the model, and with its placement the site's part of the batch.
        topology: of the sites that take part.
        site: one of them.
        buckets: of the model.
        gateway: of the site.
    """
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
    collective_s = tuple(reduce_scatter_s(site, each.raw_bytes) for each in buckets)
    return SiteWork(
        name=site.name,
        ready_s=tuple(done_s[each.last_layer] for each in buckets),
        compute_s=at_s,
        scatter_s=collective_s,
        gather_s=collective_s,
        lanes=(0,) * len(buckets),
        num_ranks=site.num_ranks,
        tokens=float(sum(shares) * job.trainer.model.context),
        gateway=gateway,
    )
