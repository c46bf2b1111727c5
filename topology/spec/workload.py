"""A job's description of a user's model, and of its cut over a site's ranks.

All classes are frozen.
"""

from dataclasses import dataclass
from typing import Annotated

from isthmus.topology.spec.yaml_keys import Bounds, Count, KeyedError, Section, Unwritten, choice

RECOMPUTES = ("none", "selective", "full")
"""Choices of recomputation in the backward pass: nothing, the attention's scores and their
products, or whole layers."""
PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
"""The formats that parameters and activations are computed with."""


Degree = Annotated[int, Bounds(ge=1, le=100_000)]
ZeroStage = Annotated[int, Bounds(ge=0, le=3)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel(Section):
    """How a site cuts the model over its ranks: tensor x pipeline x context x data of them."""

    tensor: Degree = 1
    pipeline: Degree = 1
    context: Degree = 1
    expert: Degree = 1
    """Of the data ranks, that experts are spread over."""
    data: Degree = 1
    """Replicas."""
    zero_stage: ZeroStage = 0
    """Cut over the replicas: optimizer, gradients, parameters."""
    replicate: Degree = 1
    """Groups of replicas that each hold what zero_stage cuts (HSDP)."""
    micro_batch: Count = 1
    """Sequences of a replica at once."""
    virtual_stages: Degree = 1
    """Parts of the model a stage, interleaved."""
    recompute: Annotated[str, choice(RECOMPUTES)] = "none"

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the cut takes."""
        return self.tensor * self.pipeline * self.context * self.data

    def check(self) -> None:
        """Refuse degrees that do not fit each other."""
        for key in ("expert", "replicate"):
            if self.data % (degree := getattr(self, key)):
                raise KeyedError(key, f"want a divisor of data, {self.data}; got {degree}")
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise KeyedError("virtual_stages", "want 1 without a pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Section):
    """Degrees that your script can do at most; any, where nothing is said."""

    tensor: Degree | None = None
    pipeline: Degree | None = None
    context: Degree | None = None
    expert: Degree | None = None
    zero_stage: ZeroStage | None = None
    virtual_stages: Degree | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModel(Section):
    """The model that a script of your own trains: a decoder-only transformer."""

    layers: Annotated[int, Bounds(ge=1, le=10_000)]
    width: Annotated[int, Bounds(ge=1, le=1 << 20)]
    """A multiple of heads."""
    heads: Annotated[int, Bounds(ge=1, le=65536)]
    vocabulary: Annotated[int, Bounds(ge=1, le=1 << 30)]
    context: Annotated[int, Bounds(ge=1, le=1 << 30)]
    """Tokens a sequence."""
    global_batch: Count
    """Sequences a step, over all sites."""
    kv_heads: Annotated[int, Bounds(ge=1)] | None = None
    """Of keys and values, a divisor of heads; else as many as heads."""
    feed_forward: Annotated[int, Bounds(ge=1, le=1 << 24)] | None = None
    """Width of an MLP; else 4 times width."""
    gated: bool = False
    """MLPs have three matrices (SwiGLU)."""
    tied: bool = True
    """The embedding is the output matrix too."""
    experts: Annotated[int, Bounds(ge=1, le=65536)] = 1
    """MLPs of a layer."""
    active_experts: Annotated[int, Bounds(ge=1)] = 1
    """MLPs that a token passes."""
    precision: Annotated[str, choice(PRECISIONS)] = "bf16"
    gradient_bytes: int = 4
    """1, 2 or 4: of an element, as it is kept and reduced inside a site."""
    micro_batch: Count | None = None
    """Sequences of a replica at once; else the plan decides."""
    fused_attention: bool = True
    """Scores are never written to memory (FlashAttention)."""
    at_most: Limits = Limits()
    is_trainers: Annotated[bool, Unwritten] = False
    """Whether it is the shipped trainer's model, which can run only some cuts
    (topology/spec/trainer_cuts.py)."""

    def check(self) -> None:
        """Refuse shapes that do not fit each other."""
        if self.width % self.heads:
            raise KeyedError("width", f"want a multiple of heads, {self.heads}; got {self.width}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise KeyedError(
                "kv_heads", f"want a divisor of heads, {self.heads}; got {self.kv_heads}"
            )
        if self.active_experts > self.experts:
            raise KeyedError(
                "active_experts", f"want at most experts, {self.experts}; got {self.active_experts}"
            )
        if self.gradient_bytes not in (1, 2, 4):
            raise KeyedError("gradient_bytes", f"want 1, 2 or 4; got {self.gradient_bytes}")
