"""YAML files from disk: read within limits, and loaded in the pairs that a run needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.protos.limits import DOCUMENT_BYTES
from isthmus.protos.mutual_tls import TlsFiles
from isthmus.protos.security import use_tls
from isthmus.topology.documents.load import document_kind, job_of, split_overrides, topology_of
from isthmus.topology.documents.run_documents import joined
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Topology
from isthmus.topology.text.yaml_document import Document, apply_overrides, read_with_overrides

_KINDS = {"topology": "a topology", "job": "a job", "faults": "a fault script", "plan": "a plan"}


@dataclass(frozen=True, slots=True)
class AppliedPlan:
    """A plan whose decisions are in a job."""

    decisions: dict[str, Any]
    """As a plan file has them."""
    asked_overrides: list[str]
    """The job's overrides without them."""
    explanation: dict[str, Any]
    """What the plan says beside them: `why`, `predicted`, and the first `alternatives`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A job, its topology, and the documents that they were read from, once, with their places."""

    job_path: Path
    job_document: Document
    job: Job
    topology_path: Path
    topology_document: Document
    topology: Topology
    """The sites that take part."""
    described: Topology
    """All sites that the file has."""
    plan: AppliedPlan | None = None
    """What a plan decided is among the job's overrides; None: there is no plan."""


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
    return loaded_topology(read_file(path, overrides))


def read_file(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Read a document; ConfigError if it cannot be read, or is no mapping in YAML."""
    return read_with_overrides(read_text(path), str(path), overrides)


def protect(topology: Topology, path: Path) -> None:
    """Have this process and its children speak TLS, if a topology says so.

    Args:
        topology: As it was loaded.
        path: Its file, whose folder paths of certificates are relative to.
    """
    if (files := topology.security.tls_files) is not None:
        ca, cert, key = (str(path.parent / each) for each in files)
        use_tls(TlsFiles(ca=ca, cert=cert, key=key))


def mistaken(error: ConfigError, document: Document, wanted: str) -> ConfigError:
    """Return the mistakes of a document; only that it is one of another kind, if it is.

    Args:
        error: What is wrong with the document.
        document: As it was read.
        wanted: The kind that it should be, as `document_kind` names it.
    """
    try:
        kind = document_kind(document)
    except ConfigError:
        return error
    if kind == wanted:
        return error
    message = f"this is {_KINDS[kind]}: want {_KINDS[wanted]} here"
    return ConfigError([Problem(document.source, 1, 1, message, "")])


def load_pair(
    job_path: Path,
    overrides: Sequence[str] = (),
    topology_path: Path | None = None,
    *,
    arguments: Sequence[str] = (),
    to_plan: bool = False,
) -> Pair:
    """Read and load a job and its topology, which the job names unless `topology_path` is given.

    Args:
        job_path: The job's file.
        overrides: `path=value` of either document.
        topology_path: The topology's file.
        arguments: More for the job's script, after the job's own.
        to_plan: A plan has yet to say which sites take part, as it has for each job that asks for
            one.

    Raises:
        ConfigError: with the mistakes of both, and of what they are to each other.
    """
    topology_overrides, job_overrides = split_overrides(overrides)
    written = read_file(job_path, job_overrides)
    problems: list[Problem] = []
    job: Job | None = None
    try:
        job = job_of(written)
        if arguments:
            apply_overrides(written, [f"arguments={json.dumps([*job.arguments, *arguments])}"])
            job = job_of(written)
    except ConfigError as error:
        problems += mistaken(error, written, "job").problems
    named = written.get("topology")
    if topology_path is None and not isinstance(named, str):
        raise ConfigError(problems)
    path = topology_path or job_path.parent / str(named)
    try:
        text = read_text(path)
    except ConfigError as error:
        if topology_path is not None:
            raise ConfigError(problems + error.problems) from error
        told = f"{path}: {error.problems[0].message}"
        raise ConfigError([*problems, written.problem(("topology",), told)]) from error
    try:
        described = read_with_overrides(text, str(path), topology_overrides)
        topology = loaded_topology(described)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from error
    if job is None:
        raise ConfigError(problems)
    run = joined(job, topology, written, is_placed=not (to_plan or job.is_to_plan))
    return Pair(
        job_path=job_path,
        job_document=written,
        job=job,
        topology_path=path,
        topology_document=described,
        topology=run.topology,
        described=topology,
    )


def with_overrides(pair: Pair, overrides: Sequence[str]) -> Pair:
    """Return the documents with more overrides of the job; ConfigError with every mistake."""
    written = pair.job_document.copied()
    apply_overrides(written, overrides)
    job = job_of(written)
    run = joined(job, pair.described, written, is_placed=not job.is_to_plan)
    return dataclasses.replace(pair, job_document=written, job=job, topology=run.topology)


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
        told = "{0} is not set where the job is launched: export {0}=…, and launch again"
        pair.job_document.refuse(
            [(("pass_env", index), told.format(pair.job.pass_env[index])) for index in missing]
        )
    return {name: environ[name] for name in pair.job.pass_env}


def loaded_topology(document: Document) -> Topology:
    """Load a topology that has been read; ConfigError with every mistake."""
    try:
        return topology_of(document)
    except ConfigError as error:
        raise mistaken(error, document, "topology") from error


def _wrong(path: Path, message: str) -> ConfigError:
    return ConfigError([Problem(str(path), 0, 0, message, "")])
