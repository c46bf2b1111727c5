"""One run as JSON values: what the API answers, and what pages are made of. None is not known."""

from __future__ import annotations

from typing import Any

from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.dashboard.run_index import RunIndex
from isthmus.orchestrator.dashboard.run_library import Described, WatchedRun
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.egress import PRICE, egress_of, link_costs
from isthmus.orchestrator.evidence.view.formats import known, ratio
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2

ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
ELSEWHERE = "ELSEWHERE"
"""State of a run whose coordinator is on another machine."""
OUT = frozenset({"LOST", "DROPPED", "RETURNING", "ABSENT"})
"""States of sites that take no part."""


_SITE_STATES = {
    value: name.removeprefix("SITE_STATE_") for name, value in control_pb2.SiteState.items()
}


def _site_state(site: control_pb2.SiteStatus) -> str:
    """Return `RUNNING`; of a thousand sites in no time."""
    return _SITE_STATES.get(site.state) or formats.site_state(site)


def listed(watched: WatchedRun) -> dict[str, Any]:
    """Return a run in short, by its journal alone."""
    place = watched.place
    if watched.journal is None:
        return {
            "run_id": place.run_id,
            "name": "",
            "state": ELSEWHERE,
            "outcome": ELSEWHERE,
            "reason": f"its coordinator is {place.elsewhere}: have the dashboard run there",
            "created_wall_s": place.submitted_wall_s,
        }
    run = watched.journal.run()
    state = formats.run_state(run) if run.created_wall_s else "UNKNOWN"
    totals = dict(run.totals)
    return {
        "run_id": place.run_id,
        "name": run.name,
        "state": state,
        "outcome": formats.outcome(run) if run.created_wall_s else "UNKNOWN",
        "reason_code": run.reason_code,
        "reason": run.reason or watched.journal.trouble,
        "created_wall_s": run.created_wall_s or place.submitted_wall_s or None,
        "ended_wall_s": run.ended_wall_s or None,
        "active_s": run.active_s or None,
        "num_sites": len(run.sites),
        "num_members": len(run.members),
        "num_out": sum(_site_state(site) in OUT for site in run.sites),
        "steps": _whole(known(totals, metrics.STEP)),
        "num_steps": run.num_steps or None,
        "loss": known(totals, metrics.LOSS),
    }


def shown(watched: WatchedRun, index: RunIndex | None) -> dict[str, Any]:
    """Return everything about a run but its steps and events. Nobody may change it."""
    if watched.journal is None:
        return listed(watched)
    run, figures = watched.journal.run(), index.figures() if index is not None else {}
    if watched.view is not None:
        (of_run, of_figures), view = watched.view
        if of_run is run and of_figures is figures:
            return view
    view = _made(watched, run, figures)
    watched.view = (run, figures), view
    return view


def _made(watched: WatchedRun, run: control_pb2.Run, figures: dict[str, Any]) -> dict[str, Any]:
    view = listed(watched)
    described = watched.described or Described(None, None, None)
    is_complete = figures.get("is_complete", False)
    totals = {**figures.get("totals", {}), **dict(run.totals)}
    if is_complete:
        totals |= figures["totals"]
    sites = _sites(run, described, figures)
    slowest_s = max((site["total_step_s"] or 0.0 for site in sites), default=0.0)
    all_s = sum(site["total_step_s"] or 0.0 for site in sites)
    exposed_s = sum(
        site["parts_s"][metrics.EXPOSED_INTER_S] * site["num_steps"]
        for site in sites
        if site["parts_s"]
    )
    tokens = known(totals, metrics.TOKENS)
    step_s, links = known(totals, metrics.STEP_S), _links(run, figures)
    egress = egress_of(links, active_s=run.active_s, step_s=step_s, codec=run.codec)
    return {
        **view,
        "epoch": run.epoch,
        "generation": run.generation,
        "members": list(run.members),
        "steps": max(view["steps"] or 0, int(known(totals, metrics.STEP) or 0)) or None,
        "loss": known(totals, metrics.LOSS),
        "held_out_loss": known(totals, metrics.HELD_OUT_LOSS),
        "tokens": tokens,
        "is_shipped_trainer": described.job is not None and described.job.entrypoint is None,
        "counts_tokens": figures.get("counts_tokens", True),
        "tokens_per_s": ratio(tokens or None, slowest_s),
        "step_s": step_s,
        "exposed_share": ratio(exposed_s, all_s),
        metrics.MFU: known(totals, metrics.MFU),
        metrics.MFU_ESTIMATE: known(totals, metrics.MFU_ESTIMATE),
        "sent_bytes": known(totals, metrics.WIRE_BYTES),
        "egress_usd": None if egress is None else egress.usd,
        "egress": None if egress is None else egress.line(),
        "plan": _plan(described, run),
        "keeps_checkpoints": None if described.job is None else bool(described.job.checkpoint),
        "sites": sites,
        "links": links,
        "certificates": dict(run.certificates),
        "notes": [
            {"wall_s": each.wall_s, "kind": each.kind, "site": each.site, "text": each.text}
            for each in run.noted
        ],
        "metrics": {
            "is_complete": is_complete,
            "share_read": 1.0 if is_complete else figures.get("share_read", 0.0),
            "num_lines": figures.get("num_lines", 0),
            "num_odd": figures.get("num_odd", 0),
            "last_wall_s": figures.get("last_wall_s"),
        },
    }


