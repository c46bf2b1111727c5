"""Reads what a coordinator appends to a run's journal and metrics, from the beginning on.

The files are the queue between coordinator and exporters: the coordinator writes them anyhow, and
waits for nobody who reads them.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from isthmus.orchestrator.coordinator.journal import JournalError, JournalReader
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.run_folder.home import read_object
from isthmus.orchestrator.run_folder.rotated_lines import parts_of
from isthmus.orchestrator.run_folder.run_files import METRICS, write_atomically

POSITION = "exporters.json"
"""Written by a run's exporters: how far they have got, as a `Position`."""
READ_BYTES = 4 << 20
"""Read of the metrics at once."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a run was exported: all before it."""

    line: int = 0
    """Number of the next line of metrics.jsonl, counted over all of its parts."""
    sequence: int = 0
    """Sequence number of the last event of the journal."""

    @classmethod
    def read(cls, folder: Path) -> Position:
        """Return where earlier exporters of the run have ended: at first, the beginning."""
        written = read_object(folder / POSITION)
        line, sequence = written.get("line"), written.get("sequence")
        if type(line) is not int or type(sequence) is not int:
            return cls()
        return cls(line=line, sequence=sequence)

    def write(self, folder: Path) -> None:
        """Keep it for later exporters of the run.

        Raises:
            OSError: the disk refuses.
        """
        write_atomically(folder / POSITION, json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of metrics.jsonl."""

    number: int
    """In all parts together, from 0."""
    record: dict[str, Any]


class RunFollower:
    """Reads a run; each call goes on after the one before."""

    def __init__(
        self, run_id: str, folder: Path, state: Path, read_bytes: int = READ_BYTES
    ) -> None:
        """Open nothing yet.

        Args:
            run_id: The run.
            folder: Its folder, with the metrics.
            state: The coordinator's, with the journal.
            read_bytes: Read of the metrics at once.
        """
        self._read_bytes = read_bytes
        self._run_id, self._path, self._state = run_id, folder / METRICS, state
        self._sequence, self._read_sequence = 0, 0
        """Sequence numbers of the last event that was returned, and of the last that was read."""
        self._events: deque[RecordedEvent] = deque()
        """Those between: metrics from before them have yet to be read."""
        self._first, self._offset_bytes, self._num_lines = 0, 0, 0
        """The part that is being read, how far, and the number of the next line."""

    @property
    def position(self) -> Position:
        """Where the next call begins."""
        return Position(line=self._num_lines, sequence=self._sequence)

    def read(self) -> list[RecordedEvent | Line]:
        """Return what is new, in the order in which it was written.

        A coordinator writes an event before what follows from it. So the metrics are read first:
        every event before any of them is then in the journal.
        """
        lines, are_all = self._read_lines()
        try:
            with JournalReader(self._state) as journal:
                self._events += journal.events(self._run_id, self._read_sequence)
        except JournalError as error:
            log.warning("%s", error)
        if self._events:
            self._read_sequence = self._events[-1].sequence
        until_s = math.inf if are_all or not lines else _wall_s(lines[-1])
        events = []
        while self._events and self._events[0].wall_s <= until_s:
            events.append(self._events.popleft())
        if events:
            self._sequence = events[-1].sequence
        if not events:
            return [*lines]
        found: Iterator[RecordedEvent | Line] = heapq.merge(events, lines, key=_wall_s)
        return list(found)

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

    def _read_lines(self) -> tuple[list[Line], bool]:
        """Return whole lines, about `read_bytes` of them, and whether there are no more by now."""
        lines: list[Line] = []
        parts = [part for part in parts_of(self._path) if part.first >= self._first]
        for part in parts:
            if part.first != self._first:
                self._first, self._offset_bytes, self._num_lines = part.first, 0, part.first
            try:
                with part.path.open("rb") as file:
                    file.seek(self._offset_bytes)
                    data = file.read(self._read_bytes)
            except OSError:
                return lines, True
            whole = data[: data.rfind(b"\n") + 1]
            for record in _objects_of(whole.splitlines()):
                if record is not None:
                    lines.append(Line(self._num_lines, record))
                self._num_lines += 1
            self._offset_bytes += len(whole)
            if len(data) == self._read_bytes:
                return lines, False
        return lines, True


def _wall_s(entry: object) -> float:
    wall_s: object = 0.0
    if isinstance(entry, RecordedEvent):
        wall_s = entry.wall_s
    elif isinstance(entry, Line):
        wall_s = entry.record.get("wall_s")
    return wall_s if isinstance(wall_s, int | float) else 0.0


def _objects_of(texts: list[bytes]) -> list[dict[str, Any] | None]:
    """Return the object of each line; None: it has none.

    Lines that are parsed together take half the time.
    """
    try:
        records = from_json(b"[" + b",".join(texts) + b"]")
    except ValueError:
        records = []  # one of them is damaged
    if len(records) != len(texts):
        return [_object_of(text) for text in texts]
    return [record if isinstance(record, dict) else None for record in records]


def _object_of(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None  # the end of a line that was cut when its writer was killed
    return record if isinstance(record, dict) else None
