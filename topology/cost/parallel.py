"""The time of a step in one site by itself. Pure.

    T = T_pipeline + exposed gradients + exposed parameters + T_optimizer

- Pipeline of p stages, v virtual ones each, m micro-batches (Narayanan et al., SC'21): the slowest
  stage takes all micro-batches, the bubble is one passage through all others:
      T_pipeline = m t_max + (t_1 + ... + t_p - t_max) / v
  For equal stages that is (m + (p-1)/v) t. That takes m >= p: fewer micro-batches cannot keep the
  stages busy from one virtual stage to the next, so the first takes p t, and each other t / v more.
  Stages may differ by a layer (model_shape), and the last one has the logits; each micro-batch pays
  for 2 v transfers of b s h elements (over the tensor ranks: "scatter/gather"), which 1F1B does not
  hide.
- Replicas talk round one ring through all of a group's ranks (collectives.ring_s). Overlapped
  collectives are not free: the share `contention` of their time delays the compute.
- Gradients: of ZeRO 0 all-reduced, of 1 to 3 reduce-scattered over the replicas after the last
  micro-batch; with `overlap_data` layer by layer within its backward pass (collectives.overlap),
  of virtual stages the earlier ones while it is elsewhere.
- Copies of sharded state (HSDP, `replicate`): neighbouring ranks share a copy, so ZeRO's gathers
  and scatters stay among them; a shard's gradients are then all-reduced over the copies, as above.
- Parameters, of ZeRO 1 and 2: gathered again, with `overlap_data` layer by layer behind the first
  micro-batch's forward pass.
- ZeRO 3 gathers each layer's parameters before each pass of each micro-batch and scatters its
  gradients after each backward pass, with `overlap_data` behind the neighbouring layer.
- Optimizer: Adam reads each of a rank's gradients twice (the norm, the step) and moves 26 bytes of
  states and parameter; ZeRO cuts all of it over the replicas.

Left out: the all-reduce of a tied embedding between first and last stage, data loading, and sites
whose replicas differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.topology.cost.collectives import Level, Overlap, levels_of, overlap, ring_s
from isthmus.topology.cost.layer_time import (
    Device,
    Interior,
    PassTimes,
    activation_bytes,
    head_times,
    layer_times,
)
from isthmus.topology.spec.model_shape import (
    Degrees,
    Workload,
    check_fit,
    layers_of_stages,
    layers_per_stage,
    most_parameters,
)

_ADAM_BYTES = 26
"""Bytes that Adam moves for each parameter: master copy and two moments, read and written in
float32, and the bf16 copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of one step of one site, and its parts."""

    num_micro_batches: int
    stages_s: tuple[float, ...]
    """Seconds that each stage is busy with its layers, collectives inside them included; the last
    one has the logits, too."""
    exchange_s: float
    """Seconds of `compute_s` in collectives: of tensor, context and expert groups, and ZeRO 3's."""
    transfers_s: float
    """Seconds of transfers between stages."""
    bubble_s: float
    gradients: Overlap
    """The time of the replicas' reduction of gradients."""
    parameters: Overlap
    """The time of gathering parameters again after the optimizer's step."""
    optimizer_s: float
    window_s: float
    """Seconds of the last micro-batch's backward pass over a stage in the mean, at the end of
    the pipeline's time. Gradients become complete during it; only it can hide an exchange
    between sites."""

    @property
    def compute_s(self) -> float:
        """The seconds that the slowest stage is busy."""
        return max(self.stages_s)

    @property
    def pipeline_s(self) -> float:
        """The seconds from the first forward to the last backward pass."""
        return self.compute_s + self.transfers_s + self.bubble_s

    @property
    def step_s(self) -> float:
        """The seconds of the whole step."""
        exposed_s = self.gradients.exposed_s + self.parameters.exposed_s
        return self.pipeline_s + exposed_s + self.optimizer_s


