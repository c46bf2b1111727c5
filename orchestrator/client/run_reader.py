"""Reads the facts about a run: from its coordinator while that lives, else from its files.

An embedded coordinator ends with its run, so one command may begin with the first and end
with the second. The files of others are read where they lie on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isthmus.orchestrator.client.coordinator_client import Client, CoordinatorUnreachableError
from isthmus.orchestrator.client.recorded_run import RecordedRun
from isthmus.orchestrator.coordinator.control_messages import event_from
from isthmus.orchestrator.coordinator.journal import JournalError
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.run_folder.home import (
    SUMMARY,
    RunChoice,
    RunFolder,
    find_run,
    home_folder,
    read_object,
)
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import IsthmusError

TERMINAL = frozenset(
    {
        control_pb2.RUN_STATE_SUCCEEDED,
        control_pb2.RUN_STATE_FAILED,
        control_pb2.RUN_STATE_CANCELLED,
    }
)
"""States in which a run stays."""
GONE_S = 5.0
"""The kernel takes a moment to end a process whose connection has already broken."""
POLL_S = 0.02


class RunReader:
    """Reads one run. Made by `reading`, which closes it."""

    def __init__(
        self,
        run_id: str,
        folder: RunFolder | None,
        client: Client | None,
        recorded: RecordedRun | None,
    ) -> None:
        self.run_id = run_id
        """Empty: the coordinator's latest."""
        self._folder = folder
        self._client = client
        self._files = recorded
        """None: they are on another machine."""

    def get(self) -> control_pb2.Run:
        """Return the run as it is, or as it was when its coordinator went."""
        return self._ask(Client.get_run, may_be_unled=True)

    def cancel(self) -> control_pb2.Run:
        """Ask for the end of the run; one that has ended stays as it is."""
        return self._ask(Client.cancel_run)

    def drop_site(self, site: str) -> control_pb2.Run:
        """Have the run go on without a site; one that has ended is returned as it is."""
        return self._ask(lambda client, run_id: client.drop_site(run_id, site))

    def add_site(self, site: str) -> control_pb2.Run:
        """Have a site take part again; a run that has ended is returned as it is."""
        return self._ask(lambda client, run_id: client.add_site(run_id, site))

    def _ask(
        self, question: Callable[[Client, str], control_pb2.Run], *, may_be_unled: bool = False
    ) -> control_pb2.Run:
        if self._client is not None:
            try:
                return question(self._client, self.run_id)
            except CoordinatorUnreachableError as error:
                self._require_gone(error)
        return self._recorded().run() if may_be_unled else self._ended()

    def _ended(self) -> control_pb2.Run:
        """Return the run as it was when its coordinator went.

        Raises:
            CoordinatorUnreachableError: it had not ended, and its sites may go on.
        """
        run = self._recorded().run()
        if run.state not in TERMINAL:
            assert self._folder is not None
            raise CoordinatorUnreachableError(str(self._folder.remote_address), "it has ended")
        return run

    def watch(self, deadline_s: float | None = None) -> Iterator[control_pb2.Run]:
        """Yield the run at each change and each second; the last one has ended.

        Raises:
            DeadlineExceededError: it has not ended when the monotonic clock shows `deadline_s`.
        """
        if self._client is not None:
            try:
                for run in self._client.watch_run(self.run_id, deadline_s):
                    yield run
                    if run.state in TERMINAL:
                        return
            except CoordinatorUnreachableError as error:
                self._require_gone(error)
            else:
                self._require_gone(CoordinatorUnreachableError(self._client.address, "it hung up"))
        yield self._ended()

    def watch_with_logs(
        self, *, site: str, rank: int, deadline_s: float | None = None
    ) -> Iterator[control_pb2.Run | control_pb2.LogLine]:
        """Yield the run as `watch` does, and between them what one rank prints.

        Raises:
            DeadlineExceededError: as `watch`.
        """
        has_ended = False
        if self._client is not None:
            try:
                for each in self._client.watch_run_with_logs(
                    self.run_id, site=site, rank=rank, deadline_s=deadline_s
                ):
                    yield each
                    has_ended |= isinstance(each, control_pb2.Run) and each.state in TERMINAL
            except CoordinatorUnreachableError as error:
                if not has_ended:
                    self._require_gone(error)
            else:
                if not has_ended:
                    gone = CoordinatorUnreachableError(self._client.address, "it hung up")
                    self._require_gone(gone)
        if not has_ended:
            yield self._ended()

    def logs(
        self, *, follow: bool, site: str, rank: int, tail: int
    ) -> Iterator[control_pb2.LogLine]:
        """Yield log lines, each once; with `follow` until the run has ended."""
        seen: dict[tuple[str, str], int] = {}
        if self._client is not None:
            try:
                for line in self._client.read_logs(
                    self.run_id, follow=follow, site=site, rank=rank, tail=tail
                ):
                    seen[line.site, line.source] = line.sequence
                    yield line
            except CoordinatorUnreachableError as error:
                self._require_gone(error)
            else:
                return
        for line in self._recorded().logs(site=site, rank=rank, tail=tail):
            if line.sequence > seen.get((line.site, line.source), -1):
                yield line

    def events(self, *, follow: bool) -> Iterator[RecordedEvent]:
        """Yield events, each once; with `follow` until the run has ended."""
        last = 0
        if self._client is not None:
            try:
                for event in self._client.read_events(self.run_id, follow=follow):
                    last = event.sequence
                    yield event_from(event)
            except CoordinatorUnreachableError as error:
                self._require_gone(error)
            else:
                return
        yield from self._recorded().events(after=last)

    def _recorded(self) -> RecordedRun:
        assert self._files is not None
        return self._files

    def _require_gone(self, error: CoordinatorUnreachableError) -> None:
        """Return if the coordinator that does not answer has ended; otherwise raise `error`.

        A coordinator elsewhere may be alive behind a broken path, and one that is stopped in a
        debugger is not gone: then the run's folder does not tell how the run is.
        """
        if self._folder is None or self._files is None:
            raise error
        deadline_s = time.monotonic() + GONE_S
        while self._folder.coordinator_address is not None:
            if time.monotonic() > deadline_s:
                raise error
            INTERRUPTION.check()
            time.sleep(POLL_S)


