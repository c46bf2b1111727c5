"""What the contract's messages look like in --json, and in one line to people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.orchestrator.cli import log_text
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.formats import visible
from isthmus.orchestrator.runs.facts import to_json
from isthmus.orchestrator.runs.told_facts import told_links, told_sites, told_totals
from isthmus.protos.catalogue import CATALOGUE, ExitCode
from isthmus.protos.control.v1 import control_pb2

_OWN_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
"""The time with which our own processes begin a line: the log's lines have one already."""


def run_view(run: control_pb2.Run) -> dict[str, Any]:
    """Return a run as --json shows it."""
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": formats.run_state(run),
        "generation": run.generation,
        "priority": run.priority,
        "position": run.position or None,
        "reason_code": run.reason_code,
        "reason": run.reason,
        "notes": list(run.notes),
        "noted": [
            {"wall_s": each.wall_s, "kind": each.kind, "site": each.site, "text": each.text}
            for each in run.noted
        ],
        "failure": failure_view(run.failure) if run.HasField("failure") else None,
        "members": list(run.members),
        "epoch": run.epoch,
        "sites": [
            {**to_json(facts), "state": formats.site_state(site), "host": site.host}
            for site, facts in zip(run.sites, told_sites(run), strict=True)
        ],
        "links": [to_json(facts) for facts in told_links(run)],
        "certificates": dict(run.certificates),
        "folder": run.folder,
        "created_wall_s": run.created_wall_s,
        "ended_wall_s": run.ended_wall_s or None,
        "active_s": run.active_s,
        "num_steps": run.num_steps or None,
        "loss_curve": list(run.loss_curve),
        "slow": _slow_view(run.slow) if run.HasField("slow") else None,
        "slow_ranks": [_slow_view(each) for each in run.slow_ranks],
        "totals": told_totals(run),
    }


def _slow_view(slow: control_pb2.SlowSite) -> dict[str, Any]:
    return {
        "site": slow.site,
        "rank": slow.rank if slow.HasField("rank") else None,
        "node": slow.node or None,
        "host": slow.host or None,
        "why": slow.why or None,
        "since_step": slow.since_step,
        "cost_s": slow.cost_s,
        "share": slow.share,
        "total_s": slow.total_s,
        "for_s": slow.for_s,
    }


def failure_view(failure: control_pb2.Failure) -> dict[str, Any]:
    """Return a failure as --json shows it; what does not apply is null."""
    return {
        "code": failure.code,
        "message": failure.message,
        "site": failure.site or None,
        "node": failure.node if failure.node >= 0 else None,
        "gateway": failure.gateway if failure.HasField("gateway") else None,
        "rank": failure.rank if failure.rank >= 0 else None,
        "exit_code": failure.exit_code,
        "log_path": failure.log_path or None,
    }


def outcome_view(run: control_pb2.Run, summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an ended run with its summary's figures, in one object."""
    view, figures = run_view(run), summary or {}
    return {
        **view["totals"],
        **figures,
        **view,
        "sites": _joined(view["sites"], figures.get("sites", []), "site"),
        "links": _joined(view["links"], figures.get("links", []), "source", "target"),
    }


def _joined(
    views: list[dict[str, Any]], figures: list[dict[str, Any]], *keys: str
) -> list[dict[str, Any]]:
    """Return each view with the figures that have the same keys."""
    found = {tuple(each[key] for key in keys): each for each in figures}
    return [{**view, **found.get(tuple(view[key] for key in keys), {})} for view in views]


def where_of(run: control_pb2.Run) -> dict[str, Any]:
    """Return the place of a run's failure."""
    place: dict[str, Any] = {"run_id": run.run_id}
    if run.HasField("failure"):
        place.update(failure_view(run.failure))
    if run.folder:
        place["folder"] = run.folder
    return place


def reason_code(run: control_pb2.Run) -> str:
    """Return the reason code of a run that did not succeed, one that this build's catalogue has."""
    if run.state == control_pb2.RUN_STATE_CANCELLED:
        return "CANCELLED"
    # A newer coordinator may know codes that this client does not.
    return run.reason_code if run.reason_code in CATALOGUE else "RANK_EXITED"


def exit_code_of(run: control_pb2.Run) -> ExitCode:
    """Return the exit status that a run's end means."""
    if run.state == control_pb2.RUN_STATE_SUCCEEDED and run.reason_code not in CATALOGUE:
        return ExitCode.OK
    return CATALOGUE[reason_code(run)].exit_code


def run_lines(runs: Sequence[control_pb2.Run], sizes: Sequence[str] = ()) -> str:
    """Return the list of runs under a heading; `sizes`: what each takes on the disk."""
    rows = [["run", "state", "submitted", "name"]]
    for run in runs:
        reason = f"  {run.reason_code}: {run.reason}" if run.reason_code else ""
        clock, name = formats.clock(run.created_wall_s), f"{run.name}{reason}"
        rows.append([run.run_id, formats.outcome(run), clock, visible(name)])
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    ends = ["size", *sizes] if sizes else [""] * len(rows)
    lines = []
    for row, size in zip(rows, ends, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([f"{size:>8}", *cells, row[-1]] if sizes else [*cells, row[-1]]))
    return "\n".join(lines)


def log_view(line: control_pb2.LogLine) -> dict[str, Any]:
    """Return a log line as --json shows it."""
    return {
        "site": line.site,
        "source": line.source,
        "sequence": line.sequence,
        "wall_s": line.wall_s or None,
        "text": line.text,
    }


def log_line(line: control_pb2.LogLine, *, has_colour: bool) -> str:
    """Return a log line with its time and where it comes from before it."""
    source = f"{line.site}/{line.source}" if line.site else line.source
    stamp = f"{formats.clock(line.wall_s)} " if line.wall_s else ""
    text = _OWN_STAMP.sub("", line.text) if stamp else line.text
    return visible(f"{stamp}{source} | ") + log_text.shown(text, has_colour=has_colour)


def event_line(event: RecordedEvent) -> str:
    """Return an event in one line."""
    return visible(f"{formats.clock(event.wall_s)}  {event.kind:<18}  {formats.words(event.text)}")
