"""Everything that a run recorded, as it lies in memory: for its report and its trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.core.metrics import RunMetrics
from orchestrator.evidence.report.timelines import StepTimeline
from protos.control.v1 import control_pb2
from topology.job import Job
from topology.world import Topology


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the run's journal."""

    wall_s: float
    kind: str
    site: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """A change that was made to the emulated WAN."""

    wall_s: float
    what: str
    where: str
    """A link's direction or a site; empty: everywhere."""
    site: str
    """Empty unless it was one site's."""


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Totals of one gateway over one directed link, since the run began."""

    wall_s: float
    sent_bytes: float


@dataclass(frozen=True, slots=True)
class EmulatedSample:
    """The emulator's own totals of one directed link, and its queue."""

    wall_s: float
    lost_packets: float | None
    """By the configured loss."""
    dropped_packets: float | None
    """By a full queue."""
    queued_bytes: float


@dataclass(slots=True)
class SiteSums:
    """Sums over a site's steps of what RunMetrics does not sum."""

    hidden_inter_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(slots=True)
class RunRecord:
    """One run."""

    run: control_pb2.Run
    events: tuple[Event, ...]
    folder: Path | None
    """None: a folder of another machine, or none that is known."""
    topology: Topology | None
    job: Job | None
    measured: RunMetrics
    sums: dict[str, SiteSums]
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    step_ends: list[tuple[float, int]] = field(default_factory=list)
    """Wall time at which a step's first record came, and the step; in that order."""
    samples: dict[tuple[str, str, str], list[LinkSample]] = field(default_factory=dict)
    """By source, target and node."""
    emulated: dict[tuple[str, str], list[EmulatedSample]] = field(default_factory=dict)
    """By source and target; empty where the WAN is real."""
    timelines: list[StepTimeline] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names, in the topology's order."""
        return tuple(site.site for site in self.run.sites)

    def step_at(self, wall_s: float) -> int:
        """Return the last step that was done by then; 0 before the first."""
        return max((step for end_s, step in self.step_ends if end_s <= wall_s), default=0)
