"""The figures of one run: what the page, Markdown and JSON all show. None is what is not known.

Makes the figures of one run from its record. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.orchestrator.core.model_flops import Mfu
from isthmus.orchestrator.core.run_metrics import PARTS, SiteMetrics
from isthmus.orchestrator.core.slow_sites import SlowPeriod
from isthmus.orchestrator.evidence.record import run_timeline
from isthmus.orchestrator.evidence.record.run_record import (
    STEP_FIGURES,
    RunRecord,
    detail_of,
    recorded,
)
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
    SlowLink,
    SlowShare,
    Verdict,
    VerdictFacts,
    verdict,
)
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.egress import PRICE, Egress, egress_of, link_costs
from isthmus.orchestrator.evidence.view.formats import known, ratio
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.link_codecs import plan_codecs
from isthmus.topology.trees.tree_choice import plan_reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """One site: where it is, and the mean over its steps."""

    site: str
    lat: float | None
    lon: float | None
    num_ranks: int | None
    accelerator: str | None
    num_steps: int
    tokens_per_s: float | None
    step_s: float | None
    parts_s: dict[str, float]
    """The parts of a step, by the keys of PARTS; they add up to step_s."""
    hidden_inter_s: float | None
    encode_s: float | None
    decode_s: float | None
    mfu: float | None = None
    """Model FLOPs utilisation: orchestrator/core/model_flops.py."""
    mfu_is_estimate: bool = False
    """Whether FLOPs a token are an estimate."""
    planned_mfu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One directed link, over the run."""

    source: str
    target: str
    configured_bytes_per_s: float | None
    configured_rtt_s: float | None
    throughput_bytes_per_s: float | None
    """Throughput of the link while it was busy."""
    use: float | None
    """Throughput over configured."""
    busy: float | None
    """Share of the run with a frame on the way."""
    sent_bytes: float | None
    ratio: float | None
    """float32 bytes over sent bytes."""
    rtt_s: float | None
    egress_usd: float | None
    egress_usd_per_day: float | None
    egress_usd_per_step: float | None
    lost_packets: float | None
    """By the emulator, as configured; like the next, None where the WAN is real."""
    dropped_packets: float | None
    """Packets that the emulator dropped because its queue was full."""


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
class RunFacts:
    """One run."""

    run_id: str
    name: str
    state: str
    reason_code: str
    reason: str
    log_path: str
    folder: str
    created_wall_s: float
    active_s: float | None
    steps: int
    tokens: float
    tokens_per_s: float | None
    step_s: float | None
    exposed_share: float | None
    """The exposed exchange's share of all sites' step time."""
    first_loss: float | None
    last_loss: float | None
    held_out_loss: float | None
    unigram_entropy: float | None
    sent_bytes: float | None
    ratio: float | None
    egress_usd: float | None
    egress: Egress | None
    """What `egress_usd` is a step and a day."""
    verified_steps: int | None
    sites: tuple[SiteFacts, ...]
    links: tuple[LinkFacts, ...]
    losses: tuple[tuple[int, float], ...]
    evaluations: tuple[tuple[int, float], ...]
    verdict: Verdict
    planned_step_s: float | None
    """As the step model predicts it; None: it cannot."""
    pace: tuple[tuple[float, float], ...]
    """Seconds since the run was active, and tokens a second of all sites; steps a second where no
    tokens are counted."""
    stalls: tuple[Stall, ...]
    lanes: tuple[SiteLane, ...]
    step_figures: dict[str, Any]
    """Parts of steps over the run, as StepSeries has them in columns."""
    happened: tuple[EventFacts, ...]
    num_happened: int
    """How many there were; the newest stand above."""
    machines: tuple[MachineFacts, ...]
    launched: LaunchFacts
    plan: PlanFacts | None
    emulator: str
    """`relay` or `netns`; empty: nothing was emulated."""
    emulator_note: str
    """What was lost by falling back from another one."""
    num_timelines: int
    """Steps whose buckets were kept."""
    timelines: tuple[StepTimeline, ...]
    """The timelines of steps, at most MAX_STEPS of them."""
    slow: tuple[SlowPeriod, ...]
    """When which site has kept the others waiting, and which ranks others of their site."""
    gaps: tuple[str, ...]
    mfu: float | None = None
    mfu_is_estimate: bool = False
    compared: tuple[int, int, float] = (0, 0, 0.0)
    """After how many steps gradients of one micro-batch were compared, by how many ranks, and the
    seconds that took."""
    counts_tokens: bool = True
    """Whether tokens are some: not of a script that counts none."""
    noise_scale_tokens: float | None = None
    """orchestrator/core/noise_scale.py; None: the job does not ask for it."""
    slow_times: tuple[tuple[float, float], ...] = ()
    """From when to when each period of `slow` was, in seconds since the run was active."""


