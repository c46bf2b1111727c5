"""A simulated site's agent: what it is told, what becomes of its processes, what it has to tell.

Messages are numbered and kept until the coordinator has acknowledged them, as the product's are
(protos/numbered.py): where a session begins anew, they are sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.run_events import (
    Endpoint,
    Event,
    RoundBegun,
    SendCancel,
    SendPause,
    SendPrepare,
    SendRelease,
    SendResume,
    SendStart,
    SendStop,
    SiteDone,
    SiteEnded,
    SitePaused,
    SitePrepared,
    SiteRunning,
)
from isthmus.protos.failure import Failure
from isthmus.protos.numbered import Numbered
from tests.sim.site import Report, SimSite

Told = SendPrepare | SendStart | SendStop | SendRelease | SendPause | SendResume | SendCancel


class Stage(Enum):
    """How far the run has got at a site."""

    IDLE = auto()
    """No process of it is there."""
    PREPARING = auto()
    LISTENING = auto()
    STARTING = auto()
    RUNNING = auto()
    DONE = auto()
    """Its ranks have ended well, and its gateways wait."""
    ENDING = auto()


@dataclass(slots=True)
class Around:
    """What an agent can do beyond itself."""

    now_s: Callable[[], float]
    at: Callable[..., None]
    """Do something later."""
    uniform: Callable[[float, float], float]
    transmit: Callable[[SimAgent, int, Event], None]
    """Send a message, in the order of numbers."""
    new_site: Callable[[str, bool], SimSite]
    """Starts processes; the second says whether they come back to a run that goes on."""
    on_settled: Callable[[str, Report], None]
    mutant: str = ""


@dataclass(slots=True)
class SimAgent:
    """One site's agent, from one start of it to the next."""

    name: str
    around: Around
    site: SimSite
    """The latest processes; before the first Prepare none of them does anything."""
    incarnation: int = 0
    is_alive: bool = True
    is_connected: bool = False
    session: int = 0
    """The latest that it has had; 0: none since it was started."""
    generation: int = 0
    """The highest of any coordinator that it has heard."""
    stage: Stage = Stage.IDLE
    is_released: bool = False
    outbox: Numbered[Event] = field(default_factory=Numbered)
    _num_sent: int = 0
    """How many of its messages have left in this session."""

    # ------------------------------------------------------------ messages

    def put(self, event: Event) -> None:
        """Tell the coordinator, now or as soon as there is one."""
        self.outbox.add(event)
        if self.is_connected:
            self.connect()

    def begin_session(self, number: int, generation: int) -> None:
        """Tell a coordinator that knows nothing of an earlier session all that none has taken."""
        self.session = number
        self.generation = max(self.generation, generation)
        self.outbox.begin_anew()
        self._num_sent = 0
        self.connect()

    def connect(self) -> None:
        """Send what waits; what is on the way will come, as long as the session goes on."""
        self.is_connected = True
        while (waiting := self.outbox.after(self._num_sent)) is not None:
            self._num_sent += 1
            self.around.transmit(self, self._num_sent, waiting)

    def hear(self, message: Told) -> None:
        """Do as the coordinator says."""
        match message:
            case SendPrepare() if self.stage is Stage.IDLE:
                self.site = self.around.new_site(self.name, message.returns)
                self.stage, self.is_released = Stage.PREPARING, False
                self._later(0.1, 0.6, self._listen)
            case SendStart() if self.stage is Stage.LISTENING:
                self.stage = Stage.STARTING
                self._later(0.1, 0.6, self._run)
            case SendStop() if self.stage is Stage.IDLE:
                self.put(SiteEnded(self.name, succeeded=False))
            case SendStop() if self.stage is not Stage.ENDING:
                self.end(succeeded=False, within_s=0.6)
            case SendRelease():
                self.is_released = True
                if self.stage is Stage.DONE:
                    self.end(succeeded=True, within_s=0.3)
            case SendPause() if self._has_run:
                report = self.site.settle(message.epoch, is_redo=message.is_redo)
                if report is not None:
                    self.around.on_settled(self.name, report)
                    self.put(_settled(self.name, report))
            case SendResume() if self._has_run:
                self.site.resume(message.epoch, message.handovers, message.rejoins)
                for name in self.site.forget_suspects(message.epoch, message.rejoins):
                    self.put(run_events.Reached(self.name, name))
            case SendCancel() if self._has_run:
                self.site.cancel(message.epoch)

    # ------------------------------------------------------------ processes

    @property
    def has_run(self) -> bool:
        """Whether a run goes on here."""
        return self.stage is not Stage.IDLE

    @property
    def _has_run(self) -> bool:
        return self.stage not in {Stage.IDLE, Stage.PREPARING, Stage.ENDING}

    def look_whether_done(self) -> None:
        """The ranks may be done with the job: then the gateways wait for all others'."""
        site = self.site
        is_done = self.stage is Stage.RUNNING and site.completed >= site.outside.last_round(
            self.name
        )
        if not is_done or not site.is_alive or site.is_fenced:
            return
        if self.around.mutant == "ends_at_once":
            self.end(succeeded=True, within_s=0.0)
            return
        self.stage = Stage.DONE
        self.put(SiteDone(self.name, site.round))
        if self.is_released:
            self.end(succeeded=True, within_s=0.3)

    def tell_round(self) -> None:
        """Say how far the ranks have got."""
        if self._has_run and self.site.is_alive:
            self.put(RoundBegun(self.name, max(self.site.round, 0)))

    def end(self, *, succeeded: bool, within_s: float, failure: str = "") -> None:
        """End the processes, and tell it once none is left."""
        self.site.is_fenced, self.stage = True, Stage.ENDING
        at_s = self.around.now_s()
        failed = Failure(code=failure, message="it has ended", at_s=at_s, site=self.name)
        ended = SiteEnded(self.name, succeeded, (failed,) if failure else ())
        self._later(0.0, within_s, lambda: self._ended(ended))

    def die(self) -> None:
        """The agent ends, and all processes of the site with it."""
        self.site.is_alive = self.is_alive = self.is_connected = False

    def _listen(self) -> None:
        if self.stage is Stage.PREPARING:
            self.stage = Stage.LISTENING
            self.put(SitePrepared(self.name, (Endpoint(self.name, 0, self.name, 1),)))

    def _run(self) -> None:
        if self.stage is Stage.STARTING and self.site.is_alive:
            self.stage, self.site.has_ranks = Stage.RUNNING, True
            self.put(SiteRunning(self.name))
            self.put(run_events.StateOffered(self.name))
            self.site.begin_if_due()

    def _ended(self, ended: SiteEnded) -> None:
        self.stage, self.site.has_ended = Stage.IDLE, True
        self.put(ended)

    def _later(self, from_s: float, to_s: float, do: Callable[[], None]) -> None:
        """Do something after a while, unless these processes, or the agent, are gone by then."""
        site, incarnation = self.site, self.incarnation

        def act() -> None:
            if self.is_alive and self.site is site and self.incarnation == incarnation:
                do()

        self.around.at(self.around.uniform(from_s, to_s), act)


def _settled(name: str, report: Report) -> SitePaused:
    return SitePaused(
        site=name,
        epoch=report.epoch,
        round=report.round,
        finished=report.finished,
        chain=report.chain,
        chain_round=report.chain_round,
    )
