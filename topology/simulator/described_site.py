"""A step of a described model at one site that cuts it: its pipeline, when gradients leave. Pure.

What a layer, a stage, the replicas' reduction and the optimizer take is the cost model's
(topology/cost/parallel.py); the order of micro-batches in the stages is simulated (pipeline.py). As
that model has it, a stage waits for what it sends and receives. A layer's gradient is there while
the last micro-batch's backward pass goes over its part of the model, and is reduced over the
replicas of its stage; stages do so side by side. Then it crosses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from topology.cost.degrees import Degrees, degrees_of, layers_per_stage, node_share
from topology.cost.device import device_of, interior_of
from topology.cost.layer_time import head_times
from topology.cost.overlap import overlap
from topology.cost.parallel import StepTime, gradients_ready_s, step_time
from topology.cost.workload import Workload, workload_described
from topology.job import Job
from topology.model.buckets import FLOAT32_BYTES, Bucket
from topology.simulator.pipeline import PipelineTime, Stage, StageLink, simulate_pipeline
from topology.simulator.rounds import BUCKETS_MAX
from topology.simulator.site_work import GatewayCost, SiteWork
from topology.world import Site, Topology

_SETTLED = 4
"""Times as many micro-batches as stages: from then on each further one takes what the slowest stage
does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """How one site cuts the model, and what its step is without any other site."""

    site: str
    degrees: Degrees
    step: StepTime
    """By the closed form."""
    pipeline: PipelineTime
    """Simulated: all micro-batches through all stages."""