def step_time(
    workload: Workload, degrees: Degrees, device: Device, inside: Interior, num_sequences: int
) -> StepTime:
    """Return the time of a site's step with `num_sequences`, its share of the batch.

    Raises:
        ValueError: the model cannot be cut so, or there is nothing to do.
    """
    check_fit(workload, degrees)
    layer = layer_times(workload, degrees, device, inside)
    head = head_times(workload, degrees, device)
    return step_from_times(workload, degrees, device, inside, num_sequences, layer, head)


def step_from_times(
    workload: Workload,
    degrees: Degrees,
    device: Device,
    inside: Interior,
    num_sequences: int,
    layer: PassTimes,
    head: PassTimes,
) -> StepTime:
    """Return the time of a site's step from the times of one layer and of the head.

    For measured profiles; other arguments and errors are those of `step_time`.
    """
    num_micro_batches = degrees.micro_batches(num_sequences)
    if num_micro_batches < 1:
        raise ValueError(f"num_sequences: want >= 1, got {num_sequences}")
    layers = layers_of_stages(workload, degrees)
    layer = _with_shards(workload, degrees, device, inside, layer)
    stages_s = [count * layer.total_s for count in layers]
    stages_s[-1] += head.total_s
    slowest_s = max(stages_s)
    others_s = (sum(stages_s) - slowest_s) / max(1, degrees.pipeline - 1)
    transfers_s = _transfers_s(workload, degrees, inside)
    window_s = workload.layers * layer.backward_s / degrees.pipeline
    exchange_s = layers[stages_s.index(slowest_s)] * layer.exchange_s
    return StepTime(
        num_micro_batches=num_micro_batches,
        stages_s=tuple(num_micro_batches * each_s for each_s in stages_s),
        exchange_s=num_micro_batches * exchange_s,
        transfers_s=num_micro_batches * transfers_s,
        bubble_s=passages(degrees, num_micro_batches) * (others_s + transfers_s),
        gradients=_gradients(workload, degrees, device, inside, window_s),
        parameters=_parameters(workload, degrees, device, inside, max(layers) * layer.forward_s),
        optimizer_s=_optimizer_s(workload, degrees, device),
        window_s=window_s,
    )


def passages(degrees: Degrees, num_micro_batches: int) -> float:
    """Return the pipeline bubble, in passages of a micro-batch through a stage."""
    busy = min(num_micro_batches, degrees.pipeline)
    return degrees.pipeline - busy + (busy - 1) / degrees.virtual_stages


def _transfers_s(workload: Workload, degrees: Degrees, inside: Interior) -> float:
    """Return the seconds to send one micro-batch's activations and gradients between stages."""
    if degrees.pipeline == 1 or degrees.overlap_tensor:
        return 0.0
    # Neighbouring stages are on different nodes, unless one node holds all stages.
    channel = inside.node if degrees.num_ranks <= inside.node_ranks else inside.cluster
    parts = degrees.tensor if degrees.scatter_gather else 1
    part_bytes = activation_bytes(workload, degrees) / parts
    return 2 * degrees.virtual_stages * channel.send_s(part_bytes)


def _with_shards(
    workload: Workload, degrees: Degrees, device: Device, inside: Interior, layer: PassTimes
) -> PassTimes:
    """Return a layer's times including ZeRO 3's gathers and scatters."""
    if degrees.zero_stage < 3:
        return layer
    gather_s = scatter_s = 0.0
    for each in _shared(workload, degrees, inside):
        share = each.elements / layers_per_stage(workload, degrees)
        gather_s += ring_s(each.cut, share * workload.parameter_bytes)
        scatter_s += ring_s(each.cut, share * workload.gradient_bytes)
    once_s, again_s = gather_s, gather_s + scatter_s
    if degrees.overlap_data:
        once_s = device.beside_s(once_s, layer.forward_s)
        again_s = device.beside_s(again_s, layer.backward_s)
    return PassTimes(
        layer.forward_s + once_s, layer.backward_s + again_s, layer.exchange_s + once_s + again_s
    )


