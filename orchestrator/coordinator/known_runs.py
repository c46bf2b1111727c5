"""What a coordinator tells of its runs.

Of the latest from memory, of all before from the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from orchestrator.coordinator.active_run import ActiveRun
from orchestrator.coordinator.journal import Journal
from orchestrator.coordinator.messages import run_message
from orchestrator.core.run_view import RecordedEvent
from protos.control.v1 import control_pb2
from protos.errors import NotFoundError

LISTED_RUNS = 200
"""The newest: their views fit into one message."""


class KnownRuns:
    """Reads only."""

    def __init__(self, journal: Journal, latest: Callable[[], ActiveRun | None]) -> None:
        """Read nothing yet.

        Args:
            journal: stays the caller's.
            latest: returns the latest run, if there has been one.
        """
        self._journal = journal
        self._latest = latest

    def find(self, run_id: str) -> str:
        """Return a run's id, of the latest if it is empty.

        Raises:
            NotFoundError: there is none.
        """
        run_ids = self._journal.run_ids()
        if not run_id and run_ids:
            return run_ids[0]
        if run_id not in run_ids:
            raise NotFoundError(f"there is no run {run_id!r}" if run_id else "there is no run yet")
        return run_id

    def message(self, run_id: str) -> control_pb2.Run:
        """Return a run, which `find` has found, as it is now."""
        latest = self._latest()
        if latest is not None and latest.run_id == run_id:
            return latest.message()
        return run_message(self._journal.view(run_id), self._journal.progress(run_id))

    def messages(self) -> list[control_pb2.Run]:
        """Return the newest runs, newest first."""
        return [self.message(run_id) for run_id in self._journal.run_ids()[:LISTED_RUNS]]

    def folder(self, run_id: str) -> Path:
        """Return a run's folder, of a run that `find` has found."""
        latest = self._latest()
        if latest is not None and latest.run_id == run_id:
            return Path(latest.view.folder)
        return Path(self._journal.view(run_id).folder)

    def change_of(self, run_id: str) -> asyncio.Event | None:
        """Return what the run's next change of state sets; None if the run has ended."""
        latest = self._latest()
        is_going_on = latest is not None and latest.run_id == run_id and not latest.has_ended
        return latest.changed if latest is not None and is_going_on else None

    def events_of(self, run_id: str, after: int) -> list[RecordedEvent]:
        """Return a run's recorded events with a sequence above `after`."""
        return self._journal.events(run_id, after)
