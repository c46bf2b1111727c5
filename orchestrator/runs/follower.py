"""Reads what a coordinator appends to a run's journal and metrics, from the beginning on.

The files are the queue between a coordinator and whoever shows its runs: the coordinator writes
them anyhow, and waits for nobody who reads them.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from isthmus.orchestrator.coordinator.journal import JournalError, JournalReader
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_record import Measurement
from isthmus.orchestrator.run_folder.rotated_lines import parts_of
from isthmus.orchestrator.run_folder.run_files import METRICS
from isthmus.protos.failure import text_of

READ_BYTES = 512 << 10
"""Read of the metrics at once: parsing them takes some milliseconds. No line is longer."""

log = logging.getLogger(__name__)


class JournalFollower:
    """Reads the events of one run; each call goes on after the one before."""

    def __init__(self, run_id: str, state: Path) -> None:
        """Open nothing yet. `state` is the folder of the coordinator's journal."""
        self._run_id, self._state = run_id, state
        self._sequence = 0
        self.trouble = ""
        """Why the journal cannot be read; empty: it can."""

    def read(self, take: Callable[[RecordedEvent], None]) -> None:
        """Hand over what is new; what `take` finds wrong with an event is trouble."""
        try:
            with JournalReader(self._state) as journal, journal.damage_named():
                for event in journal.events(self._run_id, self._sequence):
                    take(event)
                    self._sequence = event.sequence
        except JournalError as error:
            self.trouble = str(error)
        else:
            self.trouble = ""

    def progress(self) -> Mapping[str, Any]:
        """Return the last metrics that the coordinator has kept beside the events."""
        try:
            with JournalReader(self._state) as journal:
                return journal.progress(self._run_id)
        except JournalError as error:
            self.trouble = str(error)
            return {}


class MetricsFollower:
    """Reads a run's metrics.jsonl with all its parts; each call goes on after the one before."""

    def __init__(self, folder: Path, read_bytes: int | None = None) -> None:
        """Open nothing yet. `folder` is the run's."""
        self._path, self._read_bytes = folder / METRICS, read_bytes or READ_BYTES
        self._first, self._offset_bytes = 0, 0
        """The part that is being read, by its first line, and how far it was read."""
        self.num_lines = 0
        """Number of the next line, over all parts."""
        self.num_odd = 0
        """Lines that made no sense, which were left out."""
        self.first_line: int | None = None
        """Number of the first line that was there: only the newest are kept; None: none was."""
        self.trouble = ""
        """Why they cannot be read on; empty: they can."""

    def read(self) -> tuple[list[Measurement], bool]:
        """Return whole lines, about `read_bytes` of them, and whether there are no more by now."""
        found: list[Measurement] = []
        for part in [part for part in parts_of(self._path) if part.first >= self._first]:
            if part.first != self._first:
                self._first, self._offset_bytes, self.num_lines = part.first, 0, part.first
            try:
                with part.path.open("rb") as file:
                    file.seek(self._offset_bytes)
                    data = file.read(self._read_bytes)
            except FileNotFoundError:  # the oldest part goes while a run is read
                continue
            except OSError as error:
                self.trouble = f"{part.path}: {text_of(error)}"
                return found, True
            self.first_line = part.first if self.first_line is None else self.first_line
            is_full = len(data) == self._read_bytes
            whole = data[: data.rfind(b"\n") + 1]
            if is_full and not whole:  # no line of ours is so long
                whole = data
            found += self._measurements_of(whole.splitlines())
            self._offset_bytes += len(whole)
            if is_full:
                return found, False
        return found, True

    def share_read(self) -> float:
        """Return how much of the metrics was read, 0..1."""
        done_bytes, all_bytes = self._offset_bytes, 0
        for part in parts_of(self._path):
            try:
                num_bytes = part.path.stat().st_size
            except OSError:
                continue
            all_bytes += num_bytes
            done_bytes += num_bytes if part.first < self._first else 0
        return min(1.0, done_bytes / all_bytes) if all_bytes else 1.0

    def _measurements_of(self, lines: list[bytes]) -> Iterator[Measurement]:
        for record in _objects_of(lines):
            try:
                yield Measurement.of({} if record is None else record, self.num_lines)
            except ValueError:
                self.num_odd += 1
            self.num_lines += 1


class RunFollower:
    """Reads both, in the order in which they were written."""

    def __init__(self, run_id: str, folder: Path, state: Path) -> None:
        """Open nothing yet: as JournalFollower and MetricsFollower."""
        self._journal = JournalFollower(run_id, state)
        self._metrics = MetricsFollower(folder)
        self._events: deque[RecordedEvent] = deque()
        """Those that were read, and that metrics come before which have yet to be read."""
        self.sequence = 0
        """Sequence number of the last event that was returned."""

    @property
    def num_lines(self) -> int:
        """Number of the next line of the metrics."""
        return self._metrics.num_lines

    @property
    def num_odd(self) -> int:
        """Lines of the metrics that made no sense, which were left out."""
        return self._metrics.num_odd

    def read(self) -> list[RecordedEvent | Measurement]:
        """Return what is new.

        A coordinator writes an event before what follows from it. So the metrics are read first:
        every event before any of them is then in the journal.
        """
        lines, are_all = self._metrics.read()
        self._journal.read(self._events.append)
        if self._journal.trouble:
            log.warning("%s", self._journal.trouble)
        until_s = math.inf if are_all or not lines else lines[-1].wall_s
        events = []
        while self._events and self._events[0].wall_s <= until_s:
            events.append(self._events.popleft())
        if not events:
            return [*lines]
        self.sequence = events[-1].sequence
        found: Iterator[RecordedEvent | Measurement] = heapq.merge(
            events, lines, key=lambda entry: entry.wall_s
        )
        return list(found)


def _objects_of(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """Return the object of each line; None: it has none.

    Lines that are parsed together take half the time.
    """
    try:
        records = from_json(b"[" + b",".join(lines) + b"]")
    except ValueError:
        records = []  # one of them is damaged
    if len(records) != len(lines):
        return [_object_of(line) for line in lines]
    return [record if isinstance(record, dict) else None for record in records]


def _object_of(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None  # the end of a line that was cut when its writer was killed
    return record if isinstance(record, dict) else None
