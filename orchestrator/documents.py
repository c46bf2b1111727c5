"""YAML files from disk: read within limits, and loaded in the pairs that a run needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.protos.limits import DOCUMENT_BYTES
from isthmus.protos.mutual_tls import TlsFiles
from isthmus.protos.security import use_tls
from isthmus.topology.documents.load import document_kind, load_job, load_topology, split_overrides
from isthmus.topology.documents.run_documents import DocumentText, joined
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Topology
from isthmus.topology.text.yaml_document import read_with_overrides

_KINDS = {"topology": "a topology", "job": "a job", "faults": "a fault script", "plan": "a plan"}


@dataclass(frozen=True, slots=True)
class AppliedPlan:
    """A plan whose decisions are in a job."""

    decisions: dict[str, Any]
    """As a plan file has them."""
    asked_overrides: list[str]
    """The job's overrides without them."""
    told: dict[str, Any]
    """What the plan says beside them: `why`, `predicted`, and the first `alternatives`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A job, its topology, and the texts and overrides that they came from."""

    job_path: Path
    job_text: str
    job_overrides: list[str]
    job: Job
    topology_path: Path
    topology_text: str
    topology_overrides: list[str]
    topology: Topology
    """The sites that take part."""
    described: Topology
    """All sites that the file has."""
    plan: AppliedPlan | None = None
    """What a plan decided is among `job_overrides`; None: there is no plan."""


def read_text(path: Path, limit_bytes: int = DOCUMENT_BYTES) -> str:
    """Return a document's text.

    Raises:
        ConfigError: it cannot be read, is larger than `limit_bytes`, or is no UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise _wrong(path, error.strerror or type(error).__name__) from error
    if len(content) > limit_bytes:
        raise _wrong(path, f"larger than {limit_bytes >> 20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
        message = f"not UTF-8: byte 0x{content[error.start]:02x}"
        raise ConfigError([Problem(str(path), line, column, message, "")]) from error


def load_topology_file(path: Path, overrides: Sequence[str] = ()) -> Topology:
    """Read and load a topology; ConfigError with every mistake."""
    return loaded_topology(read_text(path), path, overrides)


def protect(topology: Topology, path: Path) -> None:
    """Have this process and its children speak TLS, if a topology says so.

    Args:
        topology: As it was loaded.
        path: Its file, whose folder paths of certificates are relative to.
    """
    if topology.tls is not None:
        ca, cert, key = (
            str(path.parent / each)
            for each in (topology.tls.ca, topology.tls.cert, topology.tls.key)
        )
        use_tls(TlsFiles(ca=ca, cert=cert, key=key))


def mistaken(error: ConfigError, text: str, path: Path, wanted: str) -> ConfigError:
    """Return the mistakes of a document; only that it is one of another kind, if it is.

    Args:
        error: What is wrong with the document.
        text: The whole file.
        path: Where it is.
        wanted: The kind that it should be, as `document_kind` names it.
    """
    try:
        kind = document_kind(text, str(path))
    except ConfigError:
        return error
    if kind == wanted:
        return error
    message = f"this is {_KINDS[kind]}: want {_KINDS[wanted]} here"
    return ConfigError([Problem(str(path), 1, 1, message, "")])


def load_pair(
    job_path: Path,
    overrides: Sequence[str] = (),
    topology_path: Path | None = None,
    *,
    to_plan: bool = False,
) -> Pair:
    """Read and load a job and its topology, which the job names unless `topology_path` is given.

    Args:
        job_path: The job's file.
        overrides: `path=value` of either document.
        topology_path: The topology's file.
        to_plan: A plan has yet to say which sites take part, as it has for each job that asks for
            one.

    Raises:
        ConfigError: with the mistakes of both, and of what they are to each other.
    """
    topology_overrides, job_overrides = split_overrides(overrides)
    job_text = read_text(job_path)
    problems: list[Problem] = []
    job: Job | None = None
    try:
        job = load_job(job_text, str(job_path), job_overrides)
    except ConfigError as error:
        problems += mistaken(error, job_text, job_path, "job").problems
    is_named = topology_path is None
    if topology_path is None:
        named = (
            _named_topology(job_text, str(job_path), job_overrides) if job is None else job.topology
        )
        if named is None:
            raise ConfigError(problems)
        topology_path = job_path.parent / named
    try:
        topology_text = read_text(topology_path)
    except ConfigError as error:
        if not is_named:
            raise ConfigError(problems + error.problems) from error
        document = read_with_overrides(job_text, str(job_path), job_overrides)
        told = f"{topology_path}: {error.problems[0].message}"
        raise ConfigError([*problems, document.problem(("topology",), told)]) from error
    try:
        topology = loaded_topology(topology_text, topology_path, topology_overrides)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from error
    if job is None:
        raise ConfigError(problems)
    written = DocumentText(job_text, str(job_path), job_overrides)
    run = joined(job, topology, written, is_placed=not (to_plan or job.is_to_plan))
    return Pair(
        job_path=job_path,
        job_text=job_text,
        job_overrides=job_overrides,
        job=job,
        topology_path=topology_path,
        topology_text=topology_text,
        topology_overrides=topology_overrides,
        topology=run.topology,
        described=topology,
    )


def passed_on(pair: Pair, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the variables that a job passes on to its ranks.

    Args:
        pair: The job, and what it was read from.
        environ: That of whoever launches it.

    Raises:
        ConfigError: some are not set there.
    """
    missing = [index for index, name in enumerate(pair.job.pass_env) if name not in environ]
    if missing:
        document = read_with_overrides(pair.job_text, str(pair.job_path), pair.job_overrides)
        problems = []
        for index in missing:
            name = pair.job.pass_env[index]
            told = f"{name} is not set where the job is launched: export {name}=…, and launch again"
            problems.append(document.problem(("pass_env", index), told))
        raise ConfigError(problems)
    return {name: environ[name] for name in pair.job.pass_env}


def loaded_topology(text: str, path: Path, overrides: Sequence[str]) -> Topology:
    """Load a topology that has been read; ConfigError with every mistake."""
    try:
        return load_topology(text, str(path), overrides)
    except ConfigError as error:
        raise mistaken(error, text, path, "topology") from error


def _named_topology(job_text: str, source: str, overrides: Sequence[str]) -> str | None:
    """Return the topology that a job names, even if the job has mistakes."""
    try:
        name = read_with_overrides(job_text, source, overrides).mapping().get("topology")
    except ConfigError:
        return None
    return name if isinstance(name, str) else None


def _wrong(path: Path, message: str) -> ConfigError:
    return ConfigError([Problem(str(path), 0, 0, message, "")])