def run_facts(record: RunRecord) -> RunFacts:
    """Return the figures of a run."""
    run, measured = record.run, record.measured
    active_s = run.active_s or None
    verified_steps = known(run.totals, "verified_steps")
    job, topology = record.job, record.topology
    planned: dict[str, float] = {}
    codec_steps: dict[str, float] = {}
    step: PlannedStep | None = None
    if job is not None and topology is not None:
        planned, step = planned_mfu(job, topology), planned_step(job, topology)
        codec_steps = codec_steps_s(job, topology)
    ends = _step_ends(record)
    stalls = _stalls(record, ends)
    happened = _happened(record)
    sites = tuple(
        _site(
            name,
            each,
            record.topology,
            counts_tokens=measured.counts_tokens is not False,
            mfu=measured.mfu(name),
            planned_mfu=planned.get(name),
        )
        for name, each in measured.sites.items()
    )
    step_s = max((site.step_s for site in sites if site.step_s is not None), default=None)
    links = tuple(_link(link, record, active_s, step_s) for link in run.links)
    totals, mfu = measured.totals(), measured.mfu()
    sent_bytes = totals[metrics.WIRE_BYTES] or None
    gaps, egress = list(record.gaps), _egress(record, active_s, step_s)
    slowest_s = max((each.step_s for each in measured.sites.values()), default=0.0)
    losses = tuple(each for each in measured.losses if math.isfinite(each[1]))
    return RunFacts(
        run_id=run.run_id,
        name=run.name,
        state=formats.outcome(run),
        reason_code=run.reason_code,
        reason=run.reason,
        log_path=run.failure.log_path if run.HasField("failure") else "",
        folder=record.run.folder,
        created_wall_s=run.created_wall_s,
        active_s=active_s,
        steps=measured.last_step,
        tokens=totals[metrics.TOKENS],
        tokens_per_s=ratio(totals[metrics.TOKENS] or None, slowest_s),
        mfu=None if mfu is None else mfu.share,
        mfu_is_estimate=mfu is not None and mfu.is_estimate,
        compared=(
            int(totals.get(metrics.COMPARED_STEPS, 0)),
            int(totals.get(metrics.COMPARED_RANKS, 0)),
            totals.get(metrics.COMPARED_S, 0.0),
        ),
        counts_tokens=measured.counts_tokens is not False,
        noise_scale_tokens=known(totals, metrics.NOISE_SCALE),
        step_s=step_s,
        exposed_share=ratio(
            sum(each.times_s[metrics.EXPOSED_INTER_S] for each in measured.sites.values()),
            sum(each.step_s for each in measured.sites.values()),
        ),
        first_loss=losses[0][1] if losses else None,
        last_loss=known(totals, metrics.LOSS),
        held_out_loss=measured.held_out_loss,
        unigram_entropy=measured.unigram_entropy,
        sent_bytes=sent_bytes,
        ratio=ratio(totals[metrics.RAW_BYTES] or None, sent_bytes),
        egress_usd=None if egress is None else egress.usd,
        egress=egress,
        verified_steps=None if verified_steps is None else int(verified_steps),
        sites=sites,
        links=links,
        losses=losses,
        evaluations=tuple(record.evaluations),
        verdict=verdict(_verdict_facts(record, sites, links, step, stalls, codec_steps)),
        planned_step_s=_planned_step_s(record, step),
        pace=tuple(run_timeline.pace(ends)),
        stalls=stalls,
        lanes=_lanes(record, ends),
        step_figures=record.step_figures.to_json(STEP_FIGURES),
        happened=happened[-MAX_EVENTS:],
        num_happened=len(happened),
        machines=_machines(record, sites),
        launched=_launched(record),
        plan=_plan(record, gaps),
        emulator=_told(record, "wan.emulated", "emulator"),
        emulator_note=_told(record, "wan.fallback", "note"),
        num_timelines=len(record.timelines),
        timelines=tuple(choose(record.timelines)),
        slow=(*measured.slow, *measured.slow_ranks),
        slow_times=tuple(
            (
                run_timeline.at_step(ends, each.since_step) or 0.0,
                run_timeline.at_step(ends, each.last_step) or 0.0,
            )
            for each in (*measured.slow, *measured.slow_ranks)
        ),
        gaps=tuple(gaps),
    )


