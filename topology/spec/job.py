"""A training job: what a user writes of it, and what the rest of isthmus sees. Frozen."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from isthmus.topology.spec.batch_rule import ON_FEWER_SITES, RATES
from isthmus.topology.spec.codec_names import CODECS, RUNGS
from isthmus.topology.spec.exporters import Exporters
from isthmus.topology.spec.job_environment import (
    VARIABLES_MAX,
    Variable,
    VariableName,
    VariableValue,
)
from isthmus.topology.spec.plan_wishes import PlanWishes
from isthmus.topology.spec.reduction_plan import TREES_MAX, WEIGHT_MAX
from isthmus.topology.spec.regime import KINDS, Regime
from isthmus.topology.spec.site_data import SiteData
from isthmus.topology.spec.suggest import one_of, shown
from isthmus.topology.spec.units import (
    DURATION,
    format_duration,
    format_size,
    parse_duration,
)
from isthmus.topology.spec.workload import DescribedModel, Parallel
from isthmus.topology.spec.yaml_keys import (
    Argument,
    BelowOne,
    Bounds,
    Checked,
    Count,
    Key,
    KeyedError,
    Name,
    NotNegative,
    Number,
    Positive,
    PositiveDuration,
    Read,
    Section,
    Share,
    Short,
    Size,
    Text,
    Unwritten,
    WrittenAs,
    choice,
    float32_size,
    number_or,
)

ON_SAME_DATA = ("refuse", "warn")
ON_CORRUPTION = ("stop", "drop")

TREES = ("auto", "gather", "star", "ring", "hierarchy")
"""The forms of reduction trees: which site sums what (topology/trees/tree_choice.py,
docs/planning.md)."""
NON_FINITE = ("carry", "stop")
"""The ways to treat a gradient that holds a NaN or an infinity: it crosses unchanged, or ends the
run."""
SCHEDULES = ("overlap", "serial", "off")
"""The times when buckets cross the WAN: during backward, only once it has ended, or never.

The last two are for measuring: `serial` shows what overlap is worth, and with `off` each site
trains by itself, which is what an efficiency of 1 means.
"""
COMPUTES = ("real", "modelled")
"""The ways to compute. `modelled`: a step takes the time that the topology's accelerators would
need (topology/spec/compute.py); tensors and communication are real, and nothing is learnt."""

TRAINED_IN = ("fp32", "bf16")
"""The formats that the shipped trainer's layers compute with."""

EXACT_MAX = 64
"""Limit on patterns of parameter names in a job."""
LINK_CODECS_MAX = 1000
"""Limit on links with their own codecs."""
CHANNELS_MAX = 32
"""Limit on the connections per link in a job."""
PROBE_CONNECTIONS_MAX = 32
"""Limit on parallel connections when a link is measured."""
KEEP_MAX = 10_000
"""Limit on kept checkpoints."""
STORES_MAX = 4
"""Limit on stores: each is written in turn."""
DATA_MAX = 100
"""Limit on the files that a job wants at its sites."""

