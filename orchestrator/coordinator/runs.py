"""The runs of a coordinator: those that go on, those that wait for their sites, those that were."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from isthmus.orchestrator.coordinator.active_run import ActiveRun
from isthmus.orchestrator.coordinator.control_messages import run_message
from isthmus.orchestrator.coordinator.journal import Journal, JournalError
from isthmus.orchestrator.coordinator.passed_env import PassedEnv
from isthmus.orchestrator.coordinator.submission import Submission, decided, submitted_before
from isthmus.orchestrator.coordinator.wan import FaultPlan
from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_events import RunState
from isthmus.orchestrator.core.run_queue import MAX_WAITING, RunQueue, Waiting
from isthmus.orchestrator.run_folder.home import is_folder_name
from isthmus.orchestrator.run_folder.run_files import RunFiles
from isthmus.protos.blobs import Blobs
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import (
    IsthmusError,
    NotFoundError,
    RemoteProtocolError,
    StaleGenerationError,
    StateConflictError,
)
from isthmus.protos.failure import reason_of
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.lanes import AgentMachine

CARRIED = "carried"
"""Folder in the state folder for contents that are carried to sites."""
LISTED_RUNS = 200
"""The newest: their views fit into one message."""

log = logging.getLogger(__name__)


class UnreadableRunError(IsthmusError):
    """A run goes on at its sites, and what was kept of it cannot be used here."""

    code = "RUN_UNREADABLE"


class Runs:
    """All runs that a coordinator knows. No two that go on have a site in common."""

    def __init__(
        self,
        journal: Journal,
        folder: Path,
        topology_hash: str,
        *,
        send: Callable[[str, control_pb2.CoordinatorMessage], None],
        introduce: Callable[[ActiveRun], None],
        faults: FaultPlan | None = None,
        agents_outlive: bool = True,
    ) -> None:
        """Raise the generation, and resume what an earlier coordinator left unfinished.

        One that no agent can hold any more ends as lost.

        `folder` gets a folder for each run. `send` sends a message to the agent of a site;
        `introduce` tells a run that begins which agents there are.

        Raises:
            UnreadableRunError: agents may hold a run that cannot be resumed. Nothing was written.
            JournalError: the journal cannot be written.
        """
        self._journal = journal
        self._folder = folder
        self._topology_hash = topology_hash
        self._send = send
        self._introduce = introduce
        self._faults = faults
        self._may_queue = agents_outlive
        self._passed_env = PassedEnv(journal.path.parent)
        unfinished = journal.unfinished()
        resumable = _resumable(
            journal, unfinished if agents_outlive else (), topology_hash, self._passed_env
        )
        self.generation = journal.raise_generation()
        self.latest: ActiveRun | None = None
        """The run that began last."""
        self.submitted = asyncio.Event()
        """Set with the first run."""
        self.blobs = Blobs(journal.path.parent.absolute() / CARRIED)
        """Contents of the folders that runs carry to their sites."""
        self.paused_because = ""
        """Why nothing can be written down; empty: it can."""
        self._runs: dict[str, ActiveRun] = {}
        """Runs that go on, and those that have ended where no other has begun since."""
        self._ended: dict[str, control_pb2.Run] = {}
        """Runs that have ended, as they were read last: nothing becomes of them any more."""
        self._queue = RunQueue()
        self._queue_changed = asyncio.Event()
        """Set at each change and replaced, as `ActiveRun.changed`."""
        self._is_ending = False
        journal.append(
            EventKind.COORDINATOR_STARTED,
            wall_s=time.time(),
            generation=self.generation,
            detail={"topology_hash": topology_hash},
        )
        for run_id in unfinished:
            if run_id not in resumable or not self._resume(resumable[run_id]):
                log.warning("run %s was lost with the coordinator before this one", run_id)
                journal.end_abandoned(run_id, time.time())

    def _resume(self, submission: Submission) -> bool:
        """Continue a run that another coordinator left, or queue it until its sites are free."""
        run_id = submission.run_id
        events = self._journal.events(run_id)
        view = self._journal.view(run_id)
        if view.state is RunState.QUEUED:
            self._wait(submission, events[0].sequence)
            return True
        if not submission.occupies.isdisjoint(self._occupied()):
            return False
        run = ActiveRun(
            submission,
            generation=view.generation,
            folder=Path(view.folder),
            journal=self._journal,
            send=self._send,
            faults=self._faults,
            recorded=events,
        )
        self._put(run)
        log.info("run %s goes on: %s are awaited", run_id, ", ".join(run.awaited))
        return True

    def tick(self) -> None:
        """Act on deadlines that have passed, and begin runs whose turn it is."""
        for run in self.active():
            run.tick()
        self._begin_waiting()

    def pause(self, why: str) -> None:
        """Refuse further orders, which cannot be written down; queries are still answered."""
        self.paused_because = why
        for run in self._runs.values():
            run.tell_changed()

    def end_unwritten(self, error: JournalError) -> None:
        """End the runs that go on, by name: nothing that happens to them can be written down."""
        self.paused_because = str(error)
        for run in self._runs.values():
            run.end_unwritten(error)

    async def close(self) -> None:
        """End the emulators of runs."""
        self.forget_passed_env()
        for run in self._runs.values():
            await run.close()

    def is_known(self, run_id: str) -> bool:
        """Whether there is a run of that name already: then a submission asks for nothing new.

        Raises:
            StateConflictError: this coordinator is paused.
            RemoteProtocolError: the name is none.
        """
        self._require_writable()
        if not is_folder_name(run_id):
            raise RemoteProtocolError(
                f"run id {run_id[:80]!r}: want letters, digits, '.', '_' and '-', at most 64"
            )
        return run_id in self._journal.run_ids()

    def decide(
        self, request: control_pb2.SubmitRequest, machines: Mapping[str, AgentMachine]
    ) -> Submission:
        """Return what a submission comes to. For any thread: with many sites it takes seconds.

        `machines` are those that `Control.machines` returns.

        Raises:
            ConfigError: the documents have mistakes.
            ConfigMismatchError: the topology is not this coordinator's.
        """
        return decided(request, self._topology_hash, machines, self.blobs)

    def carried_by_runs(self) -> set[str]:
        """Return the folders that runs carry which go on or wait."""
        going = {run_id for run_id, run in self._runs.items() if not run.has_ended}
        codes = [
            self._journal.view(each).about.get("code", {}) for each in going | self._queue.run_ids
        ]
        return {code["digest"] for code in codes if code.get("is_carried")}

    def submit(self, submission: Submission) -> None:
        """Begin a run, or have it wait for its sites; nothing, if there is one of that name.

        Raises:
            StateConflictError: too many wait; or another run goes on, and none may wait here.
        """
        run_id = submission.run_id
        if self.is_known(run_id):
            return
        folder = self._folder / run_id
        try:
            self._passed_env.keep(run_id, submission.passed_env)
            if self._has_room(submission):
                self._begin(submission, folder)
            else:
                self._enqueue(submission, folder)
        except OSError as error:
            raise StateConflictError(f"{folder}: {error.strerror}") from error
        self.submitted.set()

    def cancel(self, run_id: str, why: str) -> control_pb2.Run:
        """End a run; one that has ended stays as it is.

        Raises:
            NotFoundError: there is no such run.
            StateConflictError: this coordinator is paused.
        """
        self._require_writable()
        run_id = self.find(run_id)
        if self._queue.remove(run_id):
            self._end_unbegun(run_id, RunState.CANCELLED, "CANCELLED", why)
        elif run_id in self._runs:
            self._runs[run_id].handle(run_events.CancelRequested(why))
        return self.message(run_id)

    def drop_site(self, run_id: str, site: str) -> control_pb2.Run:
        """Continue a run without a site.

        Raises:
            NotFoundError: there is no such run.
            StateConflictError: there is no such site, or it cannot be done without.
        """
        self._going_on(run_id, site).drop(site)
        return self.message(self.find(run_id))

    def add_site(self, run_id: str, site: str) -> control_pb2.Run:
        """Let a site take part in a run again.

        Raises:
            NotFoundError: there is no such run.
            StateConflictError: there is no such site, or it takes part, or cannot.
        """
        self._going_on(run_id, site).add(site)
        return self.message(self.find(run_id))

    def _going_on(self, run_id: str, site: str) -> ActiveRun:
        self._require_writable()
        run_id = self.find(run_id)
        run = self._runs.get(run_id)
        if run is None or run.has_ended:
            raise StateConflictError(f"run {run_id} does not go on")
        if site not in run.view.sites:
            raise StateConflictError(
                f"run {run_id} has no site {site!r}; its topology has {', '.join(run.view.sites)}"
            )
        return run

    def end(self, why: str) -> list[ActiveRun]:
        """Cancel what goes on, and begin nothing more; return what has not ended yet.

        Runs that wait stay in the journal: the next coordinator begins them.
        """
        self._is_ending = True
        going = [run for run in self._runs.values() if not run.has_ended]
        for run in going:
            run.handle(run_events.CancelRequested(why))
        return going

    def _require_writable(self) -> None:
        """Refuse what would have to be written down.

        Raises:
            StateConflictError: it cannot be.
        """
        if self.paused_because:
            raise StateConflictError(f"the coordinator is paused: {self.paused_because}")

    # ------------------------------------------------------------ where they are

    def active(self) -> list[ActiveRun]:
        """Return the runs that go on, and those that were the last at their sites."""
        return list(self._runs.values())

    def at(self, site: str) -> ActiveRun | None:
        """Return the run that goes on at a site, or was the last there."""
        return next((run for run in self._runs.values() if site in run.view.sites), None)

    def handle(self, site: str, event: run_events.Event) -> None:
        """Pass an event to the run at a site, if there is one."""
        if (run := self.at(site)) is not None:
            run.handle(event)

    def get(self, run_id: str, generation: int) -> ActiveRun | None:
        """Return a run that goes on, or was the last at its sites, unless it has begun anew."""
        run = self._runs.get(run_id)
        return run if run is not None and run.generation == generation else None

    def fenced(self, run_id: str, generation: int) -> ActiveRun:
        """Return the run that a message is about, if it goes on or was the last at its sites.

        Raises:
            StaleGenerationError: it does not.
        """
        run = self.get(run_id, generation)
        if run is None:
            latest = self.latest
            current = f"{latest.run_id!r}, generation {latest.generation}" if latest else "none"
            raise StaleGenerationError(
                f"run {run_id!r}, generation {generation} has ended here; "
                f"the current run is {current}"
            )
        return run

    # ------------------------------------------------------------ the queue

    def _occupied(self) -> frozenset[str]:
        return frozenset().union(*(run.occupies for run in self._runs.values()))

    def _has_room(self, submission: Submission) -> bool:
        """Whether a run that is not in the queue yet may begin at once."""
        if self._is_ending:
            return False
        self._queue.add(_waiting(submission, sys.maxsize))
        found = self._queue.startable(self._occupied())
        self._queue.remove(submission.run_id)
        return submission.run_id in found

    def _enqueue(self, submission: Submission, folder: Path) -> None:
        """Write down that a run waits.

        Raises:
            StateConflictError: it may not.
            OSError: its folder cannot be written.
        """
        if not self._may_queue and self.latest is not None:
            raise StateConflictError(
                f"run {self.latest.run_id} is going on: wait for its end or cancel it"
            )
        if len(self._queue) >= MAX_WAITING:
            raise StateConflictError(f"{MAX_WAITING} runs wait already: cancel one first")
        submission.write(RunFiles(folder))
        event = self._journal.append(
            EventKind.RUN_SUBMITTED,
            wall_s=time.time(),
            generation=self.generation,
            run_id=submission.run_id,
            detail={**submission.to_json(folder), "is_queued": True},
        )
        self._wait(submission, event.sequence)
        log.info("run %s waits for its sites", submission.run_id)

    def _wait(self, submission: Submission, sequence: int) -> None:
        self._queue.add(_waiting(submission, sequence))
        self._tell_queue_changed()

    def _begin_waiting(self) -> None:
        """Begin every run whose turn it is."""
        if self._is_ending or not len(self._queue):
            return
        for run_id in self._queue.startable(self._occupied()):
            self._queue.remove(run_id)
            events = self._journal.events(run_id)
            folder = Path(events[0].detail["folder"])
            try:
                submission = submitted_before(
                    run_id,
                    events[0].detail,
                    RunFiles(folder),
                    self._topology_hash,
                    self._passed_env.of(run_id),
                )
                self._begin(submission, folder, events)
            except (OSError, LookupError, ValueError) as error:
                reason = f"what was kept of it cannot be used: {_why(error)}"
                self._end_unbegun(run_id, RunState.FAILED, "FILE_ERROR", reason)
            self._tell_queue_changed()

    def _begin(
        self, submission: Submission, folder: Path, recorded: Sequence[RecordedEvent] = ()
    ) -> None:
        """Begin a run. `recorded` is what the journal has of one that has waited.

        Raises:
            OSError: its folder cannot be written.
        """
        generation = self._journal.raise_generation()
        run = ActiveRun(
            submission,
            generation=generation,
            folder=folder,
            journal=self._journal,
            send=self._send,
            faults=self._faults,
            recorded=recorded,
        )
        self.generation = generation
        self._put(run)
        log.info("run %s begins, generation %d", run.run_id, generation)
        self._introduce(run)

    def _put(self, run: ActiveRun) -> None:
        """Replace the ended runs at its sites by a run."""
        sites = run.view.sites.keys()
        self._runs = {
            run_id: other
            for run_id, other in self._runs.items()
            if sites.isdisjoint(other.view.sites)
        }
        self._runs[run.run_id] = self.latest = run

    def _end_unbegun(self, run_id: str, state: RunState, code: str, reason: str) -> None:
        """Write down the end of a run that has waited."""
        detail = {"state": state.value, "reason_code": code, "reason": reason, "failure": None}
        self._journal.append(
            EventKind.RUN_ENDED,
            wall_s=time.time(),
            generation=self.generation,
            run_id=run_id,
            detail=detail,
        )
        self._tell_queue_changed()

    def forget_passed_env(self) -> None:
        """Remove what runs passed on to their ranks that have ended."""
        going = {run_id for run_id, run in self._runs.items() if not run.has_ended}
        self._passed_env.keep_only(going | self._queue.run_ids)

    def _tell_queue_changed(self) -> None:
        self._queue_changed.set()
        self._queue_changed = asyncio.Event()

    # ------------------------------------------------------------ what is known of them

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
        """Return a run, which `find` has found, from memory or from the journal."""
        if run_id in self._runs:
            run = self._runs[run_id]
            told = run.message()
            if self.paused_because and not run.has_ended:
                told.notes.append(
                    f"the coordinator is paused: {self.paused_because}; its sites go on training "
                    "without it, and it goes on once its journal can be written"
                )
            return told
        if run_id in self._ended:
            return self._ended[run_id]
        view = self._journal.view(run_id)
        told = run_message(view, self._journal.progress(run_id), self._queue.position(run_id))
        if view.state.is_terminal:
            self._ended[run_id] = told
            if len(self._ended) > LISTED_RUNS:
                del self._ended[next(iter(self._ended))]
        return told

    def messages(self) -> list[control_pb2.Run]:
        """Return the newest runs, newest first."""
        return [self.message(run_id) for run_id in self._journal.run_ids()[:LISTED_RUNS]]

    def change_of(self, run_id: str) -> asyncio.Event | None:
        """Return what the run's next change of state sets; None if the run has ended."""
        if run_id in self._runs:
            run = self._runs[run_id]
            return None if run.has_ended else run.changed
        return self._queue_changed if self._queue.position(run_id) else None

    def events_of(self, run_id: str, after: int) -> list[RecordedEvent]:
        """Return a run's recorded events with a sequence above `after`."""
        return self._journal.events(run_id, after)

    def folder_of(self, run_id: str) -> Path:
        """Return the folder of a run that `find` has found."""
        return Path(self._journal.view(run_id).folder)


