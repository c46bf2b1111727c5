"""The figures of one run: what the page, Markdown and JSON all show. None is what is not known.

Makes the figures of one run from its record. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.orchestrator.core.event_kinds import EventKind, seen_of
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_metrics import RunMetrics
from isthmus.orchestrator.core.slow_sites import SlowPeriod
from isthmus.orchestrator.evidence.record import run_timeline
from isthmus.orchestrator.evidence.record.run_record import STEP_FIGURES, RunRecording
from isthmus.orchestrator.evidence.record.run_timeline import SiteLane, Stall, StepEnd
from isthmus.orchestrator.evidence.record.step_timelines import StepTimeline, choose
from isthmus.orchestrator.evidence.report.planned_steps import (
    PlannedStep,
    codec_steps_s,
    planned_mfu,
    planned_step,
)
from isthmus.orchestrator.evidence.report.verdict import (
    LEAST_DELIVERED,
    Expected,
    Interruptions,
    SlowLink,
    SlowShare,
    Verdict,
    VerdictFacts,
    verdict,
)
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.egress import Egress, egress_of
from isthmus.orchestrator.runs.facts import (
    LinkFacts,
    SiteFacts,
    TotalFacts,
    known,
    link_facts,
    ratio,
    site_facts,
    to_json,
    total_facts,
)
from isthmus.orchestrator.runs.told_facts import described
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.link_codecs import plan_codecs
from isthmus.topology.trees.tree_choice import plan_reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFacts:
    """Something that happened to the run."""

    wall_s: float
    at_s: float | None
    """Since the run was active."""
    step: int
    """The last one that was done by then."""
    where: str
    """A site, or a link's direction; empty: the run as a whole."""
    what: str
    mark: int | None
    """Its number on the charts, from 1; None: it is not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What a site's first rank has said of its machine and code; empty is not known."""

    site: str
    num_ranks: int | None
    host: str
    device: str
    """What it computes on, by its own name; `CPU` where that is the processor."""
    cpu: str
    cores: str
    python: str
    torch: str
    build: str
    """The version of isthmus."""
    commit: str
    is_changed: bool
    """Files of the repository were changed since the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """What was launched; empty is not known."""

    job: str
    """Path of the job file where it was launched."""
    topology: str
    script: str
    """Empty: the trainer that ships."""
    arguments: tuple[str, ...]
    overrides: tuple[str, ...]
    """Each --set."""
    certificates: str
    """Which one ends first, and when."""
    code: Mapping[str, Any]
    """What its files were: orchestrator/coordinator/submission.py; empty: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternativeFacts:
    """Another plan, as the planner predicted it."""

    what: str
    step_s: float
    usd_per_step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """How gradients cross, and why so."""

    reduction: str
    edges: tuple[tuple[str, str], ...]
    """Pairs of sites that exchange bytes."""
    codec: str
    codecs: tuple[str, ...]
    """The codec of each of the reduction's trees; a gather has one."""
    chunk_bytes: int
    bucket_bytes: int
    channels_per_link: int | None
    """None: as many as the link takes."""
    schedule: str
    compute: str
    verify_every: int
    regime: str
    """When sites exchange, in words."""
    why: tuple[str, ...] = ()
    """The planner's sentences; empty: the run was not planned."""
    predicted_step_s: float | None = None
    """As the planner predicted it."""
    alternatives: tuple[AlternativeFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeFacts:
    """What became of a run."""

    state: str
    reason_code: str
    reason: str
    log_path: str
    """The log that tells more of what broke first."""
    created_wall_s: float
    active_s: float | None
    verified_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """Losses over steps."""

    losses: tuple[tuple[int, float], ...]
    evaluations: tuple[tuple[int, float], ...]
    """Held-out losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFacts:
    """The run over the wall clock; times are seconds since it was active."""

    pace: tuple[tuple[float, float], ...]
    """When, and tokens a second of all sites; steps a second where no tokens are counted."""
    stalls: tuple[Stall, ...]
    lanes: tuple[SiteLane, ...]
    slow: tuple[SlowPeriod, ...]
    """When which site has kept the others waiting, and which ranks others of their site."""
    slow_times: tuple[tuple[float, float], ...]
    """From when to when each period of `slow` was."""
    happened: tuple[EventFacts, ...]
    num_happened: int
    """How many there were; the newest stand above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Steps one by one, as far as they are kept."""

    step_figures: dict[str, Any]
    """Parts of steps over the run, as StepSeries has them in columns."""
    num_timelines: int
    """Steps whose buckets were kept."""
    timelines: tuple[StepTimeline, ...]
    """The timelines of steps, at most MAX_STEPS of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFacts:
    """What it ran on."""

    machines: tuple[MachineFacts, ...]
    launched: LaunchFacts
    emulator: str
    """`relay` or `netns`; empty: nothing was emulated."""
    emulator_note: str
    """What was lost by falling back from another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run."""

    run_id: str
    name: str
    folder: str
    outcome: OutcomeFacts
    totals: TotalFacts
    egress: Egress | None
    sites: tuple[SiteFacts, ...]
    links: tuple[LinkFacts, ...]
    loss: LossFacts
    time: TimeFacts
    steps: StepFacts
    place: PlaceFacts
    plan: PlanFacts | None
    planned_step_s: float | None
    """As the step model predicts it; None: it cannot."""
    verdict: Verdict
    gaps: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what --json shows: figures of the whole run have the names of its summary."""
        fields = dataclasses.asdict(self)
        groups = [
            fields.pop(name) for name in ("outcome", "totals", "loss", "time", "steps", "place")
        ]
        figures = {name: value for group in groups for name, value in group.items()}
        return {**fields, **figures, "egress_usd": self.egress and self.egress.usd}


def run_facts(record: RunRecording) -> RunFacts:
    """Return the figures of a run."""
    run, measured, gaps = record.run, record.measured, list(record.gaps)
    totals = total_facts(measured)
    planned_mfus: dict[str, float] = {}
    codec_steps: dict[str, float] = {}
    step: PlannedStep | None = None
    if record.job is not None and record.topology is not None:
        planned_mfus = planned_mfu(record.job, record.topology)
        step = planned_step(record.job, record.topology)
        codec_steps = codec_steps_s(record.job, record.topology)
    sites = _sites(record, planned_mfus)
    links = tuple(_link(link, record, totals.step_s) for link in run.links)
    ends = _step_ends(record)
    stalls = _stalls(record, ends)
    return RunFacts(
        run_id=run.run_id,
        name=run.name,
        folder=run.folder,
        outcome=_outcome(run),
        totals=totals,
        egress=_egress(record, links, totals.step_s),
        sites=sites,
        links=links,
        loss=LossFacts(
            losses=tuple(each for each in measured.losses if math.isfinite(each[1])),
            evaluations=tuple(record.evaluations),
        ),
        time=_times(record, ends, stalls),
        steps=StepFacts(
            step_figures=record.step_figures.to_json(STEP_FIGURES),
            num_timelines=len(record.timelines),
            timelines=tuple(choose(record.timelines)),
        ),
        place=PlaceFacts(
            machines=_machines(record, sites),
            launched=_launched(record),
            emulator=_told(record, EventKind.WAN_EMULATED, "emulator"),
            emulator_note=_told(record, EventKind.WAN_FALLBACK, "note"),
        ),
        plan=_plan(record, gaps),
        planned_step_s=_planned_step_s(record, step),
        verdict=verdict(verdict_facts(record, sites, links, step, stalls, codec_steps)),
        gaps=tuple(gaps),
    )


def _outcome(run: control_pb2.Run) -> OutcomeFacts:
    verified_steps = known(run.totals, "verified_steps")
    return OutcomeFacts(
        state=formats.outcome(run),
        reason_code=run.reason_code,
        reason=run.reason,
        log_path=run.failure.log_path if run.HasField("failure") else "",
        created_wall_s=run.created_wall_s,
        active_s=run.active_s or None,
        verified_steps=None if verified_steps is None else int(verified_steps),
    )


def _times(record: RunRecording, ends: Sequence[StepEnd], stalls: tuple[Stall, ...]) -> TimeFacts:
    happened = _happened(record)
    slow = (*record.measured.slow, *record.measured.slow_ranks)
    return TimeFacts(
        pace=tuple(run_timeline.pace(ends)),
        stalls=stalls,
        lanes=_lanes(record, ends),
        slow=slow,
        slow_times=tuple(
            (
                run_timeline.at_step(ends, each.since_step) or 0.0,
                run_timeline.at_step(ends, each.last_step) or 0.0,
            )
            for each in slow
        ),
        happened=happened[-MAX_EVENTS:],
        num_happened=len(happened),
    )


def _sites(record: RunRecording, planned_mfus: Mapping[str, float]) -> tuple[SiteFacts, ...]:
    return tuple(
        dataclasses.replace(site, planned_mfu=planned_mfus.get(name))
        for name, site in site_facts(record.measured, record.topology).items()
    )


def _egress(
    record: RunRecording, links: Sequence[LinkFacts], step_s: float | None
) -> Egress | None:
    exchange = record.job.exchange if record.job else None
    codec = "" if exchange is None or exchange.codecs else exchange.codec
    figures, active_s = [to_json(link) for link in links], record.run.active_s or None
    return egress_of(figures, active_s=active_s, step_s=step_s, codec=codec)


def _link(link: control_pb2.LinkStatus, record: RunRecording, step_s: float | None) -> LinkFacts:
    pair = (link.source, link.target)
    facts = link_facts(
        described(link),
        record.measured.links.get(pair, {}),
        active_s=record.run.active_s or None,
        step_s=step_s,
    )
    if not (emulated := record.emulated.get(pair)):
        return facts
    lost, dropped = emulated[-1].lost_packets, emulated[-1].dropped_packets
    return dataclasses.replace(facts, lost_packets=lost, dropped_packets=dropped)


def _step_ends(record: RunRecording) -> list[StepEnd]:
    """Return when each step ended, since the run was active."""
    active_s = record.account.view.active_s
    if active_s is None:
        return []
    counts = record.measured.counts_tokens is not False
    return [
        StepEnd(wall_s - active_s, step, record.step_tokens.get(step, 0.0) if counts else 1.0)
        for wall_s, step in record.step_ends
    ]


def _stalls(record: RunRecording, ends: Sequence[StepEnd]) -> tuple[Stall, ...]:
    active_s = record.account.view.active_s or 0.0
    events = [(event.wall_s - active_s, event.kind, event.site) for event in record.events]
    evaluated = (step + 1 for step, _ in record.evaluations)
    return run_timeline.StepGaps(ends).stalls(events, evaluated)


def _lanes(record: RunRecording, ends: Sequence[StepEnd]) -> tuple[SiteLane, ...]:
    active_s = record.account.view.active_s
    if active_s is None:
        return ()
    known_s = max((event.wall_s for event in record.events), default=active_s)
    if ends:
        known_s = max(known_s, active_s + ends[-1].at_s)
    return record.lanes.until((record.run.ended_wall_s or known_s) - active_s)


_ELSEWHERE = frozenset({EventKind.WAN_FALLBACK, EventKind.RUN_STOPPING, EventKind.RUN_ENDED})
"""Kinds of notes that stand elsewhere on the page."""
MAX_EVENTS = 100


def _happened(record: RunRecording) -> tuple[EventFacts, ...]:
    """Return what happened, in order: to the emulated WAN, to sites, and of what the run ended."""
    active_s, run = record.account.view.active_s, record.run
    told = [
        (fault.wall_s, fault.where or "everywhere", fault.what, True) for fault in record.faults
    ]
    told += [
        (event.wall_s, event.site, event.text, True)
        for event in record.events
        if seen_of(event.kind).is_mark
    ]
    told += [
        (each.wall_s, each.site, each.text, False)
        for each in run.noted
        if not seen_of(each.kind).is_mark and each.kind not in _ELSEWHERE
    ]
    if run.state == control_pb2.RUN_STATE_FAILED:
        stopped = (event.wall_s for event in record.events if event.kind == EventKind.RUN_STOPPING)
        told.append((next(stopped, run.ended_wall_s), run.failure.site, run.reason_code, True))
    told.sort(key=lambda each: each[0])
    found, num_marks = [], 0
    for wall_s, where, what, is_marked in told:
        num_marks += is_marked
        found.append(
            EventFacts(
                wall_s=wall_s,
                at_s=None if active_s is None else wall_s - active_s,
                step=record.step_at(wall_s),
                where=where,
                what=what,
                mark=num_marks if is_marked else None,
            )
        )
    return tuple(found)


def _machines(record: RunRecording, sites: Sequence[SiteFacts]) -> tuple[MachineFacts, ...]:
    hosts = {site.site: site.host for site in record.run.sites}
    found = []
    for site in sites:
        said = record.machines.get(site.site, {})
        found.append(
            MachineFacts(
                site=site.site,
                num_ranks=site.num_ranks,
                host=said.get(metrics.HOST) or hosts.get(site.site, ""),
                device=said.get(metrics.DEVICE, ""),
                cpu=said.get(metrics.CPU, ""),
                cores=said.get(metrics.CORES, ""),
                python=said.get(metrics.PYTHON, ""),
                torch=said.get(metrics.TORCH, ""),
                build=said.get(metrics.BUILD, ""),
                commit=said.get(metrics.COMMIT, ""),
                is_changed=said.get(metrics.CHANGED) == "1",
            )
        )
    return tuple(found)


def _launched(record: RunRecording) -> LaunchFacts:
    detail, job = record.account.view.about, record.job
    overrides = [
        *(detail.get("topology_overrides") or ()),
        *(detail.get("job_overrides") or ()),
    ]
    return LaunchFacts(
        job=str(detail.get("job_source", "")),
        topology=str(detail.get("topology_source", "")),
        script="" if job is None or job.entrypoint is None else job.entrypoint,
        arguments=() if job is None else tuple(job.arguments),
        overrides=tuple(map(str, overrides)),
        certificates=formats.certificates(record.run.certificates, record.run.ended_wall_s),
        code=detail.get("code") or {},
    )


class RunSource(Protocol):
    """What a verdict is made from: a run that was read once, or one that is watched."""

    @property
    def run(self) -> control_pb2.Run:
        """The run as its journal has it."""

    @property
    def events(self) -> Sequence[RecordedEvent]:
        """Those of its journal."""

    @property
    def job(self) -> Job | None:
        """None: it cannot be read."""

    @property
    def topology(self) -> Topology | None:
        """None: it cannot be read."""

    @property
    def plan(self) -> Mapping[str, Any]:
        """As in RunRecording."""

    @property
    def measured(self) -> RunMetrics:
        """Results derived from everything that was measured."""


def verdict_facts(
    record: RunSource,
    sites: Sequence[SiteFacts],
    links: Sequence[LinkFacts],
    planned: PlannedStep | None,
    stalls: Sequence[Stall],
    codec_steps: Mapping[str, float],
) -> VerdictFacts:
    """Return what the verdict rests on: means over sites, and the busiest link."""
    run, job, steps = record.run, record.job, record.measured.last_step
    timed = [site for site in sites if site.step_s]

    def mean(part: str) -> float:
        return math.fsum(site.parts_s[part] for site in timed) / len(timed) if timed else 0.0

    busiest = max(links, key=_bytes_s, default=None)
    described = None
    if busiest is not None and record.topology is not None:
        described = record.topology.link(busiest.source, busiest.target)
    lost_s = [each.length_s for each in stalls if each.cause.endswith("lost")]
    return VerdictFacts(
        state=formats.run_state(run),
        reason_code=run.reason_code,
        steps=steps,
        active_s=run.active_s or None,
        step_s=math.fsum(site.step_s or 0.0 for site in timed) / len(timed) if timed else None,
        compute_s=mean(metrics.COMPUTE_S) + mean(metrics.INTRA_S),
        exposed_s=mean(metrics.EXPOSED_INTER_S),
        wait_s=mean(metrics.WAIT_S),
        hidden_s=math.fsum(site.hidden_inter_s or 0.0 for site in timed) / max(1, len(timed)),
        planned=Expected(
            step_s=_planned_step_s(record, planned),
            compute_s=None if planned is None else planned.compute_s,
            alternatives_s={
                str(each.get("what", "")): step_s
                for each in _listed(record.plan, "alternatives")
                if isinstance(each, dict) and (step_s := known(each, "step_s")) is not None
            },
        ),
        codec_steps_s=codec_steps,
        codec="" if job is None or job.exchange.codecs else job.exchange.codec,
        bytes_s=_bytes_s(busiest) / steps if busiest is not None and steps else None,
        busiest_link=f"{busiest.source} → {busiest.target}" if busiest is not None else "",
        link_share=described.share if described is not None else 1.0,
        slow_link=_slow_link(record, links),
        slow=_slowest(record),
        is_sync=job is None or job.regime.is_sync,
        interruptions=Interruptions(
            num_stalls=len(stalls),
            stalled_s=math.fsum(each.length_s for each in stalls),
            stalled_by_loss_s=math.fsum(lost_s),
            num_losses=sum(event.kind == EventKind.SITE_LOST for event in record.events),
            detect_within_s=record.topology.failure.detect_within_s if record.topology else None,
        ),
    )


def _bytes_s(link: LinkFacts) -> float:
    """Return how long a link's bytes of the run keep it busy at its described rate."""
    return ratio(link.sent_bytes, link.configured_bytes_per_s) or 0.0


_LEAST_LIMITED_S = 2.0
_LEAST_LIMITED = 0.05
"""A link was the limit for at least so long, and for such a share of the run, or says nothing."""


def _slow_link(record: RunSource, links: Sequence[LinkFacts]) -> SlowLink | None:
    """Return the link that carried least of what is described while it was the limit."""
    found = []
    for link in links:
        latest = record.measured.links.get((link.source, link.target), {})
        limited_s = known(latest, metrics.LIMITED_S) or 0.0
        least_s = max(_LEAST_LIMITED_S, _LEAST_LIMITED * record.run.active_s)
        delivered = ratio(known(latest, metrics.LIMITED_BYTES), limited_s)
        part = ratio(delivered, link.configured_bytes_per_s)
        if part is not None and limited_s >= least_s and part < LEAST_DELIVERED:
            found.append((part, delivered, link))
    if not found:
        return None
    _, delivered, link = min(found, key=lambda each: each[0])
    return SlowLink(
        way=f"{link.source} → {link.target}",
        delivered_bytes_per_s=delivered or 0.0,
        described_bytes_per_s=link.configured_bytes_per_s or 0.0,
    )


def _slowest(record: RunSource) -> SlowShare | None:
    """Return which site cost the others most, over all of its periods, or else which rank."""
    by_who: dict[tuple[str, int | None], list[SlowPeriod]] = {}
    for each in record.measured.slow or record.measured.slow_ranks:
        by_who.setdefault((each.site, each.rank), []).append(each)
    if not by_who:
        return None
    periods = max(by_who.values(), key=lambda found: sum(each.total_s for each in found))
    num_steps = sum(each.num_steps for each in periods)
    total_s, for_s = sum(each.total_s for each in periods), sum(each.for_s for each in periods)
    return SlowShare(
        who=periods[-1].who,
        num_steps=num_steps,
        cost_s=total_s / num_steps if num_steps else 0.0,
        share=total_s / for_s if for_s else 0.0,
        why=next((each.why for each in reversed(periods) if each.why), ""),
        shares_machine=periods[-1].shares_machine,
    )


def _plan(record: RunRecording, gaps: list[str]) -> PlanFacts | None:
    job, topology = record.job, record.topology
    if job is None or topology is None:
        return None
    try:
        reduction = plan_reduction(job, topology)
    except ConfigError as error:
        gaps.append(f"no plan: {error.problems[0]}")
        return None
    names = [site.name for site in topology.sites]
    edges = tuple(
        (name, names[other])
        for index, name in enumerate(names)
        for other in reduction.neighbours(index)
        if index < other
    )
    return PlanFacts(
        reduction=reduction.why,
        edges=edges,
        codec=job.exchange.codec,
        codecs=plan_codecs(job, topology, reduction),
        chunk_bytes=job.exchange.chunk_bytes,
        bucket_bytes=job.exchange.bucket_bytes,
        channels_per_link=job.exchange.channels_per_link,
        schedule=job.exchange.schedule,
        compute=job.trainer.compute,
        verify_every=job.verify_every * job.regime.sync_every,
        regime=job.regime.in_words(),
        why=tuple(map(str, _listed(record.plan, "why"))),
        predicted_step_s=_predicted_step_s(record),
        alternatives=tuple(
            AlternativeFacts(
                what=str(each.get("what", "")),
                step_s=step_s,
                usd_per_step=known(each, "usd_per_step") or None,
            )
            for each in _listed(record.plan, "alternatives")
            if isinstance(each, dict) and (step_s := known(each, "step_s")) is not None
        ),
    )


def _listed(plan: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list of a plan's file; empty if it is none."""
    value = plan.get(key)
    return value if isinstance(value, list) else []


def _planned_step_s(record: RunSource, modelled: PlannedStep | None) -> float | None:
    """Return the planner's figure; of a run that was not planned the step model's."""
    return _predicted_step_s(record) or (None if modelled is None else modelled.step_s)


def _predicted_step_s(record: RunSource) -> float | None:
    predicted = record.plan.get("predicted")
    return known(predicted, "step_s") if isinstance(predicted, dict) else None


def _told(record: RunRecording, kind: str, key: str) -> str:
    """Return a word of the last event of that kind, if there is one."""
    told = [event.detail.get(key) for event in record.events if event.kind == kind]
    return told[-1] if told and isinstance(told[-1], str) else ""
