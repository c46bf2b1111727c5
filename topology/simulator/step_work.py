"""Divides a job's step into simulated units: each site's work, and each bucket's flows.

Pure.

**Flows.** A flow (`Segment`) is the unit that the simulation moves over a link: consecutive chunks
of one bucket on one tree. It has at least as many chunks as the link has connections, and more if a
step would have more hops than the settings say. On a link without competing flows this is exact
(engine.py).

**Sites.** The ranks of a site are alike, and wait for each other in its collectives: the busiest
one stands for all. The gateways of a site count as one, as fast as all of them together.

**Described models.** The times of stages, the replicas' reduction and the optimizer are the cost
model's (topology/cost/parallel.py). A layer's gradient is ready during the last micro-batch's
backward pass, and is reduced over the replicas of its stage, in parallel with other stages. Then it
crosses.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from isthmus.topology.cost.collectives import overlap
from isthmus.topology.cost.layer_time import device_of, interior_of
from isthmus.topology.cost.parallel import StepTime, gradients_ready_s, step_time
from isthmus.topology.model.buckets import BUCKETS_MAX, FLOAT32_BYTES, Bucket, predicted_buckets
from isthmus.topology.model.fabric import reduce_scatter_s
from isthmus.topology.simulator.engine import Server
from isthmus.topology.simulator.settings import (
    Rounds,
    RoundWork,
    Settings,
    fragment_buckets,
)
from isthmus.topology.spec.compute import layer_times, site_shares
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import (
    Degrees,
    Workload,
    degrees_of,
    layers_per_stage,
    node_share,
    part_layers,
    workload_described,
)
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.tcp_constants import PAYLOAD_SHARE
from isthmus.topology.spec.world import Site, Topology
from isthmus.topology.trees.codec_costs import COSTS, GATEWAY_BYTES_PER_S, usual_ratio
from isthmus.topology.trees.link_codecs import plan_codecs
from isthmus.topology.trees.tree_choice import plan_reduction
from isthmus.topology.trees.wire_load import Hop, Load, Wire

_BUCKETS_ENOUGH = 64
"""Number of buckets up to which they are not joined to have fewer flows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bucket that crosses as one flow."""

    tree: int
    """The index of the tree in the plan; 0 in a gather."""
    raw_bytes: float
    wire_bytes: float
    granule: float
    """Share of the segment that crosses before the next site can go on, 0 to 1."""
    codec: str
    """The codec of the segment's tree."""


