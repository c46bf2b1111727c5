"""A job's description of a user's model, and of its cut over a site's ranks.

All classes are frozen.
"""

from dataclasses import dataclass

RECOMPUTES = ("none", "selective", "full")
"""Choices of recomputation in the backward pass: nothing, the attention's scores and their
products, or whole layers."""
PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
"""The formats that parameters and activations are computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """A site's cut of the model. The degrees multiply to its ranks; `expert` is within `data`."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    """The number of parts that each sequence is cut into."""
    expert: int = 1
    """The number of ranks, of those of `data`, that the experts are spread over."""
    data: int = 1
    """The number of replicas."""
    zero_stage: int = 0
    """State sharded over the replicas: 1 the optimizer, 2 gradients too, 3 parameters too
    (FSDP)."""
    replicate: int = 1
    """The number of groups of replicas that each hold what `zero_stage` cuts (HSDP)."""
    micro_batch: int = 1
    """The number of sequences that a replica takes through a stage at once."""
    virtual_stages: int = 1
    """The number of parts of the model that each stage holds, interleaved."""
    recompute: str = "none"
    """One of RECOMPUTES."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the cut takes."""
        return self.tensor * self.pipeline * self.context * self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest degrees that a script can do; None: any."""

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    zero_stage: int | None = None
    virtual_stages: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModel:
    """The model that sites cut, as far as a plan has to know (topology/spec/model_shape.py)."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    """Tokens of a sequence."""
    global_batch: int
    """Sequences of a step, over all sites."""
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as `heads`."""
    feed_forward: int | None = None
    """Width of the MLP, of each expert if there are several; None: 4 times `width`."""
    gated: bool = False
    tied: bool = True
    experts: int = 1
    active_experts: int = 1
    """Experts that each token passes through."""
    precision: str = "bf16"
    """One of PRECISIONS: of parameters and activations."""
    gradient_bytes: int = 4
    """Size of an element, as it is kept and reduced inside a site; between sites the codec says."""
    micro_batch: int | None = None
    """Sequences of a micro-batch; None: for the plan to decide."""
    fused_attention: bool = True
    """Whether scores are never written to memory (FlashAttention)."""
    at_most: Limits = Limits()
    is_trainers: bool = False
    """Whether it is the shipped trainer's model, which can run only some cuts
    (topology/spec/trainer_cuts.py)."""
