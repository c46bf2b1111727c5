"""Leads one run: its life (run_machine.py) and, once it is active, its epochs (membership.py).

Pure: events in, actions out. What one of the two decides is news to the other. So everything that
follows from an event comes out as one list, in the order in which it is to be carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from isthmus.orchestrator.core import membership, run_events
from isthmus.orchestrator.core.first_failure import first_failure
from isthmus.orchestrator.core.membership import EndChange, Membership
from isthmus.orchestrator.core.replan_machine import EpochBegun
from isthmus.orchestrator.core.run_events import RecordEvent, RunState
from isthmus.orchestrator.core.run_machine import DROPPED, RunMachine
from isthmus.orchestrator.core.run_view import RecordedEvent
from isthmus.topology.spec.epoch import Epoch

Event = run_events.Event | run_events.AgentCame | run_events.AgentMissed | membership.Event
Send = membership.SendSettle | membership.SendResume | membership.SendCancel
Outcome = membership.LoseSite | membership.EndsEarly | membership.EndRun | EndChange
"""What follows for the run from a change of its epochs."""
Action = run_events.Action | Send | EpochBegun | EndChange
"""The last two are for whoever plans again: an epoch that has begun, what came of other trees."""


class RunLead:
    """Owns both machines of one run."""

    def __init__(self, run: RunMachine, begin_epochs: Callable[[], Membership]) -> None:
        """Begin with a run that nobody has heard of; `begin_epochs` makes its first epoch."""
        self.run = run
        """For questions only: events go through `handle`, so that both machines hear of them."""
        self._begin_epochs = begin_epochs
        self._epochs: Membership | None = None
        """Set once the run is active."""

    @property
    def epoch(self) -> Epoch | None:
        """The latest that has begun; None: the run is not active yet."""
        return None if self._epochs is None else self._epochs.epoch

    def recall(
        self, recorded: Sequence[RecordedEvent], happened_s: Iterable[float], now_s: float
    ) -> list[Action]:
        """Go on with what an earlier coordinator wrote down; return what it could not do any more.

        `happened_s` is when each was, on this coordinator's clock.
        """
        for event, at_s in zip(recorded, happened_s, strict=True):
            self.run.recall(event, at_s, now_s)
        if self.run.state is not RunState.ACTIVE:
            return []
        return list(self._begin(recorded, now_s))

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event. `now_s` is the coordinator's monotonic clock."""
        match event:
            case run_events.AgentCame():
                return [done for each in self._came(event) for done in self._hear(each, now_s)]
            case run_events.AgentMissed():
                why = (
                    f"site {event.site}: its agent has not come back to this coordinator{event.but}"
                )
                lost = run_events.SiteLost(event.site, why, event.silent_s)
                return list(self._hear(lost, now_s))
        return list(self._hear(event, now_s))

    def _came(self, event: run_events.AgentCame) -> Iterator[run_events.Event]:
        """An agent has joined that this coordinator has not known, or not lately."""
        site = event.site
        if site in self.run.awaited and (event.had_session or not event.has_run):
            if event.had_session:
                yield run_events.SiteReturned(site, event.host, event.epoch, event.has_run)
                return
            yield run_events.SiteLost(site, f"site {site}: its agent began anew{event.but}")
        yield run_events.SiteJoined(site, event.host, event.epoch)

    def _hear(self, event: run_events.Event | membership.Event, now_s: float) -> Iterator[Action]:
        if isinstance(event, membership.EntryBegun):
            behind = {"behind": event.behind} if event.behind else {}
            detail = {"epoch": event.epoch, "round": event.round, **behind}
            yield RecordEvent("site.resumed", event.by, detail)
        if isinstance(event, membership.Event):
            yield from self._tell_epochs(event, now_s)
            return
        if self.run.state.is_terminal:
            if isinstance(event, run_events.SitePrepared | run_events.SiteRunning):
                yield self.run.stop_late(event.site)
            return
        yield from self._tell_run(event, now_s)
        told = _told_to_epochs(event)
        if isinstance(event, run_events.SiteRunning) and self.run.is_returning(event.site):
            told = membership.SiteEnters(event.site)
        if isinstance(told, membership.SiteHeard) and self.run.is_coming_up(told.site):
            told = None  # epochs hear of it once it is there
        if told is not None:
            yield from self._tell_epochs(told, now_s)

    def _tell_run(self, event: run_events.Event, now_s: float) -> Iterator[Action]:
        being_let_in = () if self._epochs is None else self._epochs.being_let_in
        for action in self.run.handle(event, now_s, being_let_in):
            yield action
            if isinstance(action, RecordEvent) and action.kind == "run.active":
                yield from self._begin((), now_s)

    def _begin(self, recorded: Sequence[RecordedEvent], now_s: float) -> Iterator[Action]:
        """Begin with epochs, or go on with those that were written down."""
        epochs = self._epochs = self._begin_epochs()
        if recorded:
            epochs.restore(recorded)
        for site in self.run.done:
            done = membership.SiteDone(site, self.run.last_round_of(site))
            yield from self._tell_epochs(done, now_s)
        for site in self.run.successful:
            yield from self._tell_epochs(membership.SiteFinished(site), now_s)
        for site, why in self.run.gone.items():
            yield from self._tell_epochs(membership.SiteGone(site, why), now_s)
        epoch = epochs.epoch
        for site in epoch.members:
            if site not in epoch.follows and self.run.is_returning(site):
                # the coordinator before could not say so any more
                yield from self._tell_run(run_events.SiteEntered(site, epoch.from_round), now_s)
        for site in self.run.ready_to_enter:
            if site not in epoch.members:
                yield from self._tell_epochs(membership.SiteEnters(site), now_s)
        for site in self.run.awaits_drop:
            yield from self._tell_epochs(membership.DropWanted(site, DROPPED), now_s)

    def _tell_epochs(self, event: membership.Event, now_s: float) -> Iterator[Action]:
        epochs = self._epochs
        if epochs is None or not self.run.is_going_on:
            return
        before = epochs.epoch
        for action in epochs.handle(event, now_s):
            if isinstance(action, Outcome):
                told = _told_to_run(action)
                if told is not None:
                    yield from self._tell_run(told, now_s)
                elif isinstance(action, EndChange):
                    yield action
            else:
                yield action
        if epochs.epoch is not before:
            yield EpochBegun(epochs.epoch, epochs.dead_links(now_s))


