"""The spec of one run, decided once and read by all its processes.

The coordinator resolves a submission into a `RunSpec` (topology/documents/run_decisions.py),
serialises it once, and sends it to every site. Agents, gateways and ranks read it and decide
nothing again, so they need neither YAML nor a planner, and sites cannot come to different plans.

A site refuses a spec with a field that its build does not know: every site runs the same isthmus.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from isthmus.topology.spec.carried_folder import Carried
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.job_paths import moved, moved_path
from isthmus.topology.spec.json_fields import (
    json_bytes,
    json_of,
    read_json,
    to_json,
)
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.regime import Regime, Rung
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Topology

CODE = "code"
"""Folder in a run's folder at a site: the site's copy of what was carried there."""


@dataclass(frozen=True, slots=True)
class CodedPlan:
    """The reduction's trees and their codecs. Replanning replaces this, and no more."""

    plan: ReductionPlan
    """The reduction plan; sites are indices in the run's order."""
    codecs: tuple[str, ...]
    """The codec of each tree; for a gather, one."""

    def to_bytes(self) -> bytes:
        """Serialise; equal values give equal bytes."""
        return json_bytes(to_json(self))

    @classmethod
    def from_bytes(cls, written: bytes) -> CodedPlan:
        """Read what `to_bytes` wrote.

        Raises:
            ConfigError: It did not, or this build does not know all of it.
        """
        return read_json(cls, _read(written))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run, but for its id and its addresses."""

    job: Job
    """The resolved job: defaults, `--set` and a plan's decisions are in it, and paths are
    absolute."""
    topology: Topology
    """The sites that take part, in the order in which contributions are summed, and their links."""
    reduction: CodedPlan
    """The reduction of all sites, which carries gradients until another plan does."""
    chunk_bytes: int
    """float32 bytes of a chunk for the whole run: `job.exchange.chunk_bytes`, or less if links have
    a small BDP."""
    pipeline_bytes: int
    """float32 bytes that a site must be able to have in flight to keep its links busy."""
    timeouts: Timeouts
    job_folder: str = ""
    """The folder of the job file where the job was launched; empty: there was no file."""
    replan: Replan | None = None
    """The settings of planning again by the coordinator; None: the run keeps its plan. Where it may
    change, gateways have links to every site that they could have for a neighbour."""
    rungs: tuple[Regime, ...] = ()
    """The regimes less exact than the job's to which the run may change, most exact first; empty:
    it keeps its regime."""
    first: CodedPlan | None = None
    """The reduction that the run begins with, where it begins with some of its sites; None: with
    all, by `reduction`."""

    carried: Carried | None = None
    """The folder of the job's files, which sites without a `job_folder` are given; None: they lie
    there."""

    def job_at(self, site: str, run_folder: PurePath) -> Job:
        """Return the job with its paths at a site, whose run's folder is `run_folder`."""
        source, target = self._moved_at(site, run_folder)
        return moved(self.job, source, target)

    def working_folder_at(self, site: str, run_folder: PurePath) -> str | None:
        """Return the folder in which the script runs at a site; None: the run's, or unknown.

        The shipped trainer needs no folder of the user's.
        """
        job = self.job_at(site, run_folder)
        if job.working_folder is not None:
            return job.working_folder
        if job.entrypoint is None or not self.job_folder:
            return None
        source, target = self._moved_at(site, run_folder)
        return str(moved_path(self.job_folder, source, target))

    def is_carried_to(self, site: str) -> bool:
        """Whether a site is given the job's files: the topology does not say where they lie."""
        return self.carried is not None and not self.topology.site(site).job_folder

    def _moved_at(self, site: str, run_folder: PurePath) -> tuple[PurePath, PurePath]:
        """Return the folder of the job's files where it was launched, and at a site."""
        source = PurePath(self.job_folder)
        if folder := self.topology.site(site).job_folder:
            return source, PurePath(folder)
        if self.carried is not None:
            return PurePath(self.carried.source), run_folder / CODE
        return source, source

    @property
    def site_names(self) -> tuple[str, ...]:
        """The names of the sites, in the order of their indices."""
        return tuple(site.name for site in self.topology.sites)

    @property
    def first_sites(self) -> tuple[str, ...]:
        """The names of the sites that the run begins with, in the same order."""
        begin = self.job.begin_with or self.site_names
        return tuple(name for name in self.site_names if name in begin)

    @property
    def first_reduction(self) -> CodedPlan:
        """The reduction that the run begins with: of `first_sites`."""
        return self.first or self.reduction

    @property
    def ladder(self) -> tuple[Regime, ...]:
        """All regimes that the run may have, the job's first."""
        return (self.job.regime, *self.rungs)

    def regime_at(self, rung: Rung) -> Regime:
        """Return the regime of a rung of the ladder."""
        return next((each for each in self.rungs if each.kind == rung.kind), self.job.regime)

    @property
    def longest_regime(self) -> Regime:
        """The regime of the ladder with the longest rounds."""
        return max(self.ladder, key=lambda regime: (regime.is_local, regime.sync_every))

    def to_bytes(self) -> bytes:
        """Serialise; equal values give equal bytes."""
        return json_bytes(to_json(self))

    @classmethod
    def from_bytes(cls, written: bytes) -> RunSpec:
        """Read what `to_bytes` wrote.

        Raises:
            ConfigError: It did not, or another build's did.
        """
        return read_json(cls, _read(written))


def spec_hash(written: bytes) -> str:
    """Return the sha256, in hex, of a serialised spec: gateways compare it when they meet."""
    return hashlib.sha256(written).hexdigest()


def _read(written: bytes) -> dict[str, Any]:
    fields = json_of(written, "what the run is,")
    if not isinstance(fields, dict):
        raise ConfigError("what the run is, is no JSON object")
    return fields
