"""All that a coordinator knows and does, without the wire: sessions, leases, journal, runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.orchestrator.coordinator.active_run import ActiveRun
from isthmus.orchestrator.coordinator.control_messages import failure_from, run_message, stall_from
from isthmus.orchestrator.coordinator.joins import Joins
from isthmus.orchestrator.coordinator.journal import Journal, JournalError
from isthmus.orchestrator.coordinator.passed_env import PassedEnv
from isthmus.orchestrator.coordinator.revocations import Revocations
from isthmus.orchestrator.coordinator.run_epochs import paused_from, suspected_from
from isthmus.orchestrator.coordinator.sessions import Connection, Session, Sessions
from isthmus.orchestrator.coordinator.submission import Submission, decided, submitted_before
from isthmus.orchestrator.coordinator.wan import FaultPlan
from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.leases import Leases
from isthmus.orchestrator.core.run_events import RunState
from isthmus.orchestrator.core.run_queue import MAX_WAITING, RunQueue, Waiting
from isthmus.orchestrator.run_folder.home import is_folder_name
from isthmus.orchestrator.run_folder.run_files import RunFiles
from isthmus.protos.blobs import Blobs
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import (
    IsthmusError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
    RemoteProtocolError,
    StaleGenerationError,
    StateConflictError,
)
from isthmus.protos.failure import reason_of
from isthmus.protos.identities import AGENT, COORDINATOR, GATEWAY
from isthmus.protos.mutual_tls import TlsSecurity
from isthmus.protos.security import Security
from isthmus.protos.versions import build
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.hashing import topology_hash
from isthmus.topology.spec.lanes import AgentMachine
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Topology

TICK_S = 0.05
CHECK_S = 1.0
"""Between two looks whether the state folder is still there."""
REVOKED = "its certificate was revoked"
REFUSALS = 100
"""Calls of strangers that are written down: they must not fill the disk."""
CARRIED = "carried"
"""Folder in the state folder for contents that are carried to sites."""
_MAX_PORT = 65535
LISTED_RUNS = 200
"""The newest: their views fit into one message."""

log = logging.getLogger(__name__)


class UnreadableRunError(IsthmusError):
    """A run goes on at its sites, and what was kept of it cannot be used here."""

    code = "RUN_UNREADABLE"


class Control:
    """A coordinator's state, for one event loop. Leases and deadlines count while `run` runs."""

    def __init__(
        self,
        topology: Topology,
        journal: Journal,
        runs: Path,
        faults: FaultPlan | None = None,
        *,
        agents_outlive: bool = True,
        own_cores: int | None = None,
        security: Security | None = None,
    ) -> None:
        """Raise the generation, and go on with what an earlier coordinator left unfinished.

        One that no agent can hold any more ends as lost.

        `journal` stays the caller's, who closes it after the last call. `own_cores` are those of
        this machine, where all sites are on it; None: each agent tells its own.
        `security` is the coordinator's own; None: nobody shows a certificate.

        Raises:
            RevocationError: there is a list of revoked certificates, and it cannot be used. Nothing
                was written.
            UnreadableRunError: agents may hold a run that cannot be gone on with. Nothing was
                written.
            JournalError: the journal cannot be written.
        """
        self.timeouts = Timeouts.derive(topology.failure)
        self.state = journal.path.parent.absolute()
        self._security = security if isinstance(security, TlsSecurity) else None
        self._revocations = Revocations(self._security, self.state) if self._security else None
        self._told_problem = ""
        """What was said last of a list of revoked certificates that cannot be used."""
        self._topology_hash = topology_hash(topology)
        unfinished = journal.unfinished()
        self._passed_env = PassedEnv(journal.path.parent)
        may_go_on = unfinished if agents_outlive else ()
        kept = _kept(journal, may_go_on, self._topology_hash, self._passed_env)
        self.generation = journal.raise_generation()
        self.latest: ActiveRun | None = None
        """The run that began last."""
        self._runs: dict[str, ActiveRun] = {}
        """Runs that go on, and those that have ended where no other has begun since: no two have a
        site in common."""
        self._ended: dict[str, control_pb2.Run] = {}
        """Runs that have ended, as they were read last: nothing becomes of them any more."""
        self._queue = RunQueue()
        self._queue_changed = asyncio.Event()
        """Set at each change and replaced, as `ActiveRun.changed`."""
        self._is_ending = False
        self._may_queue = agents_outlive
        self.submitted = asyncio.Event()
        """Set with the first run."""
        self.blobs = Blobs(self.state / CARRIED)
        """Contents of the folders that runs carry to their sites."""
        self._sites = tuple(site.name for site in topology.sites)
        self._sessions = Sessions(self._sites, self._topology_hash)
        self._own_cores = own_cores
        self._leases = Leases(self.timeouts.lease_s)
        self._ended_agents: dict[str, run_events.AgentEnded] = {}
        self._gone_agents: dict[str, str] = {}
        """Agents of this process that have ended, and whose connection has not broken yet."""
        self._is_closed = False
        self._paused_because = ""
        """Why nothing can be written down; empty: it can."""
        self._num_refused = 0
        self._joins = Joins(self.state)
        self._journal = journal
        self._runs_folder = runs
        self._faults = faults
        self._checked_s = time.monotonic()
        self._record(EventKind.COORDINATOR_STARTED, {"topology_hash": self._topology_hash})
        for run_id in unfinished:
            if run_id not in kept or not self._take_over(kept[run_id]):
                log.warning("run %s was lost with the coordinator before this one", run_id)
                journal.end_abandoned(run_id, time.time())

    def _take_over(self, submission: Submission) -> bool:
        """Have a run that another coordinator left go on, or wait, if its sites are free."""
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

    async def run(self) -> None:
        """Let time pass. Never returns.

        Agents that an earlier coordinator knew have a whole lease from now on: what was read of
        their runs may have taken longer than one.

        Raises:
            JournalError: what happens can no longer be written down.
        """
        for awaited in [site for run in self._runs.values() for site in run.awaited]:
            self._leases.hear(awaited, time.monotonic())
        while True:
            if time.monotonic() - self._checked_s >= CHECK_S:
                self._checked_s = time.monotonic()
                self._journal.check_place()
                if self._security and (own_s := self._security.left_s()) is not None:
                    self._note_certificates(None, {COORDINATOR: own_s})
                self._look_for_revocations()
                self._forget_passed_env()
            self._expire_leases()
            for run in list(self._runs.values()):
                run.tick()
            self._begin_waiting()
            await asyncio.sleep(TICK_S)

    def pause(self, error: JournalError) -> None:
        """Decide nothing more, for it cannot be written down; go on telling what is known.

        Sites go on without a coordinator, and agents try to come back.
        """
        self._is_closed = True
        self._paused_because = str(error)
        self._sessions.close()
        for run in self._runs.values():
            run.tell_changed()

    def end_unwritten(self, error: JournalError) -> None:
        """End the runs that go on, by name: nothing that happens to them can be written down."""
        self._is_closed = True
        self._paused_because = str(error)
        for run in self._runs.values():
            run.end_unwritten(error)

    def _require_running(self) -> None:
        """Refuse what would have to be written down.

        Raises:
            StateConflictError: it cannot be.
        """
        if self._paused_because:
            raise StateConflictError(f"the coordinator is paused: {self._paused_because}")

    async def close(self) -> None:
        """End all sessions and emulators."""
        self._is_closed = True
        self._forget_passed_env()
        self._sessions.close()
        for run in self._runs.values():
            await run.close()

    # ------------------------------------------------------------ agents

    def join(self, hello: control_pb2.Hello, certificate: bytes = b"") -> Connection:
        """Admit an agent; its Welcome is the first message of the connection.

        `certificate` is what it has shown (PEM); empty without TLS.

        Raises:
            PermissionDeniedError: its certificate was revoked.
            ConfigMismatchError: it does not fit this coordinator.
            StaleGenerationError: the site has another agent.
            RemoteProtocolError: it says what cannot be.
        """
        if self._paused_because:
            raise PeerLostError(f"the coordinator is paused: {self._paused_because}")
        if hello.journal == self._journal.identity and hello.generation > self.generation:
            raise StaleGenerationError(
                f"this coordinator has generation {self.generation}, and site {hello.site} has "
                f"heard of {hello.generation}: a newer one has its journal"
            )
        if self._revocations is not None and self._revocations.has(certificate):
            raise PermissionDeniedError(f"site {hello.site}: {REVOKED}")
        session, goes_on = self._sessions.admit(hello)
        session.certificate = certificate
        connection = session.connect()
        welcome = control_pb2.Welcome(
            protocol=session.protocol,
            build=build(),
            generation=self.generation,
            lease_s=self.timeouts.lease_s,
            heartbeat_s=self.timeouts.heartbeat_s,
            session=session.id,
            received=session.numbered.received,
            journal=self._journal.identity,
            coordinator_within_s=self.timeouts.coordinator_s,
        )
        connection.put_first(control_pb2.CoordinatorMessage(welcome=welcome))
        silent_s = self._leases.silent_s(session.site, time.monotonic())
        self._leases.hear(session.site, time.monotonic())
        self._ended_agents.pop(session.site, None)
        if goes_on:
            log.info("site %s is back after %.1f s", session.site, silent_s)
            self._tell(session.site, run_events.SessionResumed(session.site, silent_s))
            return connection
        log.info("site %s joined from %s", session.site, session.host or "an unnamed host")
        self._tell_revocations(session)
        self._take_up(session, hello)
        self._tell_suspects(session.site, hello.run)
        return connection

    def _take_up(self, session: Session, hello: control_pb2.Hello) -> None:
        """Tell the run of an agent that this coordinator has not known, or not lately."""
        site, report = session.site, hello.run
        if report.run_id:
            self._stop_if_stale(session, report.run_id, report.generation)
        came = run_events.AgentCame(
            site,
            session.host,
            report.epoch,
            had_session=bool(hello.session),
            has_run=bool(report.run_id),
            but=self._stall_note(),
        )
        self._tell(site, came)

    def _tell_suspects(self, site: str, report: control_pb2.RunReport) -> None:
        """Take what a site thinks of others, of which this coordinator may not have heard."""
        run = self._runs.get(report.run_id)
        if run is not None and run.generation == report.generation:
            for each in report.suspects:
                run.handle(suspected_from(site, each))

    def broke(self, connection: Connection) -> None:
        """A connection is gone. Unless its agent has left, its lease goes on: it may come back."""
        session, why = connection.session, "its agent's connection broke"
        if session.is_leaving:
            self.leave(connection, "its agent ended the session")
        if not connection.is_newest or self._is_closed:
            return
        session.connection = None
        if session.site in self._gone_agents:
            self.leave(connection, "its agent ended")
        elif self._sessions.get(session.site) is session:
            log.info("site %s: %s", session.site, why)
            self._tell(session.site, run_events.SessionBroken(session.site, why))

    def leave(self, connection: Connection, why: str) -> None:
        """A session is over. If it was replaced or has expired, that is known already."""
        session = connection.session
        if session.connection not in (connection, None) or self._is_closed:
            return
        if self._sessions.remove(session):
            self._leases.drop(session.site)
            ended = self._gone_agents.pop(session.site, "")
            self._lost(session.site, ended or f"site {session.site}: {why}")

    def agent_ended(self, site: str, message: str, log_path: str) -> None:
        """An agent that this process started has ended, which may be before it ever joined."""
        if self._is_closed:
            return
        session = self._sessions.get(site)
        if session is None:
            ended = run_events.AgentEnded(site, message, log_path)
            self._ended_agents[site] = ended
            self._tell(site, ended)
        elif session.connection is None:
            self._sessions.remove(session)
            self._leases.drop(site)
            self._lost(site, message)
        else:  # What it said last has yet to be read.
            self._gone_agents[site] = message

    def receive(self, session: Session, message: control_pb2.AgentMessage) -> None:
        """Take a message of an agent.

        What it says of a run that is not going on is dropped, and that run is stopped there.

        Raises:
            RemoteProtocolError: an agent may not say that.
        """
        self._leases.hear(session.site, time.monotonic())
        kind = message.WhichOneof("kind")
        match kind:
            case "heartbeat":
                ack = control_pb2.HeartbeatAck(sequence=message.heartbeat.sequence)
                session.answer(control_pb2.CoordinatorMessage(heartbeat_ack=ack))
                self._note_certificates(session.site, message.heartbeat.certificates_left_s)
            case "leave":
                session.is_leaving = True
            case None | "hello":
                raise RemoteProtocolError(f"site {session.site}: a message of kind {kind}")
            case _:
                self._receive_of_run(session, kind, message)

    def _note_certificates(self, site: str | None, left_s: Mapping[str, float]) -> None:
        """Tell all runs when certificates of a site end, or the coordinator's own."""
        allowed = {f"{site}.{AGENT}", f"{site}.{GATEWAY}"} if site else {COORDINATOR}
        now_wall_s = time.time()
        for name in allowed.intersection(left_s):
            if not math.isfinite(left := left_s[name]):
                continue
            seen = run_events.CertificateSeen(site, name, now_wall_s + left, left)
            for run in list(self._runs.values()):
                run.handle(seen)

    def _look_for_revocations(self) -> None:
        """Put a new list of revoked certificates in force, or say why that cannot be."""
        revocations = self._revocations
        if revocations is None:
            return
        if revocations.look():
            log.info("a new list of revoked certificates is in force")
            self._record(EventKind.CERTIFICATES_REVOKED, {"list": revocations.text})
            for session in self._sessions.all():
                if revocations.has(session.certificate):
                    self._shut_out(session)
                else:
                    self._tell_revocations(session)
        if revocations.problem == self._told_problem:
            return
        self._told_problem = revocations.problem
        if not revocations.problem:
            return
        why = f"a list of revoked certificates is not used: {revocations.problem}"
        why += "; the one before stays in force" if revocations.text else ""
        log.warning("%s", why)
        self._record(EventKind.CERTIFICATES_LIST_REFUSED, {"why": why})
        for run in list(self._runs.values()):
            run.note(EventKind.CERTIFICATES_LIST_REFUSED, why)

    def _tell_revocations(self, session: Session) -> None:
        """Have an agent pass the list of revoked certificates on to the gateways of its run."""
        if self._revocations is not None and (text := self._revocations.text):
            revoked = control_pb2.Revoked(list=text)
            session.send(control_pb2.CoordinatorMessage(revoked=revoked))

    def _shut_out(self, session: Session) -> None:
        """End the session of an agent whose certificate was revoked, and its site's part of a run.

        A run that cannot do without the site loses it like any other.
        """
        site = session.site
        run = self._run_of(site)
        if run is not None and not run.has_ended:
            with contextlib.suppress(StateConflictError):
                run.drop(site, REVOKED)
        self._sessions.remove(session)
        self._leases.drop(site)
        session.close(PermissionDeniedError(f"site {site}: {REVOKED}"))
        self._lost(site, f"site {site}: {REVOKED}")

    def _receive_of_run(
        self, session: Session, kind: str, message: control_pb2.AgentMessage
    ) -> None:
        """Hand a run what a site says; every kind but the two of the session is about a run."""
        site, content = session.site, getattr(message, kind)
        try:
            run = self.fenced(content.run_id, content.generation)
        except StaleGenerationError:
            if kind != "ended":  # with that, nothing is left
                self._stop_if_stale(session, content.run_id, content.generation)
            return
        match kind:
            case "prepared":
                gateways = message.prepared.endpoints
                if (port := max((each.port for each in gateways), default=0)) > _MAX_PORT:
                    raise RemoteProtocolError(
                        f"site {site}: a gateway at port {port}: want at most {_MAX_PORT}"
                    )
                endpoints = (
                    run_events.Endpoint(site, each.gateway, each.host, each.port)
                    for each in gateways
                )
                run.handle(run_events.SitePrepared(site, tuple(endpoints)))
            case "running":
                run.handle(run_events.SiteRunning(site))
            case "done":
                last = message.done.round if message.done.HasField("round") else -1
                run.handle(run_events.SiteDone(site, last))
            case "ended":
                now_s = time.monotonic()
                failures = tuple(
                    failure_from(each, site, self._sites, now_s) for each in message.ended.failures
                )
                run.handle(run_events.SiteEnded(site, message.ended.succeeded, failures))
            case "metrics":
                run.add_metrics(site, message.metrics)
            case "digest":
                digest = message.digest
                tensors, names = tuple(digest.tensors), tuple(digest.names)
                round_ = digest.round if digest.HasField("round") else -1
                run.handle(
                    run_events.DigestReported(
                        site, digest.rank, digest.step, digest.combined, tensors, names, round_
                    )
                )
            case "settled":
                run.handle(paused_from(site, message.settled))
            case "resumed":
                told = message.resumed
                run.handle(run_events.EpochEntered(site, told.epoch, told.round, told.behind))
            case "suspect":
                run.handle(suspected_from(site, message.suspect))
            case "reached":
                run.handle(run_events.Reached(site, message.reached.site))
            case "stall":
                run.handle(stall_from(site, message.stall))

    def fenced(self, run_id: str, generation: int) -> ActiveRun:
        """Return the run that a message is about, if it goes on or was the last at its sites.

        Raises:
            StaleGenerationError: it does not.
        """
        run = self._runs.get(run_id)
        if run is None or generation != run.generation:
            latest = self.latest
            current = f"{latest.run_id!r}, generation {latest.generation}" if latest else "none"
            raise StaleGenerationError(
                f"run {run_id!r}, generation {generation} has ended here; "
                f"the current run is {current}"
            )
        return run

    # ------------------------------------------------------------ operators

    def is_known(self, run_id: str) -> bool:
        """Whether there is a run of that name already: then a submission asks for nothing new.

        Raises:
            StateConflictError: this coordinator is paused.
            RemoteProtocolError: the name is none.
        """
        self._require_running()
        if not is_folder_name(run_id):
            raise RemoteProtocolError(
                f"run id {run_id[:80]!r}: want letters, digits, '.', '_' and '-', at most 64"
            )
        return run_id in self._journal.run_ids()

    def machines(self) -> dict[str, AgentMachine]:
        """Return the machines of sites, as far as they are known by now."""
        if self._own_cores is None:
            return self._sessions.machines()
        here = AgentMachine(host="", usable_cores=self._own_cores, has_all_nodes=True)
        return dict.fromkeys(self._sites, here)

    def decide(
        self, request: control_pb2.SubmitRequest, machines: Mapping[str, AgentMachine]
    ) -> Submission:
        """Return what a submission comes to. For any thread: with many sites it takes seconds.

        `machines` are those that `machines` returns.

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
        folder = self._runs_folder / run_id
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
        self._require_running()
        run_id = self.find(run_id)
        if self._queue.remove(run_id):
            self._end_unbegun(run_id, RunState.CANCELLED, "CANCELLED", why)
        elif run_id in self._runs:
            self._runs[run_id].handle(run_events.CancelRequested(why))
        return self.message(run_id)

    def drop_site(self, run_id: str, site: str) -> control_pb2.Run:
        """Have a run go on without a site.

        Raises:
            NotFoundError: there is no such run.
            StateConflictError: there is no such site, or it cannot be done without.
        """
        self._going_on(run_id, site).drop(site)
        return self.message(self.find(run_id))

    def add_site(self, run_id: str, site: str) -> control_pb2.Run:
        """Have a site take part in a run again.

        Raises:
            NotFoundError: there is no such run.
            StateConflictError: there is no such site, or it takes part, or cannot.
        """
        self._going_on(run_id, site).add(site)
        return self.message(self.find(run_id))

    def _going_on(self, run_id: str, site: str) -> ActiveRun:
        self._require_running()
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
        for site, host in self._sessions.hosts().items():
            if site in run.view.sites:
                run.handle(run_events.SiteJoined(site, host))
        for site, ended in self._ended_agents.items():
            if site in run.view.sites:
                run.handle(ended)

    def _put(self, run: ActiveRun) -> None:
        """Have a run take the place of those that have ended at its sites."""
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

    def _forget_passed_env(self) -> None:
        """Remove what runs passed on to their ranks that have ended."""
        going = {run_id for run_id, run in self._runs.items() if not run.has_ended}
        self._passed_env.keep_only(going | self._queue.run_ids)

    def _tell_queue_changed(self) -> None:
        self._queue_changed.set()
        self._queue_changed = asyncio.Event()

    # ------------------------------------------------------------ what is known of runs

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
            if self._paused_because and not run.has_ended:
                told.notes.append(
                    f"the coordinator is paused: {self._paused_because}; its sites go on training "
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

    # ------------------------------------------------------------ inside

    def _stop_if_stale(self, session: Session, run_id: str, generation: int) -> None:
        """Have an agent stop a run that is not going on here, once."""
        named = (run_id, generation)
        run = self._runs.get(run_id)
        is_going_on = run is not None and run.generation == generation and not run.has_ended
        if is_going_on or named in session.stopped:
            return
        session.stopped.add(named)
        reason = f"run {named[0]}, generation {named[1]} is not going on"
        log.info("site %s: %s: it is stopped there", session.site, reason)
        stop = control_pb2.Stop(
            run_id=named[0],
            generation=named[1],
            reason=reason,
            grace_s=self.timeouts.stop_grace_s,
        )
        session.send(control_pb2.CoordinatorMessage(stop=stop))

    def _expire_leases(self) -> None:
        for site, silent_s in self._leases.expired(time.monotonic()).items():
            session = self._sessions.get(site)
            self._leases.drop(site)
            if session is None:
                missed = run_events.AgentMissed(site, silent_s, self._stall_note())
                self._tell(site, missed)
                continue
            self._sessions.remove(session)
            message = f"site {site}: its agent was silent for {silent_s:.1f} s"
            session.close(StaleGenerationError(f"{message}: its lease has ended"))
            self._lost(site, message, silent_s)

    def _lost(self, site: str, message: str, silent_s: float = 0.0) -> None:
        message += self._stall_note()
        log.info("%s", message)
        self._tell(site, run_events.SiteLost(site, message, silent_s))

    def _stall_note(self) -> str:
        """Return what may excuse an agent that is given up."""
        stood_still_s = self._leases.stood_still_s(time.monotonic())
        if stood_still_s <= 0:
            return ""
        return f", after this coordinator had itself stood still for {stood_still_s:.1f} s"

    def _run_of(self, site: str) -> ActiveRun | None:
        """Return the run that goes on at a site, or was the last there."""
        return next((run for run in self._runs.values() if site in run.view.sites), None)

    def _tell(self, site: str, event: run_events.Event) -> None:
        if (run := self._run_of(site)) is not None:
            run.handle(event)

    def _send(self, site: str, message: control_pb2.CoordinatorMessage) -> None:
        session = self._sessions.get(site)
        if session is not None:  # its loss has been told, or will be
            if message.HasField("prepare") and self._revocations is not None:
                message.prepare.revoked = self._revocations.text
            session.send(message)

    def refused(self, why: str) -> None:
        """Write down that a caller was refused for who it is; after REFUSALS of them, no more."""
        self._num_refused += 1
        if self._num_refused <= REFUSALS:
            log.warning("refused: %s", why)
            more = {"last_recorded": True} if self._num_refused == REFUSALS else {}
            self._record(EventKind.CALLER_REFUSED, {"why": why, **more})

    def offer_join(self, request: control_pb2.OfferJoinRequest) -> None:
        """Keep what a join token is good for.

        Raises:
            RemoteProtocolError: it is no offer, or for no site of this deployment.
            OSError: the disk refuses.
        """
        if request.site not in self._sites:
            raise RemoteProtocolError(f"there is no site {request.site[:80]!r}")
        ends_wall_s = request.ends_wall_s
        self._joins.offer(request.holder, request.site, ends_wall_s, request.sealed)
        detail = {"site": request.site, "token": request.holder, "ends_wall_s": ends_wall_s}
        self._record(EventKind.JOIN_OFFERED, detail)

    def use_join(self, holder: str, site: str) -> bytes:
        """Return what a join token is good for, and never again.

        Raises:
            PermissionDeniedError: it was used before, has ended, or was never offered.
            OSError: the disk refuses.
        """
        try:
            sealed = self._joins.find(holder, site)
        except PermissionDeniedError as error:
            self.refused(str(error))
            raise
        # In this order: a token is good until it is known to have been used.
        self._record(EventKind.JOIN_USED, {"site": site, "token": holder})
        self._joins.forget(holder)
        return sealed

    def _record(self, kind: EventKind, detail: dict[str, Any]) -> None:
        self._journal.append(kind, wall_s=time.time(), generation=self.generation, detail=detail)


def _kept(
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
