"""What a run recorded, read once from its folder and its journal, for its report and its trace.

Whatever is missing is left out and told in `gaps`: a run that was killed, one whose folder is on
another machine, and one of an older build all have something to show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from isthmus.orchestrator.client.run_reader import reading
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.model_flops import ModelFlops
from isthmus.orchestrator.core.run_metrics import PARTS, RunMetrics
from isthmus.orchestrator.core.run_record import Measurement, RunRecord
from isthmus.orchestrator.documents import read_text
from isthmus.orchestrator.evidence.record.run_timeline import SiteLanes
from isthmus.orchestrator.evidence.record.step_series import StepSeries
from isthmus.orchestrator.evidence.record.step_timelines import (
    StepTimeline,
    TimelineReader,
    hold_back,
)
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.run_folder.home import JOB, PLAN, TOPOLOGY, RunChoice, read_object
from isthmus.orchestrator.run_folder.run_files import METRICS, RunFiles
from isthmus.orchestrator.runs.follower import MetricsFollower
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.documents.placement import placed
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.world import Topology


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
    """Packets lost by the configured loss."""
    dropped_packets: float | None
    """Packets dropped by a full queue."""
    queued_bytes: float


@dataclass(slots=True)
class RunRecording:
    """One run."""

    run: control_pb2.Run
    events: Sequence[RecordedEvent]
    folder: Path | None
    """None: a folder of another machine, or none that is known."""
    topology: Topology | None
    job: Job | None
    account: RunRecord
    """Its events and measurements, folded."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    step_ends: list[tuple[float, int]] = field(default_factory=list)
    """Wall time at which a step's first record came, and the step; in that order."""
    samples: dict[tuple[str, str, str], list[LinkSample]] = field(default_factory=dict)
    """The links' samples, by source, target and gateway."""
    emulated: dict[tuple[str, str], list[EmulatedSample]] = field(default_factory=dict)
    """The emulator's samples, by source and target; empty where the WAN is real."""
    step_tokens: dict[int, float] = field(default_factory=dict)
    """Tokens of all sites in each step."""
    step_figures: StepSeries = field(default_factory=StepSeries)
    """The parts of steps, in a bounded number of points."""
    machines: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """What each site's first rank has said of its machine and code: labels of metrics.MACHINE."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """What its plan says beside its decisions: orchestrator/plans.py; empty: it was not planned."""
    timelines: list[StepTimeline] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    lanes: SiteLanes = field(init=False)

    def __post_init__(self) -> None:
        self.lanes = SiteLanes(self.sites)

    @property
    def measured(self) -> RunMetrics:
        """What comes of all that was measured."""
        return self.account.measured

    @property
    def sites(self) -> tuple[str, ...]:
        """Names, in the topology's order."""
        return tuple(site.site for site in self.run.sites)

    def step_at(self, wall_s: float) -> int:
        """Return the last step that was done by then; 0 before the first."""
        return max((step for end_s, step in self.step_ends if end_s <= wall_s), default=0)


def read_run_record(choice: RunChoice) -> RunRecording:
    """Read everything that a run recorded.

    Raises:
        NotFoundError: there is no such run.
    """
    with reading(choice) as reader:
        return read_record(reader.get(), list(reader.events(follow=False)))


def read_record(run: control_pb2.Run, events: Sequence[RecordedEvent]) -> RunRecording:
    """Read what a run's folder holds, beside what its coordinator or its journal says of it."""
    folder = Path(run.folder) if run.folder and Path(run.folder).is_dir() else None
    gaps: list[str] = []
    topology: Topology | None = None
    job: Job | None = None
    about = next((each.detail for each in events if each.kind == EventKind.RUN_SUBMITTED), {})
    if folder is None:
        named = run.folder or "its folder"
        gaps.append(f"{named} is not on this machine: no documents, and nothing that was measured")
    else:
        topology, job = _documents(folder, about, gaps)
    record = RunRecording(
        run=run,
        events=events,
        folder=folder,
        topology=topology,
        job=job,
        account=RunRecord(
            run.run_id,
            [site.site for site in run.sites],
            None if job is None or topology is None else ModelFlops(job, topology),
        ),
        gaps=gaps,
    )
    for event in events:
        record.account.apply(event)
        record.lanes.take(event, record.account.view)
    if folder is not None:
        record.plan = read_object(folder / PLAN)
        _Reading(record).read(folder)
    return record


def _documents(
    folder: Path, submitted: Mapping[str, Any], gaps: list[str]
) -> tuple[Topology | None, Job | None]:
    """Return both documents as they were submitted; a gap for each that cannot be read.

    Where the topology leaves the number of gateways to isthmus, it is the one that was decided.
    """
    topology: Topology | None = None
    job: Job | None = None
    try:
        text, overrides = read_text(folder / TOPOLOGY), submitted.get("topology_overrides", [])
        topology = load_topology(text, str(folder / TOPOLOGY), overrides)
    except ConfigError as error:
        gaps.append(f"no topology: {error.problems[0]}")
    try:
        text, overrides = read_text(folder / JOB), submitted.get("job_overrides", [])
        job = load_job(text, str(folder / JOB), overrides)
    except ConfigError as error:
        gaps.append(f"no job: {error.problems[0]}")
    if topology is not None and job is not None:
        topology = _with_gateways(placed(job, topology), folder)
    return topology, job