def segments_of(
    plan: ReductionPlan,
    codecs: tuple[str, ...],
    buckets: Sequence[Bucket],
    loads: Sequence[Load],
    settings: Settings,
) -> tuple[tuple[Segment, ...], ...]:
    """Cut each bucket into segments of its trees; `codecs` has one codec per tree."""
    is_fair = settings.sharing == "fair"
    num_chunks = sum(each.num_chunks for each in loads)
    turn_chunks = max(1.0, num_chunks * _num_hops(plan) / settings.flows_per_step)
    turns = (plan.tree_index(turn) for turn in itertools.count())
    of_links = loads[0].in_flight_of_links or {}  # of one exchange's loads, all have the same
    most_of_links = math.ceil(max(of_links.values(), default=0.0))
    segments = []
    for bucket, load in zip(buckets, loads, strict=True):
        # Flows that share a link leave as a whole, so each chunk is a flow.
        in_flight = 1 if is_fair else load.num_in_flight
        most = 1 if is_fair else min(load.num_chunks, max(in_flight, most_of_links))
        num_turns = max(1, round(load.num_chunks / turn_chunks))
        cuts = [load.num_chunks * turn // num_turns for turn in range(num_turns + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(cuts)]
        segments.append(
            tuple(
                Segment(
                    tree,
                    bucket.raw_bytes * count / load.num_chunks,
                    load.chunk_bytes[tree] * count,
                    min(in_flight, count) / count,
                    codecs[tree],
                )
                for tree, count in _flows(zip(sizes, turns, strict=False), most)
            )
        )
    return tuple(segments)


def _num_hops(plan: ReductionPlan) -> int:
    """Return the links that a chunk crosses, at least 1."""
    others = plan.num_sites - 1
    return max(1, others * plan.num_sites if plan.is_gather else 2 * others)


def _flows(turns: Iterable[tuple[int, int]], in_flight: int) -> Iterator[tuple[int, int]]:
    """Yield (tree, number of chunks): a tree's turns together, at least `in_flight` of them."""
    waiting: dict[int, int] = {}
    for num_chunks, tree in turns:
        waiting[tree] = waiting.get(tree, 0) + num_chunks
        if waiting[tree] >= in_flight:
            yield tree, waiting.pop(tree)
    yield from waiting.items()


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """The cost of a site's gateways, all together, each with a core for its codecs."""

    num_gateways: float
    """Effective number of gateways, lower if the fullest one has more than its share; 0: they take
    no time."""

    def coding_s(self, segment: Segment, encoded: float, decoded: float) -> tuple[float, float]:
        """Return the CPU seconds to encode and decode a segment that many times."""
        if not self.num_gateways:
            return 0.0, 0.0
        cost, share = COSTS[segment.codec], segment.raw_bytes / self.num_gateways
        return encoded * share / cost.encode_bytes_per_s, decoded * share / cost.decode_bytes_per_s

    def sending_s(self, segment: Segment, sent: float) -> float:
        """Return the seconds of sending a segment `sent` times, its arrivals elsewhere included."""
        if not self.num_gateways:
            return 0.0
        return sent * segment.wire_bytes / GATEWAY_BYTES_PER_S / self.num_gateways


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteWork:
    """The work of one site in a step."""

    name: str
    ready_s: tuple[float, ...]
    """Seconds since the step began at which each bucket is ready, without stragglers."""
    compute_s: float
    """Seconds until the last backward pass has ended."""
    scatter_s: tuple[float, ...]
    """Seconds of each bucket's reduction inside the site."""
    gather_s: tuple[float, ...]
    """Seconds of each bucket inside the site once it is back."""
    lanes: tuple[int, ...]
    """The lane of each bucket: the ranks that it belongs to. Buckets of one lane go one after
    another."""
    tail_s: float = 0.0
    """Seconds after all that, before the next step: the optimizer, where it takes time."""
    num_ranks: int
    tokens: float
    """Tokens of a step."""
    gateway: GatewayCost

    @property
    def num_lanes(self) -> int:
        """The number of groups of ranks that reduce side by side."""
        return max(self.lanes) + 1

    def alone_s(self, factor: float, *, is_serial: bool) -> tuple[float, float]:
        """Return when a step's compute and the step itself end, without any crossing.

        Compute takes `factor` times as long. If `is_serial`, buckets are reduced only after it.
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
    """Return a site's work in a step of the shipped trainer."""
    shares = site_shares(job, topology, site)
    most, micro_batch = max(shares), job.trainer.micro_batch
    # Only the last micro-batch's backward pass submits buckets: earlier ones are summed first.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The cut of the model in one site, and its step without any other site."""

    site: str
    degrees: Degrees
    step: StepTime
    stages_busy_s: tuple[float, ...]
    """Seconds that each stage computes, sends and receives; the last one has the logits, too."""

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they are idle."""
        return 1 - math.fsum(self.stages_busy_s) / len(self.stages_busy_s) / self.step.pipeline_s


def described_buckets(workload: Workload, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets in backward's order: layers, together until they fill a bucket.

    Layers are numbered from 1; 0 is the embedding, the last the head. Buckets are larger than
    `bucket_bytes` of float32 where there would be hundreds.
    """
    layer = workload.dense_parameters_per_layer + workload.expert_parameters_per_layer
    numels = [workload.embedding_parameters, *([layer] * workload.layers), workload.head_parameters]
    least_bytes = max(bucket_bytes, FLOAT32_BYTES * sum(numels) / BUCKETS_MAX)
    buckets, raw_bytes = [], 0
    for index in reversed(range(len(numels))):
        raw_bytes += FLOAT32_BYTES * numels[index]
        if raw_bytes >= least_bytes or index == 0:
            buckets.append(Bucket(raw_bytes, index))
            raw_bytes = 0
    return tuple(buckets)


def described_sites(
    job: Job, topology: Topology, buckets: Sequence[Bucket], *, gateways_take_time: bool
) -> tuple[tuple[SiteWork, ...], tuple[Inside, ...]]:
    """Return each placed site's work in a step, and its cut of the model."""
    placed = {each.site: each for each in job.placement}
    known: list[tuple[tuple[object, ...], Inside]] = []
    works, insides = [], []
    for site in topology.sites:
        mine = placed[site.name]
        # Equal sites with equal parts do the same: one is simulated.
        hardware = (site.accelerator, site.fabric, site.nodes, site.accelerators_per_node)
        key = (mine.parallel, mine.sequences, *hardware)
        cut = next((inside for other, inside in known if other == key), None)
        if cut is None:
            cut = inside_of(job, site)
            known.append((key, cut))
        inside = dataclasses.replace(cut, site=site.name)
        gateways = 0.0
        if gateways_take_time and (job.plan is None or job.plan.gateways == "measured"):
            workload = _workload(job)
            gateways = site.gateways_per_node / node_share(workload, inside.degrees, site)
        insides.append(inside)
        works.append(_site_work(job, site, inside, buckets, GatewayCost(gateways)))
    return tuple(works), tuple(insides)


def inside_of(job: Job, site: Site) -> Inside:
    """Return a site's cut of the job's model, and its step."""
    workload, (degrees, sequences) = _workload(job), _part(job, site)
    device, interior = device_of(site.accelerator), interior_of(site)
    step = step_time(workload, degrees, device, interior, sequences)
    busy_s = tuple(each_s + step.transfers_s for each_s in step.stages_s)
    return Inside(site=site.name, degrees=degrees, step=step, stages_busy_s=busy_s)


def _workload(job: Job) -> Workload:
    assert job.workload is not None, "the job describes its model"
    return workload_described(job.workload)


def _part(job: Job, site: Site) -> tuple[Degrees, int]:
    """Return a site's cut, and its sequences of a step."""
    [mine] = [each for each in job.placement if each.site == site.name]
    assert job.workload is not None, "the job describes its model"
    assert mine.parallel is not None, "the job says how each site cuts it"
    return degrees_of(mine.parallel, job.workload), mine.sequences


def _site_work(
    job: Job, site: Site, inside: Inside, buckets: Sequence[Bucket], gateway: GatewayCost
) -> SiteWork:
    workload, (degrees, sequences) = _workload(job), _part(job, site)
    done_s, stages = _layers_done(workload, degrees, inside)
    lanes = tuple(stages[each.last_layer] for each in buckets)
    return SiteWork(
        name=site.name,
        ready_s=tuple(done_s[each.last_layer] for each in buckets),
        compute_s=inside.step.pipeline_s,
        scatter_s=_reductions_s(workload, inside, buckets, lanes),
        # In the cost model the whole reduction precedes the crossing; ZeRO's gathers are in the
        # tail.
        gather_s=(0.0,) * len(buckets),
        lanes=lanes,
        tail_s=inside.step.parameters.exposed_s + inside.step.optimizer_s,
        num_ranks=site.num_ranks,
        tokens=float(sequences * workload.sequence),
        gateway=gateway,
    )


def _reductions_s(
    workload: Workload, inside: Inside, buckets: Sequence[Bucket], lanes: Sequence[int]
) -> tuple[float, ...]:
    """Return the seconds of each bucket's reduction over the replicas of its stage.

    A stage's last bucket is later by the cost model's delay of the backward pass.
    """
    gradients, window_s = inside.step.gradients, inside.step.window_s
    count = layers_per_stage(workload, inside.degrees)
    layer_s = gradients.busy_s / count
    ready_s = gradients_ready_s(inside.degrees, count, window_s)
    in_turn = overlap(ready_s, layer_s)
    slowed_s = max(0.0, gradients.exposed_s - in_turn.exposed_s)
    last = {lane: index for index, lane in enumerate(lanes)}
    reductions_s, above = [], workload.layers + 1
    for index, (bucket, lane) in enumerate(zip(buckets, lanes, strict=True)):
        num_layers = above - max(1, bucket.last_layer)
        reductions_s.append(layer_s * num_layers + (slowed_s if last[lane] == index else 0.0))
        above = min(above, max(1, bucket.last_layer))
    return tuple(reductions_s)


def _layers_done(
    workload: Workload, degrees: Degrees, inside: Inside
) -> tuple[list[float], list[int]]:
    """Return when each layer's gradient is ready, and its stage; layer 0 is the embedding.

    The last micro-batch goes back through one part after another, and ends with the first.
    """
    step, num_parts = inside.step, degrees.pipeline * degrees.virtual_stages
    layer_s = step.window_s * degrees.pipeline / workload.layers
    crossing_s = step.transfers_s / step.num_micro_batches / 2 / degrees.virtual_stages
    done_s, stages = [step.pipeline_s], [0]
    for part, count in enumerate(part_layers(workload.layers, num_parts)):
        first, last_s = len(stages) - 1, step.pipeline_s - part * crossing_s
        # Backward goes from the part's last layer to its first one.
        done_s += [last_s - layer_s * layer for layer in range(first, first + count)]
        stages += [part % degrees.pipeline] * count
    return [*done_s, done_s[-1]], [*stages, degrees.pipeline - 1]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step at all sites."""

    topology: Topology
    plan: ReductionPlan
    schedule: str
    """One of isthmus.topology.spec.job.SCHEDULES."""
    sites: tuple[SiteWork, ...]
    buckets: tuple[Bucket, ...]
    segments: tuple[tuple[Segment, ...], ...]
    """The segments of each bucket."""
    has_packets: bool
    first_window_bytes: float | None
    num_in_flight: int
    """Largest number of chunks in flight on any link."""
    granules_of_links: Mapping[Hop, float]
    """Mean chunks in flight on each directed link, divided by `num_in_flight`."""
    inside: tuple[Inside, ...] = ()
    """The inside of each site, where the job describes its model."""
    rounds: RoundWork | None = None
    """Work of rounds; None: all buckets cross in every step. With rounds, `sites` use other
    buckets."""

    is_delayed: bool = False
    """Whether a step applies the gradients of the step before."""

    @property
    def round_steps(self) -> int:
        """The number of steps in which each bucket crosses once."""
        return 1 if self.rounds is None else self.rounds.rounds.steps

    def exchanged(self, steps: int) -> float:
        """Return what the first `steps` steps have sent, in steps' worth: their mean is 1."""
        return float(steps) if self.rounds is None else self.rounds.exchanged(self.buckets, steps)

    @property
    def frame_share(self) -> float:
        """The share of the bytes on the wire that gateways count: all but headers of packets."""
        return PAYLOAD_SHARE if self.has_packets else 1.0


def step_work(job: Job, topology: Topology, settings: Settings) -> StepWork:
    """Return the work of a job's step on a topology.

    Raises:
        ConfigError: the job's tree does not fit the topology.
    """
    plan = plan_reduction(job, topology)
    schedule = "off" if plan.num_sites == 1 else job.exchange.schedule
    sites, insides, buckets = _sites(job, topology, plan, settings)
    rounds = None
    if settings.rounds is not None and schedule != "off":
        rounds, buckets = _rounds(job, topology, settings.rounds, buckets)
    ratio = usual_ratio(job.exchange.codec) if settings.ratio is None else settings.ratio
    sizes, wire = [each.raw_bytes for each in buckets], Wire(job, topology, plan, ratio)
    loads = [wire.load(each) for each in sizes]
    has_packets = loads[0].first_window_bytes is not None
    has_slow_start = has_packets if settings.slow_start is None else settings.slow_start
    windows = [each.first_window_bytes or 0.0 for each in loads]
    if has_slow_start and not has_packets:
        packeted = dataclasses.replace(topology, emulate=False)
        packets = Wire(job, packeted, plan, ratio)
        windows = [packets.load(each).first_window_bytes or 0.0 for each in sizes]
    codecs = plan_codecs(job, topology, plan)
    num_in_flight, in_flight = (
        max(each.num_in_flight for each in loads),
        loads[0].in_flight_of_links or {},
    )
    return StepWork(
        topology=topology,
        plan=plan,
        schedule=schedule,
        sites=sites,
        buckets=buckets,
        segments=segments_of(plan, codecs, buckets, loads, settings),
        has_packets=has_packets,
        first_window_bytes=max(windows) if has_slow_start else None,
        num_in_flight=num_in_flight,
        granules_of_links={hop: each / num_in_flight for hop, each in in_flight.items()},
        inside=insides,
        rounds=rounds,
        is_delayed=job.regime.kind == "delayed" and rounds is None and schedule != "off",
    )


def _sites(
    job: Job, topology: Topology, plan: ReductionPlan, settings: Settings
) -> tuple[tuple[SiteWork, ...], tuple[Inside, ...], tuple[Bucket, ...]]:
    """Return each site's work, its cut of a described model, and all buckets."""
    if job.workload is not None:
        buckets = described_buckets(workload_described(job.workload), job.exchange.bucket_bytes)
        take_time = settings.gateways_take_time
        sites, insides = described_sites(job, topology, buckets, gateways_take_time=take_time)
        return sites, insides, buckets
    most = min(BUCKETS_MAX, max(_BUCKETS_ENOUGH, settings.flows_per_step // _num_hops(plan)))
    buckets = predicted_buckets(job.trainer.model, job.exchange.bucket_bytes, most)
    sites = tuple(
        trainer_work(
            job,
            topology,
            site,
            buckets,
            GatewayCost(site.num_gateways if settings.gateways_take_time else 0),
        )
        for site in topology.sites
    )
    return sites, (), buckets


def _rounds(
    job: Job, topology: Topology, rounds: Rounds, gradients: Sequence[Bucket]
) -> tuple[RoundWork, tuple[Bucket, ...]]:
    """Return the work of a round, in which all parameters cross once, and its buckets."""
    total_bytes = sum(each.raw_bytes for each in gradients)
    buckets, owners = fragment_buckets(total_bytes, rounds, job.exchange.bucket_bytes)
    gather_s = tuple(
        tuple(reduce_scatter_s(site, each.raw_bytes) for each in buckets) for site in topology.sites
    )
    return RoundWork(rounds, owners, gather_s), buckets
