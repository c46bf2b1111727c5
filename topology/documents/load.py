"""Loads YAML documents. All mistakes are reported at once, with line and column.

    text -> Document, with places -> overrides -> model (types, units), references -> dataclasses

Pure: the caller reads the file.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from isthmus.topology.documents.references import check_references
from isthmus.topology.documents.resolve import resolve
from isthmus.topology.models.exporters_model import ExportersModel
from isthmus.topology.models.job_model import CheckpointModel, JobModel, PlanModel, ReductionModel
from isthmus.topology.models.topology_model import TopologyModel
from isthmus.topology.spec.exporters import Exporters, Otlp, Prometheus
from isthmus.topology.spec.job import Checkpoint, Exchange, Job, Placed, Probe, Reduction, Trainer
from isthmus.topology.spec.job_environment import Variable
from isthmus.topology.spec.json_fields import read_json
from isthmus.topology.spec.plan_wishes import PlanWishes, Replan
from isthmus.topology.spec.trainer_cuts import described
from isthmus.topology.spec.workload import DescribedModel
from isthmus.topology.spec.world import Topology
from isthmus.topology.text.validation import validate
from isthmus.topology.text.yaml_document import Document, read_with_overrides

T = TypeVar("T")


def load_topology(text: str, source: str, overrides: Sequence[str] = ()) -> Topology:
    """Return the topology that a YAML text describes.

    `source` is its name in messages. Overrides such as `links.0.rtt=120ms` are applied in order
    before the checks.

    Raises:
        ConfigError: with every problem.
    """
    return topology_of(read_with_overrides(text, source, overrides))


def topology_of(document: Document) -> Topology:
    """Return the topology that a document describes; ConfigError with every problem."""
    model = validate(document, TopologyModel)
    check_references(document)
    document.raise_problems()
    assert model is not None, "a model that is not valid has problems"
    topology = resolve(document, model)
    document.raise_problems()
    return topology


def load_job(text: str, source: str, overrides: Sequence[str] = ()) -> Job:
    """Return the job that a YAML text describes; arguments and errors as of `load_topology`."""
    return job_of(read_with_overrides(text, source, overrides))


def job_of(document: Document) -> Job:
    """Return the job that a document describes; ConfigError with every problem."""
    model = validate(document, JobModel)
    document.raise_problems()
    assert model is not None, "a model that is not valid has problems"
    return _with_trainers_model(
        Job(
            name=model.name,
            topology=model.topology,
            entrypoint=model.entrypoint,
            arguments=tuple(model.arguments),
            working_folder=model.working_folder,
            env=tuple(Variable(name=name, value=value) for name, value in model.env.items()),
            pass_env=tuple(model.pass_env),
            data=tuple(each.resolved() for each in model.data),
            exchange=_made(
                Exchange,
                model.exchange,
                chunk="chunk_bytes",
                bucket="bucket_bytes",
                window="window_bytes",
            ),
            reduction=_made(Reduction, model.reduction),
            regime=model.regime.resolved(),
            verify_every=model.verify.parameters_every,
            same_data=model.verify.same_data,
            gradients_every=model.verify.gradients_every,
            on_corruption=model.verify.on_corruption,
            timeline_every=model.timeline.every,
            trainer=_made(Trainer, model.trainer),
            probe=None if model.probe is None else _made(Probe, model.probe, window="window_s"),
            on_fewer_sites=model.on_fewer_sites,
            rate=model.rate,
            allow_cpu=model.allow_cpu,
            noise_scale=model.noise_scale,
            flops_per_token=None if model.model is None else model.model.flops_per_token,
            checkpoint=None if model.checkpoint is None else _checkpoint(model.checkpoint),
            placement=tuple(_made(Placed, each) for each in model.placement),
            begin_with=tuple(model.begin_with),
            plan=None if model.plan is None else _wishes(model.plan),
            workload=None if model.workload is None else _made(DescribedModel, model.workload),
            exporters=_exporters(model.exporters),
        )
    )


def reduction_of(document: Document) -> Reduction | None:
    """Return the reduction of a job's document, whatever else is in it; None: it has mistakes."""
    try:
        return _made(Reduction, ReductionModel.model_validate(document.get("reduction") or {}))
    except ValidationError:
        return None


