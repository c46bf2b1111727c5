"""One run as JSON values: what the API answers, and what pages are made of. None is not known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from isthmus.orchestrator.dashboard.watched_run import Described, WatchedRun
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.egress import egress_of
from isthmus.orchestrator.evidence.view.live import start_phases
from isthmus.orchestrator.runs.facts import (
    LinkFacts,
    SiteFacts,
    TotalFacts,
    known,
    link_facts,
    to_json,
)
from isthmus.orchestrator.runs.told_facts import described as described_link
from isthmus.orchestrator.runs.told_facts import told_totals
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
    if watched.is_elsewhere:
        return {
            "run_id": place.run_id,
            "name": "",
            "state": ELSEWHERE,
            "outcome": ELSEWHERE,
            "reason": f"its coordinator is {place.elsewhere}: have the dashboard run there",
            "created_wall_s": place.submitted_wall_s,
        }
    run = watched.run()
    state = formats.run_state(run) if run.created_wall_s else "UNKNOWN"
    totals = dict(run.totals)
    return {
        "run_id": place.run_id,
        "name": run.name,
        "state": state,
        "outcome": formats.outcome(run) if run.created_wall_s else "UNKNOWN",
        "reason_code": run.reason_code,
        "reason": run.reason or watched.trouble,
        "created_wall_s": run.created_wall_s or place.submitted_wall_s or None,
        "ended_wall_s": run.ended_wall_s or None,
        "active_s": run.active_s or None,
        "num_sites": len(run.sites),
        "num_members": len(run.members),
        "num_training": watched.num_training,
        "troubles": [dataclasses.asdict(each) for each in watched.troubles()],
        "num_out": sum(_site_state(site) in OUT for site in run.sites),
        "steps": _whole(known(totals, metrics.STEP)),
        "num_steps": run.num_steps or None,
        "loss": known(totals, metrics.LOSS),
    }


def shown(watched: WatchedRun) -> dict[str, Any]:
    """Return everything about a run but its steps and events. Nobody may change it."""
    if watched.is_elsewhere:
        return listed(watched)
    run, figures = watched.run(), watched.figures()
    stalled_wall_s = watched.stalled_wall_s
    if watched.view is not None:
        (of_run, of_figures, of_stall), view = watched.view
        if of_run is run and of_figures is figures and of_stall == stalled_wall_s:
            return view
    view = _made(watched, run, figures)
    watched.view = (run, figures, stalled_wall_s), view
    return view


def _made(watched: WatchedRun, run: control_pb2.Run, figures: Mapping[str, Any]) -> dict[str, Any]:
    view, described = listed(watched), watched.described
    is_complete = figures.get("is_complete", False)
    totals = _totals(run, figures)
    step_s = totals["step_s"] or totals["step_s_recent"]
    links = _links(run, figures, step_s)
    egress = egress_of(links, active_s=run.active_s, step_s=step_s, codec=run.codec)
    saved, measured = watched.saved, figures.get("sites", {})
    judged = watched.verdict(run, list(measured.values()), [LinkFacts(**each) for each in links])
    return {
        **view,
        **totals,
        "epoch": run.epoch,
        "generation": run.generation,
        "members": list(run.members),
        "steps": max(view["steps"] or 0, int(totals["steps"] or 0)) or None,
        "is_shipped_trainer": described.job is not None and described.job.entrypoint is None,
        "verdict": dataclasses.asdict(judged) if measured else None,
        "active_wall_s": watched.active_wall_s,
        "last_step_wall_s": watched.last_step_wall_s,
        "stalled_wall_s": watched.stalled_wall_s,
        "checkpoint": None if saved is None else {"step": saved[0], "wall_s": saved[1]},
        "slow": _slow(run.slow) if run.HasField("slow") else None,
        "starting": None if totals["steps"] else start_phases(run) or None,
        "egress_usd": None if egress is None else egress.usd,
        "egress": None if egress is None else egress.line(),
        "plan": _plan(described, run),
        "keeps_checkpoints": None if described.job is None else bool(described.job.checkpoint),
        "sites": _sites(run, figures),
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


def _totals(run: control_pb2.Run, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the whole run: until all is read, those that the coordinator tells."""
    told = told_totals(run)
    found = figures.get("totals") or to_json(TotalFacts())
    first, then = (told, found) if figures.get("is_complete") else (found, told)
    totals = first | {name: value for name, value in then.items() if value is not None}
    return {**found, **totals}


def _sites(run: control_pb2.Run, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    measured, members = figures.get("sites", {}), frozenset(run.members)
    views = []
    for site in run.sites:
        view = to_json(measured.get(site.site) or SiteFacts(site=site.site))
        view["step"] = max(site.step, view["step"])
        view |= {
            "state": _site_state(site),
            "is_member": site.site in members,
            "host": site.host or None,
        }
        views.append(view)
    return views


def _links(
    run: control_pb2.Run, figures: Mapping[str, Any], step_s: float | None
) -> list[dict[str, Any]]:
    measured, views = figures.get("links", {}), []
    for link in run.links:
        carried, now = measured.get((link.source, link.target), ({}, None))
        if not carried or not figures["is_complete"]:
            carried = {**carried, **link.latest}
        facts = link_facts(
            described_link(link),
            carried,
            active_s=run.active_s,
            step_s=step_s,
            now_bytes_per_s=now,
        )
        views.append(to_json(facts))
    return views


def _plan(described: Described, run: control_pb2.Run) -> dict[str, Any]:
    """Return what was decided: the present regime, codec, and the trees of the submission."""
    job, reduction = described.job, described.reduction
    codecs = list(reduction.codecs) if reduction is not None else []
    codec = job.exchange.codec if job is not None else run.codec
    return {
        "regime": run.regime or (None if job is None else job.regime.in_words()),
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


def _slow(slow: control_pb2.SlowSite) -> dict[str, Any]:
    """Return who keeps the others waiting now."""
    return {"site": slow.site, "since_step": slow.since_step, "cost_s": slow.cost_s}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
