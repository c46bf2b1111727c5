"""Reads the facts about a run: from its coordinator while that lives, else from the run's folder.

An embedded coordinator ends with its run, so one command may begin with the first and end
with the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.client.coordinator_client import Client, CoordinatorUnreachableError
from orchestrator.client.recorded_run import RecordedRun
from orchestrator.interruption import INTERRUPTION
from orchestrator.run_folder.home import (
    SUMMARY,
    RunChoice,
    RunFolder,
    find_run,
    home_folder,
    read_object,
)
from protos.control.v1 import control_pb2

if TYPE_CHECKING:
    from orchestrator.evidence.record.run_record import RunRecord

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

    def __init__(self, run_id: str, folder: RunFolder | None, client: Client | None) -> None:
        self.run_id = run_id
        """Empty: the coordinator's latest."""
        self._folder = folder
        self._client = client

    def get(self) -> control_pb2.Run:
        """Return the run as it is, or as it was when its coordinator went."""
        return self._ask(Client.get_run)

    def cancel(self) -> control_pb2.Run:
        """Ask for the end of the run; one that has ended stays as it is."""
        return self._ask(Client.cancel_run)

    def drop_site(self, site: str) -> control_pb2.Run:
        """Have the run go on without a site; one that has ended is returned as it is."""
        return self._ask(lambda client, run_id: client.drop_site(run_id, site))

    def add_site(self, site: str) -> control_pb2.Run:
        """Have a site take part again; a run that has ended is returned as it is."""
        return self._ask(lambda client, run_id: client.add_site(run_id, site))

    def _ask(self, question: Callable[[Client, str], control_pb2.Run]) -> control_pb2.Run:
        if self._client is not None:
            try:
                return question(self._client, self.run_id)
            except CoordinatorUnreachableError as error:
                self._require_gone(error)
        return self._recorded().run()

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
        yield self._recorded().run()

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

    def events(self, *, follow: bool) -> Iterator[control_pb2.Event]:
        """Yield events, each once; with `follow` until the run has ended."""
        last = 0
        if self._client is not None:
            try:
                for event in self._client.read_events(self.run_id, follow=follow):
                    last = event.sequence
                    yield event
            except CoordinatorUnreachableError as error:
                self._require_gone(error)
            else:
                return
        yield from self._recorded().events(after=last)

    def _recorded(self) -> RecordedRun:
        assert self._folder is not None
        return RecordedRun(self._folder)

    def _require_gone(self, error: CoordinatorUnreachableError) -> None:
        """Return if the coordinator that does not answer has ended; otherwise raise `error`.

        A coordinator elsewhere may be alive behind a broken path, and one that is stopped in a
        debugger is not gone: then the run's folder does not tell how the run is.
        """
        if self._folder is None or self._folder.remote_address is not None:
            raise error
        deadline_s = time.monotonic() + GONE_S
        while self._folder.living_coordinator() is not None:
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
    if folder is not None:
        wait_launched(folder)
        folder = find_run(home, folder.run_id)  # unless it was not to be
        address = folder.remote_address or folder.living_coordinator()
        run_id = folder.run_id
        folder.use_tls()
    if address is None:
        yield RunReader(run_id, folder, None)
        return
    with Client(address) as client:
        yield RunReader(run_id, folder, client)


def read_summary(run: control_pb2.Run) -> dict[str, Any] | None:
    """Return what the coordinator wrote at the run's end, if this machine has it."""
    return (read_object(Path(run.folder) / SUMMARY) or None) if run.folder else None


def read_run_record(choice: RunChoice) -> RunRecord:
    """Read everything that a run recorded.

    Raises:
        NotFoundError: there is no such run.
    """
    # Imported here: it brings the documents' models, which most commands about a run do without.
    from orchestrator.evidence.record.run_record import read_record

    with reading(choice) as reader:
        return read_record(reader.get(), list(reader.events(follow=False)))