def _site(
    name: str,
    measured: SiteMetrics,
    topology: Topology | None,
    *,
    counts_tokens: bool,
    mfu: Mfu | None,
    planned_mfu: float | None,
) -> SiteFacts:
    sites = topology.sites if topology else ()
    described = next((site for site in sites if site.name == name), None)
    location = described.location if described else None
    times_s: dict[str, float | None] = {
        key: total_s / measured.num_steps if measured.num_steps else None
        for key, total_s in measured.times_s.items()
    }
    return SiteFacts(
        site=name,
        lat=location.lat if location else None,
        lon=location.lon if location else None,
        num_ranks=described.num_ranks if described else None,
        accelerator=described.accelerator.name if described else None,
        num_steps=measured.num_steps,
        tokens_per_s=ratio(measured.tokens or None, measured.step_s) if counts_tokens else None,
        step_s=ratio(measured.step_s, measured.num_steps),
        parts_s={part: times_s[part] or 0.0 for part in PARTS},
        hidden_inter_s=times_s[metrics.HIDDEN_INTER_S],
        encode_s=times_s[metrics.ENCODE_S],
        decode_s=times_s[metrics.DECODE_S],
        mfu=None if mfu is None else mfu.share,
        mfu_is_estimate=mfu is not None and mfu.is_estimate,
        planned_mfu=planned_mfu,
    )


def _price(record: RunRecord, source: str, target: str) -> float:
    described = record.topology.link(source, target) if record.topology else None
    return described.egress_usd_per_byte if described else 0.0


def _egress(record: RunRecord, active_s: float | None, step_s: float | None) -> Egress | None:
    exchange = record.job.exchange if record.job else None
    links = [
        {**latest, PRICE: _price(record, source, target)}
        for (source, target), latest in record.measured.links.items()
    ]
    codec = "" if exchange is None or exchange.codecs else exchange.codec
    return egress_of(links, active_s=active_s, step_s=step_s, codec=codec)


def _link(
    link: control_pb2.LinkStatus,
    record: RunRecord,
    active_s: float | None,
    step_s: float | None,
) -> LinkFacts:
    latest = record.measured.links.get((link.source, link.target), {})
    sent_bytes = known(latest, metrics.SENT_BYTES) or None
    throughput = known(latest, metrics.THROUGHPUT_BYTES_PER_S) or None
    price = _price(record, link.source, link.target)
    costs = link_costs({**latest, PRICE: price}, active_s, step_s)
    busy = ratio(known(latest, metrics.BUSY_S) or None, active_s)
    emulated = record.emulated.get((link.source, link.target))
    return LinkFacts(
        source=link.source,
        target=link.target,
        configured_bytes_per_s=link.bytes_per_s or None,
        configured_rtt_s=link.rtt_s or None,
        throughput_bytes_per_s=throughput,
        use=ratio(throughput, link.bytes_per_s),
        busy=None if busy is None else min(1.0, busy),
        sent_bytes=sent_bytes,
        ratio=ratio(known(latest, metrics.RAW_BYTES) or None, sent_bytes),
        rtt_s=known(latest, metrics.RTT_S),
        egress_usd=costs.get("egress_usd"),
        egress_usd_per_day=costs.get("egress_usd_per_day"),
        egress_usd_per_step=costs.get("egress_usd_per_step"),
        lost_packets=emulated[-1].lost_packets if emulated else None,
        dropped_packets=emulated[-1].dropped_packets if emulated else None,
    )


def _active_wall_s(record: RunRecord) -> float | None:
    return next((event.wall_s for event in record.events if event.kind == "run.active"), None)


def _step_ends(record: RunRecord) -> list[StepEnd]:
    """Return when each step ended, since the run was active."""
    active_s = _active_wall_s(record)
    if active_s is None:
        return []
    counts = record.measured.counts_tokens is not False
    return [
        StepEnd(wall_s - active_s, step, record.step_tokens.get(step, 0.0) if counts else 1.0)
        for wall_s, step in record.step_ends
    ]


def _stalls(record: RunRecord, ends: Sequence[StepEnd]) -> tuple[Stall, ...]:
    active_s = _active_wall_s(record) or 0.0
    events = [(event.wall_s - active_s, event.kind, event.site) for event in record.events]
    evaluated = (step + 1 for step, _ in record.evaluations)
    return run_timeline.stalls(ends, events, evaluated)


