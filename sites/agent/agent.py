"""The agent's life: join, serve one run after the other, stop the site when the session is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from isthmus.protos.control.v1.control_pb2 import (
    AgentMessage,
    CancelSettle,
    CoordinatorMessage,
    Hello,
    Prepare,
    Release,
    Resume,
    RunReport,
    Settle,
    SiteEnded,
    Start,
    Stop,
)
from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import Failure
from isthmus.protos.identities import AGENT, GATEWAY
from isthmus.protos.save_time import SAVE_WITHIN_S
from isthmus.protos.security import Security, control_security, exchange_security
from isthmus.sites.agent.coordinator_channel import CoordinatorChannel
from isthmus.sites.agent.known_coordinator import KnownCoordinator
from isthmus.sites.agent.run import SiteRun
from isthmus.sites.agent.session import Dialler, Session, SessionLostError, channel_options
from isthmus.sites.agent.site_processes import Place
from isthmus.topology.spec.timeouts import Timeouts

_LEAVE_S = 2.0
"""Time for the coordinator to receive the last messages."""

_JOIN_WITHIN_S = 60.0
_AFTER_LEASE_S = 10.0
"""Margin beyond the previous agent's lease: time to the next attempt to join, and a reserve."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """The coordinator's address, and this agent's introduction to it."""

    coordinator: str
    """host:port."""
    hello: Hello
    timeouts: Timeouts
    join_within_s: float
    """How long the agent keeps dialling, at its start and after it has lost an idle session."""


def join_within_s(lease_s: float) -> float:
    """Return how long an agent keeps dialling: longer than a previous agent holds the site."""
    return max(_JOIN_WITHIN_S, lease_s + _AFTER_LEASE_S)