def _resumable(
    journal: Journal, unfinished: Iterable[str], own_hash: str, passed_env: PassedEnv
) -> dict[str, Submission]:
    """Return those runs with which a coordinator of this topology can go on.

    Raises:
        UnreadableRunError: it cannot go on with one that agents may hold.
    """
    kept = {}
    for run_id in unfinished:
        events, view = journal.events(run_id), journal.view(run_id)
        kinds = {event.kind for event in events}
        is_queued = view.state is RunState.QUEUED
        if not is_queued and (
            EventKind.RUN_PREPARING not in kinds or EventKind.WAN_EMULATED in kinds
        ):
            continue
        files = RunFiles(Path(view.folder))
        try:
            kept[run_id] = submitted_before(
                run_id, events[0].detail, files, own_hash, passed_env.of(run_id)
            )
        except (OSError, LookupError, ValueError) as error:
            why = f"{view.folder}: {_why(error)}"
            if EventKind.RUN_ACTIVE in kinds:
                raise UnreadableRunError(
                    f"run {run_id} may go on at its sites, and this coordinator cannot lead it: {why}"
                ) from error
            log.warning("run %s cannot be gone on with: %s", run_id, why)
    return kept


def _why(error: Exception) -> str:
    """Return in one line why what was kept of a run cannot be used."""
    match error:
        case ConfigError():
            return error.problems[0].message
        case OSError():
            return f"{error.filename}: {error.strerror}"
    return reason_of(error)


def _waiting(submission: Submission, sequence: int) -> Waiting:
    return Waiting(
        run_id=submission.run_id,
        priority=submission.priority,
        sequence=sequence,
        sites=submission.occupies,
    )
