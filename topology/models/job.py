"""The job file as a user writes it. Defaults are those of topology.job."""

from typing import Annotated, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from topology.job import Job, Probe
from topology.models.exchange import ExchangeModel, ReductionModel
from topology.models.plan import PlanModel
from topology.models.trainer import TrainerModel
from topology.models.workload import ParallelModel, WorkloadModel
from topology.text.fields import (
    Count,
    KeyedError,
    Name,
    PositiveDuration,
    Strict,
    Text,
    default,
    version_one,
)
from topology.units import format_duration

_JOB = Job(name="job", topology="topology.yaml")
_PROBE = Probe()
PROBE_CONNECTIONS_MAX = 32
"""Side by side, when a link is measured."""


class PlacedModel(Strict):
    """A site that takes part."""

    site: Text
    sequences: Annotated[Count, Field(description="Of each step, over all ranks of the site.")]
    parallel: Annotated[
        ParallelModel | None,
        Field(description="How a script of your own cuts its model there: `isthmus plan` decides."),
    ] = None


class VerifyModel(Strict):
    """What is compared between sites."""

    parameters_every: Annotated[
        int, Field(ge=0, le=1_000_000, description="Steps between comparisons; 0: never.")
    ] = _JOB.verify_every


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


class JobModel(Strict):
    """A job file: one training run."""

    version: Annotated[int, PlainValidator(version_one), WithJsonSchema({"const": 1})]
    name: Name
    topology: Annotated[Text, Field(description="The topology file, relative to this one.")]
    entrypoint: Annotated[
        Text | None,
        Field(description="Your own script, relative to this file; else the trainer that ships."),
    ] = None
    arguments: list[Text] = Field(default_factory=list, description="For the entrypoint.")
    exchange: ExchangeModel = Field(default_factory=ExchangeModel)
    reduction: ReductionModel = Field(default_factory=ReductionModel)
    verify: VerifyModel = Field(default_factory=VerifyModel)
    timeline: TimelineModel = Field(default_factory=TimelineModel)
    trainer: TrainerModel = Field(default_factory=TrainerModel)
    probe: Annotated[
        ProbeModel | None,
        Field(description="Measure the links instead: `isthmus probe` writes it."),
    ] = None
    placement: list[PlacedModel] = Field(
        default_factory=list,
        description="The sites that take part; none: all, the batch spread evenly over all ranks.",
    )
    plan: PlanModel | None = None
    workload: Annotated[
        WorkloadModel | None,
        Field(
            description="What the entrypoint trains, for `isthmus plan` to cut it over each site."
        ),
    ] = None

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
        if self.workload is None and self.plan is not None and self.plan.gateways != "measured":
            raise KeyedError("plan", "gateways: unlimited has no use without a workload")
        return self
