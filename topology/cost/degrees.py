"""How a model is cut over the ranks of one site. Pure.

Ranks are numbered as Megatron does it: neighbours in a tensor group first, then context, data and
pipeline, so that what talks most is nearest.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from topology.cost.workload import Workload, known_recompute
from topology.workload import DescribedModel, Parallel
from topology.world import Site

ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of parallelism inside one site, and what goes with them."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    """Parts that each sequence is cut into."""
    expert: int = 1
    """Ranks, of those of `data`, that the experts are spread over."""
    data: int = 1
    """Replicas, sharded as `zero_stage` says; FSDP is stage 3."""
    micro_batch: int = 1
    """Sequences that a replica takes through a stage at once."""
    virtual_stages: int = 1
    """Parts of the model that each stage holds, interleaved."""
    recompute: str = "none"
    """One of workload.RECOMPUTES."""
    sequence_parallel: bool = False
    """What tensor parallelism leaves whole is cut along the sequence."""
    fused_attention: bool = False
    """Scores are never written to memory (FlashAttention)."""
    zero_stage: int = 0
    """What is cut over the replicas: 1 the optimizer, 2 gradients too, 3 parameters too."""
    scatter_gather: bool = True
    """Between stages each tensor rank sends its part of the activations, and they are gathered
    there; else each sends all of them."""
    overlap_data: bool = False
    """Replicas exchange gradients and parameters while they compute."""
    overlap_tensor: bool = False
    """Collectives of tensor groups go on while pieces of the multiplications beside them compute,
    and transfers between stages while other micro-batches do."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"Degrees.{name}: want >= 1, got {getattr(self, name)}")
        known_recompute(self.recompute)
        if self.zero_stage not in ZERO_STAGES:
            raise ValueError(f"Degrees.zero_stage: want 0 to 3, got {self.zero_stage}")
        if self.data % self.expert:
            raise ValueError(
                f"Degrees.expert: want a divisor of data {self.data}, got {self.expert}"
            )
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise ValueError("Degrees.virtual_stages: want 1 without a pipeline")

    @property
    def num_ranks(self) -> int:
        """Accelerators that one such cut takes."""
        return self.tensor * self.pipeline * self.context * self.data

    def micro_batches(self, num_sequences: int) -> int:
        """Return how many micro-batches the busiest replica takes, of a site's share of a step."""
        return math.ceil(num_sequences / (self.data * self.micro_batch))


_COUNTS = (
    "tensor",
    "pipeline",
    "context",
    "expert",
    "data",
    "micro_batch",
    "virtual_stages",
)


def misfit(workload: Workload, degrees: Degrees) -> str | None:
    """Return why the model cannot be cut so, naming the degree, or None if it can."""
    chunks = degrees.pipeline * degrees.virtual_stages
    wanted = (
        (degrees.tensor <= workload.heads and workload.heads % degrees.tensor == 0,
         f"tensor: {degrees.tensor} does not divide the {workload.heads} heads"),
        (chunks <= workload.layers,
         f"pipeline: {chunks} stages are more than the {workload.layers} layers"),
        (workload.sequence % degrees.context == 0,
         f"context: {degrees.context} does not divide the sequence of {workload.sequence} tokens"),
        (workload.experts % degrees.expert == 0,
         f"expert: {degrees.expert} does not divide the {workload.experts} experts"),
    )  # fmt: skip
    return next((why for fits, why in wanted if not fits), None)


def check_fit(workload: Workload, degrees: Degrees) -> None:
    """Raise ValueError, naming the degree, if the model cannot be cut so."""
    why = misfit(workload, degrees)
    if why is not None:
        raise ValueError(f"Degrees.{why}")


def layers_per_stage(workload: Workload, degrees: Degrees) -> int:
    """Return the layers of the fullest stage."""
    chunks = degrees.pipeline * degrees.virtual_stages
    return math.ceil(workload.layers / chunks) * degrees.virtual_stages


def stage_parameters(workload: Workload, degrees: Degrees) -> tuple[float, float]:
    """Return what one rank of the first stage holds before ZeRO: dense, and in experts.

    The first stage, for it holds the embedding; the last holds as many for the logits.
    """
    layers, tensor = layers_per_stage(workload, degrees), degrees.tensor
    ends = workload.embedding_parameters
    if degrees.pipeline == 1:
        ends += workload.head_parameters
    if workload.experts == 1:
        whole = workload.dense_parameters_per_layer + workload.expert_parameters_per_layer
        return (layers * whole + ends) / tensor, 0.0
    experts = layers * workload.expert_parameters_per_layer / (tensor * degrees.expert)
    return (layers * workload.dense_parameters_per_layer + ends) / tensor, experts


def node_share(workload: Workload, degrees: Degrees, site: Site) -> float:
    """Return the share of all gradients that crosses the gateway of a site's fullest node, 0 to 1.

    Each rank's shard goes through its own node. Replicas and context ranks share what they hold
    alike; the first stage has the embedding beside its layers.
    """
    dense, experts = stage_parameters(workload, degrees)
    ranks = degrees.data * degrees.context
    shard = dense / ranks + experts * degrees.expert / ranks
    return min(1.0, site.accelerators_per_node * shard / workload.parameters)


def degrees_of(parallel: Parallel, model: DescribedModel) -> Degrees:
    """Return a written cut as the cost model takes it."""
    return Degrees(
        **dataclasses.asdict(parallel),
        sequence_parallel=parallel.tensor > 1,
        fused_attention=model.fused_attention,
        overlap_data=True,
    )