def event_view(event: RecordedEvent) -> dict[str, Any]:
    """Return an event of the journal."""
    return {
        "sequence": event.sequence,
        "wall_s": event.wall_s,
        "kind": event.kind,
        "site": event.site,
        "detail": dict(event.detail),
    }


def _sites(
    run: control_pb2.Run, described: Described, figures: dict[str, Any]
) -> list[dict[str, Any]]:
    topology = described.topology
    by_name = {site.name: site for site in topology.sites} if topology is not None else {}
    measured = figures.get("sites", {})
    members = frozenset(run.members)
    views = []
    for site in run.sites:
        about, found = by_name.get(site.site), measured.get(site.site)
        num_steps = found["num_steps"] if found else 0
        total_s = found["step_s"] if num_steps else None
        location = about.location if about else None
        views.append(
            {
                "site": site.site,
                "state": _site_state(site),
                "is_member": site.site in members,
                "host": site.host or None,
                "lat": location.lat if location else None,
                "lon": location.lon if location else None,
                "num_ranks": about.num_ranks if about else None,
                "accelerator": about.accelerator.name if about else None,
                "step": max(site.step, found["step"] if found else 0),
                "num_steps": num_steps,
                "tokens_per_s": ratio(found["tokens"] or None, total_s) if found else None,
                "total_step_s": total_s,
                "step_s": ratio(total_s, num_steps),
                "parts_s": {
                    name: found["parts_s"][name] / num_steps
                    for name in (*PARTS, metrics.HIDDEN_INTER_S)
                }
                if num_steps
                else None,
            }
        )
    return views


def _links(run: control_pb2.Run, figures: dict[str, Any]) -> list[dict[str, Any]]:
    measured = figures.get("links", {})
    views = []
    for link in run.links:
        latest = measured.get((link.source, link.target)) or {}
        if not latest or not figures["is_complete"]:
            latest = {**latest, **dict(link.latest)}
        configured = link.bytes_per_s or None
        throughput = known(latest, metrics.THROUGHPUT_BYTES_PER_S) or None
        now = known(latest, "now_bytes_per_s")
        price = {PRICE: link.egress_usd_per_byte or None}
        costs = link_costs({**latest, **price}, run.active_s, known(run.totals, metrics.STEP_S))
        views.append(
            {
                "source": link.source,
                "target": link.target,
                **price,
                **costs,
                "configured_bytes_per_s": configured,
                "configured_rtt_s": link.rtt_s or None,
                metrics.THROUGHPUT_BYTES_PER_S: throughput,
                "use": ratio(throughput, configured),
                "now_bytes_per_s": now,
                "now_use": ratio(now, configured),
                metrics.SENT_BYTES: known(latest, metrics.SENT_BYTES) or None,
                metrics.RAW_BYTES: known(latest, metrics.RAW_BYTES) or None,
                metrics.RTT_S: known(latest, metrics.RTT_S),
            }
        )
    return views


def _plan(described: Described, run: control_pb2.Run) -> dict[str, Any]:
    """Return what was decided: regime, codec, and the trees that the run was submitted with."""
    job, reduction = described.job, described.reduction
    codecs = list(reduction.codecs) if reduction is not None else []
    codec = job.exchange.codec if job is not None else run.codec
    return {
        "regime": job.regime.in_words() if job is not None else None,
        "codec": codec or None,
        "codecs": codecs,
        "reduction": reduction.plan.why if reduction is not None else None,
        "schedule": job.exchange.schedule if job is not None else None,
        "bucket_bytes": job.exchange.bucket_bytes if job is not None else None,
        "chunk_bytes": job.exchange.chunk_bytes if job is not None else None,
        "why": described.plan.get("why", []),
        "predicted": described.plan.get("predicted"),
        "alternatives": described.plan.get("alternatives", []),
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
