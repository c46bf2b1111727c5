"""Pydantic models of the job file as a user writes it.

They cover the exchange, the reduction, the plan, the shipped trainer, and a user's own model with
its cut. Defaults are those of topology/spec/job.py and topology/spec/plan_wishes.py.
"""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from isthmus.topology.models.exporters_model import ExportersModel
from isthmus.topology.models.regime_model import RegimeModel, Regimes
from isthmus.topology.spec.batch_rule import ON_FEWER_SITES, RATES
from isthmus.topology.spec.job import (
    CODECS,
    COMPUTES,
    NON_FINITE,
    ON_CORRUPTION,
    ON_SAME_DATA,
    RUNGS,
    SCHEDULES,
    TRAINED_IN,
    TREES,
    Checkpoint,
    Exchange,
    Job,
    Probe,
    Reduction,
    Trainer,
)
from isthmus.topology.spec.job_environment import NAME, OURS, VALUE_BYTES, VARIABLES_MAX
from isthmus.topology.spec.plan_wishes import (
    CUTS,
    GATEWAYS,
    MICRO_BATCHES,
    OBJECTIVES,
    PLAN_SITES,
    SHARES,
    PlanWishes,
    Replan,
)
from isthmus.topology.spec.reduction_plan import TREES_MAX, WEIGHT_MAX
from isthmus.topology.spec.site_data import SiteData
from isthmus.topology.spec.suggest import one_of, shown
from isthmus.topology.spec.units import (
    DURATION,
    format_duration,
    format_fraction,
    format_size,
    parse_duration,
)
from isthmus.topology.spec.workload import PRECISIONS, RECOMPUTES, DescribedModel, Parallel
from isthmus.topology.text.validation import (
    SIZE_SCHEMA,
    Argument,
    BelowOne,
    Budget,
    Count,
    KeyedError,
    Name,
    Number,
    PositiveDuration,
    Share,
    Size,
    Strict,
    Text,
    choice,
    default,
    float32_size,
    version_one,
)

_EXCHANGE = Exchange()
_REDUCTION = Reduction()
EXACT_MAX = 64
"""Limit on patterns of parameter names in a job."""
LINK_CODECS_MAX = 1000
"""Limit on links with their own codecs."""
CHANNELS_MAX = 32
"""Limit on the connections per link in a job."""


def _channels(value: object) -> int | None:
    """Return a number of connections; None for `auto`."""
    if value == "auto":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= CHANNELS_MAX:
        return value
    raise ValueError(f"want auto, or a whole number from 1 to {CHANNELS_MAX}; got {shown(value)}")


Chunk = Annotated[int, float32_size(64 << 10, 16 << 20), SIZE_SCHEMA]
"""The size of a chunk. It is one frame of protos/frame.py, whose payload ends below 17 MiB: 16 MiB
leaves room for any codec's overhead. Under 64 KiB the cost of a message outweighs its bytes."""
Channels = Annotated[
    int | None,
    PlainValidator(_channels),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": CHANNELS_MAX},
                {"type": "string", "const": "auto"},
            ]
        }
    ),
]
Bucket = Annotated[int, float32_size(64 << 10, 1 << 30), SIZE_SCHEMA]


class LinkCodecModel(Strict):
    """The codec of one link."""

    between: Annotated[
        list[Text], Field(min_length=2, max_length=2, description="Two sites; both ways alike.")
    ]
    codec: Annotated[str, *choice(CODECS)]


