"""The shape of a decoder-only transformer: parameters, FLOPs, and how a site cuts it. Pure.

Formulas count matrix multiplications, two FLOPs for each element of a matrix and each token:

- The model FLOPs of a step over B sequences of s tokens (Narayanan et al., SC'21, eq. 3, without
  its recomputation; for any width of the MLP and any number of key-value heads):

      F = 6 B s (N_matrices + V h) + 12 B s² L h

  which is 72 B s L h² (1 + s/(6h) + V/(12 L h)) for a GPT. This is the "6 N + attention" of
  Chowdhery et al., "PaLM", appendix B, where N counts the parameters that multiply every token.
  The causal mask is not credited.

MFU divides the model FLOPs of a second by the peak. What is computed twice is not in it.

Stages of a pipeline of p stages of v parts each: each of the p v parts holds as many layers as any
other, or one less. One less holds the last part, for it has the logits; then the first, for it has
the embedding, and those behind it, which keep most micro-batches at once.

Ranks are numbered as Megatron does it: neighbours belong to one tensor group, then come context,
data and pipeline. So ranks that exchange most are nearest to each other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from isthmus.topology.spec.compute import VOCABULARY
from isthmus.topology.spec.job import Model
from isthmus.topology.spec.workload import DescribedModel, Parallel
from isthmus.topology.spec.world import Site

RUNTIME_BYTES = 2 << 30
"""Bytes for CUDA context, NCCL's buffers, cuBLAS workspaces and fragmentation. Reported are 1 to 5
GB; 2 are taken here."""
_PRECISION_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The shape of a model, and the width of its numbers in bytes."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    """Tokens of a sequence."""
    vocabulary: int
    ffn: int | None = None
    """Width of the MLP, of each expert if there are several; None: 4 times `hidden`."""
    kv_heads: int | None = None
    """Heads of keys and values (grouped-query attention); None: as many as `heads`."""
    gated: bool = False
    """Whether the MLP has three matrices (SwiGLU) instead of two."""
    experts: int = 1
    """MLPs of each layer, all of them learnt."""
    experts_per_token: int = 1
    """MLPs that each token passes through."""
    biases: bool = False
    """Whether matrices have a bias, as in GPT-3."""
    learned_positions: bool = False
    tied: bool = True
    """Whether the embedding is the output matrix too."""
    parameter_bytes: int = 2
    """Bytes of a parameter, and of an activation, as it is computed with."""
    gradient_bytes: int = 4
    """Bytes of an element of the gradient that is kept and reduced."""
    runtime_bytes: int = RUNTIME_BYTES

    @property
    def mlp_width(self) -> int:
        """Width of one MLP's hidden layer."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values: `hidden`, less where heads share them."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def attention_parameters(self) -> int:
        """Elements of a layer's four matrices for queries, keys, values and their output."""
        return 2 * self.hidden * (self.hidden + self.kv_width)

    @property
    def mlp_parameters(self) -> int:
        """Elements of the matrices of one MLP."""
        return (3 if self.gated else 2) * self.hidden * self.mlp_width

    @property
    def dense_parameters_per_layer(self) -> int:
        """Parameters that every token of a layer meets: attention, norms, biases, router."""
        norms = 4 * self.hidden
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_parameters + norms + self._biases + router

    @property
    def expert_parameters_per_layer(self) -> int:
        """Parameters of all MLPs of a layer."""
        return self.experts * self.mlp_parameters

    @property
    def _biases(self) -> int:
        if not self.biases:
            return 0
        up = self.mlp_width * (2 if self.gated else 1)
        return 2 * self.hidden + 2 * self.kv_width + self.experts * (up + self.hidden)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the table of tokens, and of that of positions where these are learnt."""
        return (self.vocabulary + self.learned_positions * self.sequence) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the last norm, and of the output matrix where it is not the embedding."""
        return 2 * self.hidden + (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def parameters(self) -> int:
        """The number of all parameters.

        12 L h² (1 + 13/(12h) + (V + s)/(12 L h)) for a GPT with biases (SC'21, eq. 2), and 2 h.
        """
        per_layer = self.dense_parameters_per_layer + self.expert_parameters_per_layer
        return self.layers * per_layer + self.embedding_parameters + self.head_parameters

    def layer_flops(self, num_sequences: float) -> float:
        """Return the FLOPs of one layer's forward pass; the attention's included."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        matrices = self.attention_parameters + self.experts_per_token * self.mlp_parameters + router
        return 2 * num_sequences * self.sequence * matrices + self.attention_flops(num_sequences)

    def attention_flops(self, num_sequences: float) -> float:
        """Return the FLOPs of the scores and of the sums that they weigh: 4 B s² h, forward."""
        return 4.0 * num_sequences * self.sequence**2 * self.hidden

    def head_flops(self, num_sequences: float) -> float:
        """Return the FLOPs of the logits: 2 B s h V, forward."""
        return 2.0 * num_sequences * self.sequence * self.hidden * self.vocabulary

    def model_flops(self, num_sequences: float) -> float:
        """Return the FLOPs of forward and backward pass, the latter twice the former."""
        layers = self.layers * self.layer_flops(num_sequences)
        return 3 * (layers + self.head_flops(num_sequences))


def workload_of(model: Model) -> Workload:
    """Return the model that ships as a workload: bytes for words, everything float32."""
    return Workload(
        layers=model.layers,
        hidden=model.width,
        heads=model.heads,
        sequence=model.context,
        vocabulary=VOCABULARY,
        experts=model.experts,
        experts_per_token=model.active_experts,
        tied=model.tied,
        learned_positions=True,
        parameter_bytes=4,
        gradient_bytes=4,
    )


def workload_described(model: DescribedModel) -> Workload:
    """Return what a job's `workload` section describes."""
    return Workload(
        layers=model.layers,
        hidden=model.width,
        heads=model.heads,
        sequence=model.context,
        vocabulary=model.vocabulary,
        ffn=model.feed_forward,
        kv_heads=model.kv_heads,
        gated=model.gated,
        experts=model.experts,
        experts_per_token=model.active_experts,
        tied=model.tied,
        learned_positions=model.is_trainers,
        parameter_bytes=_PRECISION_BYTES[model.precision],
        gradient_bytes=model.gradient_bytes,
        # The shipped trainer runs on CPUs, too: what the runtime takes there is not known.
        runtime_bytes=0 if model.is_trainers else RUNTIME_BYTES,
    )


def utilisation(
    flops: float, step_s: float, num_accelerators: int, peak_flops_per_s: float
) -> float:
    """Return the MFU, 0 to 1."""
    return flops / (step_s * num_accelerators * peak_flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees(Parallel):
    """How a site cuts a model over its ranks, and what goes with that."""

    sequence_parallel: bool = False
    """Whether what tensor parallelism leaves whole is cut along the sequence."""
    fused_attention: bool = False
    """Whether scores are never written to memory (FlashAttention)."""
    scatter_gather: bool = True
    """Whether each tensor rank sends only its part of the activations between stages, where they
    are gathered again; else each sends all of them."""
    overlap_data: bool = False
    """Whether replicas exchange gradients and parameters while they compute."""
    overlap_tensor: bool = False
    """Whether collectives of tensor groups go on beside pieces of the multiplications, and
    transfers between stages beside other micro-batches."""

    def micro_batches(self, num_sequences: int) -> int:
        """Return how many micro-batches the busiest replica takes, of a site's share of a step."""
        return math.ceil(num_sequences / (self.data * self.micro_batch))


def misfit(workload: Workload, degrees: Degrees) -> str | None:
    """Return why the model cannot be cut so, naming the degree, or None if it can."""
    # Of virtual stages, the first may be the embedding alone, and the last the logits.
    parts = degrees.pipeline * degrees.virtual_stages
    wanted = (
        (degrees.tensor <= workload.heads and workload.heads % degrees.tensor == 0,
         f"tensor: {degrees.tensor} does not divide the {workload.heads} heads"),
        (parts <= workload.layers + (2 if degrees.virtual_stages > 1 else 0),
         f"pipeline: {parts} stages are more than the {workload.layers} layers"),
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


@functools.lru_cache(maxsize=4096)
def part_layers(layers: int, num_parts: int) -> tuple[int, ...]:
    """Return how many layers each part of a model has, from the embedding to the logits."""
    most = -(-layers // num_parts)
    fewer = num_parts * most - layers
    first = max(0, fewer - 1)
    whole = num_parts - first - min(1, fewer)
    return (most - 1,) * first + (most,) * whole + (most - 1,) * min(1, fewer)


@functools.lru_cache(maxsize=4096)
def stage_layers(layers: int, pipeline: int, virtual_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage of a pipeline has; part i is of stage i mod `pipeline`."""
    parts = part_layers(layers, pipeline * virtual_stages)
    return tuple(sum(parts[stage::pipeline]) for stage in range(pipeline))


def layers_of_stages(workload: Workload, degrees: Degrees) -> tuple[int, ...]:
    """Return how many layers each stage of a cut has, the first stage first."""
    return stage_layers(workload.layers, degrees.pipeline, degrees.virtual_stages)


def layers_per_stage(workload: Workload, degrees: Degrees) -> int:
    """Return the layers of the stage that has most."""
    return max(layers_of_stages(workload, degrees))


def full_stages(workload: Workload, degrees: Degrees) -> tuple[int, ...]:
    """Return the stages of which one needs most: the first, the first of most layers, the last.

    The first has the embedding, and most micro-batches at once; the last has the logits.
    """
    layers = layers_of_stages(workload, degrees)
    return tuple(dict.fromkeys((0, layers.index(max(layers)), degrees.pipeline - 1)))


def stage_parameters(workload: Workload, degrees: Degrees, stage: int) -> tuple[float, float]:
    """Return what one rank of a stage holds before ZeRO: dense, and in experts."""
    layers, tensor = layers_of_stages(workload, degrees)[stage], degrees.tensor
    ends = 0
    if stage == 0:
        ends += workload.embedding_parameters
    if stage == degrees.pipeline - 1:
        ends += workload.head_parameters
        if workload.tied and stage > 0:  # A copy of the embedding.
            ends += workload.vocabulary * workload.hidden
    if workload.experts == 1:
        whole = workload.dense_parameters_per_layer + workload.expert_parameters_per_layer
        return (layers * whole + ends) / tensor, 0.0
    experts = layers * workload.expert_parameters_per_layer / (tensor * degrees.expert)
    return (layers * workload.dense_parameters_per_layer + ends) / tensor, experts


def most_parameters(workload: Workload, degrees: Degrees) -> tuple[float, float]:
    """Return what one rank of the stage with most parameters holds: dense, and in experts."""
    stages = full_stages(workload, degrees)
    return max((stage_parameters(workload, degrees, each) for each in stages), key=sum)


def node_share(workload: Workload, degrees: Degrees, site: Site) -> float:
    """Return the share of all gradients that crosses the gateway of a site's fullest node, 0 to 1.

    Each rank's shard goes through its own node. Replicas and context ranks share what they hold
    alike.
    """
    dense, experts = most_parameters(workload, degrees)
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