def described_buckets(workload: Workload, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return what leaves together, in backward's order: layers, together until they fill a bucket.

    Args:
        workload: the model. Its layers are numbered from 1; 0 is the embedding, the last the head.
        bucket_bytes: float32 bytes that close a bucket; more where there would be hundreds.
    """
    layer = workload.dense_parameters_per_layer + workload.expert_parameters_per_layer
    numels = [workload.embedding_parameters, *([layer] * workload.layers), workload.head_parameters]
    least_bytes = max(bucket_bytes, FLOAT32_BYTES * sum(numels) / BUCKETS_MAX)
    found, raw_bytes = [], 0
    for index in reversed(range(len(numels))):
        raw_bytes += FLOAT32_BYTES * numels[index]
        if raw_bytes >= least_bytes or index == 0:
            found.append(Bucket(raw_bytes, index))
            raw_bytes = 0
    return tuple(found)


def described_sites(
    job: Job, topology: Topology, buckets: Sequence[Bucket], *, gateways_take_time: bool
) -> tuple[tuple[SiteWork, ...], tuple[Inside, ...]]:
    """Return what each site does in a step, and how.

    Args:
        job: describes its model; each of its placed sites says how it cuts it.
        topology: of those sites.
        buckets: of the model.
        gateways_take_time: False: they cost nothing.
    """
    placed = {each.site: each for each in job.placement}
    known: list[tuple[tuple[object, ...], Inside]] = []
    works, insides = [], []
    for site in topology.sites:
        mine = placed[site.name]
        # Equal sites with equal parts do the same: one is simulated.
        hardware = (site.accelerator, site.fabric, site.nodes, site.accelerators_per_node)
        key = (mine.parallel, mine.sequences, *hardware)
        found = next((inside for other, inside in known if other == key), None)
        if found is None:
            found = inside_of(job, site)
            known.append((key, found))
        inside = dataclasses.replace(found, site=site.name)
        gateways = 0.0
        if gateways_take_time and (job.plan is None or job.plan.gateways == "measured"):
            workload = _workload(job)
            gateways = 1 / node_share(workload, inside.degrees, site)
        insides.append(inside)
        works.append(_site_work(job, site, inside, buckets, GatewayCost(gateways)))
    return tuple(works), tuple(insides)


def inside_of(job: Job, site: Site) -> Inside:
    """Return how a site cuts the job's model, and its step."""
    workload, (degrees, sequences) = _workload(job), _part(job, site)
    device, interior = device_of(site.accelerator), interior_of(site)
    one = step_time(workload, degrees, device, interior, degrees.data * degrees.micro_batch)
    whole = step_time(workload, degrees, device, interior, sequences)
    head = head_times(workload, degrees, device)
    forward_s = one.compute_s - head.total_s - one.window_s
    stage = Stage(
        forward_s=forward_s + one.transfers_s / 2, backward_s=one.window_s + one.transfers_s / 2
    )
    last = Stage(
        forward_s=stage.forward_s + head.forward_s, backward_s=stage.backward_s + head.backward_s
    )
    stages = [*([stage] * (degrees.pipeline - 1)), last]
    pipeline = _pipeline(stages, whole.num_micro_batches, degrees.virtual_stages)
    return Inside(site=site.name, degrees=degrees, step=whole, pipeline=pipeline)


def _workload(job: Job) -> Workload:
    assert job.workload is not None, "the job describes its model"
    return workload_described(job.workload)


def _part(job: Job, site: Site) -> tuple[Degrees, int]:
    """Return a site's cut, and its sequences of a step."""
    [mine] = [each for each in job.placement if each.site == site.name]
    assert job.workload is not None, "the job describes its model"
    assert mine.parallel is not None, "the job says how each site cuts it"
    return degrees_of(mine.parallel, job.workload), mine.sequences


def _pipeline(stages: Sequence[Stage], num_micro_batches: int, num_parts: int) -> PipelineTime:
    """Simulate a pipeline until it has settled; what is left is more of the same."""
    count = len(stages)
    rest = num_micro_batches % count
    settled = min(num_micro_batches, _SETTLED * count + rest)
    if num_parts > 1 and rest:
        settled = num_micro_batches  # groups of another size would go round otherwise
    links = [StageLink()] * (count if num_parts > 1 else count - 1)
    made = simulate_pipeline(stages, links, settled, num_parts)
    more = num_micro_batches - settled
    later_s = more * max(each.forward_s + each.backward_s for each in stages)
    return PipelineTime(
        made.step_s + later_s,
        [
            busy_s + more * (each.forward_s + each.backward_s)
            for busy_s, each in zip(made.busy_s, stages, strict=True)
        ],
        [[each_s + later_s for each_s in stage] for stage in made.gradients_s],
    )


def _site_work(
    job: Job, site: Site, inside: Inside, buckets: Sequence[Bucket], gateway: GatewayCost
) -> SiteWork:
    workload, (degrees, sequences) = _workload(job), _part(job, site)
    done_s, stages = _layers_done(workload, degrees, inside)
    lanes = tuple(stages[each.last_layer] for each in buckets)
    return SiteWork(
        name=site.name,
        ready_s=tuple(done_s[each.last_layer] for each in buckets),
        compute_s=inside.pipeline.step_s,
        scatter_s=_reductions_s(workload, inside, buckets, lanes),
        # The cost model has the whole reduction before the crossing; what ZeRO gathers is in the
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
    """Return what each bucket's reduction over the replicas of its stage takes.

    By what the cost model has for collectives that slow the backward pass down, a stage's last one
    is later.
    """
    gradients, window_s = inside.step.gradients, inside.step.window_s
    count = layers_per_stage(workload, inside.degrees)
    layer_s = gradients.busy_s / count
    ready_s = gradients_ready_s(inside.degrees, count, window_s)
    in_turn = overlap(ready_s, [[layer_s] * count], ready_s[-1])
    slowed_s = max(0.0, gradients.exposed_s - in_turn.exposed_s)
    last = {lane: index for index, lane in enumerate(lanes)}
    found, above = [], workload.layers + 1
    for index, (bucket, lane) in enumerate(zip(buckets, lanes, strict=True)):
        num_layers = above - max(1, bucket.last_layer)
        found.append(layer_s * num_layers + (slowed_s if last[lane] == index else 0.0))
        above = min(above, max(1, bucket.last_layer))
    return tuple(found)


def _layers_done(
    workload: Workload, degrees: Degrees, inside: Inside
) -> tuple[list[float], list[int]]:
    """Return when each layer's gradient is there, and the stage that has it; 0 is the embedding."""
    num_parts = degrees.pipeline * degrees.virtual_stages
    per_part = math.ceil(workload.layers / num_parts)
    backward_s = inside.step.window_s / degrees.virtual_stages
    done_s, stages = [], []
    for layer in range(workload.layers):
        part = layer // per_part
        stage = part % degrees.pipeline
        end_s = inside.pipeline.gradients_s[stage][part // degrees.pipeline]
        later = layer - part * per_part  # layers of the part whose turn comes after this one's
        done_s.append(end_s - backward_s * later / per_part)
        stages.append(stage)
    return [done_s[0], *done_s, done_s[-1]], [stages[0], *stages, stages[-1]]