class ExchangeModel(Strict):
    """How gradients cross the WAN."""

    codec: Annotated[str, *choice(CODECS)] = _EXCHANGE.codec
    codecs: list[LinkCodecModel] = Field(
        default_factory=list,
        max_length=LINK_CODECS_MAX,
        description="Of links that have their own: a tree takes the smallest of its links'.",
    )
    exact: list[Text] = Field(
        default_factory=list,
        max_length=EXACT_MAX,
        description="Patterns of parameters' names, as '*norm*': their gradients are not rounded, "
        "nor are those of one dimension.",
    )
    error_feedback: Annotated[
        bool, Field(description="Add what a lossy codec loses of a gradient to the next one.")
    ] = _EXCHANGE.error_feedback
    error_feedback_decay: Annotated[
        Number,
        Field(gt=0, le=1, description="Factor on what is added, in each round: 0.95, say."),
    ] = _EXCHANGE.error_feedback_decay
    non_finite: Annotated[
        str,
        *choice(NON_FINITE),
        Field(
            description="A NaN or an infinity among the gradients crosses unchanged, "
            "or ends the run."
        ),
    ] = _EXCHANGE.non_finite
    chunk: Chunk = default(
        format_size(_EXCHANGE.chunk_bytes),
        "Of float32, before the codec: 64KiB to 16MiB. "
        "Unit of checksums, scheduling and reduction.",
    )
    channels_per_link: Channels = default(
        "auto",
        "TCP connections between each two gateways, exactly so many; auto: what fills the link, "
        "and more where packets are lost, up to the link's max_flows.",
    )
    bucket: Bucket = default(
        format_size(_EXCHANGE.bucket_bytes), "Of float32 a DDP bucket, in the shipped trainer."
    )
    window: Annotated[
        Size | None,
        Field(description="Unacknowledged bytes a peer; else from bandwidth times RTT."),
    ] = None
    schedule: Annotated[str, *choice(SCHEDULES)] = _EXCHANGE.schedule

    @model_validator(mode="after")
    def _window_holds_a_chunk(self) -> Self:
        if self.window is not None and self.window < self.chunk:
            raise KeyedError("window", f"want at least the chunk, {format_size(self.chunk)}")
        return self

    @model_validator(mode="after")
    def _decay_is_of_something(self) -> Self:
        if self.error_feedback_decay != 1 and not self.error_feedback:
            raise KeyedError("error_feedback_decay", "has no use without error_feedback: want 1")
        return self


class TreeModel(Strict):
    """One reduction tree over all sites."""

    root: Annotated[Text, Field(description="The site that forms the whole sum.")]
    parents: Annotated[
        dict[str, Text],
        Field(min_length=1, description="Whom each other site sends its sum to."),
    ]
    weight: Annotated[
        int,
        Field(ge=1, le=WEIGHT_MAX, description="Share of the chunks, relative to the other trees."),
    ] = 1
    down: Annotated[
        dict[str, Text] | None,
        Field(
            min_length=1,
            description="Whom each other site has the result from; else whom it sends to.",
        ),
    ] = None


class ReductionModel(Strict):
    """Which sites sum, and where."""

    tree: Annotated[str, *choice(TREES)] = _REDUCTION.tree
    hub: Annotated[str | None, Field(description="The star's centre.")] = _REDUCTION.hub
    groups: list[Annotated[list[Text], Field(min_length=1)]] = Field(
        default_factory=list,
        description="Of a hierarchy: sites near each other; by their round trips when absent.",
    )
    trees: list[TreeModel] = Field(
        default_factory=list,
        max_length=TREES_MAX,
        description="Instead of a form: exactly these, each over all sites.",
    )

    @model_validator(mode="after")
    def _keys_fit_the_form(self) -> Self:
        if self.hub is not None and self.tree not in ("auto", "star"):
            raise KeyedError("hub", f"has no use with tree: {self.tree}")
        if self.groups and self.tree != "hierarchy":
            raise KeyedError("groups", f"has no use with tree: {self.tree}; want tree: hierarchy")
        if self.trees and (self.tree != "auto" or self.hub is not None):
            other = "hub" if self.hub is not None else f"tree: {self.tree}"
            raise KeyedError("trees", f"has no use with {other}: the trees say it all")
        return self


_WISHES = PlanWishes()
_REPLAN = Replan()
REPORTS_S = 0.5
"""Seconds between two reports of a gateway on its links (sites/gateway/gateway.py)."""