class Agent:
    """The agent of a site: joins the coordinator and serves its runs."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        place: Place,
        save_within_s: float = SAVE_WITHIN_S,
    ) -> None:
        """Start nothing yet. A checkpoint after SIGTERM may take `save_within_s`."""
        self._settings = settings
        self._place = place
        self._save_within_s = save_within_s
        self._session: Session | None = None
        self._run: SiteRun | None = None
        self._executing: asyncio.Task[None] | None = None
        self._generation = 0
        """Generation of the latest run prepared here; it may be older than the coordinator."""
        self._own: Mapping[str, Security] = {}
        """What the site's processes show, by the names of certificates."""
        self._alone_s = 0.0
        """How long the latest run, or an idle agent, goes on without a coordinator."""

    async def serve(self) -> int:
        """Serve runs until SIGTERM or SIGINT; return the exit status.

        0 if the agent was idle, 128 plus the signal's number if a run was stopped for it.

        Raises:
            UnreachableError: no coordinator in time.
            RefusedError: the coordinator refused this agent for good.
            SessionLostError: a run was ended because no coordinator came back in time.
        """
        settings = self._settings
        options = channel_options(settings.timeouts)
        known = await asyncio.to_thread(KnownCoordinator, self._place.state, self._place.site)
        site = self._place.site
        security = control_security(f"{site}.{AGENT}")
        self._own = {f"{site}.{AGENT}": security, f"{site}.{GATEWAY}": exchange_security(site)}
        channel = CoordinatorChannel(security, settings.coordinator, options)
        watching = asyncio.create_task(security.watch(), name="certificate")
        try:
            dialler = Dialler(channel, settings.hello, known, settings.timeouts, self._report_run)
            with _signals() as signalled:
                while not signalled.done():
                    if await self._serve_once(dialler, signalled):
                        break
        finally:
            watching.cancel()
            await channel.close()
        assert signalled.done(), "the session goes on until then"
        signum = signalled.result()
        return 128 + signum if self._run is not None else 0

    async def _serve_once(
        self, dialler: Dialler, signalled: asyncio.Future[signal.Signals]
    ) -> bool:
        """Serve one session; True when a signal ended it, False to join again."""
        session = await self._join(dialler, signalled)
        if session is None:
            return True
        self._session = session
        serving = asyncio.create_task(session.serve(self._handle), name="session")
        try:
            while not signalled.done() and not serving.done():
                waits: list[asyncio.Future[Any]] = [signalled, serving]
                if self._executing is not None:
                    waits.append(self._executing)
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                self._forget_ended_run()
            if signalled.done():
                await self._stop_for(signalled.result())
                session.outbox.end()
                await asyncio.wait([serving], timeout=_LEAVE_S)
                return True
            return await self._fence(serving)
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            await self._end_run()

    async def _join(
        self, dialler: Dialler, signalled: asyncio.Future[signal.Signals]
    ) -> Session | None:
        """Open a session; None when a signal came first."""
        deadline_s = time.monotonic() + self._settings.join_within_s
        opening = asyncio.create_task(dialler.dial(deadline_s))
        waits: list[asyncio.Future[Any]] = [opening, signalled]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            await asyncio.wait([opening])
            return None
        call, welcome = opening.result()
        log.info("joined, generation %d", welcome.generation)
        return Session(call, welcome, dialler, self._patience_s, self._certificates_left_s)

    def _patience_s(self) -> float:
        """Return for how long this site goes on without a coordinator."""
        assert self._session is not None
        welcome = self._session.welcome
        if self._run is not None:
            self._alone_s = self._run.coordinator_s
        elif not self._session.outbox.numbered:
            self._alone_s = welcome.coordinator_within_s  # the run's end has been reported
        if any(left_s < 0 for left_s in self._certificates_left_s().values()):
            return math.inf  # until it is renewed
        return max(welcome.lease_s, self._alone_s)

    def _certificates_left_s(self) -> dict[str, float]:
        """Return until when the site's certificates are valid, by name."""
        found = {name: security.left_s() for name, security in self._own.items()}
        return {name: left_s for name, left_s in found.items() if left_s is not None}

    def _report_run(self) -> RunReport | None:
        """Return a report of the run in progress for a coordinator; None: no run."""
        if self._run is None:
            return None
        return self._run.report()

    async def _fence(self, serving: asyncio.Task[None]) -> bool:
        """End the run after the loss of the session, and all its time without a coordinator.

        Raises:
            IsthmusError: there was a run, or the coordinator refused this agent for good.
        """
        error = serving.exception()
        assert error is not None, "a session ends with an error"
        log.warning("session lost: %s", error)
        if self._run is None and isinstance(error, SessionLostError):
            return False
        if self._run is None or not isinstance(error, IsthmusError):
            raise error
        self._run.stop(self._settings.timeouts.stop_grace_s)
        await self._end_run()
        raise error

    async def _stop_for(self, signum: signal.Signals) -> None:
        if self._run is not None:
            why_not = await self._run.save(self._save_within_s)
            message = f"the agent of site {self._place.site} was stopped by {signum.name}"
            if why_not:
                message += f"; no checkpoint: {why_not}"
            self._run.fail(
                Failure(
                    code="SITE_LOST",
                    message=message,
                    at_s=time.monotonic(),
                    site=self._place.site,
                )
            )
            if self._executing is not None:
                await asyncio.wait([self._executing])

    async def _end_run(self) -> None:
        """Stop the run if that has not happened, and wait for its end."""
        if self._executing is not None:
            assert self._run is not None
            self._run.stop(0.0)
            executing, self._executing = self._executing, None
            await executing

    def _forget_ended_run(self) -> None:
        """Forget a run that has ended; raise an error of the agent itself."""
        if self._executing is not None and self._executing.done():
            executing, self._executing, self._run = self._executing, None, None
            executing.result()

    def _handle(self, message: CoordinatorMessage) -> None:
        match message.WhichOneof("kind"):
            case "prepare":
                self._prepare(message.prepare)
            case "start":
                if (run := self._run_of(message.start)) is not None:
                    run.start(message.start.endpoints)
            case "stop":
                self._stop(message.stop)
            case "settle":
                if (run := self._run_of(message.settle)) is not None:
                    run.settle(message.settle)
            case "resume":
                if (run := self._run_of(message.resume)) is not None:
                    run.resume(message.resume)
            case "cancel_settle":
                if (run := self._run_of(message.cancel_settle)) is not None:
                    run.cancel_settle(message.cancel_settle)
            case "revoked":
                self._take_revoked(message.revoked.list)
            case "release":
                if (run := self._run_of(message.release)) is not None:
                    run.release()
            case other:
                log.warning("the coordinator sent %s: ignored", other or "something newer")

    def _prepare(self, prepare: Prepare) -> None:
        assert self._session is not None
        self._forget_ended_run()
        if self._run is not None:
            if not self._run.is_for(prepare.run_id, prepare.generation):
                self._refuse(prepare, "REFUSED", f"run {self._run.run_id} is going on here")
        elif prepare.generation < self._generation:
            why = f"it is over: generation {self._generation} has begun"
            self._refuse(prepare, "STALE_GENERATION", why)
        else:
            self._generation = prepare.generation
            self._run = SiteRun(prepare, self._place, self._session)
            self._executing = asyncio.create_task(self._run.execute(), name=prepare.run_id)

    def _take_revoked(self, revoked: str) -> None:
        """Pass a list of revoked certificates on to the run's gateways, if it can be believed."""
        try:
            self._own[f"{self._place.site}.{AGENT}"].take_revoked(revoked)
        except IsthmusError as error:
            log.warning("a list of revoked certificates is not used: %s", error)
            if self._run is not None:
                self._run.tell_trouble(f"a list of revoked certificates is not used: {error}")
        else:
            if self._run is not None:
                self._run.take_revoked(revoked)

    def _run_of(self, message: Start | Settle | Resume | CancelSettle | Release) -> SiteRun | None:
        """Return the run that a message is about; None if it is not prepared here."""
        run = self._run
        if run is not None and run.is_for(message.run_id, message.generation):
            return run
        kind, run_id = type(message).__name__, message.run_id
        log.warning("%s for run %s, which is not prepared here: ignored", kind, run_id)
        return None

    def _stop(self, stop: Stop) -> None:
        if self._run is not None and self._run.is_for(stop.run_id, stop.generation):
            log.info("stopping run %s: %s", stop.run_id, stop.reason)
            self._run.stop(max(0.0, stop.grace_s))
        else:
            # The run has ended, or never came here: there is nothing to stop.
            self._put_ended(SiteEnded(run_id=stop.run_id, generation=stop.generation))

    def _refuse(self, prepare: Prepare, code: str, message: str) -> None:
        failure = Failure(code=code, message=message, site=self._place.site)
        self._put_ended(
            SiteEnded(
                run_id=prepare.run_id,
                generation=prepare.generation,
                failures=[failure.to_message()],
            )
        )

    def _put_ended(self, ended: SiteEnded) -> None:
        assert self._session is not None
        self._session.outbox.put(AgentMessage(ended=ended))


@contextmanager
def _signals() -> Iterator[asyncio.Future[signal.Signals]]:
    """Yield a future that the first SIGTERM or SIGINT completes."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[signal.Signals] = loop.create_future()

    def note(signum: signal.Signals) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            signalled.set_result(signum)

    watched = (signal.SIGTERM, signal.SIGINT)
    for signum in watched:
        loop.add_signal_handler(signum, note, signum)
    try:
        yield signalled
    finally:
        for signum in watched:
            loop.remove_signal_handler(signum)
