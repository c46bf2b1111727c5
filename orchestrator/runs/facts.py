"""The figures that every view of a run shows: status, summary, the dashboard's API, report.

None is what is not known. The names of the fields are those of the JSON.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.orchestrator.core.model_flops import by_name
from isthmus.orchestrator.core.run_metrics import PARTS, RunMetrics, SiteMetrics, slow_json
from isthmus.orchestrator.core.run_record import RunRecord
from isthmus.protos import metrics
from isthmus.topology.spec.world import Site, Topology

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalFacts:
    """The run as a whole."""

    steps: int = 0
    tokens: float = 0.0
    counts_tokens: bool = True
    """Whether tokens are some: not of a script that counts none."""
    tokens_per_s: float | None = None
    """Over the time that the steps of the slowest site took."""
    step_s: float | None = None
    """The mean of the slowest site."""
    step_s_recent: float | None = None
    """The same of the last steps."""
    exposed_share: float | None = None
    """The exposed exchange's share of all sites' step time."""
    time_split: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    """Where a step's time went, by the keys of PARTS: the mean over all steps of all sites."""
    loss: float | None = None
    """The last that is known of all sites."""
    held_out_loss: float | None = None
    unigram_entropy: float | None = None
    noise_scale: float | None = None
    """In tokens, orchestrator/core/noise_scale.py; None: the job does not ask for it."""
    mfu: float | None = None
    mfu_estimate: float | None = None
    compared_gradients: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """`steps` after which gradients of one micro-batch were compared, by how many `ranks`, and the
    seconds that took, `total_s`."""
    sent_bytes: float | None = None
    compression_ratio: float | None = None
    """float32 bytes over sent bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """One site: where it is, and the mean over its steps."""

    site: str
    lat: float | None = None
    lon: float | None = None
    num_ranks: int | None = None
    accelerator: str | None = None
    step: int = 0
    """The last that it has taken."""
    num_steps: int = 0
    tokens: float = 0.0
    tokens_per_s: float | None = None
    """None, too, where the script counts none."""
    step_s: float | None = None
    parts_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The parts of a step, by the keys of PARTS; they add up to step_s."""
    hidden_inter_s: float | None = None
    encode_s: float | None = None
    decode_s: float | None = None
    mfu: float | None = None
    """Model FLOPs utilisation: orchestrator/core/model_flops.py."""
    mfu_estimate: float | None = None
    """The same, where FLOPs a token are an estimate."""
    planned_mfu: float | None = None
    """As the step model predicts it: of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One directed link, over the run."""

    source: str
    target: str
    configured_bytes_per_s: float | None = None
    configured_rtt_s: float | None = None
    throughput_bytes_per_s: float | None = None
    """Throughput of the link while it was busy."""
    use: float | None = None
    """Throughput over configured."""
    busy: float | None = None
    """Share of the run with a frame on the way."""
    sent_bytes: float | None = None
    raw_bytes: float | None = None
    """As float32."""
    compression_ratio: float | None = None
    """Raw over sent bytes."""
    rtt_s: float | None = None
    egress_usd_per_byte: float | None = None
    egress_usd: float | None = None
    egress_usd_per_day: float | None = None
    egress_usd_per_step: float | None = None
    now_bytes_per_s: float | None = None
    """What it carries now: where a run is watched that goes on."""
    now_use: float | None = None
    lost_packets: float | None = None
    """By the emulator, as configured; like the next, None where the WAN is real."""
    dropped_packets: float | None = None
    """Packets that the emulator dropped because its queue was full."""


_NAMES = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in (TotalFacts, SiteFacts, LinkFacts)
}


def to_json(facts: TotalFacts | SiteFacts | LinkFacts) -> dict[str, Any]:
    """Return the fields by their names. Nobody may change what they hold."""
    return {name: getattr(facts, name) for name in _NAMES[type(facts)]}


def total_facts(measured: RunMetrics) -> TotalFacts:
    """Return the figures of the whole run."""
    totals, sites = measured.totals(), measured.sites.values()
    num_steps, slowest_s = sum(site.num_steps for site in sites), [site.step_s for site in sites]
    means_s = [site.step_s / site.num_steps for site in sites if site.num_steps]
    sent_bytes = totals[metrics.WIRE_BYTES] or None
    return TotalFacts(
        steps=measured.last_step,
        tokens=totals[metrics.TOKENS],
        counts_tokens=measured.counts_tokens is not False,
        tokens_per_s=ratio(totals[metrics.TOKENS] or None, max(slowest_s, default=None)),
        step_s=max(means_s, default=None),
        step_s_recent=totals.get(metrics.STEP_S),
        exposed_share=ratio(
            sum(site.times_s[metrics.EXPOSED_INTER_S] for site in sites),
            sum(site.step_s for site in sites),
        ),
        time_split={
            part: ratio(sum(site.times_s[part] for site in sites), num_steps) for part in PARTS
        },
        loss=totals.get(metrics.LOSS),
        held_out_loss=measured.held_out_loss,
        unigram_entropy=measured.unigram_entropy,
        noise_scale=totals.get(metrics.NOISE_SCALE),
        mfu=totals.get(metrics.MFU),
        mfu_estimate=totals.get(metrics.MFU_ESTIMATE),
        compared_gradients={
            "steps": int(totals.get(metrics.COMPARED_STEPS, 0)),
            "ranks": int(totals.get(metrics.COMPARED_RANKS, 0)),
            "total_s": totals.get(metrics.COMPARED_S, 0.0),
        },
        sent_bytes=sent_bytes,
        compression_ratio=ratio(totals[metrics.RAW_BYTES] or None, sent_bytes),
    )


