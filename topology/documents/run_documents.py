"""Loads a job and a topology together, checks that they fit, and applies the placement.

Only here the placement restricts the topology. Mistakes are reported at the job's lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.topology.documents.load import job_of, load_topology, reduction_of
from isthmus.topology.documents.placement import Misplaced, placed, problems_of
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.job import Job, Reduction
from isthmus.topology.spec.world import Topology
from isthmus.topology.text.yaml_document import Document, Path, apply_overrides, read_with_overrides
from isthmus.topology.trees.link_codecs import problems_of as problems_of_codecs
from isthmus.topology.trees.tree_choice import check_reduction


@dataclass(frozen=True, slots=True)
class DocumentText:
    """The text of one file, and overrides (`path=value`) for it."""

    text: str
    source: str
    """The text's name in messages."""
    overrides: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RunDocuments:
    """A job, and the topology that it runs on."""

    job: Job
    topology: Topology
    """Topology of the sites that take part, used by the run."""
    described: Topology
    """Topology of all sites, with which agents and coordinator are started."""
    written: Document
    """The job's document."""
    asked_reduction: Reduction | None
    """The job's reduction without the decisions of a plan; None: it has mistakes."""


def load_run(
    job: DocumentText, topology: DocumentText, decisions: Sequence[str] = ()
) -> RunDocuments:
    """Load a job and a topology from their texts.

    `decisions` are further overrides of the job, which a plan has decided.

    Raises:
        ConfigError: with the mistakes of both, or those of their combination.
    """
    problems: list[Problem] = []
    loaded, described, written, asked = None, None, None, None
    try:
        written = read_with_overrides(job.text, job.source, job.overrides)
        asked = reduction_of(written)
        apply_overrides(written, decisions)
        loaded = job_of(written)
    except ConfigError as error:
        problems += error.problems
    try:
        described = load_topology(topology.text, topology.source, topology.overrides)
    except ConfigError as error:
        problems += error.problems
    if loaded is None or described is None or written is None:
        raise ConfigError(problems)
    return dataclasses.replace(joined(loaded, described, written), asked_reduction=asked)


def joined(
    job: Job, described: Topology, written: Document, *, is_placed: bool = True
) -> RunDocuments:
    """Combine a job with the part of a topology that it runs on.

    `written` is the job's document, for the places of problems. If not `is_placed`, a plan will
    decide later which sites take part.

    Raises:
        ConfigError: the placement or the codecs of links do not fit, or as for `check_pair`.
    """
    _refuse([*problems_of(job, described), *problems_of_codecs(job, described)], written)
    here = placed(job, described)
    _refuse(_probe_problems(job, here), written)
    check_pair(job, here, written, is_placed=is_placed)
    return RunDocuments(job, here, described, written, job.reduction)


def check_pair(job: Job, topology: Topology, written: Document, *, is_placed: bool = True) -> None:
    """Check that a job can run on a topology.

    If a plan will decide later which sites take part (not `is_placed`), the batch may have fewer
    sequences than all ranks.

    Raises:
        ConfigError: with every problem, each at the job's line.
    """
    problems = _batch_problems(job, topology) if is_placed else []
    try:
        check_reduction(job, topology)
    except ConfigError as error:
        found = [(tuple(each.path.split(".")), each.message) for each in error.problems]
        _refuse([*found, *problems], written)
        raise
    _refuse(problems, written)


def _probe_problems(job: Job, topology: Topology) -> list[Misplaced]:
    """Return problems of a probe that would have to dial a site that accepts no connections."""
    shut = [site.name for site in topology.sites if not site.inbound]
    if job.probe is None or not shut:
        return []
    message = f"a probe dials every site, and {', '.join(map(repr, shut))} has inbound: false"
    return [(("probe",), message)]


def _batch_problems(job: Job, topology: Topology) -> list[Misplaced]:
    """Return problems of a batch with fewer sequences than the shipped trainer's ranks.

    With a placement, each site was checked already.
    """
    batch, ranks = job.trainer.global_batch, topology.num_ranks
    is_trainers = job.entrypoint is None and job.probe is None and not job.placement
    if not is_trainers or batch >= ranks:
        return []
    fewer = batch >= min(site.num_ranks for site in topology.sites)
    cure = "; with a `plan` section, `launch` leaves sites out" if fewer else ""
    message = f"want at least {ranks}, a sequence for each rank of {topology.name!r}"
    return [(("trainer", "global_batch"), f"{message}; got {batch}{cure}")]


def _refuse(problems: Sequence[Misplaced], written: Document) -> None:
    """Raise a ConfigError with the problems, if any, at their places in the job's document."""
    written.refuse([(_path(written, path), message) for path, message in problems])


def _path(document: Document, written: Path) -> Path:
    """Return a path with list positions as numbers instead of texts."""
    path: Path = ()
    for part in written:
        path = (*path, int(part) if isinstance(document.get(*path), list) else part)
    return path