def _lanes(record: RunRecord, ends: Sequence[StepEnd]) -> tuple[SiteLane, ...]:
    active_s = _active_wall_s(record)
    if active_s is None:
        return ()
    known_s = max((event.wall_s for event in record.events), default=active_s)
    if ends:
        known_s = max(known_s, active_s + ends[-1].at_s)
    end_s = record.run.ended_wall_s or known_s
    events = [recorded(event) for event in record.events]
    return run_timeline.lanes(events, record.sites, active_s, end_s)


_MARKED = {
    "site.lost": "lost",
    "site.dropped": "dropped",
    "site.returned": "takes part again",
    "run.replanned": "other trees",
}
"""Events that are drawn on the charts, and words for one that has none of its own."""
_ELSEWHERE = frozenset({"wan.fallback", "run.stopping", "run.ended"})
"""Kinds of notes that stand elsewhere on the page."""
MAX_EVENTS = 100


def _happened(record: RunRecord) -> tuple[EventFacts, ...]:
    """Return what happened, in order: to the emulated WAN, to sites, and of what the run ended."""
    active_s, run = _active_wall_s(record), record.run
    told = [
        (fault.wall_s, fault.where or "everywhere", fault.what, True) for fault in record.faults
    ]
    for event in record.events:
        if event.kind in _MARKED:
            detail = detail_of(event)
            words = str(detail.get("note") or detail.get("message") or _MARKED[event.kind])
            told.append((event.wall_s, event.site, words, True))
    told += [
        (each.wall_s, each.site, each.text, False)
        for each in run.noted
        if each.kind not in _MARKED.keys() | _ELSEWHERE
    ]
    if run.state == control_pb2.RUN_STATE_FAILED:
        stopped = (event.wall_s for event in record.events if event.kind == "run.stopping")
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


def _machines(record: RunRecord, sites: Sequence[SiteFacts]) -> tuple[MachineFacts, ...]:
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


def _launched(record: RunRecord) -> LaunchFacts:
    submitted = (each for each in record.events if each.kind == "run.submitted")
    detail = next(map(detail_of, submitted), {})
    job = record.job
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


def _verdict_facts(
    record: RunRecord,
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
        planned_step_s=_planned_step_s(record, planned),
        alternatives_s={
            str(each.get("what", "")): step_s
            for each in _listed(record.plan, "alternatives")
            if isinstance(each, dict) and (step_s := known(each, "step_s")) is not None
        },
        planned_compute_s=None if planned is None else planned.compute_s,
        codec_steps_s=codec_steps,
        codec="" if job is None or job.exchange.codecs else job.exchange.codec,
        bytes_s=_bytes_s(busiest) / steps if busiest is not None and steps else None,
        busiest_link=f"{busiest.source} → {busiest.target}" if busiest is not None else "",
        link_share=described.share if described is not None else 1.0,
        slow_link=_slow_link(record, links),
        slow=_slowest(record),
        is_sync=job is None or job.regime.is_sync,
        num_stalls=len(stalls),
        stalled_s=math.fsum(each.length_s for each in stalls),
        stalled_by_loss_s=math.fsum(lost_s),
        num_losses=sum(event.kind == "site.lost" for event in record.events),
        detect_within_s=record.topology.failure.detect_within_s if record.topology else None,
    )


def _bytes_s(link: LinkFacts) -> float:
    """Return how long a link's bytes of the run keep it busy at its described rate."""
    return ratio(link.sent_bytes, link.configured_bytes_per_s) or 0.0


_LEAST_LIMITED_S = 2.0
_LEAST_LIMITED = 0.05
"""A link was the limit for at least so long, and for such a share of the run, or says nothing."""


def _slow_link(record: RunRecord, links: Sequence[LinkFacts]) -> SlowLink | None:
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


def _slowest(record: RunRecord) -> SlowShare | None:
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


def _plan(record: RunRecord, gaps: list[str]) -> PlanFacts | None:
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


def _planned_step_s(record: RunRecord, modelled: PlannedStep | None) -> float | None:
    """Return the planner's figure; of a run that was not planned the step model's."""
    return _predicted_step_s(record) or (None if modelled is None else modelled.step_s)


def _predicted_step_s(record: RunRecord) -> float | None:
    predicted = record.plan.get("predicted")
    return known(predicted, "step_s") if isinstance(predicted, dict) else None


def _told(record: RunRecord, kind: str, key: str) -> str:
    """Return a word of the last event of that kind, if there is one."""
    told = [detail_of(event).get(key) for event in record.events if event.kind == kind]
    return told[-1] if told and isinstance(told[-1], str) else ""
