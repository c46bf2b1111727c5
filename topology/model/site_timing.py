"""The times at which a site's gradients leave in a step, and of its step without other sites. Pure.

This is all that the step model (topology/model/step_model.py) uses of a site. The shipped trainer
has data parallelism only, and one timing per number of sequences. A model that a job describes may
be cut over a site's ranks in many ways, with different timings.

A cut's backward pass ends after m micro_batch_s + passages(m) passage_s + reduction_s, with m
micro-batches; the step after tail_s more.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from isthmus.topology.cost.memory import most_in_flight, stage_memories
from isthmus.topology.cost.parallel import StepTime, gradients_ready_s, passages
from isthmus.topology.model.buckets import FLOAT32_BYTES, gradient_bytes, releases
from isthmus.topology.model.fabric import reduce_scatter_s
from isthmus.topology.spec.compute import sequence_s
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import Degrees, Workload, layers_per_stage, node_share
from isthmus.topology.spec.world import Site

Point = tuple[float, ...]
"""The figures by which cuts are compared, entry by entry: the lower the better."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteTiming:
    """The timing of a step at one site. Seconds count from the beginning of the site's step."""

    leave_s: tuple[float, ...]
    """Seconds at which gradients leave, in this order."""
    left_share: tuple[float, ...]
    """Share of all gradients that had not left before each release; 1 for the first."""
    alone_s: float
    """Seconds of a step without other sites."""
    tail_s: float = 0.0
    """Seconds of the step after the last gradients are back."""
    inside_s: float = 0.0
    """Seconds that the site's own collectives are busy in a step: no step is shorter."""
    node_share: float = 1.0
    """Share of all gradients that crosses the gateway of the fullest node."""
    node_leave_s: tuple[float, ...] = ()
    """Seconds at which gradients leave that node; empty: when all others do."""
    node_left_share: tuple[float, ...] = ()
    """Share of that node's gradients that had not left it before each release."""
    cut: Cut | None = field(default=None, repr=False)
    """The cut of a described model; None: the shipped trainer's timing."""

    @property
    def head_s(self) -> float:
        """The seconds at which the last gradients leave."""
        return self.leave_s[-1]