class ReplanModel(Strict):
    """When the plan of a run is made again while it goes on."""

    drift: Share = default(
        format_fraction(_REPLAN.drift), "How far a link is off what the plan counts on."
    )
    lasting: PositiveDuration = default(
        format_duration(_REPLAN.lasting_s), "For so long, all the time; 500ms at least."
    )
    gain: Share = default(
        format_fraction(_REPLAN.gain), "Of the predicted step, that other trees have to save."
    )
    least_exact: Annotated[
        Annotated[str, *choice(RUNGS)] | None,
        Field(
            description="The least exact codec to which a run may go over, as its links narrow; "
            "else it keeps exchange.codec."
        ),
    ] = _REPLAN.least_exact
    shares: Annotated[
        str,
        *choice(SHARES),
        Field(description="fixed: sites keep their parts of the batch, however fast they are."),
    ] = _REPLAN.shares

    @model_validator(mode="after")
    def _is_measured_in_time(self) -> Self:
        if self.lasting < REPORTS_S:
            raise KeyedError(
                "lasting",
                f"want at least {format_duration(REPORTS_S)}, in which gateways report once; "
                f"got {format_duration(self.lasting)}",
            )
        return self


def _off(value: object) -> object:
    """Return None for `off`, and any other value unchanged."""
    return None if value == "off" else value


class _OrOffSchema:
    """Adds the word `off` to a mapping's JSON Schema."""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(core_schema), {"type": "string", "const": "off"}]}


Replans = Annotated[ReplanModel | None, BeforeValidator(_off), _OrOffSchema()]


class PlanModel(Strict):
    """What `isthmus plan` may decide; with this section, `launch` makes a plan by itself."""

    codecs: Annotated[
        list[Annotated[str, *choice(CODECS)]],
        Field(
            description="To choose from; of equally fast ones the most exact. Else exchange.codec."
        ),
    ] = Field(default_factory=list)
    sites: Annotated[str, *choice(PLAN_SITES)] = _WISHES.sites
    max_sync_period: Annotated[
        int,
        Field(ge=1, le=100_000, description="Steps between two exchanges that are permitted."),
    ] = _WISHES.max_sync_period
    max_loss_gap: Annotated[
        Share | None,
        Field(
            description="How much more loss than sync's a regime may be expected to end with: 1%."
        ),
    ] = _WISHES.max_loss_gap
    objective: Annotated[str, *choice(OBJECTIVES)] = _WISHES.objective
    budget: Annotated[
        Budget | None,
        Field(description="What egress may cost, at most; choices above it are left out."),
    ] = None
    micro_batch: Annotated[
        str,
        *choice(MICRO_BATCHES),
        Field(description="given: trainer.micro_batch; auto: the largest that fits the memory."),
    ] = _WISHES.micro_batch
    cuts: Annotated[
        str,
        *choice(CUTS),
        Field(
            description="auto: the plan decides how each site's ranks share the trainer's model."
        ),
    ] = _WISHES.cuts
    gateways: Annotated[
        str,
        *choice(GATEWAYS),
        Field(
            description="unlimited: as if gateways and codecs took no time; with `workload` only."
        ),
    ] = _WISHES.gateways
    replan: Annotated[
        Replans,
        Field(description="Other trees while a run goes on, where links have drifted; or off."),
    ] = Field(default_factory=ReplanModel)

    @model_validator(mode="after")
    def _each_codec_once(self) -> Self:
        twice = [codec for codec in self.codecs if self.codecs.count(codec) > 1]
        if twice:
            raise KeyedError("codecs", f"{twice[0]!r} is there twice")
        return self


_TRAINER = Trainer()
_MODEL, _DATA, _OPTIMIZER = _TRAINER.model, _TRAINER.data, _TRAINER.optimizer

Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]


