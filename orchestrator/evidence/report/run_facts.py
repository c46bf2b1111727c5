"""The figures of one run: what the page, Markdown and JSON all show. None is what is not known.

Makes the figures of one run from its record. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.orchestrator.core.model_flops import Mfu
from isthmus.orchestrator.core.run_metrics import PARTS, SiteMetrics
from isthmus.orchestrator.core.slow_sites import SlowPeriod
from isthmus.orchestrator.evidence.record.run_record import RunRecord, detail_of
from isthmus.orchestrator.evidence.record.step_timelines import StepTimeline, choose
from isthmus.orchestrator.evidence.report.planned_mfu import planned_mfu
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


@dataclass(frozen=True, slots=True)
class NoteFacts:
    """What people should know of the run beside its figures."""

    wall_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFacts:
    """Something that was done to the run, or that it died of."""

    wall_s: float
    active_s: float | None
    """Since the run was active."""
    step: int
    """The last one that was done by then."""
    what: str
    where: str


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
    faults: tuple[FaultFacts, ...]
    plan: PlanFacts | None
    emulator: str
    """`relay` or `netns`; empty: nothing was emulated."""
    emulator_note: str
    """What was lost by falling back from another one."""
    num_timelines: int
    """Steps whose buckets were kept."""
    timelines: tuple[StepTimeline, ...]
    """The timelines of steps, at most MAX_STEPS of them."""
    notes: tuple[NoteFacts, ...]
    slow: tuple[SlowPeriod, ...]
    """When which site has kept the others waiting."""
    gaps: tuple[str, ...]
    mfu: float | None = None
    mfu_is_estimate: bool = False
    counts_tokens: bool = True
    """Whether tokens are some: not of a script that counts none."""
    noise_scale_tokens: float | None = None
    """orchestrator/core/noise_scale.py; None: the job does not ask for it."""


def run_facts(record: RunRecord) -> RunFacts:
    """Return the figures of a run."""
    run, measured = record.run, record.measured
    active_s = run.active_s or None
    verified_steps = known(run.totals, "verified_steps")
    planned = (
        {} if not (record.job and record.topology) else planned_mfu(record.job, record.topology)
    )
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
        faults=_faults(record),
        plan=_plan(record, gaps),
        emulator=_told(record, "wan.emulated", "emulator"),
        emulator_note=_told(record, "wan.fallback", "note"),
        num_timelines=len(record.timelines),
        timelines=tuple(choose(record.timelines)),
        notes=tuple(
            NoteFacts(each.wall_s, each.text)
            for each in run.noted
            if each.kind
            not in {
                "wan.fallback",
                "run.stopping",
                "run.ended",
            }  # these stand elsewhere on the page
        ),
        slow=tuple(measured.slow),
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


def _faults(record: RunRecord) -> tuple[FaultFacts, ...]:
    """Return changes of the emulated WAN, switches to other trees, and of what a run ended ill."""
    began = next((event.wall_s for event in record.events if event.kind == "run.active"), None)
    told = [(fault.wall_s, fault.what, fault.where) for fault in record.faults]
    told += [
        (event.wall_s, f"other trees: {detail_of(event).get('plan', '')}", "all sites")
        for event in record.events
        if event.kind == "run.replanned"
    ]
    told.sort(key=lambda each: each[0])
    run = record.run
    if run.state == control_pb2.RUN_STATE_FAILED:
        ended = next(
            (event.wall_s for event in record.events if event.kind == "run.stopping"), None
        )
        told.append((ended or run.ended_wall_s, run.reason_code, run.failure.site))
    return tuple(
        FaultFacts(
            wall_s=wall_s,
            active_s=None if began is None else wall_s - began,
            step=record.step_at(wall_s),
            what=what,
            where=where,
        )
        for wall_s, what, where in told
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
    )


def _told(record: RunRecord, kind: str, key: str) -> str:
    """Return a word of the last event of that kind, if there is one."""
    told = [detail_of(event).get(key) for event in record.events if event.kind == kind]
    return told[-1] if told and isinstance(told[-1], str) else ""
