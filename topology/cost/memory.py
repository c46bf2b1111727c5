"""The memory that one accelerator needs. Pure.

N parameters on a rank before ZeRO, d ranks that hold the same (replicas, and context ranks of
each), p and g bytes of a parameter and a gradient:

- States (Rajbhandari et al., "ZeRO"; Megatron-LM's docs for its distributed optimizer): parameters
  p N, gradients g N, Adam's two moments 8 N, a float32 master copy 4 N unless p = 4, and a float32
  copy of the gradient 4 N where g < 4. ZeRO 1 divides the last three by d, 2 also gradients, 3 also
  parameters (two layers of which are there whole at any time).
- Activations a layer and micro-batch (Korthikanti et al., MLSys'23, eq. 1 to 6; here generic in the
  MLP's width and the attention's groups): s b h (10 + 24/t + 5 a s/(h t)); sequence parallelism
  divides the 10 by t, context parallelism s by c; selective recomputation and fused attention drop
  the last term; full recomputation keeps 2 s b h, and all of one layer while it is computed again.
- Of m micro-batches, stage i = 0 to p-1 of a pipeline keeps min(m, p - i) at once; of v virtual
  stages min(v m, p v + p - 1 - 2 i) parts, which is 1 + (p-1)/(p v) times as much at the first.
- Logits: 4 s b V/t, float32, on the last stage.
- What crosses sites (sites/worker: slots.py, bucket_copy.py, shard_encoder.py): a float32 buffer of
  each bucket, kept from step to step, 4 N or, of gradients in shards, 4 N/d; beside it this rank's
  shard, 4 N/d, where d > 1; and another 4 N/d for a lossy codec's residual, where ranks encode.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.topology.spec.model_shape import (
    Degrees,
    Workload,
    check_fit,
    full_stages,
    layers_of_stages,
    stage_parameters,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on an accelerator of one stage."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    """Bytes of the layers that ZeRO 3 has gathered."""
    activations: float
    """Bytes kept from forward to backward pass, of all micro-batches in flight."""
    recomputed: float
    """Bytes of one layer's activations while it is computed again."""
    logits: float
    exchange: float = 0.0
    """Bytes of buffers for other sites, and of a lossy codec's residual."""
    runtime: float

    @property
    def states(self) -> float:
        """The bytes of parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Bytes of all parts together; the site fits if its accelerators have as many."""
        temporary = self.gathered + self.recomputed + self.logits + self.runtime
        return self.states + self.activations + self.exchange + temporary


def memory(
    workload: Workload, degrees: Degrees, num_sequences: int, *, exchange: float = 0.0
) -> Memory:
    """Return the bytes that a rank of the fullest stage needs for a site's share of a step.

    Args:
        workload: The model.
        degrees: The cut of the model.
        num_sequences: The site's sequences per step.
        exchange: Buffers for other sites, from `exchange_bytes`.

    Raises:
        ValueError: the model cannot be cut so.
    """
    needed = stage_memories(workload, degrees, num_sequences, exchange=exchange)
    return max(needed.values(), key=lambda each: each.total)


def stage_memories(
    workload: Workload, degrees: Degrees, num_sequences: int, *, exchange: float = 0.0
) -> dict[int, Memory]:
    """Return the memory of the stages that may be the fullest; arguments as in `memory`."""
    check_fit(workload, degrees)
    all_of_layer = layer_activations(workload, degrees, "none")
    kept = layer_activations(workload, degrees, degrees.recompute)
    layers, memories = layers_of_stages(workload, degrees), {}
    for stage in full_stages(workload, degrees):
        parameters, gradients, optimizer = _states(workload, degrees, stage)
        in_flight = min(degrees.micro_batches(num_sequences), most_in_flight(degrees, stage))
        memories[stage] = Memory(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            gathered=_gathered(workload, degrees, stage),
            activations=max(1, in_flight) * layers[stage] * kept,
            recomputed=all_of_layer - kept,
            logits=_logits(workload, degrees) if stage == degrees.pipeline - 1 else 0.0,
            exchange=exchange,
            runtime=workload.runtime_bytes,
        )
    return memories


