"""Reads a run from its coordinator's files on this machine, once the coordinator is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from isthmus.orchestrator.coordinator.control_messages import run_message
from isthmus.orchestrator.coordinator.journal import JournalReader
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.run_folder.home import LOG, RunFolder
from isthmus.orchestrator.run_folder.log_files import LogReader, last_line
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import NotFoundError
from isthmus.protos.failure import Failure

UNLED = (
    "no coordinator leads it now: this is how it was when its coordinator ended, and its sites may "
    "go on: start the coordinator again (isthmus up) to know"
)


class RecordedRun:
    """Reads one run's files. Nothing in them is changed, whatever state a crash left them in."""

    def __init__(self, folder: RunFolder, state: Path | None = None) -> None:
        """Read nothing yet.

        Args:
            folder: The run's, of this machine's HOME.
            state: Of its coordinator; None: the same folder, for the coordinator was the run's own.
        """
        self._folder = folder
        self._state = state or folder.path
        self._is_own = self._state == folder.path

    def is_known(self) -> bool:
        """Whether the coordinator's journal has the run."""
        with JournalReader(self._state) as journal:
            return self._folder.run_id in journal.run_ids()

    def run(self) -> control_pb2.Run:
        """Return the run.

        One that had not ended when its own coordinator went is COORDINATOR_LOST. One of a
        coordinator that can be started again is as it was then, with a note.

        Raises:
            NotFoundError: the journal does not know the run.
            JournalError: there is no journal that this build can read.
        """
        run_id = self._folder.run_id
        with JournalReader(self._state) as journal:
            try:
                view = journal.final_view(run_id) if self._is_own else journal.view(run_id)
            except KeyError:
                raise NotFoundError(f"{journal.path}: there is no run {run_id!r}") from None
            progress = journal.progress(run_id)
            with journal.damage_named():
                run = run_message(view, progress)
        if not self._is_own:
            if not view.state.is_terminal:
                run.notes.append(UNLED)
            return run
        run.folder = str(self._folder.path)  # where it was written may be another name by now
        if run.reason_code == "COORDINATOR_LOST":
            said = last_line(self._folder.path / LOG)
            if said.startswith("error: "):  # it did not just vanish: it could say why
                run.reason += f": {said.removeprefix('error: ')}"
            path = str(self._folder.path / LOG)
            lost = Failure(code=run.reason_code, message=run.reason, log_path=path)
            run.failure.CopyFrom(lost.to_message())
        return run

    def events(self, after: int) -> list[RecordedEvent]:
        """Return the run's events with a sequence above `after`; JournalError as for `run`."""
        with JournalReader(self._state) as journal:
            return journal.events(self._folder.run_id, after)

    def logs(self, *, site: str, rank: int, tail: int) -> Iterator[control_pb2.LogLine]:
        """Yield the log lines that arrived; `rank` -1 and `tail` 0 mean all."""
        folder = self._folder.path if self._is_own else Path(self.run().folder)
        reader = LogReader(folder, site=site, rank=rank)
        if tail:
            reader.skip_to_tail(tail)
        yield from reader.read()
