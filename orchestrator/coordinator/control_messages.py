"""Translations between the control contract's messages and the core's facts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent
from isthmus.orchestrator.core.run_events import Endpoint, SiteNamespace, StallReported
from isthmus.orchestrator.core.stall_watch import AbsentRank
from isthmus.protos.catalogue import CATALOGUE
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.failure import Failure, one_line

MAX_TEXT = 2000
"""Characters of a site's message that are kept."""


def stall_from(site: str, message: control_pb2.Stall) -> StallReported:
    """Return what a site says of its ranks that do not move; texts of bounded length."""
    absent = (
        AbsentRank(
            rank=each.rank,
            for_s=each.for_s,
            round=each.round,
            is_stopped=each.stopped,
            is_in_collective=each.in_collective,
            doing=one_line(each.doing),
            stack_path=each.stack_path[:MAX_TEXT],
        )
        for each in message.absent
    )
    return StallReported(site, tuple(absent), message.waiting, message.behind)


def run_message(
    view: JournaledRun, progress: Mapping[str, Any], position: int = 0
) -> control_pb2.Run:
    """Return a run as operators see it.

    Args:
        view: the fold of its events.
        progress: its metrics, as RunMetrics.progress made them, and `active_s`.
        position: its place in the queue, from 1; 0: it does not wait.
    """
    measured = progress.get("sites", {})
    links = {(each["source"], each["target"]): each for each in progress.get("links", [])}
    sites = [
        control_pb2.SiteStatus(
            site=name,
            state=control_pb2.SiteState.Value(f"SITE_STATE_{site.state}"),
            host=site.host,
            step=measured.get(name, {}).get("step", 0),
            latest=measured.get(name, {}).get("latest", {}),
            totals=measured.get(name, {}).get("totals", {}),
        )
        for name, site in view.sites.items()
    ]
    return control_pb2.Run(
        run_id=view.run_id,
        name=view.name,
        state=control_pb2.RunState.Value(f"RUN_STATE_{view.state}"),
        generation=view.generation,
        reason_code=view.reason_code,
        reason=view.reason,
        failure=view.failure.to_message() if view.failure else None,
        sites=sites,
        links=[
            control_pb2.LinkStatus(
                **link, latest=links.get((link["source"], link["target"]), {}).get("latest", {})
            )
            for link in view.links
        ],
        folder=view.folder,
        notes=view.notes,
        noted=[control_pb2.Note(**dataclasses.asdict(each)) for each in view.noted],
        members=view.taking_part,
        epoch=view.epoch,
        created_wall_s=view.created_wall_s,
        ended_wall_s=view.ended_wall_s,
        totals=progress.get("totals", {}),
        active_s=progress.get("active_s", 0.0),
        priority=view.priority,
        position=position,
        num_steps=view.num_steps,
        codec=view.codec,
        regime=view.regime,
        slow=control_pb2.SlowSite(**slow) if (slow := progress.get("slow")) else None,
        slow_ranks=[control_pb2.SlowSite(**each) for each in progress.get("slow_ranks", ())],
        loss_curve=progress.get("loss_curve", ()),
        certificates={name: each.ends_wall_s for name, each in view.certificates.items()},
    )


def event_message(event: RecordedEvent) -> control_pb2.Event:
    """Return an event as operators see it."""
    return control_pb2.Event(
        sequence=event.sequence,
        wall_s=event.wall_s,
        run_id=event.run_id,
        generation=event.generation,
        kind=event.kind,
        site=event.site,
        detail_json=json.dumps(event.detail),
    )


def event_from(message: control_pb2.Event) -> RecordedEvent:
    """Return an event as the journal has it; without its detail where that is no object."""
    try:
        detail = json.loads(message.detail_json or "{}")
    except ValueError:
        detail = {}
    return RecordedEvent(
        sequence=message.sequence,
        wall_s=message.wall_s,
        run_id=message.run_id,
        generation=message.generation,
        kind=message.kind,
        site=message.site,
        detail=detail if isinstance(detail, dict) else {},
    )


def failure_from(
    message: control_pb2.Failure, reporter: str, sites: Iterable[str], now_s: float
) -> Failure:
    """Return what a site reports, dated by the coordinator's clock.

    A code that this build does not know becomes INTERNAL, and a site that is none of the run's the
    reporter: neither is worth losing the report.
    """
    failure = Failure.from_message(message, now_s)
    known = failure.code in CATALOGUE
    text = " ".join(failure.message.split())[:MAX_TEXT]
    return replace(
        failure,
        code=failure.code if known else "INTERNAL",
        message=text if known else f"{failure.code[:64]}: {text}",
        site=failure.site if failure.site in sites else reporter,
        reported_by=reporter,
    )


def endpoint_messages(endpoints: Iterable[Endpoint]) -> list[control_pb2.GatewayEndpoint]:
    """Return an address book."""
    return [
        control_pb2.GatewayEndpoint(
            site=each.site, gateway=each.gateway, host=each.host, port=each.port
        )
        for each in endpoints
    ]


def namespace_message(namespace: SiteNamespace) -> control_pb2.Namespace:
    """Return where a site's gateways are to run."""
    return control_pb2.Namespace(user=namespace.user, net=namespace.net, address=namespace.address)
