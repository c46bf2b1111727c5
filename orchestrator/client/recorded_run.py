"""Reads an embedded run from its folder once the run's coordinator is gone."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.coordinator.control_messages import event_message, run_message
from orchestrator.coordinator.journal import JournalReader
from orchestrator.run_folder.home import LOG, RunFolder
from orchestrator.run_folder.log_files import LogReader, last_line
from protos.control.v1 import control_pb2
from protos.errors import NotFoundError
from protos.failure import Failure


class RecordedRun:
    """Reads one run's folder. Nothing in it is changed, whatever state a crash left it in."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def run(self) -> control_pb2.Run:
        """Return the run; COORDINATOR_LOST if its coordinator went before it had ended.

        Raises:
            NotFoundError: the journal does not know the run.
            JournalError: there is no journal that this build can read.
        """
        run_id = self._folder.run_id
        with JournalReader(self._folder.path) as journal:
            try:
                view = journal.final_view(run_id)
            except KeyError:
                raise NotFoundError(f"{journal.path}: there is no run {run_id!r}") from None
            progress = journal.progress(run_id)
            with journal.damage_told():
                run = run_message(view, progress)
        run.folder = str(self._folder.path)  # where it was written may be another name by now
        if run.reason_code == "COORDINATOR_LOST":
            said = last_line(self._folder.path / LOG)
            if said.startswith("error: "):  # it did not just vanish: it could say why
                run.reason += f": {said.removeprefix('error: ')}"
            path = str(self._folder.path / LOG)
            lost = Failure(code=run.reason_code, message=run.reason, log_path=path)
            run.failure.CopyFrom(lost.to_message())
        return run

    def events(self, after: int) -> Iterator[control_pb2.Event]:
        """Yield the run's events with a sequence above `after`; JournalError as for `run`."""
        with JournalReader(self._folder.path) as journal:
            events = journal.events(self._folder.run_id, after)
            with journal.damage_told():
                messages = [event_message(event) for event in events]
        yield from messages

    def logs(self, *, site: str, rank: int, tail: int) -> Iterator[control_pb2.LogLine]:
        """Yield the log lines that arrived; `rank` -1 and `tail` 0 mean all."""
        reader = LogReader(self._folder.path, site=site, rank=rank)
        if tail:
            reader.skip_to_tail(tail)
        yield from reader.read()