def _with_gateways(topology: Topology, folder: Path) -> Topology:
    """Return the sites with the gateways that a run had, if its folder has its spec."""
    try:
        spec = RunSpec.from_bytes(RunFiles(folder).read_spec())
    except (OSError, ConfigError):
        return topology
    decided = {site.name: site for site in spec.topology.sites}
    sites = (
        dataclasses.replace(
            site,
            gateways_per_node=decided[site.name].gateways_per_node,
            chooses_gateways=decided[site.name].chooses_gateways,
        )
        if site.name in decided
        else site
        for site in topology.sites
    )
    return dataclasses.replace(topology, sites=tuple(sites))


STEP_FIGURES = (metrics.STEP_S, *PARTS)
"""What is kept of every step."""
MAX_SAMPLES = 20_000
"""The most samples kept of one link: once there are more, every second one is dropped. They are
totals, so only detail is lost."""

Sample = TypeVar("Sample", LinkSample, EmulatedSample)


class _Reading:
    """Adds metrics.jsonl to what a run recorded."""

    def __init__(self, record: RunRecording) -> None:
        self._record = record
        self._timelines = TimelineReader()
        self._evaluations: dict[int, float] = {}
        self._step_ends: dict[int, float] = {}
        self._num_odd = 0

    def read(self, folder: Path) -> None:
        """Take every line; one that makes no sense is counted, not believed."""
        record, follower, path = self._record, MetricsFollower(folder), folder / METRICS
        is_read = False
        while not is_read:
            measurements, is_read = follower.read()
            for measurement in measurements:
                self._take(measurement)
        record.account.reach()
        first = follower.first_line
        if follower.trouble:
            record.gaps.append(follower.trouble)
        elif first is None:
            record.gaps.append(f"there is no {path}: nothing was measured")
        elif first:
            record.gaps.append(f"{path}: its first {first} lines, for only the newest are kept")
        if num_odd := self._num_odd + follower.num_odd:
            record.gaps.append(f"{path}: {num_odd} lines make no sense and were left out")
        if self._timelines.num_dropped:
            record.gaps.append(
                f"the timelines of {self._timelines.num_dropped} steps, for they are many"
            )
        record.evaluations = sorted(self._evaluations.items())
        record.step_ends = sorted((wall_s, step) for step, wall_s in self._step_ends.items())
        record.timelines = self._timelines.steps(record.sites)
        if record.job is not None and record.job.exchange.schedule == "serial":
            hold_back(record.timelines)
        record.faults.sort(key=lambda fault: fault.wall_s)

    def _take(self, found: Measurement) -> None:
        record, kind, site, values = self._record, found.kind, found.site, found.values
        if kind == metrics.FAULT:
            record.faults.append(_fault(found.wall_s, values, found.labels))
        elif kind == metrics.EMULATED_LINK:
            pair = (found.labels.get("source", ""), found.labels.get("target", ""))
            _keep(record.emulated.setdefault(pair, []), _emulated(found.wall_s, values))
        elif site not in record.measured.sites:
            self._num_odd += 1
        elif kind in {metrics.TIMELINE, metrics.BUCKET}:
            self._num_odd += not self._timelines.add(site, kind, found.step, values)
        else:
            record.account.measure(found)
            self._keep(found)

    def _keep(self, found: Measurement) -> None:
        """Keep what the sums of the run do not have."""
        record, step, wall_s, values = self._record, found.step, found.wall_s, found.values
        if found.kind == metrics.STEP:
            self._step_ends.setdefault(step, wall_s)
            tokens = record.step_tokens.get(step, 0.0) + values.get(metrics.SITE_TOKENS, 0.0)
            record.step_tokens[step] = tokens
            figures = {name: values[name] for name in STEP_FIGURES if name in values}
            record.step_figures.add(step, wall_s, figures)
        elif found.kind == metrics.MACHINE:
            record.machines[found.site] = found.labels
        elif found.kind == metrics.EVALUATION and metrics.HELD_OUT_LOSS in values:
            self._evaluations[step] = values[metrics.HELD_OUT_LOSS]
        elif found.kind == metrics.LINK and metrics.SENT_BYTES in values:
            source = found.labels.get("source", found.site)
            key = (source, found.labels.get("target", ""), found.labels.get("gateway", ""))
            _keep(
                record.samples.setdefault(key, []), LinkSample(wall_s, values[metrics.SENT_BYTES])
            )


def _keep(samples: list[Sample], sample: Sample) -> None:
    samples.append(sample)
    if len(samples) > MAX_SAMPLES:
        del samples[1::2]


def _emulated(wall_s: float, values: Mapping[str, float]) -> EmulatedSample:
    return EmulatedSample(
        wall_s,
        values.get("lost_packets"),
        values.get("dropped_packets"),
        values.get("queued_bytes", 0.0),
    )


def _fault(wall_s: float, values: Mapping[str, float], labels: Mapping[str, str]) -> Fault:
    source, target = labels.get("source", ""), labels.get("target", "")
    site = labels.get("site", "")
    set_to = [
        f"{name} {style(values[key])}" for key, (name, style) in _SHAPE.items() if key in values
    ]
    what = f"{labels.get('what', 'fault')} {', '.join(set_to)}".strip()
    way = f"{source} → {target}" if source and target else source or target
    return Fault(wall_s, what, site or way, site)


_SHAPE: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "bytes_per_s": ("to", formats.rate),
    "delay_s": ("delay", formats.duration),
    "jitter_s": ("jitter", formats.duration),
    "loss": ("loss", formats.share),
}
"""What a fault record says of a link's new shape."""
