"""What the journal says of one run, kept up by reading only what was appended."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

from isthmus.orchestrator.coordinator.control_messages import run_message
from isthmus.orchestrator.coordinator.journal import FILE, JournalError, JournalReader
from isthmus.orchestrator.core.journaled_run import (
    JournaledRun,
    RecordedEvent,
    coordinator_lost,
)
from isthmus.orchestrator.run_folder.state_lock import is_abandoned
from isthmus.protos.control.v1 import control_pb2

MAX_EVENTS = 1000
"""The newest events that are kept of a run."""
_SITES_UP = frozenset(
    {
        control_pb2.SITE_STATE_PREPARED,
        control_pb2.SITE_STATE_STARTING,
        control_pb2.SITE_STATE_RUNNING,
        control_pb2.SITE_STATE_RETURNING,
    }
)


class JournalWatch:
    """One run's journal. Any thread may use it."""

    def __init__(self, run_id: str, state: Path, *, is_own: bool) -> None:
        """Read nothing yet.

        Args:
            run_id: The run.
            state: The folder of its coordinator's journal.
            is_own: That coordinator was started for this run alone: the run is lost without it.
        """
        self._run_id, self._state = run_id, state
        self._is_own = is_own
        self._lock = threading.Lock()
        self._stamp: tuple[tuple[int, int], ...] = ()
        self._view = JournaledRun(run_id)
        self._sequence = 0
        self._progress: dict[str, Any] = {}
        self._events: deque[RecordedEvent] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._run: control_pb2.Run | None = None
        self.trouble = ""
        """Why the journal cannot be read; empty: it can."""

    def run(self) -> control_pb2.Run:
        """Return the run as its journal has it now. Nobody may change what is returned."""
        with self._lock:
            self._refresh()
            assert self._run is not None
            return self._run

    @property
    def version(self) -> object:
        """What changes with what `run` and `events` return."""
        return _stamp(self._state), self._is_own and is_abandoned(self._state)

    def events(self, after: int = 0) -> list[RecordedEvent]:
        """Return the newest events with a sequence above `after`, in order."""
        with self._lock:
            self._refresh()
            return [each for each in self._events if each.sequence > after]

    @property
    def num_events(self) -> int:
        """All events of the run, those that are not kept among them."""
        return self._num_events

    @property
    def about(self) -> dict[str, Any]:
        """What the run was submitted with."""
        return dict(self._view.about)

    def _refresh(self) -> None:
        if self._run is not None and self._view.state.is_terminal:
            return  # nothing comes after its end
        stamp = _stamp(self._state)
        is_lost = self._is_lost()
        if self._run is not None and stamp == self._stamp:
            if is_lost == (self._run.reason_code == "COORDINATOR_LOST"):
                return
        else:
            self._read()
            self._stamp = stamp
        self._run = run_message(self._view, self._progress)
        if self._is_lost():
            _tell_lost(self._run, self._view)

    def _read(self) -> None:
        try:
            with JournalReader(self._state) as journal, journal.damage_told():
                for event in journal.events(self._run_id, self._sequence):
                    self._view.apply(event)
                    self._sequence = event.sequence
                    self._events.append(event)
                    self._num_events += 1
                self._progress = journal.progress(self._run_id)
        except JournalError as error:
            self.trouble = str(error)
        else:
            self.trouble = ""

    def _is_lost(self) -> bool:
        """Whether the run had not ended when its own coordinator did."""
        return (
            self._is_own
            and self._num_events > 0
            and not self._view.state.is_terminal
            and is_abandoned(self._state)
        )


def _tell_lost(run: control_pb2.Run, view: JournaledRun) -> None:
    """Show a run as the next coordinator would find it: JournalReader.final_view says the same."""
    end = coordinator_lost(view)
    run.state = control_pb2.RUN_STATE_FAILED
    run.reason_code, run.reason = end["reason_code"], end["reason"]
    for site in run.sites:
        if site.state in _SITES_UP:
            site.state = control_pb2.SITE_STATE_LOST


def _stamp(state: Path) -> tuple[tuple[int, int], ...]:
    """Return what changes whenever the journal is written."""
    stamps = []
    for name in (FILE, f"{FILE}-wal"):
        try:
            status = (state / name).stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((status.st_mtime_ns, status.st_size))
    return tuple(stamps)
