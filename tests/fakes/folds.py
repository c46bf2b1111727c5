"""Whether what coordinators know of their runs is what their journals say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from isthmus.orchestrator.coordinator.active_run import ActiveRun
from isthmus.orchestrator.coordinator.journal import JournalReader
from isthmus.orchestrator.core.journaled_run import JournaledRun, coordinator_lost
from isthmus.orchestrator.run_folder.home import JOURNAL


def check_live_runs(state: Path, runs: Iterable[ActiveRun]) -> None:
    """Compare all that is known of runs with the journal: members, epoch, failures, result."""
    with JournalReader(state) as journal:
        for run in runs:
            if run._unwritten is not None:
                continue
            live = run.view
            disk = JournaledRun(live.run_id, live.names, live.first)
            for event in journal.events(live.run_id):
                disk.apply(event)
            for field in dataclasses.fields(live):
                known, written = (_timeless(getattr(of, field.name)) for of in (live, disk))
                assert known == written, f"{field.name} of run {live.run_id}"


def check_ended_runs(home: Path) -> None:
    """Compare what coordinators that have ended said of each run's end with their journals."""
    for path in home.rglob("summary.json"):
        summary = json.loads(path.read_text())
        for state in {file.parent for file in home.rglob(JOURNAL)}:
            with JournalReader(state) as journal:
                if summary["run_id"] not in journal.run_ids():
                    continue
                view = journal.view(summary["run_id"])
            if summary["reason_code"] == coordinator_lost(view)["reason_code"]:
                continue  # nobody has written that down
            told = ("state", "reason_code", "reason", "notes")
            assert [summary[key] for key in told] == [getattr(view, key) for key in told], path


def _timeless(known: object) -> object:
    """Return what is known but for times: those of the journal are by another clock."""
    if dataclasses.is_dataclass(known) and not isinstance(known, type):
        fields = [field.name for field in dataclasses.fields(known)]
        return {name: _timeless(getattr(known, name)) for name in fields}
    if isinstance(known, dict):
        return {key: _timeless(each) for key, each in known.items()}
    if isinstance(known, list | tuple):
        return [_timeless(each) for each in known]
    return "a time" if isinstance(known, float) else known
