"""What an experiment measured: the record in its folder, and the objects of bench.json.

Scaling, all-reduce and recovery benchmarks and simulations each keep one `Record`; they differ in
their question and settings. Here are those of bench.json, which `bench scaling` and `simulate`
write and `isthmus report` reads. Every class is one JSON object, under the names that it has in the
file. All times are seconds, all sizes bytes. The file is written anew after each run, so an
interruption loses one run at most.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from isthmus.orchestrator.run_folder.run_files import strict_json, write_atomically
from isthmus.topology.spec.errors import ConfigError, Problem

BENCH = "bench.json"

QuestionT = TypeVar("QuestionT")
SettingT = TypeVar("SettingT")


class _Strict:
    """Has an object of the file refused that holds something else, or more."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval(_Strict):
    """A mean over repeats, and where it lies with a confidence of 95 %."""

    mean: float
    half_width: float | None
    """The interval is mean ± this; null where a single value says nothing about it."""
    values: tuple[float, ...]
    """One a repeat, in order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split(_Strict):
    """Where the time of a step went: the mean over the sites and the measured steps."""

    compute_s: float
    intra_s: float
    exposed_inter_s: float
    wait_s: float
    """These four add up to the step."""
    hidden_inter_s: float
    """Crossing the WAN while backward went on: no part of the step."""
    encode_s: float
    """CPU time of a gateway, like the next: a cost, no part of the step."""
    decode_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes(_Strict):
    """What one directed link carried, a step."""

    source: str
    target: str
    bytes_per_step: float
    """As sent, headers of frames included."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured(_Strict):
    """One run's figures, over the steps after the warm-up."""

    tokens_per_s: float
    """Committed, of all sites of the run together."""
    tokens_per_step: float
    step_s: float
    """The mean over sites and steps."""
    split: Split
    links: tuple[LinkBytes, ...]
    wire_ratio: float | None
    """Bytes sent for each byte of float32; null where nothing was."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_Strict):
    """Why a run gave no figures."""

    code: str
    """A key of protos/catalogue.py."""
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Made(_Strict):
    """A run that was made, of whichever experiment."""

    run_id: str = ""
    emulator: str = "none"
    """`netns`, `relay`, or `none`: nothing was between the sites but this machine."""
    failed: Failed | None = None
    """Null where it has figures."""

    def fields(self) -> dict[str, Any]:
        """Return these three, for what a setting says of its run."""
        return {"run_id": self.run_id, "emulator": self.emulator, "failed": self.failed}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run(Made):
    """One run of one setting. A solo run that several settings share stands in each of them."""

    kind: Literal["all", "solo"]
    site: str | None
    """The site of a solo run: the one that ran by itself."""
    repeat: int
    """The number of the repeat, from 0."""
    folder: str
    """Relative to bench.json's own."""
    wall_s: float
    """Seconds from the run's submission to its end."""
    measured: Measured | None = None
    """Null where it failed."""

    def __post_init__(self) -> None:
        if (self.measured is None) == (self.failed is None):
            raise ValueError(f"run {self.run_id}: want either measured or failed")
        if (self.kind == "solo") != (self.site is not None):
            raise ValueError(f"run {self.run_id}: want a site for a solo run, and only for one")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteSpeed(_Strict):
    """One site by itself."""

    site: str
    tokens_per_s: Interval


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse(_Strict):
    """One directed link in a setting: as configured, and what the steps made of it."""

    source: str
    target: str
    bytes_per_s: float
    rtt_s: float
    loss: float
    """Configured, like the two before: a share of packets."""
    bytes_per_step: float
    utilisation: float
    """The share of what the link could have carried in the time of the steps, 0 to 1."""
    egress_usd_per_step: float
    egress_usd_per_1e9_tokens: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Predicted(_Strict):
    """What topology/spec/compute.py and topology/trees/tree_times.py expect of a step."""

    compute_s: float
    exchange_s: float
    """If nothing hid it."""
    step_s: float
    efficiency: float
    """The efficiency that all sites would reach with such a step, each by itself computing all
    the time."""
    deviation: float
    """How far the measured step is from the predicted one, as a share of it: 0.02 is 2 % slower."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result(_Strict):
    """A setting's figures, over the repeats in which all of its runs succeeded."""

    compute: Literal["modelled", "real"]
    schedule: str
    """One of isthmus.topology.spec.job.SCHEDULES."""
    emulator: str
    """As in Run; several, joined by `+`, where runs differed."""
    efficiency: Interval
    """All sites together, over the sum of each by itself."""
    tokens_per_s: Interval
    solo: tuple[SiteSpeed, ...]
    step_s: Interval
    split: Split
    """How a step's time splits in the runs of all sites, in seconds a step."""
    shares: dict[str, float]
    """`compute`, `intra`, `exposed_inter`, `wait`: of the step, 0 to 1."""
    links: tuple[LinkUse, ...]
    predicted: Predicted | None
    """Null where the job's script is the user's own, or compute is real."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting(_Strict):
    """One point of the sweep."""

    overrides: dict[str, str]
    """Path as in --sweep, and value; empty without a sweep."""
    runs: tuple[Run, ...] = ()
    result: Result | None = None
    """Null until a repeat is complete."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(_Strict):
    """One --sweep."""

    path: str
    values: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question(_Strict):
    """What was asked. A benchmark is resumed only with the same."""

    config_hash: str
    """The hash of job and topology with --set, before any sweep."""
    overrides: tuple[str, ...]
    """Each --set."""
    compute: Literal["modelled", "real"]
    schedule: str | None
    """Null: as the job says; else one of isthmus.topology.spec.job.SCHEDULES."""
    emulator: str | None
    """Null: as the topology says; else one of isthmus.topology.spec.world.EMULATORS."""
    warmup_steps: int
    steps: int
    """Measured ones, after the warm-up."""
    repeats: int
    sweeps: tuple[Sweep, ...]
    link_trace: str = ""
    """sha256 of the recording by which links change; empty: they stay as described."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source(_Strict):
    """One of the two documents."""

    name: str
    path: str


@dataclasses.dataclass(frozen=True, kw_only=True)  # slots and frozen refuse Record[…](…)
class Record(_Strict, Generic[QuestionT, SettingT]):
    """What one experiment was asked, and what came of each setting: the whole file."""

    schema_version: Literal[1] = 1
    name: str
    job: Source
    topology: Source
    question: QuestionT
    settings: tuple[SettingT, ...]


Bench: TypeAlias = Record[Question, Setting]
"""The whole bench.json."""
_BENCH = TypeAdapter[Bench](Bench)


def read_bench(path: Path) -> Bench:
    """Return what a bench.json holds.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is not a benchmark's, or another version's; names the places.
    """
    try:
        return _BENCH.validate_json(path.read_bytes())
    except ValidationError as error:
        problems = [
            Problem(str(path), 0, 0, each["msg"], ".".join(str(part) for part in each["loc"]))
            for each in error.errors()
        ]
        raise ConfigError(problems) from error


def write_bench(path: Path, bench: Record[Any, Any]) -> None:
    """Replace an experiment's record as a whole; OSError if the disk refuses."""
    write_atomically(path, strict_json(dataclasses.asdict(bench), indent=1) + "\n")


# Two-sided 95 % quantiles of Student's t: Abramowitz and Stegun, table 26.10.
# fmt: off
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
_T_95_MANY = ((120, 1.980), (60, 2.000), (40, 2.021))
"""From so many degrees of freedom on; between two rows the wider one is right enough."""


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of `values`, at least one, with its 95 % interval.

    Repeats are taken as drawn from one normal distribution. So the mean lies within t · s / √n of
    what endless repeats would give, in 95 of 100 benchmarks; s is the sample's standard deviation
    and t Student's quantile for n - 1 degrees of freedom.
    """
    mean = math.fsum(values) / len(values)
    half_width = None
    if len(values) > 1:
        half_width = t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean=mean, half_width=half_width, values=tuple(values))


def t_95(degrees_of_freedom: int) -> float:
    """Return Student's two-sided 95 % quantile; `degrees_of_freedom` is 1 or more."""
    if degrees_of_freedom <= len(_T_95):
        return _T_95[degrees_of_freedom - 1]
    return next((t for least, t in _T_95_MANY if degrees_of_freedom >= least), _T_95[-1])