def _with_trainers_model(job: Job) -> Job:
    """Return the job with the shipped trainer's model as its workload, if sites are to cut it."""
    is_written = any(each.parallel for each in job.placement)
    is_planned = job.plan is not None and job.plan.cuts == "auto"
    if job.entrypoint is not None or not (is_written or is_planned):
        return job
    # A written cut has its own micro-batch.
    is_given = job.plan is not None and job.plan.micro_batch == "given" and not is_written
    micro_batch = job.trainer.micro_batch if is_given else None
    return dataclasses.replace(job, workload=described(job.trainer, micro_batch=micro_batch))


def document_kind(document: Document) -> str:
    """Return the kind of a document: `topology`, `job`, `faults` or `plan`, by best match.

    Raises:
        ConfigError: it is equally close to two kinds.
    """
    keys = set(document.mapping())
    own_keys = {
        "topology": _TOPOLOGY_KEYS,
        "job": _JOB_KEYS,
        "faults": _FAULTS_KEYS,
        "plan": _PLAN_KEYS,
    }
    matches = {kind: len(keys & own) for kind, own in own_keys.items()}
    kind, second = sorted(matches, key=matches.__getitem__, reverse=True)[:2]
    if matches[kind] == matches[second]:
        message = (
            "neither a topology (which has sites) nor a job (which has a topology) "
            "nor a fault script (which has faults)"
        )
        document.refuse([((), message)])
    return kind


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides meant for the topology, and those meant for the job, each in order.

    The first key decides. A key of both (`name`) or of neither goes to the job, which reports it.
    """
    is_topology = [override.split("=")[0].split(".")[0] in _TOPOLOGY_KEYS for override in overrides]
    pairs = list(zip(overrides, is_topology, strict=True))
    return [each for each, own in pairs if own], [each for each, own in pairs if not own]


_TOPOLOGY_KEYS = TopologyModel.model_fields.keys() - JobModel.model_fields.keys()
_JOB_KEYS = JobModel.model_fields.keys() - TopologyModel.model_fields.keys()
_FAULTS_KEYS = {"seed", "faults"}
_PLAN_KEYS = {"made_for", "decisions", "predicted", "binding", "why", "alternatives"}
"""Keys that identify a plan file."""


def _wishes(written: PlanModel) -> PlanWishes:
    wishes = _made(PlanWishes, written, without="replan", budget="budget_usd_per_s")
    replan = written.replan
    return dataclasses.replace(
        wishes, replan=None if replan is None else _made(Replan, replan, lasting="lasting_s")
    )


def _exporters(written: ExportersModel) -> Exporters:
    otlp = None if written.otlp is None else _made(Otlp, written.otlp, every="every_s")
    page = written.prometheus
    return dataclasses.replace(
        _made(Exporters, written, without={"otlp", "prometheus"}),
        otlp=otlp,
        prometheus=None if page is None else _made(Prometheus, page, open="is_open"),
    )


def _checkpoint(written: CheckpointModel) -> Checkpoint:
    every = written.every
    return dataclasses.replace(
        _made(Checkpoint, written, without="every"),
        **({"every_steps": every} if isinstance(every, int) else {"every_s": every}),
    )


def _made(kind: type[T], written: BaseModel, *, without: str | set[str] = "", **renamed: str) -> T:
    """Convert a section to a dataclass with fields of the same names.

    `renamed` gives fields of other names, as with a unit; keys `without` keep their defaults.
    """
    fields = written.model_dump(exclude={without} if isinstance(without, str) else without)
    return read_json(kind, {renamed.get(key, key): value for key, value in fields.items()})
