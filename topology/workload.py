"""What a script of one's own trains, and how a site cuts it over its ranks, as a job says it.

Frozen.
"""

from dataclasses import dataclass

RECOMPUTES = ("none", "selective", "full")
"""What the backward pass computes again instead of keeping it: nothing, the attention's scores and
what follows from them, or whole layers."""
PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
"""What parameters and activations are computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How a site cuts the model over its ranks; they multiply to these, `expert` within `data`."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    """Parts that each sequence is cut into."""
    expert: int = 1
    """Ranks, of those of `data`, that the experts are spread over."""
    data: int = 1
    """Replicas."""
    zero_stage: int = 0
    """What is cut over the replicas: 1 the optimizer, 2 gradients too, 3 parameters too (FSDP)."""
    micro_batch: int = 1
    """Sequences that a replica takes through a stage at once."""
    virtual_stages: int = 1
    """Parts of the model that each stage holds, interleaved."""
    recompute: str = "none"
    """One of RECOMPUTES."""

    @property
    def num_ranks(self) -> int:
        """Ranks that it takes."""
        return self.tensor * self.pipeline * self.context * self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Degrees that a script can do at most; None: any."""

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    zero_stage: int | None = None
    virtual_stages: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModel:
    """What one's own script trains, as far as a plan has to know (topology/cost/model_shape.py)."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    """Tokens of a sequence."""
    global_batch: int
    """Sequences a step, over all sites."""
    kv_heads: int | None = None
    """None: as many as `heads`."""
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
    """None: for the plan to decide."""
    fused_attention: bool = True
    """Scores are never written to memory (FlashAttention)."""
    at_most: Limits = Limits()
