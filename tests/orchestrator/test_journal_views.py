"""What people see of a run, event by event: journals that were recorded, and the view of each.

`journals/*.json` has, for each event, what the view shows differently after it. Most are journals
of simulated runs; `notes_and_coordinator_lost` was written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.core.first_failure import detail_of
from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent

JOURNALS = sorted((Path(__file__).parent / "journals").glob("*.json"))


def seen(view: JournaledRun) -> dict[str, Any]:
    """Return all that a view shows, as JSON has it."""
    shown = {
        "state": view.state,
        "name": view.name,
        "folder": view.folder,
        "generation": view.generation,
        "priority": view.priority,
        "reason_code": view.reason_code,
        "reason": view.reason,
        "failure": detail_of(view.failure) if view.failure else None,
        "sites": {name: [site.state, site.host] for name, site in view.sites.items()},
        "begin_with": view.begin_with,
        "members": view.taking_part,
        "follows": view.epochs.epoch.follows,
        "counted": sorted(view.counted),
        "epoch": view.epoch,
        "links": view.links,
        "notes": [
            [each.sequence for each in view.noted],
            *([each.kind, each.site, each.text] for each in view.noted[-1:]),
        ],
        "created_wall_s": view.created_wall_s,
        "ended_wall_s": view.ended_wall_s,
    }
    decoded: dict[str, Any] = json.loads(json.dumps(shown))
    return decoded


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_a_recorded_journal_gives_the_view_that_was_recorded_with_it(path: Path) -> None:
    view = JournaledRun("run")
    expected = seen(view)
    for number, (event, changes) in enumerate(json.loads(path.read_text("utf-8"))):
        wall_s, generation, kind, site, detail = event
        view.apply(
            RecordedEvent(
                sequence=number,
                wall_s=wall_s,
                run_id="run",
                generation=generation,
                kind=kind,
                site=site,
                detail=detail,
            )
        )
        expected |= changes
        assert seen(view) == expected, f"after line {number + 2}: {kind} {site}"