def site_facts(measured: RunMetrics, topology: Topology | None = None) -> dict[str, SiteFacts]:
    """Return the figures of each site of the run, by its name."""
    described = {} if topology is None else {site.name: site for site in topology.sites}
    return {
        name: facts_of_site(
            name,
            site,
            by_name(measured.mfu(name)),
            described.get(name),
            counts_tokens=measured.counts_tokens is not False,
        )
        for name, site in measured.sites.items()
    }


def facts_of_site(
    name: str,
    site: SiteMetrics,
    mfu: Mapping[str, float],
    described: Site | None = None,
    *,
    counts_tokens: bool,
) -> SiteFacts:
    """Return the figures of one site; `mfu` is that of all its steps, by its name."""
    location, num = None if described is None else described.location, site.num_steps
    mean_s = {part: total_s / num for part, total_s in site.times_s.items()} if num else {}
    return SiteFacts(
        site=name,
        lat=None if location is None else location.lat,
        lon=None if location is None else location.lon,
        num_ranks=None if described is None else described.num_ranks,
        accelerator=None if described is None else described.accelerator.name,
        step=site.step,
        num_steps=num,
        tokens=site.tokens,
        tokens_per_s=ratio(site.tokens or None, site.step_s) if counts_tokens else None,
        step_s=ratio(site.step_s, num),
        parts_s={part: mean_s[part] for part in PARTS} if num else {},
        hidden_inter_s=mean_s.get(metrics.HIDDEN_INTER_S),
        encode_s=mean_s.get(metrics.ENCODE_S),
        decode_s=mean_s.get(metrics.DECODE_S),
        mfu=mfu.get(metrics.MFU),
        mfu_estimate=mfu.get(metrics.MFU_ESTIMATE),
    )


def link_facts(
    link: Mapping[str, Any],
    carried: Mapping[str, float],
    *,
    active_s: float | None,
    step_s: float | None,
    now_bytes_per_s: float | None = None,
) -> LinkFacts:
    """Return the figures of a link.

    Args:
        link: As the journal describes it: JournaledRun.links.
        carried: What it has carried over the run, by the names of protos/metrics.py.
        active_s: How long the run trains.
        step_s: The time of a step.
        now_bytes_per_s: What it carries now.
    """
    configured, price = link.get("bytes_per_s") or None, link.get("egress_usd_per_byte") or None
    sent, raw = carried.get(metrics.SENT_BYTES) or None, carried.get(metrics.RAW_BYTES) or None
    throughput = carried.get(metrics.THROUGHPUT_BYTES_PER_S) or None
    busy = ratio(carried.get(metrics.BUSY_S) or None, active_s)
    usd = None if price is None else price * (sent or 0.0)
    usd_per_s = None if usd is None else ratio(usd, active_s)
    return LinkFacts(
        source=link["source"],
        target=link["target"],
        configured_bytes_per_s=configured,
        configured_rtt_s=link.get("rtt_s") or None,
        throughput_bytes_per_s=throughput,
        use=ratio(throughput, configured),
        busy=None if busy is None else min(1.0, busy),
        sent_bytes=sent,
        raw_bytes=raw,
        compression_ratio=ratio(raw, sent),
        rtt_s=carried.get(metrics.RTT_S),
        egress_usd_per_byte=price,
        egress_usd=usd,
        egress_usd_per_day=None if usd_per_s is None else usd_per_s * DAY_S,
        egress_usd_per_step=None if usd_per_s is None or not step_s else usd_per_s * step_s,
        now_bytes_per_s=now_bytes_per_s,
        now_use=ratio(now_bytes_per_s, configured),
    )


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part over whole, where both are known and the whole is not 0."""
    return part / whole if part is not None and whole else None


def known(values: Mapping[str, Any], key: str) -> float | None:
    """Return the number at `key`, if there is one: journals and runs that failed have gaps."""
    value = values.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def summarise(record: RunRecord, *, active_s: float, verified_steps: int) -> dict[str, Any]:
    """Return a run's summary as JSON values; what was not measured is null."""
    view, measured = record.view, record.measured
    totals, carried = total_facts(measured), measured.links
    return {
        "run_id": view.run_id,
        "state": view.state.value,
        "reason_code": view.reason_code,
        "reason": view.reason,
        "notes": view.notes,
        "noted": [dataclasses.asdict(each) for each in view.noted],
        **to_json(totals),
        "verified_steps": verified_steps,
        "losses": [[step, loss] for step, loss in measured.losses],
        "slow_sites": [slow_json(each) for each in measured.slow],
        "slow_ranks": [slow_json(each) for each in measured.slow_ranks],
        "codec": view.codec,
        "regime": view.regime or None,
        "active_s": active_s,
        "sites": [to_json(site) for site in site_facts(measured).values()],
        "links": [
            to_json(
                link_facts(
                    link,
                    carried.get((link["source"], link["target"]), {}),
                    active_s=active_s,
                    step_s=totals.step_s,
                )
            )
            for link in view.links
        ],
    }
