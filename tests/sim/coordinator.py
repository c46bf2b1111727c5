"""The simulated coordinator: the product's decisions, a journal that may fail, and sessions.

What is decided about the run is all the product's (orchestrator/core/run.py), and so are the
leases (leases.py). Sessions are as orchestrator/coordinator/control.py has them, without the wire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epochs import EpochRules, Epochs
from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent
from isthmus.orchestrator.core.leases import Leases
from isthmus.orchestrator.core.run import Run, RunSettings
from isthmus.orchestrator.core.run_end import LOSES_SITE, SCRIPT_FAILED, Verdict
from isthmus.orchestrator.core.run_events import Action, Event, RecordEvent, RunState, SendStop
from isthmus.topology.spec.epoch import Epoch
from tests.fakes.run_worlds import read_again
from tests.sim.agent import SimAgent, Told
from tests.sim.plans import LIMITS, all_pairs, followed_plan, links_of, world
from tests.sim.site import BrokenPromiseError

FORGOTTEN = {
    "generation_not_persisted": {"epoch.proposed", "epoch.entering", "epoch.cancelled"},
    "drop_forgotten": {"site.drop_requested"},
    "done_forgotten": {"site.done"},
}
"""The kinds of record that a coordinator overlooks in the journal, by mutant."""


class _ReleasesEarly(Run):
    """Lets all gateways go with the first site that is done."""

    def _release_if_done(self) -> Iterator[Action]:
        if self.is_going_on and not self._departures.is_released and self.has_done_sites:
            yield from self._departures.release()


class _StopsFollowers(Run):
    """Does not know, after a restart, who catches up."""

    def resume(self, now_s: float, verified_steps: int = 0) -> Iterator[Action]:
        for site in self.members.values():
            site.become_outside_again()
        return super().resume(now_s, verified_steps)


class _GoesOnWithoutScript(Run):
    """Takes a script's error for an outage of its site."""

    def handle(self, event: Event, now_s: float) -> Iterator[Action]:
        self._failures._losable = LOSES_SITE | {SCRIPT_FAILED}
        return super().handle(event, now_s)


class _LosesBeforeFirstStep(Run):
    """Goes on without a site before all have taken a step."""

    def handle(self, event: Event, now_s: float) -> Iterator[Action]:
        self._record.progress.may_lose = True
        return super().handle(event, now_s)


class _ForgetsLosses(Run):
    """Calls any end a success in which those were well who were left."""

    def _finish(self, verdict: Verdict, now_s: float) -> Iterator[Action]:
        is_success = verdict.state is RunState.SUCCEEDED
        return super()._finish(Verdict(RunState.SUCCEEDED) if is_success else verdict, now_s)


class _ChecksNoChains(Run):
    """Goes on with sites that have had other results."""

    def _begin_epochs(self) -> Epochs:
        epochs = super()._begin_epochs()
        epochs._chains.take = lambda *_: True  # type: ignore[method-assign]
        return epochs


class _SeesNoEarlyEnd(Run):
    """Waits for a site whose script ends before the others'."""

    def _begin_epochs(self) -> Epochs:
        epochs = super()._begin_epochs()
        epochs._presence.leave_early_out = lambda now_s: []  # type: ignore[method-assign]
        return epochs


BROKEN = {
    "script_goes_on": _GoesOnWithoutScript,
    "lost_early": _LosesBeforeFirstStep,
    "losses_forgotten": _ForgetsLosses,
    "released_early": _ReleasesEarly,
    "follower_stopped": _StopsFollowers,
    "no_chain_check": _ChecksNoChains,
    "early_end_unseen": _SeesNoEarlyEnd,
}
"""The faulty machine that takes the place of the run's, by mutant."""


class CoordinatorDiedError(Exception):
    """The coordinator was killed while it handled an event."""


