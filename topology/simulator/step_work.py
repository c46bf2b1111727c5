"""A job on a topology, cut into what is simulated: each site's step in time, each bucket in flows.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topology.codec_costs import usual_ratio
from topology.cost.workload import workload_described
from topology.job import Job
from topology.model.buckets import Bucket, buckets_of
from topology.model.fabric import reduce_scatter_s
from topology.model.reduction_plans import plan_reduction
from topology.model.wire_load import PACKET_FACTOR, Hop, wire_loads
from topology.simulator.described_site import Inside, described_buckets, described_sites
from topology.simulator.rounds import Rounds, RoundWork, fragment_buckets
from topology.simulator.segments import Segment, segments_of
from topology.simulator.settings import Settings
from topology.simulator.site_work import GatewayCost, SiteWork, trainer_work
from topology.trees.link_codecs import plan_codecs
from topology.trees.trees import ReductionPlan
from topology.world import Topology


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
    """Chunks that are side by side on every link, at most."""
    granules_of_links: Mapping[Hop, float]
    """How many times that on each directed link, on the average."""
    inside: tuple[Inside, ...] = ()
    """Of each site, where the job describes its model."""
    rounds: RoundWork | None = None
    """None: all buckets cross in every step. Else sites' own work has other buckets than these."""

    @property
    def round_steps(self) -> int:
        """Steps in which each bucket crosses once."""
        return 1 if self.rounds is None else self.rounds.rounds.steps

    def exchanged(self, steps: int) -> float:
        """Return what the first `steps` steps have sent, in steps' worth: their mean is 1."""
        return float(steps) if self.rounds is None else self.rounds.exchanged(self.buckets, steps)

    @property
    def frame_share(self) -> float:
        """Of the bytes on the wire, what gateways count: frames without headers of packets."""
        return 1 / PACKET_FACTOR if self.has_packets else 1.0


def step_work(job: Job, topology: Topology, settings: Settings) -> StepWork:
    """Return what a step of a job is on a topology.

    Raises:
        ConfigError: the job's tree does not fit the topology.
    """
    plan = plan_reduction(job, topology)
    schedule = "off" if plan.num_sites == 1 else job.exchange.schedule
    sites, insides, buckets = _sites(job, topology, settings)
    rounds = None
    if settings.rounds is not None and schedule != "off":
        rounds, buckets = _rounds(job, topology, settings.rounds, buckets)
    ratio = usual_ratio(job.exchange.codec) if settings.ratio is None else settings.ratio
    sizes = [each.raw_bytes for each in buckets]
    loads = wire_loads(job, topology, plan, sizes, ratio)
    has_packets = loads[0].first_window_bytes is not None
    has_slow_start = has_packets if settings.slow_start is None else settings.slow_start
    windows = [each.first_window_bytes or 0.0 for each in loads]
    if has_slow_start and not has_packets:
        packeted = dataclasses.replace(topology, emulate=False)
        packets = wire_loads(job, packeted, plan, sizes, ratio)
        windows = [each.first_window_bytes or 0.0 for each in packets]
    codecs, is_fair = plan_codecs(job, topology, plan), settings.sharing == "fair"
    num_abreast, abreast = max(each.num_abreast for each in loads), loads[0].abreast_of_links or {}
    return StepWork(
        topology=topology,
        plan=plan,
        schedule=schedule,
        sites=sites,
        buckets=buckets,
        segments=segments_of(plan, codecs, buckets, loads, is_fair=is_fair),
        has_packets=has_packets,
        first_window_bytes=max(windows) if has_slow_start else None,
        num_abreast=num_abreast,
        granules_of_links={hop: each / num_abreast for hop, each in abreast.items()},
        inside=insides,
        rounds=rounds,
    )


def _sites(
    job: Job, topology: Topology, settings: Settings
) -> tuple[tuple[SiteWork, ...], tuple[Inside, ...], tuple[Bucket, ...]]:
    """Return each site's step, how it cuts a model that the job describes, and all buckets."""
    if job.workload is not None:
        buckets = described_buckets(workload_described(job.workload), job.exchange.bucket_bytes)
        take_time = settings.gateways_take_time
        sites, insides = described_sites(job, topology, buckets, gateways_take_time=take_time)
        return sites, insides, buckets
    buckets = buckets_of(job.trainer.model, job.exchange.bucket_bytes)
    sites = tuple(
        trainer_work(
            job,
            topology,
            site,
            buckets,
            GatewayCost(site.nodes if settings.gateways_take_time else 0),
        )
        for site in topology.sites
    )
    return sites, (), buckets


def _rounds(
    job: Job, topology: Topology, rounds: Rounds, gradients: Sequence[Bucket]
) -> tuple[RoundWork, tuple[Bucket, ...]]:
    """Return what crosses in a round: all parameters once, whatever the gradients' buckets are."""
    total_bytes = sum(each.raw_bytes for each in gradients)
    buckets, owners = fragment_buckets(total_bytes, rounds, job.exchange.bucket_bytes)
    gather_s = tuple(
        tuple(reduce_scatter_s(site, each.raw_bytes) for each in buckets) for site in topology.sites
    )
    return RoundWork(rounds, owners, gather_s), buckets