class ModelModel(Strict):
    """Shape of the byte-level GPT that ships."""

    layers: Annotated[int, Field(ge=1, le=256)] = _MODEL.layers
    heads: Annotated[int, Field(ge=1, le=256)] = _MODEL.heads
    width: Annotated[int, Field(ge=1, le=65536, description="A multiple of heads.")] = _MODEL.width
    context: Annotated[int, Field(ge=1, le=1 << 20, description="Bytes a sequence.")] = (
        _MODEL.context
    )

    tied: Annotated[
        bool,
        Field(description="The embedding is the output matrix too; a pipeline wants false."),
    ] = _MODEL.tied
    experts: Annotated[int, Field(ge=1, le=1024, description="MLPs of a layer.")] = _MODEL.experts
    active_experts: Annotated[int, Field(ge=1, description="MLPs that a byte passes.")] = (
        _MODEL.active_experts
    )

    @model_validator(mode="after")
    def _shapes_fit_each_other(self) -> Self:
        if self.width % self.heads:
            raise KeyedError("width", f"want a multiple of heads, {self.heads}; got {self.width}")
        if self.active_experts > self.experts:
            raise KeyedError(
                "active_experts", f"want at most experts, {self.experts}; got {self.active_experts}"
            )
        return self


class DataModel(Strict):
    """Which text is learnt."""

    files: list[Text] = Field(
        default_factory=list,
        description="Globs, relative to this file; none: Python's own standard library.",
    )
    held_out: Share = default(
        format_fraction(_DATA.held_out), "Share of the files that is only evaluated."
    )
    max_bytes: Size = default(format_size(_DATA.max_bytes), "Of text, at most.")

    @model_validator(mode="after")
    def _something_is_learnt(self) -> Self:
        if self.held_out == 1:
            raise KeyedError("held_out", "must be less than 100%: nothing would be learnt")
        return self


class OptimizerModel(Strict):
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: Positive = _OPTIMIZER.learning_rate
    min_learning_rate: NotNegative = _OPTIMIZER.min_learning_rate
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = _OPTIMIZER.warmup_steps
    weight_decay: NotNegative = _OPTIMIZER.weight_decay
    beta1: BelowOne = _OPTIMIZER.beta1
    beta2: BelowOne = _OPTIMIZER.beta2
    clip_norm: Positive = _OPTIMIZER.clip_norm

    @model_validator(mode="after")
    def _rate_decays(self) -> Self:
        if self.min_learning_rate > self.learning_rate:
            raise KeyedError(
                "learning_rate",
                f"want at least min_learning_rate, {self.min_learning_rate:g}; "
                f"got {self.learning_rate:g}",
            )
        return self


class TrainerModel(Strict):
    """What the shipped trainer does; a script of your own may read it too."""

    compute: Annotated[str, *choice(COMPUTES)] = _TRAINER.compute
    steps: Count = _TRAINER.steps
    global_batch: Annotated[Count, Field(description="Sequences a step, over all sites.")] = (
        _TRAINER.global_batch
    )
    micro_batch: Annotated[
        Count, Field(description="Sequences that a rank takes through the model at once, at most.")
    ] = _TRAINER.micro_batch
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = _TRAINER.seed
    evaluate_every: Annotated[Count, Field(description="Steps; one is always made at the end.")] = (
        _TRAINER.evaluate_every
    )
    evaluation_batches: Count = _TRAINER.evaluation_batches
    precision: Annotated[
        str,
        *choice(TRAINED_IN),
        Field(description="Of layers; parameters, optimizer and reductions are float32."),
    ] = _TRAINER.precision
    compile: Annotated[
        bool, Field(description="Compile each block (torch.compile); wants a C++ compiler.")
    ] = _TRAINER.compile
    offload: Annotated[
        bool,
        Field(description="Parameters and optimizer on the host between uses; for accelerators."),
    ] = _TRAINER.offload
    model: ModelModel = Field(default_factory=ModelModel)
    data: DataModel = Field(default_factory=DataModel)
    optimizer: OptimizerModel = Field(default_factory=OptimizerModel)