def _told_to_run(outcome: Outcome) -> run_events.Event | None:
    """Return what follows for the run from what became of its epoch; None: nothing."""
    match outcome:
        case membership.LoseSite():
            return run_events.SiteDropped(outcome.site, outcome.why)
        case membership.EndsEarly():
            return run_events.SiteEndedEarly(
                outcome.site, outcome.round, outcome.by, outcome.by_round, outcome.num_left
            )
        case membership.EndRun():
            return run_events.CannotGoOn(outcome.code, outcome.why)
        case EndChange(change=membership.SiteEnters(site=site)):
            if outcome.epoch is None:
                return run_events.SiteDropped(site, outcome.why)
            return run_events.SiteEntered(site, outcome.epoch.from_round)
        case EndChange(change=membership.DropWanted(site=site)):
            if outcome.epoch is None:
                return run_events.DropRefused(site, outcome.why)
            return run_events.SiteLeaves(site)
        case _:
            return None


def _told_to_epochs(event: run_events.Event) -> membership.Event | None:
    """Return what an event of the run means for who takes part; None: nothing."""
    match event:
        case run_events.Ticked():
            return membership.Ticked()
        case run_events.SiteDone():
            return membership.SiteDone(event.site, event.round)
        case run_events.SiteEnded() if event.succeeded and not event.failures:
            return membership.SiteFinished(event.site)
        case run_events.SiteEnded():
            why = first_failure(event.failures).reason if event.failures else "it has ended"
            return membership.SiteGone(event.site, why)
        case run_events.SiteLost() if event.silent_s > 0:
            return membership.LeaseEnded(event.site, event.message)
        case run_events.SiteLost():
            return membership.SiteGone(event.site, event.message)
        case run_events.SessionBroken():
            return membership.SessionLost(event.site, event.message)
        case run_events.SessionResumed():
            return membership.SiteHeard(event.site)
        case run_events.SiteJoined() | run_events.SiteReturned():
            return membership.SiteHeard(event.site, event.epoch)
        case run_events.DropRequested():
            return membership.DropWanted(event.site, event.message)
        case _:
            return None
