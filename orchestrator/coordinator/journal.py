"""The coordinator's memory: SQLite, append-only events, one writer, readable after any crash.

A run's view is the fold of its events (orchestrator/core/journaled_run.py). Beside them stand the
last metrics of each run, overwritten about once a second: what people see, nothing that decisions
rest on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import sqlite3
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import (
    JournaledRun,
    RecordedEvent,
    coordinator_lost,
    fold,
)
from isthmus.orchestrator.run_folder.home import JOURNAL
from isthmus.orchestrator.run_folder.state_lock import LOCK, is_abandoned, lock
from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import reason_of, text_of
from isthmus.protos.private_files import private_folder

FILE = JOURNAL
VERSION = 1
"""Version of the schema, in `PRAGMA user_version`."""
BUSY_S = 5.0
"""Time for a lock inside SQLite, which only a checkpoint holds for longer than an instant."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('generation', 0);
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    wall_s REAL NOT NULL,
    run_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    kind TEXT NOT NULL,
    site TEXT NOT NULL,
    detail TEXT NOT NULL
);
CREATE INDEX events_of_run ON events (run_id, sequence);
CREATE INDEX ended_runs ON events (run_id) WHERE kind = 'run.ended';
CREATE TRIGGER events_are_final BEFORE UPDATE ON events
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_are_kept BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    submitted INTEGER NOT NULL REFERENCES events (sequence),
    progress TEXT NOT NULL DEFAULT '{}'
);
"""

_MOST = 2**63 - 1
"""The greatest number that SQLite has."""
_COLUMNS = "sequence, wall_s, run_id, generation, kind, site, detail"
"""A row of `events`, in this order."""


class JournalError(IsthmusError):
    """The journal cannot be used: not ours, damaged, of another version, or the disk refuses."""

    code = "FILE_ERROR"


class JournalGoneError(JournalError):
    """Somebody has removed or replaced the journal of a coordinator that uses it."""


class JournalReader:
    """Reads a journal that somebody may be writing, or that nobody writes any more."""

    def __init__(self, folder: Path) -> None:
        """Open it. Nothing is created or changed.

        Raises:
            JournalError: there is none, or this build cannot read it.
        """
        self.path = folder / FILE
        self._folder = folder
        self._connection = self._connect()
        try:
            with self._sqlite_errors():
                self._check_version()
        except JournalError:
            self.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        if not self.path.is_file():
            raise JournalError(f"{self.path}: there is no journal")
        self._require_content()
        return _open(self.path, "ro")

    def _require_content(self) -> None:
        """A journal is whole from its first moment: an empty file is what is left of one.

        Raises:
            JournalError: it is one, and what to do.
        """
        if self.path.stat().st_size == 0:
            raise JournalError(
                f"{self.path}: empty, which no journal ever is: something has cut it off, as a full "
                "disk or a copy that failed. Put a copy of it there; or remove it, and what it "
                "knew of runs is lost: agents that still have one stop it"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. A second call changes nothing."""
        self._connection.close()

    def run_ids(self) -> list[str]:
        """Return all runs, newest first."""
        query = "SELECT run_id FROM runs ORDER BY submitted DESC"
        with self._sqlite_errors():
            return [row[0] for row in self._connection.execute(query)]

    def events(self, run_id: str, after: int = 0) -> list[RecordedEvent]:
        """Return a run's events with a sequence above `after`, in order."""
        query = f"SELECT {_COLUMNS} FROM events WHERE run_id = ? AND sequence > ? ORDER BY sequence"  # noqa: S608
        with self._sqlite_errors(), self.damage_named():
            rows = self._connection.execute(query, (run_id, min(after, _MOST)))
            return [_event_of(row) for row in rows]

    def view(self, run_id: str) -> JournaledRun:
        """Return a run as its events tell it, unfinished if they do.

        Raises:
            KeyError: there is no such run.
        """
        events = self.events(run_id)
        if not events:
            raise KeyError(run_id)
        with self.damage_named():
            return fold(run_id, events)

    def final_view(self, run_id: str) -> JournaledRun:
        """Return a run as the next coordinator would find it.

        Lost, if it is unfinished and nobody writes.

        Raises:
            KeyError: there is no such run.
        """
        view = self.view(run_id)
        if not view.state.is_terminal and self.is_abandoned():
            last = self.events(run_id)[-1]
            detail = coordinator_lost(view)
            view.apply(dataclasses.replace(last, kind=EventKind.RUN_ENDED, site="", detail=detail))
        return view

    def progress(self, run_id: str) -> dict[str, Any]:
        """Return a run's last metrics, as `Journal.save_progress` got them.

        Empty before the first.
        """
        query = "SELECT progress FROM runs WHERE run_id = ?"
        with self._sqlite_errors():
            row = self._connection.execute(query, (run_id,)).fetchone()
        with self.damage_named():
            return _object_of(row[0]) if row else {}

    def is_abandoned(self) -> bool:
        """Whether no coordinator holds the state folder."""
        return is_abandoned(self._folder)

    def _check_version(self) -> None:
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version != VERSION:
            raise JournalError(
                f"{self.path}: its format is version {version}, this build reads {VERSION}; "
                "use the build that wrote it, or another --state"
            )

    @contextmanager
    def damage_named(self) -> Iterator[None]:
        """Turn what goes wrong with a row that nobody wrote so into a line that names the file."""
        try:
            yield
        except (
            AttributeError,
            LookupError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise JournalError(f"{self.path}: damaged: {reason_of(error):.300}") from error

    @contextmanager
    def _sqlite_errors(self) -> Iterator[None]:
        """Turn SQLite's errors into one line that names the file."""
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(f"{self.path}: {text_of(error)}") from error


class Journal(JournalReader):
    """The one writer of a journal. What a call writes is on the disk when it returns."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder, which is made if need be, and open or create its journal.

        Raises:
            StateLockedError: another coordinator has it.
            JournalError: the journal there cannot be used.
            OSError: the folder cannot be made or written.
        """
        private_folder(folder)
        self._lock = lock(folder / LOCK)
        try:
            super().__init__(folder)
            self._identity = self._identify()
            self._inodes = {each: each.stat().st_ino for each in (folder / LOCK, self.path)}
        except BaseException:
            self._unlock()
            raise

    def _connect(self) -> sqlite3.Connection:
        if not self.path.exists():
            self._create()
        self._require_content()
        connection = _open(self.path, "rw")
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error as error:
            connection.close()
            raise JournalError(f"{self.path}: {text_of(error)}") from error
        return connection

    def _create(self) -> None:
        """Make an empty journal, which is there as a whole or not at all."""
        scratch = self.path.with_suffix(".new")
        scratch.unlink(missing_ok=True)
        connection = _open(scratch, "rwc")
        try:
            connection.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;"
            )
        except sqlite3.Error as error:
            raise JournalError(f"{self.path}: {text_of(error)}") from error
        finally:
            connection.close()
        for rest in ("-wal", "-shm"):  # of one that was removed: it would be taken for this one's
            self.path.with_name(f"{FILE}{rest}").unlink(missing_ok=True)
        scratch.replace(self.path)
        folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @property
    def identity(self) -> str:
        """What tells this journal from any other: its generations are compared within it."""
        return f"{self._identity:x}"

    def _identify(self) -> int:
        """Return the journal's number, which is made the first time that it is asked for."""
        with self._writing() as connection:
            insert = "INSERT OR IGNORE INTO meta VALUES ('identity', ?)"
            connection.execute(insert, (secrets.randbits(62),))
            select = "SELECT value FROM meta WHERE key = 'identity'"
            return int(connection.execute(select).fetchone()[0])

    def close(self) -> None:
        """Let go of the file and of the lock. A second call changes nothing."""
        super().close()
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def raise_generation(self) -> int:
        """Return a generation that no coordinator of this journal has used before."""
        with self._writing() as connection:
            update = "UPDATE meta SET value = value + 1 WHERE key = 'generation' RETURNING value"
            return int(connection.execute(update).fetchone()[0])

    def append(
        self,
        kind: str,
        *,
        wall_s: float,
        generation: int,
        run_id: str = "",
        site: str = "",
        detail: Mapping[str, Any],
    ) -> RecordedEvent:
        """Write an event; `run.submitted` also adds its run."""
        with self._writing() as connection:
            insert = (
                "INSERT INTO events (wall_s, run_id, generation, kind, site, detail) "
                "VALUES (?, ?, ?, ?, ?, ?)"
            )
            text = json.dumps(detail)
            values = (wall_s, run_id, generation, kind, site, text)
            sequence = connection.execute(insert, values).lastrowid
            assert sequence is not None
            if kind == EventKind.RUN_SUBMITTED:
                run = (run_id, sequence)
                connection.execute("INSERT INTO runs (run_id, submitted) VALUES (?, ?)", run)
        return _event_of((sequence, wall_s, run_id, generation, kind, site, text))

    def save_progress(self, run_id: str, progress: Mapping[str, Any]) -> None:
        """Overwrite a run's last metrics."""
        with self._writing() as connection:
            update = "UPDATE runs SET progress = ? WHERE run_id = ?"
            connection.execute(update, (json.dumps(progress), run_id))

    def unfinished(self) -> list[str]:
        """Return the runs that an earlier coordinator left going on, newest first.

        Nothing is read of those that have ended, however many.
        """
        ended = "SELECT run_id FROM events WHERE kind = 'run.ended'"
        query = f"SELECT run_id FROM runs WHERE run_id NOT IN ({ended}) ORDER BY submitted DESC"  # noqa: S608
        with self._sqlite_errors():
            return [row[0] for row in self._connection.execute(query)]

    def end_abandoned(self, run_id: str, wall_s: float) -> None:
        """Mark an unfinished run as lost with the coordinator before this one."""
        view = self.view(run_id)
        self.append(
            EventKind.RUN_ENDED,
            wall_s=wall_s,
            generation=view.generation,
            run_id=run_id,
            detail=coordinator_lost(view),
        )

    def can_be_written(self) -> bool:
        """Whether the disk takes something now."""
        try:
            with self._writing() as connection:
                connection.execute("UPDATE meta SET value = value WHERE key = 'generation'")
        except JournalError:
            return False
        return True

    def check_place(self) -> None:
        """Check that the state folder is still the one that was locked.

        Raises:
            JournalError: somebody removed or replaced it, or a file of it.
        """
        for path, inode in self._inodes.items():
            try:
                is_ours = path.stat().st_ino == inode
            except FileNotFoundError:
                is_ours = False
            except OSError:
                continue  # a disk that does not answer says nothing of the file
            if not is_ours:
                raise JournalGoneError(
                    f"{path}: removed or replaced under the coordinator that uses it"
                )

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, on disk at the end of the block."""
        with self._sqlite_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:
                yield self._connection


def _open(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode={mode}"
    try:
        return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)
    except sqlite3.Error as error:
        raise JournalError(f"{path}: {text_of(error)}") from error


def _event_of(row: tuple[Any, ...]) -> RecordedEvent:
    """Return what a row of _COLUMNS says.

    Raises:
        TypeError: its detail is no object.
        ValueError: or not JSON.
    """
    sequence, wall_s, run_id, generation, kind, site, detail = row
    return RecordedEvent(
        sequence=sequence,
        wall_s=wall_s,
        run_id=run_id,
        generation=generation,
        kind=kind,
        site=site,
        detail=_object_of(detail),
    )


def _object_of(text: str) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        TypeError: it is something else.
        ValueError: it is not JSON.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(f"want an object, got {text:.100}")
    return value