_CUT = Parallel()
_DESCRIBED = DescribedModel(layers=1, width=1, heads=1, vocabulary=1, context=1, global_batch=1)
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
    replicate: Annotated[
        Degree, Field(description="Groups of replicas that each hold what zero_stage cuts (HSDP).")
    ] = _CUT.replicate
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
        if self.data % self.replicate:
            raise KeyedError(
                "replicate", f"want a divisor of data, {self.data}; got {self.replicate}"
            )
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
    gated: Annotated[bool, Field(description="MLPs have three matrices (SwiGLU).")] = (
        _DESCRIBED.gated
    )
    tied: Annotated[bool, Field(description="The embedding is the output matrix too.")] = (
        _DESCRIBED.tied
    )
    vocabulary: Annotated[int, Field(ge=1, le=1 << 30)]
    context: Annotated[int, Field(ge=1, le=1 << 30, description="Tokens a sequence.")]
    experts: Annotated[int, Field(ge=1, le=65536, description="MLPs of a layer.")] = (
        _DESCRIBED.experts
    )
    active_experts: Annotated[int, Field(ge=1, description="MLPs that a token passes.")] = (
        _DESCRIBED.active_experts
    )
    precision: Annotated[str, *choice(PRECISIONS)] = _DESCRIBED.precision
    gradient_bytes: Annotated[
        int, Field(description="1, 2 or 4: of an element, as it is kept and reduced inside a site.")
    ] = _DESCRIBED.gradient_bytes
    global_batch: Annotated[Count, Field(description="Sequences a step, over all sites.")]
    micro_batch: Annotated[
        Count | None, Field(description="Sequences of a replica at once; else the plan decides.")
    ] = None
    fused_attention: Annotated[
        bool, Field(description="Scores are never written to memory (FlashAttention).")
    ] = _DESCRIBED.fused_attention
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


_CHECKPOINT = Checkpoint()
KEEP_MAX = 10_000
"""Limit on kept checkpoints."""
_STEPS = re.compile(r"([1-9]\d{0,8}) ?steps?")


def _every(value: object) -> int | float:
    """Return a number of steps (int), or a duration in seconds (float)."""
    if isinstance(value, str) and (steps := _STEPS.fullmatch(value)) is not None:
        return int(steps[1])
    try:
        every_s = float(parse_duration(value))
    except ValueError as error:
        raise ValueError(
            f"want steps or a duration, as '100 steps' or 10m; got {shown(value)}"
        ) from error
    if every_s <= 0:
        raise ValueError(f"must be more than 0, got {shown(value)}")
    return every_s


Every = Annotated[
    int | float,
    PlainValidator(_every),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": rf"^{_STEPS.pattern}$", "examples": ["100 steps"]},
                {"type": "string", "pattern": DURATION.pattern, "examples": [DURATION.example]},
            ]
        }
    ),
]


class CheckpointModel(Strict):
    """What is kept of a run, so that it can go on after everything was killed."""

    every: Every = default(
        format_duration(_CHECKPOINT.every_s), "Steps or time between two, as '100 steps' or 10m."
    )
    keep: Annotated[int, Field(ge=1, le=KEEP_MAX, description="The newest so many stay.")] = (
        _CHECKPOINT.keep
    )
    to: Annotated[
        Text,
        Field(description="A folder, relative to this file, or a URL, that all sites reach."),
    ] = _CHECKPOINT.to
    resume: Annotated[
        Text | None,
        Field(description="The checkpoint to go on from: `launch --resume` sets it."),
    ] = _CHECKPOINT.resume


def _variable_name(value: str) -> str:
    if NAME.fullmatch(value) is None:
        raise ValueError(f"want letters, digits and '_', no digit first; got {shown(value)}")
    if OURS.fullmatch(value) is not None:
        raise ValueError(f"{value} is set by isthmus or torchrun for each rank: leave it out")
    return value


def _variable_value(value: str) -> str:
    if "\0" in value:
        raise ValueError("a variable cannot hold a NUL byte")
    if len(value.encode()) > VALUE_BYTES:
        raise ValueError(f"want at most {format_size(VALUE_BYTES)}")
    return value


VariableName = Annotated[
    str,
    AfterValidator(_variable_name),
    WithJsonSchema({"type": "string", "pattern": rf"^{NAME.pattern}$"}),
]
VariableValue = Annotated[str, AfterValidator(_variable_value)]
_JOB = Job(name="job", topology="topology.yaml")
DATA_MAX = 100
"""Limit on the files that a job wants at its sites."""
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def _digest(value: str) -> str:
    """Return a sha256 in hex."""
    if (found := _DIGEST.fullmatch(value)) is None:
        raise ValueError(
            f"want sha256: and 64 hex digits, as `sha256sum` prints; got {shown(value)}"
        )
    return found[1]


