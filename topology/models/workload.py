"""The parts of a job file that describe a model of one's own, and how a site cuts it."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from topology.text.fields import Count, KeyedError, Strict, choice
from topology.workload import PRECISIONS, RECOMPUTES, DescribedModel, Parallel

_CUT = Parallel()
_MODEL = DescribedModel(layers=1, width=1, heads=1, vocabulary=1, context=1, global_batch=1)
Degree = Annotated[int, Field(ge=1, le=100_000)]


class ParallelModel(Strict):
    """How a site cuts the model over its ranks: tensor x pipeline x context x data of them."""

    tensor: Degree = _CUT.tensor
    pipeline: Degree = _CUT.pipeline
    context: Degree = _CUT.context
    expert: Annotated[
        Degree, Field(description="Of the data ranks, that experts are spread over.")
    ] = _CUT.expert
    data: Annotated[Degree, Field(description="Replicas.")] = _CUT.data
    zero_stage: Annotated[
        int,
        Field(ge=0, le=3, description="Cut over the replicas: optimizer, gradients, parameters."),
    ] = _CUT.zero_stage
    micro_batch: Annotated[Count, Field(description="Sequences of a replica at once.")] = (
        _CUT.micro_batch
    )
    virtual_stages: Annotated[
        Degree, Field(description="Parts of the model a stage, interleaved.")
    ] = _CUT.virtual_stages
    recompute: Annotated[str, *choice(RECOMPUTES)] = _CUT.recompute

    @model_validator(mode="after")
    def _degrees_fit_each_other(self) -> Self:
        if self.data % self.expert:
            raise KeyedError("expert", f"want a divisor of data, {self.data}; got {self.expert}")
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise KeyedError("virtual_stages", "want 1 without a pipeline")
        return self


class LimitsModel(Strict):
    """Degrees that your script can do at most; any, where nothing is said."""

    tensor: Degree | None = None
    pipeline: Degree | None = None
    context: Degree | None = None
    expert: Degree | None = None
    zero_stage: Annotated[int | None, Field(ge=0, le=3)] = None
    virtual_stages: Degree | None = None


class WorkloadModel(Strict):
    """The model that a script of your own trains: a decoder-only transformer."""

    layers: Annotated[int, Field(ge=1, le=10_000)]
    width: Annotated[int, Field(ge=1, le=1 << 20, description="A multiple of heads.")]
    heads: Annotated[int, Field(ge=1, le=65536)]
    kv_heads: Annotated[
        int | None,
        Field(ge=1, description="Of keys and values, a divisor of heads; else as many as heads."),
    ] = None
    feed_forward: Annotated[
        int | None, Field(ge=1, le=1 << 24, description="Width of an MLP; else 4 times width.")
    ] = None
    gated: Annotated[bool, Field(description="MLPs have three matrices (SwiGLU).")] = _MODEL.gated
    tied: Annotated[bool, Field(description="The embedding is the output matrix too.")] = (
        _MODEL.tied
    )
    vocabulary: Annotated[int, Field(ge=1, le=1 << 30)]
    context: Annotated[int, Field(ge=1, le=1 << 30, description="Tokens a sequence.")]
    experts: Annotated[int, Field(ge=1, le=65536, description="MLPs of a layer.")] = _MODEL.experts
    active_experts: Annotated[int, Field(ge=1, description="MLPs that a token passes.")] = (
        _MODEL.active_experts
    )
    precision: Annotated[str, *choice(PRECISIONS)] = _MODEL.precision
    gradient_bytes: Annotated[
        int, Field(description="1, 2 or 4: of an element, as it is kept and reduced inside a site.")
    ] = _MODEL.gradient_bytes
    global_batch: Annotated[Count, Field(description="Sequences a step, over all sites.")]
    micro_batch: Annotated[
        Count | None, Field(description="Sequences of a replica at once; else the plan decides.")
    ] = None
    fused_attention: Annotated[
        bool, Field(description="Scores are never written to memory (FlashAttention).")
    ] = _MODEL.fused_attention
    at_most: LimitsModel = Field(default_factory=LimitsModel)

    @model_validator(mode="after")
    def _shapes_fit_each_other(self) -> Self:
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
        return self
