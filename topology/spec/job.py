"""A training job as the rest of isthmus sees it.

Made from YAML by topology/documents/load.py; frozen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.topology.spec.exporters import Exporters
from isthmus.topology.spec.job_environment import Variable
from isthmus.topology.spec.json_fields import IF_USED, IN_USE, REQUIRED
from isthmus.topology.spec.plan_wishes import PlanWishes
from isthmus.topology.spec.regime import Regime
from isthmus.topology.spec.site_data import SiteData
from isthmus.topology.spec.workload import DescribedModel, Parallel

ON_SAME_DATA = ("refuse", "warn")
ON_CORRUPTION = ("stop", "drop")

CODECS = (
    "fp32",
    "bf16",
    "split",
    "bf16-split",
    "int8",
    "int8-zstd",
    "int4",
    "int4-zstd",
    "fp8",
    "fp8-zstd",
    "topk",
    "topk-zstd",
    "topk2",
)
"""The codecs for gradient chunks; sites/codecs implements them, docs/codecs.md compares them.

`fp32` and `bf16` are plain; `split` is fp32 cut into byte planes, each under zstd: lossless;
`bf16-split` rounds to bf16, then compresses the plane with the exponents. `int8`, `int4` and `fp8`
(e4m3) give each block of 128 elements a scale; `topk` sends the largest one in a hundred,
`topk2` 64 of each 4096 with two bits for each value. With `-zstd`, what compresses is compressed.
"""

RUNGS = ("fp32", "split", "bf16", "bf16-split", "int8", "int4")
"""The codecs that a running job may go over to, as its links narrow and widen: the most exact, then
the largest first."""


def rungs(own: str, least_exact: str) -> tuple[str, ...]:
    """Return the codecs that a run may have: from its own down to the least exact one.

    Both are of RUNGS, and `own` is not below `least_exact`.
    """
    return RUNGS[RUNGS.index(own) : RUNGS.index(least_exact) + 1]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCodec:
    """The codec of one link, both ways, with names of sites (see topology/trees/link_codecs.py)."""

    between: tuple[str, str]
    codec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The settings of how gradients cross the WAN."""

    codec: str = "split"
    codecs: tuple[LinkCodec, ...] = ()
    """The codecs of links that have one of their own (topology/trees/link_codecs.py)."""
    exact: tuple[str, ...] = ()
    """Patterns of parameter names whose gradients cross as fp32, like those of one dimension."""
    error_feedback: bool = True
    """Whether a lossy codec's loss on a gradient is added to the next one."""
    error_feedback_decay: float = field(default=1.0, metadata=IN_USE)
    """Factor on that loss in each round, above 0, up to 1."""
    non_finite: str = "carry"
    """One of NON_FINITE."""
    chunk_bytes: int = 1 << 20
    """Bytes of a chunk in float32, before the codec."""
    is_cut: bool = field(default=False, compare=False)
    """Whether chunks have exactly that size, whatever the links are like. Planning again sets it,
    for a run that goes on keeps its chunks; users cannot."""
    channels_per_link: int | None = None
    """The exact number of TCP connections between each two gateways; None: as many as links and
    their losses take."""
    bucket_bytes: int = 4 << 20
    """Bytes of a DDP bucket in float32, in the shipped trainer."""
    window_bytes: int | None = None
    """Unacknowledged bytes for each peer; None: derived from bandwidth times RTT."""
    schedule: str = "overlap"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTree:
    """A reduction tree as a job writes it, with names of sites (see topology/trees/named_trees.py).

    Sites by name; topology/trees/named_trees.py checks them.
    """

    root: str
    parents: Mapping[str, str]
    """The site that each site but the root sends its sum to."""
    weight: int = 1
    """The tree's share of the chunks, relative to the other trees."""
    down: Mapping[str, str] | None = None
    """The site that each site but the root has the result from; None: the one that it sends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """The settings of the reduction: which sites sum, and where."""

    tree: str = "auto"
    hub: str | None = None
    """The star's centre; None: chosen by bandwidth."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Groups of sites near each other, for a hierarchy; empty: found by their round trips."""
    trees: tuple[NamedTree, ...] = ()
    """The exact trees to use instead of a form; empty: as the form says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The shape of the byte-level GPT that ships."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 128
    tied: bool = True
    """Whether the embedding is the output matrix too; a pipeline wants False."""
    experts: int = 1
    """MLPs of a layer."""
    active_experts: int = 1
    """MLPs that each token passes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The text that is learnt."""

    files: tuple[str, ...] = ()
    """Globs of the text's files; empty: the Python standard library's own sources."""
    held_out: float = 0.05
    """Share of the files that is only used to evaluate, 0 to 1."""
    max_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The settings of AdamW, with linear warm-up and cosine decay."""

    learning_rate: float = 6e-3
    min_learning_rate: float = 6e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The settings of the shipped trainer."""

    compute: str = "real"
    steps: int = 150
    global_batch: int = 48
    """Sequences of a step, over all sites."""
    micro_batch: int = 8
    """Sequences that a rank takes through the model at once, at most."""
    seed: int = 1337
    evaluate_every: int = 50
    """Steps between held-out evaluations; one is always made at the end."""
    evaluation_batches: int = 8
    precision: str = "fp32"
    """One of TRAINED_IN: what layers compute with. Parameters and reductions are float32."""
    compile: bool = False
    """Whether blocks are compiled (torch.compile)."""
    offload: bool = False
    """Whether parameters and optimizer states stay in the host's memory between their uses."""
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The settings of what is kept of a run so that it can go on after everything was killed."""

    every_steps: int | None = None
    """Steps between checkpoints; None: by time."""
    every_s: float = 600.0
    """Seconds between checkpoints, where there are no `every_steps`."""
    keep: int = 3
    """Number of newest checkpoints that are kept."""
    to: str = "checkpoints"
    """A folder or URL that all sites reach; a run has a folder of its own in it."""
    resume: str | None = None
    """Folder or URL of a checkpoint to resume from; None: start from scratch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The settings of measuring the links, one direction after the other."""

    connections: tuple[int, ...] = (1, 4, 16)
    """The numbers of TCP connections side by side that are measured, once each."""
    echoes: int = 100
    """Round trips that are timed; fewer where they take too long."""
    window_s: float = 2.0
    """Seconds for which bytes are counted, once the flow is steady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A site that takes part, and its part of the batch."""

    site: str
    sequences: int
    """Sequences of a step, over the site's ranks."""
    parallel: Parallel | None = None
    """The site's cut of the model. The shipped trainer follows it; a script of the user's reads
    it here. None: replicas, or as the script decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run, before it has an id."""

    name: str
    topology: str
    """Path of the topology file, relative to the job file."""
    entrypoint: str | None = None
    """The user's own script, relative to the job file; None: the shipped trainer."""
    arguments: tuple[str, ...] = ()
    working_folder: str | None = field(default=None, metadata=REQUIRED)
    """The folder in which the script runs, relative to the job file; None: the job file's."""
    env: tuple[Variable, ...] = field(default=(), metadata=REQUIRED)
    """Environment variables of the ranks, beside those of their machine."""
    pass_env: tuple[str, ...] = field(default=(), metadata=REQUIRED)
    """Names of more, which ranks have as they are where the job is launched: in no document."""
    data: tuple[SiteData, ...] = field(default=(), metadata=IN_USE)
    """What has to lie at every site before its ranks start."""
    exchange: Exchange = Exchange()
    reduction: Reduction = Reduction()
    regime: Regime = field(default=Regime(), metadata=IN_USE)
    verify_every: int = 10
    """Steps between comparisons of all parameters across sites; 0: never."""
    same_data: str = "refuse"
    """One of ON_SAME_DATA: what becomes of a run whose sites train on the same data."""
    gradients_every: int = field(default=0, metadata=IF_USED)
    """Steps between those after which all ranks compute one micro-batch and compare gradients; 0:
    never."""
    on_corruption: str = field(default="stop", metadata=IF_USED)
    """One of ON_CORRUPTION: what becomes of a run of which a rank computes wrongly."""
    timeline_every: int = 10
    """Steps between those whose buckets' times are kept, the first three always; 0: none."""
    trainer: Trainer = Trainer()
    probe: Probe | None = None
    """The settings of a run that measures the links between its sites and trains nothing; None: it
    trains."""
    on_fewer_sites: str = field(default="keep", metadata=REQUIRED)
    """One of `ON_FEWER_SITES` (topology/spec/batch_rule.py): the batch of a run that goes on with
    fewer ranks."""
    rate: str = field(default="linear", metadata=IN_USE)
    """One of `RATES` there: how the learning rate follows that batch."""
    checkpoint: Checkpoint | None = field(default=None, metadata=REQUIRED)
    """What is kept; None: nothing."""
    placement: tuple[Placed, ...] = ()
    """The sites that take part; empty: all, with the batch spread evenly over all ranks."""
    begin_with: tuple[str, ...] = field(default=(), metadata=REQUIRED)
    """The sites that the run begins with; the others of its topology may be added. Empty: all."""
    plan: PlanWishes | None = None
    """What a plan may decide; None: a run takes the job as it is."""
    workload: DescribedModel | None = None
    """The model that sites cut: the described one of the entrypoint, or the shipped trainer's where
    its sites share it; None: a plan knows nothing of it, or every rank has all of it."""

    allow_cpu: bool = field(default=False, metadata=IF_USED)
    """Whether ranks compute on CPUs where the topology says an accelerator and there is none."""
    noise_scale: bool = field(default=False, metadata=IF_USED)
    """Whether sites measure the norm of their own gradients, for the gradient noise scale."""
    flops_per_token: float | None = field(default=None, metadata=IF_USED)
    """FLOPs of a forward and a backward pass for each token, what is computed twice left out; None:
    by the model's shape, where it is known (orchestrator/core/model_flops.py)."""
    exporters: Exporters = field(default=Exporters(), compare=False, metadata=IF_USED)
    """Where the coordinator sends figures and events; it changes no run."""

    @property
    def is_to_plan(self) -> bool:
        """Whether a plan is made before the job runs: it asks for one, and has no placement."""
        return self.plan is not None and not self.placement

    @property
    def global_batch(self) -> int:
        """The sequences of a step, over all sites."""
        return self.trainer.global_batch if self.workload is None else self.workload.global_batch
