"""A coordinator's dealings with its agents, without gRPC: sessions, leases, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.orchestrator.coordinator.active_run import ActiveRun
from isthmus.orchestrator.coordinator.control_messages import failure_from, stall_from
from isthmus.orchestrator.coordinator.joins import Joins
from isthmus.orchestrator.coordinator.journal import Journal, JournalError
from isthmus.orchestrator.coordinator.revocations import Revocations
from isthmus.orchestrator.coordinator.run_epochs import paused_from, suspected_from
from isthmus.orchestrator.coordinator.runs import Runs
from isthmus.orchestrator.coordinator.sessions import Connection, Session, Sessions
from isthmus.orchestrator.coordinator.wan import FaultPlan
from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.leases import Leases
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import (
    PeerLostError,
    PermissionDeniedError,
    RemoteProtocolError,
    StaleGenerationError,
    StateConflictError,
)
from isthmus.protos.identities import AGENT, COORDINATOR, GATEWAY
from isthmus.protos.mutual_tls import TlsSecurity
from isthmus.protos.security import Security
from isthmus.protos.versions import build
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
_MAX_PORT = 65535

log = logging.getLogger(__name__)


class Control:
    """A coordinator, for one event loop: its agents, and with them its `runs`.

    Leases and deadlines count while `run` runs.
    """

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
        """Raise the generation, and resume what an earlier coordinator left unfinished.

        `journal` stays the caller's, who closes it after the last call. `own_cores` are those of
        this machine, where all sites are on it; None: each agent tells its own.
        `security` is the coordinator's own; None: nobody shows a certificate.

        Raises:
            RevocationError: there is a list of revoked certificates, and it cannot be used. Nothing
                was written.
            UnreadableRunError: agents may hold a run that cannot be resumed. Nothing was written.
            JournalError: the journal cannot be written.
        """
        self.timeouts = Timeouts.derive(topology.failure)
        self.state = journal.path.parent.absolute()
        self._security = security if isinstance(security, TlsSecurity) else None
        self._revocations = Revocations(self._security, self.state) if self._security else None
        self._told_problem = ""
        """What was said last of a list of revoked certificates that cannot be used."""
        self._sites = tuple(site.name for site in topology.sites)
        own_hash = topology_hash(topology)
        self._sessions = Sessions(self._sites, own_hash)
        self._own_cores = own_cores
        self._leases = Leases(self.timeouts.lease_s)
        self._ended_agents: dict[str, run_events.AgentEnded] = {}
        self._gone_agents: dict[str, str] = {}
        """Agents of this process that have ended, and whose connection has not broken yet."""
        self._is_closed = False
        self._num_refused = 0
        self._joins = Joins(self.state)
        self._journal = journal
        self._checked_s = time.monotonic()
        self.runs = Runs(
            journal,
            runs,
            own_hash,
            send=self._send,
            introduce=self._introduce,
            faults=faults,
            agents_outlive=agents_outlive,
        )

    async def run(self) -> None:
        """Let time pass. Never returns.

        Agents that an earlier coordinator knew have a whole lease from now on: what was read of
        their runs may have taken longer than one.

        Raises:
            JournalError: what happens can no longer be written down.
        """
        for awaited in [site for run in self.runs.active() for site in run.awaited]:
            self._leases.hear(awaited, time.monotonic())
        while True:
            if time.monotonic() - self._checked_s >= CHECK_S:
                self._checked_s = time.monotonic()
                self._journal.check_place()
                if self._security and (own_s := self._security.left_s()) is not None:
                    self._note_certificates(None, {COORDINATOR: own_s})
                self._look_for_revocations()
                self.runs.forget_passed_env()
            self._expire_leases()
            self.runs.tick()
            await asyncio.sleep(TICK_S)

    def pause(self, error: JournalError) -> None:
        """Decide nothing more, for it cannot be written down; go on telling what is known.

        Sites go on without a coordinator, and agents try to come back.
        """
        self._is_closed = True
        self._sessions.close()
        self.runs.pause(str(error))

    def end_unwritten(self, error: JournalError) -> None:
        """End the runs that go on, by name: nothing that happens to them can be written down."""
        self._is_closed = True
        self.runs.end_unwritten(error)

    async def close(self) -> None:
        """End all sessions and emulators."""
        self._is_closed = True
        self._sessions.close()
        await self.runs.close()

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
        if self.runs.paused_because:
            raise PeerLostError(f"the coordinator is paused: {self.runs.paused_because}")
        if hello.journal == self._journal.identity and hello.generation > self.runs.generation:
            raise StaleGenerationError(
                f"this coordinator has generation {self.runs.generation}, and site {hello.site} has "
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
            generation=self.runs.generation,
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
            self.runs.handle(session.site, run_events.SessionResumed(session.site, silent_s))
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
        self.runs.handle(site, came)

    def _tell_suspects(self, site: str, report: control_pb2.RunReport) -> None:
        """Take what a site thinks of others, of which this coordinator may not have heard."""
        if (run := self.runs.get(report.run_id, report.generation)) is not None:
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
            self.runs.handle(session.site, run_events.SessionBroken(session.site, why))

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
            self.runs.handle(site, ended)
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
            for run in self.runs.active():
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
        for run in self.runs.active():
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
        run = self.runs.at(site)
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
            run = self.runs.fenced(content.run_id, content.generation)
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

    def machines(self) -> dict[str, AgentMachine]:
        """Return the machines of sites, as far as they are known by now."""
        if self._own_cores is None:
            return self._sessions.machines()
        here = AgentMachine(host="", usable_cores=self._own_cores, has_all_nodes=True)
        return dict.fromkeys(self._sites, here)

    # ------------------------------------------------------------ inside

    def _stop_if_stale(self, session: Session, run_id: str, generation: int) -> None:
        """Have an agent stop a run that is not going on here, once."""
        named = (run_id, generation)
        run = self.runs.get(run_id, generation)
        is_going_on = run is not None and not run.has_ended
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
                self.runs.handle(site, missed)
                continue
            self._sessions.remove(session)
            message = f"site {site}: its agent was silent for {silent_s:.1f} s"
            session.close(StaleGenerationError(f"{message}: its lease has ended"))
            self._lost(site, message, silent_s)

    def _lost(self, site: str, message: str, silent_s: float = 0.0) -> None:
        message += self._stall_note()
        log.info("%s", message)
        self.runs.handle(site, run_events.SiteLost(site, message, silent_s))

    def _stall_note(self) -> str:
        """Return what may excuse an agent that is given up."""
        stood_still_s = self._leases.stood_still_s(time.monotonic())
        if stood_still_s <= 0:
            return ""
        return f", after this coordinator had itself stood still for {stood_still_s:.1f} s"

    def _introduce(self, run: ActiveRun) -> None:
        """Tell a run that begins which of its sites have an agent, and whose have ended."""
        for site, host in self._sessions.hosts().items():
            if site in run.view.sites:
                run.handle(run_events.SiteJoined(site, host))
        for site, ended in self._ended_agents.items():
            if site in run.view.sites:
                run.handle(ended)

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
        self._journal.append(
            kind, wall_s=time.time(), generation=self.runs.generation, detail=detail
        )