@dataclass(slots=True)
class FakeJournal:
    """What is on disk: it outlives coordinators."""

    on_kept: Callable[[RecordEvent], None]
    generation: int = 0
    records: list[tuple[float, RecordEvent]] = field(default_factory=list)
    """What was written, and when."""
    dies_at: str = ""
    """What the next record comes to: `torn` or `full` (it is lost, and the coordinator ends), or
    `kept` (it is there, and the coordinator ends before it does anything else)."""

    def append(self, record: RecordEvent, now_s: float) -> None:
        """Write a record.

        Raises:
            CoordinatorDiedError: by `dies_at`.
        """
        dies_at, self.dies_at = self.dies_at, ""
        if dies_at in {"", "kept"}:
            self.records.append((now_s, record))
            self.on_kept(record)
        if dies_at:
            raise CoordinatorDiedError(dies_at)

    def has(self, kind: str) -> bool:
        """Whether a record of that kind is there."""
        return any(record.kind == kind for _, record in self.records)

    def last_is(self, kind: str, site: str) -> bool:
        """Whether the latest record is that one."""
        last = self.records[-1][1] if self.records else None
        return last is not None and (last.kind, last.site) == (kind, site)

    def read(self, but: set[str]) -> list[RecordedEvent]:
        """Return the records as another process reads them."""
        return [
            read_again(each, number, at_s)
            for number, (at_s, each) in enumerate(self.records)
            if each.kind not in but
        ]


@dataclass(slots=True)
class Outward:
    """What a coordinator can do beyond itself."""

    send: Callable[[Told, int, int], None]
    """Sends to that incarnation of an agent, for a coordinator of that generation."""
    say: Callable[..., None]