Digest = Annotated[
    str,
    AfterValidator(_digest),
    WithJsonSchema({"type": "string", "pattern": rf"^{_DIGEST.pattern}$"}),
]


class SiteDataModel(Strict):
    """A file that has to lie at every site before ranks start."""

    path: Annotated[
        Text | None,
        Field(
            description="Where it lies at each site, relative to where the script runs. With a "
            "url absolute; absent: ranks find it in $ISTHMUS_DATA by its name."
        ),
    ] = None
    url: Annotated[
        Text | None,
        Field(
            description="Where a site that lacks it fetches it, by fsspec: s3://bucket/train.bin. "
            "[it has to be there]"
        ),
    ] = None
    digest: Annotated[Digest | None, Field(description="sha256: and the file's digest.")] = None
    size: Annotated[
        Size | None,
        Field(description="Its exact size, as 17179869184B; of a folder, of all files."),
    ] = None

    @model_validator(mode="after")
    def _can_be_found_and_checked(self) -> Self:
        if self.path is None and self.url is None:
            raise ValueError("want a path, or a url to fetch it from")
        if self.digest is None and self.size is None:
            raise ValueError("want a digest or a size: what lies at a site is checked")
        if self.url is not None and "://" not in self.url:
            raise KeyedError("url", f"want a URL, as s3://bucket/file; got {shown(self.url)}")
        if self.url is not None and self.path is not None and not self.path.startswith("/"):
            raise KeyedError("path", "want an absolute path, where the url's content is kept")
        if self.path is None and not self.resolved().name:
            raise KeyedError("url", "want the URL of a file: it ends with no name")
        return self

    def resolved(self) -> SiteData:
        """Return it as runs have it."""
        return SiteData(path=self.path, url=self.url, digest=self.digest, num_bytes=self.size)


_PROBE = Probe()
PROBE_CONNECTIONS_MAX = 32
"""Limit on parallel connections when a link is measured."""


class PlacedModel(Strict):
    """A site that takes part."""

    site: Text
    sequences: Annotated[Count, Field(description="Of each step, over all ranks of the site.")]
    parallel: Annotated[
        ParallelModel | None,
        Field(description="How the site's ranks share the model: `isthmus plan` decides."),
    ] = None


class VerifyModel(Strict):
    """What is compared between sites."""

    parameters_every: Annotated[
        int, Field(ge=0, le=1_000_000, description="Steps between comparisons; 0: never.")
    ] = _JOB.verify_every
    same_data: Annotated[
        str,
        *choice(ON_SAME_DATA),
        Field(description="Whether sites that train on the same data end the run."),
    ] = _JOB.same_data
    gradients_every: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="Steps until all ranks compute one micro-batch again, and compare its "
            "gradients; 0: never.",
        ),
    ] = _JOB.gradients_every
    on_corruption: Annotated[
        str,
        *choice(ON_CORRUPTION),
        Field(
            description="Where a rank computes other gradients than the rest: stop the run, or "
            "drop its site until `isthmus sites add`."
        ),
    ] = _JOB.on_corruption


class TimelineModel(Strict):
    """Which steps are kept in detail, for `isthmus report` and `isthmus trace`."""

    every: Annotated[
        int, Field(ge=0, le=1_000_000, description="Steps; the first three always; 0: none.")
    ] = _JOB.timeline_every


class ProbeModel(Strict):
    """How the links are measured."""

    connections: list[Annotated[int, Field(ge=1, le=PROBE_CONNECTIONS_MAX)]] = Field(
        default_factory=lambda: list(_PROBE.connections),
        min_length=1,
        max_length=8,
        description="TCP connections side by side, in turn.",
    )
    echoes: Annotated[int, Field(ge=10, le=10_000, description="Round trips that are timed.")] = (
        _PROBE.echoes
    )
    window: PositiveDuration = default(
        format_duration(_PROBE.window_s), "For which bytes are counted: 100ms to 60s."
    )

    @model_validator(mode="after")
    def _window_is_of_use(self) -> Self:
        if not 0.1 <= self.window <= 60:
            raise KeyedError("window", f"want 100ms to 60s, got {format_duration(self.window)}")
        return self