@dataclass(frozen=True, slots=True)
class _Shared:
    """Parameters that several ranks share."""

    elements: float
    cut: list[Level]
    """Levels of the ranks over which ZeRO shards the parameters, or that hold the same."""
    copies: list[Level]
    """Levels of the ranks that hold copies of the same shard."""

    def reduce_s(self, degrees: Degrees, num_bytes: float) -> float:
        """Return the seconds to reduce `num_bytes` of gradients, once per step."""
        shard_bytes = num_bytes / math.prod(level.ranks for level in self.cut)
        reduced_s = 2 * ring_s(self.copies, shard_bytes)
        if degrees.zero_stage < 3:  # ZeRO 3 scatters them layer by layer
            # An all-reduce gathers what it has reduced.
            reduced_s += ring_s(self.cut, num_bytes) * (2 if degrees.zero_stage == 0 else 1)
        return reduced_s


def _shared(workload: Workload, degrees: Degrees, inside: Interior) -> list[_Shared]:
    """Return the groups of parameters that a rank shares with others.

    Context ranks hold the same parameters, too. Experts are shared by fewer ranks.
    """
    dense, experts = most_parameters(workload, degrees)
    copies = degrees.replicate if degrees.zero_stage else 1

    def levels(ranks: int, stride: int) -> list[Level]:
        return levels_of(ranks, stride, inside.node_ranks, inside.node, inside.cluster)

    def shared(elements: float, ranks: int, stride: int) -> _Shared:
        cut = ranks // copies
        return _Shared(elements, levels(cut, stride), levels(copies, cut * stride))

    ranks = degrees.data * degrees.context
    found = [shared(dense, ranks, degrees.tensor)]
    if experts:
        found.append(shared(experts, ranks // degrees.expert, degrees.tensor * degrees.expert))
    return found


def _buckets(workload: Workload, degrees: Degrees) -> int:
    """Return the number of buckets of the replicas' exchange: per layer, if overlapped."""
    return layers_per_stage(workload, degrees) if degrees.overlap_data else 1


def _gradients(
    workload: Workload, degrees: Degrees, device: Device, inside: Interior, window_s: float
) -> Overlap:
    """Return the reduction of gradients over the replicas, layer by layer."""
    num_buckets = _buckets(workload, degrees)
    bucket_s = sum(
        each.reduce_s(degrees, each.elements * workload.gradient_bytes / num_buckets)
        for each in _shared(workload, degrees, inside)
    )
    ready_s = gradients_ready_s(degrees, num_buckets, window_s)
    found = overlap(ready_s, bucket_s)
    return Overlap(found.busy_s, found.exposed_s + device.contention * found.hidden_s)


def gradients_ready_s(degrees: Degrees, num_buckets: int, window_s: float) -> list[float]:
    """Return when a stage's buckets are ready, in seconds from the last micro-batch's arrival.

    Between two parts of a stage, that micro-batch goes back through one part of every other stage.
    Buckets have equally many elements; `window_s` is its backward pass over the stage.
    """
    parts = degrees.virtual_stages
    away_s = (degrees.pipeline - 1) * window_s / parts
    return [
        window_s * made / num_buckets + away_s * (math.ceil(made * parts / num_buckets) - 1)
        for made in range(1, num_buckets + 1)
    ]


def _parameters(
    workload: Workload, degrees: Degrees, device: Device, inside: Interior, window_s: float
) -> Overlap:
    """Return the time to gather parameters whose optimizer states are sharded over replicas."""
    if degrees.zero_stage not in (1, 2):
        return Overlap(0.0, 0.0)
    num_buckets = _buckets(workload, degrees)
    gather_s = num_buckets * sum(
        ring_s(each.cut, each.elements * workload.parameter_bytes / num_buckets)
        for each in _shared(workload, degrees, inside)
    )
    return Overlap(gather_s, device.beside_s(gather_s, window_s if degrees.overlap_data else 0.0))


def _optimizer_s(workload: Workload, degrees: Degrees, device: Device) -> float:
    dense, experts = most_parameters(workload, degrees)
    if degrees.zero_stage:
        ranks = degrees.data * degrees.context // degrees.replicate
        dense, experts = dense / ranks, experts * degrees.expert / ranks
    return device.stream_s((dense + experts) * (_ADAM_BYTES + 2 * workload.gradient_bytes))