def most_in_flight(degrees: Degrees, stage: int) -> float:
    """Return the largest number of micro-batches whose activations a stage keeps at once."""
    stages, parts = degrees.pipeline, degrees.virtual_stages
    if parts == 1:
        return stages - stage
    return stages + (stages - 1 - 2 * stage) / parts


def layer_activations(workload: Workload, degrees: Degrees, recompute: str) -> float:
    """Return the bytes that one layer of one micro-batch keeps on a rank.

    Elements have the width of parameters; dropout masks one byte.
    """
    tokens = degrees.micro_batch * workload.sequence / degrees.context
    width, tensor = workload.parameter_bytes, degrees.tensor
    cut = tensor if degrees.sequence_parallel else 1
    layer_input = width * tokens * workload.hidden / cut
    if recompute == "full":
        return layer_input
    # Inputs of two norms, of attention and of MLP; two masks.
    whole = tokens * workload.hidden * (4 * width + 2) / cut
    heads = 2 * workload.hidden + 2 * workload.kv_width  # queries, sums; keys, values
    mlp = (3 if workload.gated else 2) * workload.mlp_width * workload.experts_per_token
    divided = tokens * width * (heads + mlp) / tensor
    scores = tokens * workload.sequence * workload.heads * (2 * width + 1) / tensor
    if recompute == "selective" or degrees.fused_attention:
        scores = 0.0
    return whole + divided + scores


def _states(workload: Workload, degrees: Degrees, stage: int) -> tuple[float, float, float]:
    """Return the bytes of parameters, of gradients and of the optimizer's states."""
    dense, experts = stage_parameters(workload, degrees, stage)
    of_parameters = of_gradients = of_optimizer = 0.0
    ranks = degrees.data * degrees.context
    for elements, replicas in ((dense, ranks), (experts, ranks / degrees.expert)):
        of_parameters += elements * workload.parameter_bytes / _cut(degrees, 3, replicas)
        of_gradients += elements * workload.gradient_bytes / _cut(degrees, 2, replicas)
        of_optimizer += elements * adam_bytes(workload) / _cut(degrees, 1, replicas)
    return of_parameters, of_gradients, of_optimizer


def _cut(degrees: Degrees, stage: int, replicas: float) -> float:
    return replicas / degrees.replicate if degrees.zero_stage >= stage else 1.0


def adam_bytes(workload: Workload) -> int:
    """Return the bytes of Adam's states for each parameter."""
    master = 4 if workload.parameter_bytes < 4 else 0
    gradient = 4 if workload.gradient_bytes < 4 else 0
    return 8 + master + gradient


def _gathered(workload: Workload, degrees: Degrees, stage: int) -> float:
    """Return the bytes of the two layers that ZeRO 3 has whole: one computes, the next arrives."""
    ranks = degrees.data * degrees.context // degrees.replicate
    if degrees.zero_stage < 3 or ranks == 1:
        return 0.0
    # This rank's own shares of these layers are counted with the parameters.
    elsewhere = 1 - 1 / ranks
    num_layers = max(1, layers_of_stages(workload, degrees)[stage])
    elements = sum(stage_parameters(workload, degrees, stage)) * min(2, num_layers) / num_layers
    return elements * workload.parameter_bytes * elsewhere


def _logits(workload: Workload, degrees: Degrees) -> float:
    tokens = degrees.micro_batch * workload.sequence / degrees.context
    return 4 * tokens * workload.vocabulary / degrees.tensor


def outer_optimizer_bytes(parameters: float, num_fragments: int = 1) -> float:
    """Return the bytes that local SGD adds: float32 outer parameters and momentum, 8 per parameter.

    Of streaming fragments only one is on the accelerator at a time.
    """
    return 8 * parameters / num_fragments


def exchange_bytes(elements: float, ranks: int, *, is_sharded: bool, has_residual: bool) -> float:
    """Return the accelerator bytes of a rank's buffers for the exchange between sites.

    The site's ranks reduce `elements` among themselves, and hold all of them, or only a shard
    (`is_sharded`, fully_shard). `has_residual`: the rank encodes with a lossy codec and error
    feedback.
    """
    shard = elements / ranks
    buffers = shard if is_sharded else elements
    beside = shard if ranks > 1 else 0.0
    return 4 * (buffers + beside + (shard if has_residual else 0.0))