def wait_launched(folder: RunFolder) -> None:
    """Return once a run was submitted that another command is about to submit, or never will be."""
    while folder.is_being_launched:
        INTERRUPTION.check()
        time.sleep(POLL_S)


@contextmanager
def reading(choice: RunChoice) -> Iterator[RunReader]:
    """Find a run, and whoever knows about it. One that is being launched is waited for.

    Raises:
        NotFoundError: there is no such run.
    """
    run_id, address = choice.run_id, choice.coordinator
    home = home_folder(choice.home)
    folder = None if address else find_run(home, run_id)
    recorded = None
    if folder is not None:
        wait_launched(folder)
        folder = find_run(home, folder.run_id)  # unless it was not to be
        recorded = _recorded(folder)
        address = folder.remote_address if recorded is None else folder.coordinator_address
        run_id = folder.run_id
        folder.use_tls()
    if address is None:
        yield RunReader(run_id, folder, None, recorded)
        return
    with Client(address) as client:
        yield RunReader(run_id, folder, client, recorded)


def _recorded(folder: RunFolder) -> RecordedRun | None:
    """Return the files that the coordinator of a run keeps; None: they are on another machine."""
    if folder.state is None:
        return None
    recorded = RecordedRun(folder, folder.state)
    if folder.remote_address is None:
        return recorded
    try:  # a folder may have this name on the other machine, and be another coordinator's here
        return recorded if recorded.is_known() else None
    except JournalError:
        return None


def known_run(home: Path, folder: RunFolder) -> control_pb2.Run:
    """Return a run that this machine keeps; where nobody tells about it, one that says why not."""
    try:
        with reading(RunChoice(run_id=folder.run_id, home=home)) as reader:
            return reader.get()
    except IsthmusError as error:
        return control_pb2.Run(
            run_id=folder.run_id,
            created_wall_s=folder.submitted_wall_s,
            reason_code=error.code,
            reason=str(error),
        )


def read_summary(run: control_pb2.Run) -> dict[str, Any] | None:
    """Return what the coordinator wrote at the run's end, if this machine has it."""
    return (read_object(Path(run.folder) / SUMMARY) or None) if run.folder else None
