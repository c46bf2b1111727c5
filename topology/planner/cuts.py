"""One way to cut a model over a site, and its times as plans reckon with them. Pure.

A cut's backward pass ends after m micro_batch_s + passages(m) passage_s + reduction_s, with m
micro-batches; the step after tail_s more. What a joint step of several sites depends on besides is
when gradients leave, of all stages and of the first one, and how much of them crosses one node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from topology.cost.layer_time import device_of, interior_of
from topology.cost.memory import Memory, memory
from topology.cost.model_shape import Degrees, Workload, layers_per_stage, node_share
from topology.cost.parallel import StepTime, gradients_ready_s, passages, step_time
from topology.model.buckets import FLOAT32_BYTES
from topology.world import Site

Point = tuple[float, ...]
"""What cuts are compared by: the lower the better, entry by entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One way to cut the model over a site, and its times."""

    degrees: Degrees
    micro_batch_s: float
    """Of one more micro-batch, in the slowest stage."""
    passage_s: float
    """Of a micro-batch through one stage: what the pipeline's bubble consists of."""
    reduction_s: float
    """What the replicas' reduction takes after the backward pass."""
    tail_s: float
    """After the exchange: the optimizer, and parameters that are gathered again."""
    window_s: float
    """Of the last micro-batch's backward pass through all stages: gradients leave during it."""
    node_window_s: float
    """Of the same, in the first stage: whose nodes have most to send."""
    num_layers: int
    """Of a stage: their gradients leave one after another, or several together."""
    embedding_share: float
    """Of all gradients, those of the embedding, which leave last; the first stage has it."""
    node_share: float
    """Of all gradients, what crosses the gateway of the fullest node."""
    least_bytes: float
    """Of memory, with one micro-batch in flight."""
    in_flight_bytes: float
    """Of each further one; there are never more than stages."""

    def head_s(self, micro_batches: int) -> float:
        """Return when the backward pass is over."""
        bubble_s = passages(self.degrees, micro_batches) * self.passage_s
        return micro_batches * self.micro_batch_s + bubble_s + self.reduction_s

    def timing(self, num_sequences: int, together: int) -> Timing:
        """Return times for a site's share of a step; so many layers' gradients leave together."""
        head_s = self.head_s(self.degrees.micro_batches(num_sequences))
        stages = self.degrees.pipeline
        share = min(1.0, together / self.num_layers / stages)
        node_share = min(1.0, together / self.num_layers)
        embedding = self.embedding_share
        of_node = embedding / (embedding + (1 - embedding) / stages)
        return Timing(
            cut=self,
            first_s=head_s - self.window_s * (1 - share),
            node_first_s=head_s - self.node_window_s * (1 - node_share),
            head_s=head_s,
            last_share=share + (1 - share) * embedding,
            node_last_share=node_share + (1 - node_share) * of_node,
        )

    def memory_bytes(self, num_sequences: int) -> float:
        """Return what the fullest accelerator needs."""
        in_flight = min(self.degrees.micro_batches(num_sequences), self.degrees.pipeline)
        return self.least_bytes + (in_flight - 1) * self.in_flight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A cut with a number of sequences."""

    cut: Cut
    first_s: float
    """When the first gradients leave."""
    node_first_s: float
    """When the first ones leave the fullest node."""
    head_s: float
    """When the last do: the backward pass is over."""
    last_share: float
    """Of all gradients, those that leave then."""
    node_last_share: float
    """Of the fullest node's, those that leave then."""

    @property
    def alone_s(self) -> float:
        """Of a step without any other site."""
        return self.head_s + self.cut.tail_s

    @property
    def point(self) -> Point:
        """All that a joint step depends on."""
        cut = self.cut
        firsts_s, lasts = (self.first_s, self.node_first_s), (self.last_share, self.node_last_share)
        return (self.head_s, *firsts_s, cut.tail_s, cut.node_share, *lasts)

    @property
    def preference(self) -> Point:
        """What decides between cuts equal by all else: less to set up, then less memory."""
        degrees = self.cut.degrees
        return (
            degrees.zero_stage,
            degrees.virtual_stages,
            degrees.pipeline,
            degrees.tensor,
            degrees.context,
            self.cut.least_bytes,
        )


def cut_of(
    workload: Workload,
    degrees: Degrees,
    site: Site,
    one: StepTime,
    needed: Memory,
    *,
    serial: bool,
) -> Cut:
    """Return a cut whose step is known.

    Args:
        workload: the model.
        degrees: the cut.
        site: that it is of.
        one: its step with one micro-batch.
        needed: what that takes of an accelerator's memory.
        serial: nothing leaves before the backward pass has ended.
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
        least_bytes=needed.total,
        in_flight_bytes=needed.activations,
    )


def given_cut(workload: Workload, degrees: Degrees, site: Site, *, serial: bool) -> Cut:
    """Return the cut that somebody has chosen; arguments as of `cut_of`.

    Raises:
        ValueError: the model cannot be cut so.
    """
    device, inside = device_of(site.accelerator), interior_of(site)
    one = step_time(workload, degrees, device, inside, degrees.data * degrees.micro_batch)
    return cut_of(workload, degrees, site, one, memory(workload, degrees, 1), serial=serial)


def layers_together(workload: Workload, bucket_bytes: int) -> int:
    """Return of how many layers gradients leave together: as many as fill a bucket, one at least.

    Args:
        workload: the model.
        bucket_bytes: float32 bytes that close a bucket, all ranks' parts of it.
    """
    numel = workload.dense_parameters_per_layer + workload.expert_parameters_per_layer
    return math.ceil(bucket_bytes / (FLOAT32_BYTES * numel))