class ModelFlopsModel(Strict):
    """What a report has to know of the model that is trained."""

    flops_per_token: Annotated[
        Number,
        Field(
            gt=0,
            description="FLOPs of a forward and a backward pass for each token, for the MFU: what "
            "is computed twice left out.",
        ),
    ]


class JobModel(Strict):
    """A job file: one training run."""

    version: Annotated[int, PlainValidator(version_one), WithJsonSchema({"const": 1})]
    name: Name
    topology: Annotated[Text, Field(description="The topology file, relative to this one.")]
    entrypoint: Annotated[
        Text | None,
        Field(description="Your own script, relative to this file; else the shipped trainer."),
    ] = None
    arguments: list[Argument] = Field(
        default_factory=list, description="For the entrypoint; `launch JOB -- …` adds more."
    )
    working_folder: Annotated[
        Text | None,
        Field(
            description="The folder in which the entrypoint runs, relative to this file; else "
            "this file's own."
        ),
    ] = None
    env: dict[VariableName, VariableValue] = Field(
        default_factory=dict,
        max_length=VARIABLES_MAX,
        description="Environment variables of all ranks, beside those of their machines.",
    )
    pass_env: list[VariableName] = Field(
        default_factory=list,
        max_length=VARIABLES_MAX,
        description="Names of variables, as of secrets, that ranks have as they are where "
        "`isthmus launch` is called. Their values are written nowhere.",
    )
    data: list[SiteDataModel] = Field(
        default_factory=list,
        max_length=DATA_MAX,
        description="What has to lie at every site before ranks start: checked, and fetched once "
        "where there is a url.",
    )
    exchange: ExchangeModel = Field(default_factory=ExchangeModel)
    reduction: ReductionModel = Field(default_factory=ReductionModel)
    regime: Annotated[
        Regimes, Field(description="How often sites exchange, and what; absent: in every step.")
    ] = Field(default_factory=lambda: RegimeModel(kind="sync"))
    verify: VerifyModel = Field(default_factory=VerifyModel)
    timeline: TimelineModel = Field(default_factory=TimelineModel)
    trainer: TrainerModel = Field(default_factory=TrainerModel)
    probe: Annotated[
        ProbeModel | None,
        Field(description="Measure the links instead: `isthmus probe` writes it."),
    ] = None
    on_fewer_sites: Annotated[
        str,
        *choice(ON_FEWER_SITES),
        Field(
            description="With fewer ranks than in the beginning: the global batch stays, or "
            "shrinks with them, and the learning rate follows."
        ),
    ] = "keep"
    rate: Annotated[
        str,
        *choice(RATES),
        Field(
            description="How the learning rate follows a batch that shrinks: as its share of the "
            "full one, as the root of that, or not at all."
        ),
    ] = "linear"
    checkpoint: Annotated[
        CheckpointModel | None,
        Field(description="What is kept so that `launch --resume` can go on; else nothing."),
    ] = None
    placement: list[PlacedModel] = Field(
        default_factory=list,
        description="The sites that take part; none: all, the batch spread evenly over all ranks.",
    )
    begin_with: list[Text] = Field(
        default_factory=list,
        min_length=1,
        validate_default=False,
        description="The sites that the run begins with; `isthmus sites add` adds others of the "
        "topology. Absent: all.",
    )
    plan: PlanModel | None = None
    workload: Annotated[
        WorkloadModel | None,
        Field(
            description="What the entrypoint trains, for `isthmus plan` to cut it over each site."
        ),
    ] = None

    allow_cpu: Annotated[
        bool,
        Field(
            description="Compute on CPUs where the topology says an accelerator and there is none."
        ),
    ] = False
    noise_scale: Annotated[
        bool,
        Field(description="Measure the gradient noise scale: how large a batch is worth it."),
    ] = False
    model: Annotated[
        ModelFlopsModel | None,
        Field(description="What reports say of the model; else by its shape, or an estimate."),
    ] = None
    exporters: Annotated[
        ExportersModel,
        Field(description="Where figures and events go while the run goes on; else nowhere."),
    ] = Field(default_factory=ExportersModel)

    @model_validator(mode="after")
    def _data_have_names_of_their_own(self) -> Self:
        names = [each.resolved().name for each in self.data if each.path is None]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise KeyedError("data", f"two files are called {twice[0]!r}: want a path for one")
        return self

    @model_validator(mode="after")
    def _variables_have_one_value(self) -> Self:
        for name in self.pass_env:
            if name in self.env:
                raise KeyedError("pass_env", f"{name} has a value in env: want it in one of both")
        return self

    @model_validator(mode="after")
    def _noise_is_of_gradients_that_cross(self) -> Self:
        if self.noise_scale and (self.regime.kind != "sync" or self.exchange.schedule == "off"):
            raise KeyedError(
                "noise_scale", "compares sites' gradients in every step: want regime: sync"
            )
        return self

    @model_validator(mode="after")
    def _rate_has_a_batch_to_follow(self) -> Self:
        if self.rate != "linear" and self.on_fewer_sites == "keep":
            raise KeyedError(
                "rate",
                f"has no use with on_fewer_sites: keep, where the batch stays: want shrink for "
                f"{self.rate}, or no rate",
            )
        return self

    @model_validator(mode="after")
    def _codec_may_become_less_exact(self) -> Self:
        replan = None if self.plan is None else self.plan.replan
        if self.plan is None or replan is None or replan.least_exact is None:
            return self
        codec, least = self.exchange.codec, replan.least_exact
        if self.exchange.codecs or self.plan.codecs:
            raise KeyedError(
                "plan",
                "replan.least_exact has no use where codecs are chosen by link, or by the plan: want "
                "one exchange.codec",
            )
        if codec not in RUNGS or RUNGS.index(codec) > RUNGS.index(least):
            raise KeyedError(
                "plan",
                f"replan.least_exact: want {one_of(RUNGS)}, in this order from exchange.codec on, "
                f"which is {codec}; got {least}",
            )
        return self

    @model_validator(mode="after")
    def _regime_is_exchanged(self) -> Self:
        if self.exchange.schedule == "off" and self.regime.kind != "sync":
            raise KeyedError(
                "regime",
                f"has no use with exchange.schedule: off, which exchanges nothing: want another "
                f"schedule for {self.regime.kind}, or no regime",
            )
        return self

    @model_validator(mode="after")
    def _workload_is_the_entrypoints(self) -> Self:
        if self.workload is not None and self.entrypoint is None:
            raise KeyedError(
                "workload", "describes an entrypoint's model, and there is none: want trainer.model"
            )
        if (
            self.entrypoint is not None
            and self.plan is not None
            and self.plan.micro_batch == "auto"
        ):
            raise KeyedError(
                "plan",
                "micro_batch: auto is the shipped trainer's; your script's is left open where "
                "workload has no micro_batch",
            )
        if self.entrypoint is None:
            self._trainer_can_cut()
        plan = self.plan
        is_whole = self.workload is None and (plan is None or plan.cuts == "given")
        if plan is not None and plan.gateways != "measured" and is_whole:
            raise KeyedError("plan", "gateways: unlimited has no use without a workload")
        if plan is not None and plan.cuts == "auto" and self.entrypoint is not None:
            raise KeyedError("plan", "cuts: auto is the shipped trainer's; describe a workload")
        return self

    def _trainer_can_cut(self) -> None:
        """Refuse a cut that other settings of the job rule out."""
        cuts = [each.parallel for each in self.placement if each.parallel is not None]
        trainer = self.trainer
        plans_cuts = self.plan is not None and self.plan.cuts == "auto"
        is_cut = cuts or plans_cuts or trainer.precision != "fp32" or trainer.offload
        if is_cut and trainer.compute == "modelled":
            raise KeyedError(
                "trainer", "compute: modelled is for replicas in fp32: want real, or no cut"
            )
