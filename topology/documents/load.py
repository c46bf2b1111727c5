"""Loads YAML documents. All mistakes are reported at once, with line and column.

    text -> Document, with places -> overrides -> types, units, references -> frozen classes

Pure: the caller reads the file.
"""

import dataclasses
import functools
from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from isthmus.topology.documents.references import check_references
from isthmus.topology.documents.resolve import resolve
from isthmus.topology.spec.job import Job, Reduction
from isthmus.topology.spec.trainer_cuts import described
from isthmus.topology.spec.world import Topology
from isthmus.topology.spec.yaml_models import model_of
from isthmus.topology.text.validation import validate
from isthmus.topology.text.yaml_document import Document, read_with_overrides


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
    written = validate(document, Topology)
    check_references(document)
    document.raise_problems()
    assert written is not None, "a topology that is not valid has problems"
    topology = resolve(document, written)
    document.raise_problems()
    return topology


def load_job(text: str, source: str, overrides: Sequence[str] = ()) -> Job:
    """Return the job that a YAML text describes; arguments and errors as of `load_topology`."""
    return job_of(read_with_overrides(text, source, overrides))


def job_of(document: Document) -> Job:
    """Return the job that a document describes; ConfigError with every problem."""
    job = validate(document, Job)
    document.raise_problems()
    assert job is not None, "a job that is not valid has problems"
    return _with_trainers_model(job)


def reduction_of(document: Document) -> Reduction | None:
    """Return the reduction of a job's document, whatever else is in it; None: it has mistakes."""
    try:
        return TypeAdapter(Reduction).validate_python(document.get("reduction") or {})
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
    own_keys = {**_own_keys(), "faults": _FAULTS_KEYS, "plan": _PLAN_KEYS}
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
    topology_keys = _own_keys()["topology"]
    is_topology = [override.split("=")[0].split(".")[0] in topology_keys for override in overrides]
    pairs = list(zip(overrides, is_topology, strict=True))
    return [each for each, own in pairs if own], [each for each, own in pairs if not own]


@functools.cache
def _own_keys() -> dict[str, set[str]]:
    """Return the keys that only topologies have, and those that only jobs have, by the kind."""
    topology, job = model_of(Topology).model_fields.keys(), model_of(Job).model_fields.keys()
    return {"topology": topology - job, "job": job - topology}


_FAULTS_KEYS = {"seed", "faults"}
_PLAN_KEYS = {"made_for", "decisions", "predicted", "binding", "why", "alternatives"}
"""Keys that identify a plan file."""
