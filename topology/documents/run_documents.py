"""Two YAML texts to what a run is: the one place where a job's placement narrows its topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topology.documents.load import load_job, load_topology
from topology.documents.placement import placed, problems_of
from topology.errors import ConfigError, Problem
from topology.job import Job
from topology.text.yaml_document import read_with_overrides
from topology.trees.link_codecs import problems_of as problems_of_codecs
from topology.world import Topology


@dataclass(frozen=True, slots=True)
class DocumentText:
    """One file as it was read, and the `path=value` that are put into it."""

    text: str
    source: str
    """What messages call it."""
    overrides: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RunDocuments:
    """A job, and the world that it runs in."""

    job: Job
    topology: Topology
    """Of the sites that take part: what a run uses, and what is hashed with its job."""
    described: Topology
    """Of all sites: what agents and coordinator are started with."""


def load_run(job: DocumentText, topology: DocumentText) -> RunDocuments:
    """Return what two texts describe together.

    Raises:
        ConfigError: with the mistakes of both, or those of the placement.
    """
    problems: list[Problem] = []
    loaded, described = None, None
    try:
        loaded = load_job(job.text, job.source, job.overrides)
    except ConfigError as error:
        problems += error.problems
    try:
        described = load_topology(topology.text, topology.source, topology.overrides)
    except ConfigError as error:
        problems += error.problems
    if loaded is None or described is None:
        raise ConfigError(problems)
    return joined(loaded, described, job)


def joined(job: Job, described: Topology, written: DocumentText) -> RunDocuments:
    """Return a job with the part of a topology that it runs on.

    Args:
        job: As loaded from `written`.
        described: All sites.
        written: For the places of problems.

    Raises:
        ConfigError: the placement, or the codecs of links, do not fit.
    """
    problems = [*problems_of(job, described), *problems_of_codecs(job, described)]
    if problems:
        document = read_with_overrides(written.text, written.source, written.overrides)
        for path, message in problems:
            document.add(path, message)
        document.raise_problems()
    return RunDocuments(job, placed(job, described), described)