CHUNK = float32_size(64 << 10, 16 << 20)
"""The size of a chunk. It is one frame of protos/frame.py, whose payload ends below 17 MiB: 16 MiB
leaves room for any codec's overhead. Under 64 KiB the cost of a message outweighs its bytes."""
BUCKET = float32_size(64 << 10, 1 << 30)
CHANNELS = number_or("auto", CHANNELS_MAX, None)
EverySteps = Annotated[int, Bounds(ge=0, le=1_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCodec(Section):
    """The codec of one link."""

    between: tuple[Text, Text]
    """Two sites; both ways alike."""
    codec: Annotated[str, choice(CODECS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(Section):
    """How gradients cross the WAN."""

    codec: Annotated[str, choice(CODECS)] = "split"
    codecs: Annotated[tuple[LinkCodec, ...], Bounds(max_length=LINK_CODECS_MAX)] = ()
    """Of links that have their own: a tree takes the smallest of its links'."""
    exact: Annotated[tuple[Text, ...], Bounds(max_length=EXACT_MAX)] = ()
    """Patterns of parameters' names, as '*norm*': their gradients are not rounded, nor are those
    of one dimension."""
    error_feedback: bool = True
    """Add what a lossy codec loses of a gradient to the next one."""
    error_feedback_decay: Annotated[float, Bounds(allow_inf_nan=False, gt=0, le=1)] = 1.0
    """Factor on what is added, in each round: 0.95, say."""
    non_finite: Annotated[str, choice(NON_FINITE)] = "carry"
    """A NaN or an infinity among the gradients crosses unchanged, or ends the run."""
    chunk_bytes: Annotated[int, Key("chunk"), CHUNK] = 2 << 20
    """Of float32, before the codec: 64KiB to 16MiB. Unit of checksums, scheduling and
    reduction."""
    is_cut: Annotated[bool, Unwritten] = field(default=False, compare=False)
    """Whether chunks have exactly that size, whatever the links are like. Planning again sets it,
    for a run that goes on keeps its chunks."""
    channels_per_link: Annotated[int | None, CHANNELS] = None
    """TCP connections between each two gateways, exactly so many; auto: what fills the link, and
    more where packets are lost, up to the link's max_flows."""
    bucket_bytes: Annotated[int, Key("bucket"), BUCKET] = 4 << 20
    """Of float32 a DDP bucket, in the shipped trainer."""
    window_bytes: Annotated[Size | None, Key("window")] = None
    """Unacknowledged bytes a peer; else from bandwidth times RTT."""
    schedule: Annotated[str, choice(SCHEDULES)] = "overlap"

    def check(self) -> None:
        """Refuse a window below a chunk, and a decay of nothing."""
        if self.window_bytes is not None and self.window_bytes < self.chunk_bytes:
            raise KeyedError("window", f"want at least the chunk, {format_size(self.chunk_bytes)}")
        if self.error_feedback_decay != 1 and not self.error_feedback:
            raise KeyedError("error_feedback_decay", "has no use without error_feedback: want 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTree(Section):
    """One reduction tree over all sites."""

    root: Text
    """The site that forms the whole sum."""
    parents: Annotated[Mapping[str, Text], Bounds(min_length=1)]
    """Whom each other site sends its sum to."""
    weight: Annotated[int, Bounds(ge=1, le=WEIGHT_MAX)] = 1
    """Share of the chunks, relative to the other trees."""
    down: Annotated[Mapping[str, Text], Bounds(min_length=1)] | None = None
    """Whom each other site has the result from; else whom it sends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction(Section):
    """Which sites sum, and where."""

    tree: Annotated[str, choice(TREES)] = "auto"
    hub: str | None = None
    """The star's centre."""
    groups: tuple[Annotated[tuple[Text, ...], Bounds(min_length=1)], ...] = ()
    """Of a hierarchy: sites near each other; by their round trips when absent."""
    trees: Annotated[tuple[NamedTree, ...], Bounds(max_length=TREES_MAX)] = ()
    """Instead of a form: exactly these, each over all sites."""

    def check(self) -> None:
        """Refuse keys that the form has no use for."""
        if self.hub is not None and self.tree not in ("auto", "star"):
            raise KeyedError("hub", f"has no use with tree: {self.tree}")
        if self.groups and self.tree != "hierarchy":
            raise KeyedError("groups", f"has no use with tree: {self.tree}; want tree: hierarchy")
        if self.trees and (self.tree != "auto" or self.hub is not None):
            other = "hub" if self.hub is not None else f"tree: {self.tree}"
            raise KeyedError("trees", f"has no use with {other}: the trees say it all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Section):
    """Shape of the byte-level GPT that ships."""

    layers: Annotated[int, Bounds(ge=1, le=256)] = 4
    heads: Annotated[int, Bounds(ge=1, le=256)] = 4
    width: Annotated[int, Bounds(ge=1, le=65536)] = 128
    """A multiple of heads."""
    context: Annotated[int, Bounds(ge=1, le=1 << 20)] = 128
    """Bytes a sequence."""
    tied: bool = True
    """The embedding is the output matrix too; a pipeline wants false."""
    experts: Annotated[int, Bounds(ge=1, le=1024)] = 1
    """MLPs of a layer."""
    active_experts: Annotated[int, Bounds(ge=1)] = 1
    """MLPs that a byte passes."""

    def check(self) -> None:
        """Refuse shapes that do not fit each other."""
        if self.width % self.heads:
            raise KeyedError("width", f"want a multiple of heads, {self.heads}; got {self.width}")
        if self.active_experts > self.experts:
            raise KeyedError(
                "active_experts", f"want at most experts, {self.experts}; got {self.active_experts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(Section):
    """Which text is learnt."""

    files: tuple[Text, ...] = ()
    """Globs, relative to this file; none: Python's own standard library."""
    held_out: Share = 0.05
    """Share of the files that is only evaluated."""
    max_bytes: Size = 32 << 20
    """Of text, at most."""

    def check(self) -> None:
        """Refuse to learn nothing."""
        if self.held_out == 1:
            raise KeyedError("held_out", "must be less than 100%: nothing would be learnt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(Section):
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: Positive = 6e-3
    min_learning_rate: NotNegative = 6e-4
    warmup_steps: EverySteps = 20
    weight_decay: NotNegative = 0.1
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    clip_norm: Positive = 1.0

    def check(self) -> None:
        """Refuse a rate that grows."""
        if self.min_learning_rate > self.learning_rate:
            raise KeyedError(
                "learning_rate",
                f"want at least min_learning_rate, {self.min_learning_rate:g}; "
                f"got {self.learning_rate:g}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer(Section):
    """What the shipped trainer does; a script of your own may read it too."""

    compute: Annotated[str, choice(COMPUTES)] = "real"
    steps: Count = 150
    global_batch: Count = 48
    """Sequences a step, over all sites."""
    micro_batch: Count = 8
    """Sequences that a rank takes through the model at once, at most."""
    seed: Annotated[int, Bounds(ge=0, lt=1 << 63)] = 1337
    evaluate_every: Count = 50
    """Steps; one is always made at the end."""
    evaluation_batches: Count = 8
    precision: Annotated[str, choice(TRAINED_IN)] = "fp32"
    """Of layers; parameters, optimizer and reductions are float32."""
    compile: bool = False
    """Compile each block (torch.compile); wants a C++ compiler."""
    offload: bool = False
    """Parameters and optimizer on the host between uses; for accelerators."""
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()


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


_EVERY_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": rf"^{_STEPS.pattern}$", "examples": ["100 steps"]},
        {"type": "string", "pattern": DURATION.pattern, "examples": [DURATION.example]},
    ]
}


def _in_a_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _all_differ(stores: tuple[str, ...]) -> tuple[str, ...]:
    if len({*stores}) < len(stores):
        raise ValueError("names a store twice: want each once")
    return stores


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Section):
    """What is kept of a run, so that it can go on after everything was killed."""

    every_steps: Annotated[int | None, Unwritten] = None
    """Steps between checkpoints; None: by time."""
    every_s: Annotated[float, Key("every"), Read(_every, _EVERY_SCHEMA, format_duration)] = 600.0
    """Steps or time between two, as '100 steps' or 10m."""
    keep: Annotated[int, Bounds(ge=1, le=KEEP_MAX)] = 3
    """The newest so many stay."""
    to: Annotated[
        tuple[Text, ...],
        Key("to", default="checkpoints"),
        Bounds(min_length=1, max_length=STORES_MAX),
        Checked(_all_differ),
        Short(_in_a_list, {"type": "string"}),
    ] = ("checkpoints",)
    """A folder, relative to this file, or a URL, that all sites reach; or several of them."""
    resume: Text | None = None
    """The checkpoint to go on from: `launch --resume` sets it."""

    @classmethod
    def of_keys(cls, **given: Any) -> Self:  # noqa: ANN401 - each field has its type
        """Return the section; `every` is a number of steps, or seconds."""
        if isinstance(given.get("every_s"), int):
            given["every_steps"] = given.pop("every_s")
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Section):
    """How the links are measured."""

    connections: Annotated[
        tuple[Annotated[int, Bounds(ge=1, le=PROBE_CONNECTIONS_MAX)], ...],
        Bounds(min_length=1, max_length=8),
    ] = (1, 4, 16)
    """TCP connections side by side, in turn."""
    echoes: Annotated[int, Bounds(ge=10, le=10_000)] = 100
    """Round trips that are timed."""
    window_s: Annotated[PositiveDuration, Key("window")] = 2.0
    """For which bytes are counted: 100ms to 60s."""

    def check(self) -> None:
        """Refuse a window that tells nothing, or takes for ever."""
        if not 0.1 <= self.window_s <= 60:
            raise KeyedError("window", f"want 100ms to 60s, got {format_duration(self.window_s)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(Section):
    """A site that takes part."""

    site: Text
    sequences: Count
    """Of each step, over all ranks of the site."""
    parallel: Parallel | None = None
    """How the site's ranks share the model: `isthmus plan` decides."""


def _variables(written: Mapping[str, str]) -> tuple[Variable, ...]:
    return tuple(Variable(name=name, value=value) for name, value in written.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Section):
    """A job file: one training run."""

    is_document: ClassVar[bool] = True
    parts: ClassVar[Mapping[str, str]] = {
        "verify": "What is compared between sites.",
        "timeline": "Which steps are kept in detail, for `isthmus report` and `isthmus trace`.",
        "model": "What reports say of the model; else by its shape, or an estimate.",
    }
    name: Name
    topology: Text
    """The topology file, relative to this one."""
    entrypoint: Text | None = None
    """Your own script, relative to this file; else the shipped trainer."""
    arguments: tuple[Argument, ...] = ()
    """For the entrypoint; `launch JOB -- …` adds more."""
    working_folder: Text | None = None
    """The folder in which the entrypoint runs, relative to this file; else this file's own."""
    env: Annotated[
        tuple[Variable, ...],
        WrittenAs(dict[VariableName, VariableValue], _variables),
        Bounds(max_length=VARIABLES_MAX),
    ] = ()
    """Environment variables of all ranks, beside those of their machines."""
    pass_env: Annotated[tuple[VariableName, ...], Bounds(max_length=VARIABLES_MAX)] = ()
    """Names of variables, as of secrets, that ranks have as they are where `isthmus launch` is
    called. Their values are written nowhere."""
    data: Annotated[tuple[SiteData, ...], Bounds(max_length=DATA_MAX)] = ()
    """What has to lie at every site before ranks start: checked, and fetched once where there is
    a url."""
    exchange: Exchange = Exchange()
    reduction: Reduction = Reduction()
    regime: Annotated[
        Regime,
        Short(
            lambda value: value if isinstance(value, dict | Regime) else {"kind": value},
            {"type": "string", "enum": list(KINDS)},
        ),
    ] = field(default=Regime())
    """How often sites exchange, and what; absent: in every step."""
    verify_every: Annotated[EverySteps, Key("verify.parameters_every")] = 10
    """Steps between comparisons; 0: never."""
    same_data: Annotated[str, Key("verify.same_data"), choice(ON_SAME_DATA)] = "refuse"
    """Whether sites that train on the same data end the run."""
    gradients_every: Annotated[EverySteps, Key("verify.gradients_every")] = 0
    """Steps until all ranks compute one micro-batch again, and compare its gradients; 0: never."""
    on_corruption: Annotated[str, Key("verify.on_corruption"), choice(ON_CORRUPTION)] = "stop"
    """Where a rank computes other gradients than the rest: stop the run, or drop its site until
    `isthmus sites add`."""
    timeline_every: Annotated[EverySteps, Key("timeline.every")] = 10
    """Steps; the first three always; 0: none."""
    trainer: Trainer = Trainer()
    probe: Probe | None = None
    """Measure the links instead: `isthmus probe` writes it."""
    on_fewer_sites: Annotated[str, choice(ON_FEWER_SITES)] = "keep"
    """With fewer ranks than in the beginning: the global batch stays, or shrinks with them, and
    the learning rate follows."""
    rate: Annotated[str, choice(RATES)] = "linear"
    """How the learning rate follows a batch that shrinks: as its share of the full one, as the
    root of that, or not at all."""
    checkpoint: Checkpoint | None = None
    """What is kept so that `launch --resume` can go on; else nothing."""
    placement: tuple[Placed, ...] = ()
    """The sites that take part; none: all, the batch spread evenly over all ranks."""
    begin_with: Annotated[tuple[Text, ...], Bounds(min_length=1)] = ()
    """The sites that the run begins with; `isthmus sites add` adds others of the topology.
    Absent: all."""
    plan: PlanWishes | None = None
    workload: DescribedModel | None = None
    """What the entrypoint trains, for `isthmus plan` to cut it over each site."""

    allow_cpu: bool = False
    """Compute on CPUs where the topology says an accelerator and there is none."""
    noise_scale: bool = False
    """Measure the gradient noise scale: how large a batch is worth it."""
    flops_per_token: Annotated[
        Annotated[Number, Bounds(gt=0)] | None, Key("model.flops_per_token", is_required=True)
    ] = None
    """FLOPs of a forward and a backward pass for each token, for the MFU: what is computed twice
    left out."""
    exporters: Exporters = field(default=Exporters(), compare=False)
    """Where figures and events go while the run goes on; else nowhere."""

    @property
    def is_to_plan(self) -> bool:
        """Whether a plan is made before the job runs: it asks for one, and has no placement."""
        return self.plan is not None and not self.placement

    @property
    def global_batch(self) -> int:
        """The sequences of a step, over all sites."""
        return self.trainer.global_batch if self.workload is None else self.workload.global_batch

    def check(self) -> None:
        """Refuse keys that contradict each other."""
        names = [data.name for data in self.data if data.path is None]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise KeyedError("data", f"two files are called {twice[0]!r}: want a path for one")
        for variable in self.env:
            if variable.name in self.pass_env:
                raise KeyedError(
                    "pass_env", f"{variable.name} has a value in env: want it in one of both"
                )
        if self.rate != "linear" and self.on_fewer_sites == "keep":
            raise KeyedError(
                "rate",
                f"has no use with on_fewer_sites: keep, where the batch stays: want shrink for "
                f"{self.rate}, or no rate",
            )
        self._check_exchange()
        self._check_plan()

    def _check_exchange(self) -> None:
        """Refuse what has no use with the exchange, or with its regime."""
        is_off = self.exchange.schedule == "off"
        if self.noise_scale and (not self.regime.is_sync or is_off):
            raise KeyedError(
                "noise_scale", "compares sites' gradients in every step: want regime: sync"
            )
        if is_off and not self.regime.is_sync:
            raise KeyedError(
                "regime",
                f"has no use with exchange.schedule: off, which exchanges nothing: want another "
                f"schedule for {self.regime.kind}, or no regime",
            )
        if self.regime.is_open and self.gradients_every:
            raise KeyedError(
                "verify.gradients_every",
                "has all ranks compute one micro-batch of the same step, and with regime.min_steps "
                "sites are in unlike ones: want one of both",
            )
        replan = None if self.plan is None else self.plan.replan
        if replan is not None and replan.regime == "follow":
            self._check_ladder()
        if self.plan is None or replan is None or replan.least_exact is None:
            return
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

    def _check_ladder(self) -> None:
        """Refuse what does not go with a regime that changes while the run goes on."""
        wrong = ""
        if not self.regime.is_sync:
            wrong = f"the run begins in sync, and regime is {self.regime.kind}: leave one out"
        elif self.exchange.schedule == "off":
            wrong = "has no use with exchange.schedule: off, which exchanges nothing"
        elif self.noise_scale:
            wrong = "noise_scale compares sites' gradients in every step: want one of both"
        if wrong:
            raise KeyedError("plan", f"replan.regime: follow: {wrong}")

    def _check_plan(self) -> None:
        """Refuse what has no use with the shipped trainer, or with a script of the user's."""
        plan, trainer = self.plan, self.trainer
        is_shipped = self.entrypoint is None
        if self.workload is not None and is_shipped:
            raise KeyedError(
                "workload", "describes an entrypoint's model, and there is none: want trainer.model"
            )
        if not is_shipped and plan is not None and plan.micro_batch == "auto":
            raise KeyedError(
                "plan",
                "micro_batch: auto is the shipped trainer's; your script's is left open where "
                "workload has no micro_batch",
            )
        plans_cuts = plan is not None and plan.cuts == "auto"
        is_cut = plans_cuts or any(placed.parallel is not None for placed in self.placement)
        is_modelled = trainer.compute == "modelled"
        if (
            is_shipped
            and is_modelled
            and (is_cut or trainer.precision != "fp32" or trainer.offload)
        ):
            raise KeyedError(
                "trainer", "compute: modelled is for replicas in fp32: want real, or no cut"
            )
        is_whole = self.workload is None and not plans_cuts
        if plan is not None and plan.gateways != "measured" and is_whole:
            raise KeyedError("plan", "gateways: unlimited has no use without a workload")
        if plans_cuts and not is_shipped:
            raise KeyedError("plan", "cuts: auto is the shipped trainer's; describe a workload")