def trainer_timing(job: Job, site: Site, num_sequences: int) -> SiteTiming:
    """Return the timing of the shipped trainer.

    Gradients leave during the last micro-batch's backward pass, after all have been summed.

    Args:
        job: model, exchange and micro-batch.
        site: accelerator and fabric.
        num_sequences: Sequences of the busiest rank.
    """
    parts = releases(job)
    total = gradient_bytes(job)
    each_s = sequence_s(job, site)
    compute_s = num_sequences * each_s
    last = (num_sequences - 1) % job.trainer.micro_batch + 1
    collective_s = [reduce_scatter_s(site, each.num_bytes) for each in parts]
    leave_s = tuple(
        compute_s - each.share_after * last * each_s + collective
        for each, collective in zip(parts, collective_s, strict=True)
    )
    # Without other sites a bucket is reduced and gathered, and waits for those before it.
    free_s = 0.0
    for each_leaves_s, collective in zip(leave_s, collective_s, strict=True):
        free_s = max(free_s, each_leaves_s) + collective
    return SiteTiming(
        leave_s=leave_s,
        left_share=tuple(each.left_bytes / total for each in parts),
        alone_s=max(compute_s, free_s) if any(collective_s) else compute_s,
        tail_s=collective_s[-1],
        inside_s=2 * math.fsum(collective_s),
        node_share=1 / site.nodes,
    )


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of an accelerator of one stage."""

    least_bytes: float
    """Bytes with one micro-batch in flight."""
    in_flight_bytes: float
    """Bytes for each further micro-batch in flight."""
    most_in_flight: float

    def bytes_of(self, micro_batches: float) -> float:
        """Return the bytes for a step of `micro_batches` micro-batches."""
        more = min(micro_batches, self.most_in_flight) - 1
        return self.least_bytes + more * self.in_flight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One way to cut a described model over a site, and its times."""

    degrees: Degrees
    micro_batch_s: float
    """Seconds of one more micro-batch in the slowest stage."""
    passage_s: float
    """Seconds of a micro-batch through one stage: the pipeline's bubble consists of such
    passages."""
    reduction_s: float
    """Seconds of the replicas' reduction after the backward pass."""
    tail_s: float
    """Seconds after the exchange: the optimizer, and parameters that are gathered again."""
    window_s: float
    """Seconds of the last micro-batch's backward pass through all stages; gradients leave during
    it."""
    node_window_s: float
    """Seconds of that backward pass in the first stage, whose nodes have most to send."""
    num_layers: int
    """Number of layers of a stage: their gradients leave one after another, or several together."""
    embedding_share: float
    """Share of all gradients that are the embedding's, which leave last; the first stage has it."""
    node_share: float
    """Share of all gradients that crosses the gateway of the fullest node."""
    stages: tuple[StageMemory, ...]
    """Memory of the stages that may be the fullest."""

    def head_s(self, micro_batches: int) -> float:
        """Return when the backward pass is over."""
        bubble_s = passages(self.degrees, micro_batches) * self.passage_s
        return micro_batches * self.micro_batch_s + bubble_s + self.reduction_s

    def timing(self, num_sequences: int, together: int) -> SiteTiming:
        """Return the timing of a site's share of a step.

        Gradients leave about evenly, so only the first and the last are modelled.

        Args:
            num_sequences: Sequences of the site.
            together: Layers whose gradients leave together.
        """
        head_s = self.head_s(self.degrees.micro_batches(num_sequences))
        stages = self.degrees.pipeline
        share = min(1.0, together / self.num_layers / stages)
        node_share = min(1.0, together / self.num_layers)
        embedding = self.embedding_share
        of_node = embedding / (embedding + (1 - embedding) / stages)
        return SiteTiming(
            leave_s=(head_s - self.window_s * (1 - share), head_s),
            left_share=(1.0, share + (1 - share) * embedding),
            alone_s=head_s + self.tail_s,
            tail_s=self.tail_s,
            node_share=self.node_share,
            node_leave_s=(head_s - self.node_window_s * (1 - node_share), head_s),
            node_left_share=(1.0, node_share + (1 - node_share) * of_node),
            cut=self,
        )

    def memory_bytes(self, num_sequences: int) -> float:
        """Return the bytes that the fullest accelerator needs."""
        micro_batches = self.degrees.micro_batches(num_sequences)
        return max(each.bytes_of(micro_batches) for each in self.stages)

    @property
    def least_bytes(self) -> float:
        """Bytes that the fullest accelerator needs with one micro-batch in flight."""
        return max(each.least_bytes for each in self.stages)

    @property
    def preference(self) -> Point:
        """Tie-break between equally fast cuts: the simpler one, then the one with less memory."""
        degrees = self.degrees
        return (
            degrees.zero_stage,
            degrees.replicate,
            degrees.virtual_stages,
            degrees.pipeline,
            degrees.tensor,
            degrees.context,
            self.least_bytes,
        )


def cut_of(
    workload: Workload,
    degrees: Degrees,
    site: Site,
    one: StepTime,
    *,
    serial: bool,
) -> Cut:
    """Return a cut, given the time of its step.

    Args:
        workload: The model.
        degrees: The cut.
        site: The site of the cut.
        one: The step with one micro-batch.
        serial: Whether gradients leave only after the backward pass.
    """
    num_layers = layers_per_stage(workload, degrees)
    return Cut(
        degrees=degrees,
        micro_batch_s=one.compute_s + one.transfers_s,
        passage_s=one.bubble_s / (passages(degrees, 1) or 1),
        reduction_s=one.gradients.exposed_s,
        tail_s=one.parameters.exposed_s + one.optimizer_s,
        window_s=0.0 if serial else degrees.pipeline * one.window_s,
        node_window_s=0.0 if serial else gradients_ready_s(degrees, num_layers, one.window_s)[-1],
        num_layers=num_layers,
        embedding_share=workload.embedding_parameters / workload.parameters,
        node_share=node_share(workload, degrees, site),
        stages=tuple(
            StageMemory(each.total, each.activations, most_in_flight(degrees, stage))
            for stage, each in stage_memories(workload, degrees, 1).items()
        ),
    )


@functools.lru_cache(maxsize=256)
def layers_together(workload: Workload, bucket_bytes: int) -> int:
    """Return the number of layers whose gradients leave together: enough to fill a bucket.

    Args:
        workload: The model.
        bucket_bytes: float32 bytes that close a bucket, all ranks' parts of it.
    """
    numel = workload.dense_parameters_per_layer + workload.expert_parameters_per_layer
    return math.ceil(bucket_bytes / (FLOAT32_BYTES * numel))