class SimCoordinator:
    """One coordinator process."""

    def __init__(
        self,
        names: tuple[str, ...],
        first: Epoch,
        journal: FakeJournal,
        outward: Outward,
        now_s: float,
        mutant: str,
    ) -> None:
        self._names, self._first, self._journal, self._outward = names, first, journal, outward
        self._mutant = mutant
        journal.generation += not (mutant == "generation_not_persisted" and journal.generation)
        self.generation = journal.generation
        self.is_alive = True
        self.dead_since_s = 0.0
        self.turn = 0
        self._sessions: dict[str, int] = {}
        """The incarnation of the agent that holds each site's session."""
        self._leases = Leases(LIMITS.detect_s)
        recorded = journal.read(FORGOTTEN.get(mutant, set()))
        self.record = self._fold(recorded)
        self._on_disk = self._fold(recorded)
        """What the next coordinator would make of the journal."""
        settings = RunSettings(may_return=True, drops_corrupt=True)
        self.run = BROKEN.get(mutant, Run)(
            world(names), self._rules(), settings, self.record, now_s
        )
        if recorded and not self.run.state.is_terminal:
            for name in self.run.awaited:
                self._leases.hear(name, now_s)
            self._carry_out(self.run.resume(now_s), now_s)

    def _fold(self, recorded: list[RecordedEvent]) -> JournaledRun:
        record = JournaledRun("run", self._names, self._first)
        for each in recorded:
            record.apply(each)
        return record

    def _rules(self) -> EpochRules:
        names = self._names
        return EpochRules(
            ranks=dict.fromkeys(names, 2),
            links=all_pairs(names),
            limits=LIMITS,
            make_plan=lambda members, dead, follows: followed_plan(
                names, members, dead, follows, self.turn
            ),
            links_of=lambda reduction: links_of(names, reduction),
        )

    # ------------------------------------------------------------ the run

    def tell(self, event: Event, now_s: float) -> None:
        """Let the run's machines decide, and do what they say."""
        if not self.is_alive:
            return
        if not isinstance(event, run_events.Ticked):
            self._outward.say(f"generation {self.generation} hears", event)
        self._carry_out(self.run.handle(event, now_s), now_s)
        if self.is_alive and not self._mutant:
            self._check_record(event)

    def _carry_out(self, actions: Iterable[Action], now_s: float) -> None:
        try:
            for action in actions:
                self._do(action, now_s)
        except CoordinatorDiedError:
            self.die(now_s)

    def _do(self, action: Action, now_s: float) -> None:
        self._outward.say("   ", action)
        match action:
            case RecordEvent():
                self._journal.append(action, now_s)
                written = read_again(action, len(self._journal.records), now_s)
                self.record.apply(written)
                self._on_disk.apply(written)
            case _ if isinstance(action, Told):
                self._send(action)

    def _send(self, message: Told) -> None:
        """Send in a site's session; its loss has been told, or will be."""
        if message.site in self._sessions:
            self._outward.send(message, self._sessions[message.site], self.generation)

    def _check_record(self, event: Event) -> None:
        """Whatever the run has come to by an event is what its journal says."""
        for each in dataclasses.fields(JournaledRun):
            live, disk = getattr(self.record, each.name), getattr(self._on_disk, each.name)
            if live != disk:
                told = f"{each.name}, after {event}: {live}; on disk {disk}"
                raise BrokenPromiseError(told)

    def die(self, now_s: float) -> None:
        """End, whatever was under way."""
        self.is_alive = False
        self.dead_since_s = now_s

    def drop(self, site: str, now_s: float) -> bool:
        """An operator has a site take part no more; return whether that can be."""
        if not self.is_alive or self.run.drop_problem(site):
            return False
        self.tell(run_events.DropRequested(site, "dropped"), now_s)
        return self.is_alive

    def add(self, site: str, now_s: float) -> None:
        """An operator has a site take part again, if that can be."""
        if self.is_alive and not self.run.add_problem(site):
            self.tell(run_events.AddRequested(site), now_s)

    @property
    def members(self) -> tuple[str, ...]:
        """Who takes part in the latest epoch."""
        return (self.run.epoch or self._first).members

    @property
    def suspicions(self) -> set[tuple[str, str]]:
        """Return who is said not to reach whom."""
        epochs = self.run._epochs
        return {*epochs._presence.reach._suspicions} if epochs is not None else set()

    @property
    def is_changing(self) -> bool:
        """Whether sites are asked to pause, or somebody is about to come back."""
        epochs = self.run._epochs
        return epochs is not None and bool(epochs._proposal or epochs._entry)

    # ------------------------------------------------------------ sessions

    def join(self, agent: SimAgent, epoch: int, now_s: float) -> bool:
        """Begin or go on with an agent's session; False: another agent has the site."""
        name, known = agent.name, self._sessions.get(agent.name)
        if known not in {None, agent.incarnation}:
            return False
        silent_s = self._leases.silent_s(name, now_s)
        self._leases.hear(name, now_s)
        if known is not None:
            agent.connect()
            self.tell(run_events.SessionResumed(name, silent_s), now_s)
            return True
        self._sessions[name] = agent.incarnation
        had_session = agent.session > 0
        agent.begin_session(agent.session + 1, self.generation)
        if agent.has_run and self.run.state.is_terminal:
            self._send(SendStop(name, "it does not go on", 1.0))
        came = run_events.AgentCame(
            name, name, epoch, had_session=had_session, has_run=agent.has_run
        )
        self.tell(came, now_s)
        return True

    def broke(self, name: str, now_s: float) -> None:
        """The connection of a session is gone."""
        if name in self._sessions:
            self.tell(run_events.SessionBroken(name, "its connection broke"), now_s)

    def leave(self, name: str, now_s: float) -> None:
        """An agent has ended its session."""
        if self._sessions.pop(name, None) is not None:
            self._leases.drop(name)
            self.tell(run_events.SiteLost(name, f"site {name}: its agent has left"), now_s)

    def tick(self, audible: set[str], now_s: float) -> None:
        """Let time pass; heartbeats of some sites come through."""
        for name in audible & self._sessions.keys():
            self._leases.hear(name, now_s)
        for name, silent_s in self._leases.expired(now_s).items():
            self._leases.drop(name)
            if self._sessions.pop(name, None) is None:
                self.tell(run_events.AgentMissed(name, silent_s), now_s)
            else:
                self.tell(run_events.SiteLost(name, f"site {name} was silent", silent_s), now_s)
        self.tell(run_events.Ticked(), now_s)

    def has_session(self, name: str) -> bool:
        """Whether a site's session goes on."""
        return name in self._sessions
