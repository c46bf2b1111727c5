"""The life of one run: all sites start together or none does, and every end has one first cause.

Pure: events in, actions out, time an argument. Each event takes one way: what it says of a site is
written down (site_events.py), then the epochs of an active run decide (epochs.py), with what comes
of that for sites (departures.py), then what is due for the run as a whole is done.

Decide, write, apply: whatever becomes of a run is a record of its journal, and only the fold of the
journal (journaled_run.py) changes what is known of it. So `handle` returns its actions one by one,
and each `RecordEvent` is to be written and applied to the record before the next is asked for: what
comes after it is decided by what is on disk. A coordinator that is started again goes on from the
same record. Only what it hears and says itself is not there (`Contact`).

- FORMING: all sites come up together, or are rolled back and begin again (forming.py).
- ACTIVE: all sites are running, except those that are lost, and those that the run did not begin
  with and nobody has added yet. Until all have taken a step, none may be lost: the first failure is
  the run's. So is one of the script, whenever it comes, unless the topology says otherwise. A site
  that fails later is lost, and the run continues without it, as long as enough are left.
- STOPPING: something failed (and the other sites had a moment to report theirs), or somebody
  cancelled the run. Stop went to every site that was told to prepare.
- SUCCEEDED: every site that was not lost ended by itself, well; WITH_LOSSES where one was lost and
  did not come back, or the last checkpoint was not written. FAILED. CANCELLED.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.orchestrator.core import certificate_watch, run_events
from isthmus.orchestrator.core.departures import Departures
from isthmus.orchestrator.core.epochs import EpochRules, Epochs
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.failures import FailureReports
from isthmus.orchestrator.core.first_failure import detail_of
from isthmus.orchestrator.core.forming import Forming
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.known_run import KnownRun
from isthmus.orchestrator.core.members import Contact, Member, Stage, Wish
from isthmus.orchestrator.core.policy import drop_problem
from isthmus.orchestrator.core.rank_reports import RankReports
from isthmus.orchestrator.core.returns import Returns
from isthmus.orchestrator.core.run_end import Verdict, note_of_missing, success
from isthmus.orchestrator.core.run_events import (
    Action,
    Endpoint,
    EpochBegun,
    Event,
    Outcome,
    RecordEvent,
    RunState,
)
from isthmus.orchestrator.core.site_events import SiteEvents
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What of a run's job decides about its life."""

    may_return: bool = False
    """A site that is lost can be given the run's state."""
    refuses_same_data: bool = True
    """Sites that train on the same data end the run."""
    drops_corrupt: bool = False
    """The run goes on without a site of which a rank computes wrongly."""
    trains: bool = True
    """Ranks take steps; else links are probed."""
    saves: bool = False
    """The job wants checkpoints."""


class Run:
    """Leads one run to its end. Messages of other generations never come here."""

    def __init__(
        self,
        topology: Topology,
        rules: EpochRules,
        settings: RunSettings,
        record: JournaledRun,
        now_s: float,
    ) -> None:
        """Begin with what the journal says: nothing, of a run that nobody has heard of.

        Of one that goes on, `resume` has to be called.
        """
        self._topology, self._rules, self._settings = topology, rules, settings
        self._record, self._begun_s = record, now_s
        self._timeouts = Timeouts.derive(topology.failure)
        self._contacts = {name: Contact() for name in record.members}
        known = KnownRun(topology, self._timeouts, record, self._contacts)
        self._forming = Forming(known, now_s)
        self._returns = Returns(known, self._forming, may_return=settings.may_return)
        self._reports = RankReports(
            topology,
            record.progress,
            collect_s=self._timeouts.collect_s,
            refuses_same_data=settings.refuses_same_data,
        )
        self._reports.begin_again(self._outside)
        self._failures = FailureReports(
            record.failures,
            self._contacts,
            topology.failure,
            drops_corrupt=settings.drops_corrupt,
        )
        self._departures = Departures(known, self._returns, self._reports, self._failures)
        self._sites = SiteEvents(
            known, self._forming, self._returns, self._departures, self._failures
        )
        self._epochs: Epochs | None = None
        """Set once the run is active."""

    def resume(self, now_s: float, verified_steps: int = 0) -> Iterator[Action]:
        """Go on where an earlier coordinator ended; return what it could not do any more."""
        self._reports.recall(self.members.values(), verified_steps)
        if self.state is RunState.ACTIVE:
            self._epochs = self._begin_epochs()
            yield from self._decided(self._epochs.resume(), now_s)
            yield from self._begin_with_epochs(now_s)

    # ------------------------------------------------------------ questions

    @property
    def state(self) -> RunState:
        """How far the run has got."""
        return self._record.state

    @property
    def members(self) -> dict[str, Member]:
        """What has become of each site."""
        return self._record.members

    @property
    def epoch(self) -> Epoch | None:
        """The latest that has begun; None: the run is not active yet."""
        return None if self._epochs is None else self._epochs.epoch

    @property
    def is_going_on(self) -> bool:
        """Whether the run is active, and nothing is known that will end it."""
        return self._record.failures.is_going_on

    @property
    def has_done_sites(self) -> bool:
        """Whether the ranks of any site are done with the job."""
        return any(site.is_done for site in self.members.values())

    @property
    def brings_back(self) -> bool:
        """Whether the run goes on, and a site that is lost now may come back."""
        is_open = self.is_going_on and not self._departures.is_released
        return is_open and self._record.progress.has_state and not self._returns.problem

    @property
    def restarts_agents(self) -> bool:
        """Whether an agent that has ended is of use to the run once it is started again."""
        is_forming = self._record.is_rolling_back and not self._record.failures.ending.has_begun
        return self.brings_back or is_forming

    def awaits_step_of(self, site: str) -> bool:
        """Whether it is news that the site has taken a step."""
        return not self._may_lose and site not in self._record.progress.stepped

    def endpoints_of(self, site: str, dialler: str) -> tuple[Endpoint, ...]:
        """Return where another site dials a site's gateways."""
        return self._forming.wan.ways(dialler, self.members[site].endpoints)

    @property
    def verified_steps(self) -> int:
        """Steps after which the parameters of all ranks of all sites were seen to be equal."""
        return self._reports.verified_steps

    def active_for_s(self, now_s: float) -> float:
        """Return for how long the run has been active, or was until it was stopped."""
        if self._record.active_s is None:
            return 0.0
        stopped_s = self._record.failures.ending.stopped_s
        return (now_s if stopped_s is None else stopped_s) - self._record.active_s

    @property
    def awaited(self) -> list[str]:
        """Sites where something of the run may be alive."""
        return [site.name for site in self.members.values() if site.may_have_processes]

    def drop_problem(self, name: str) -> str:
        """Return why a site cannot be dropped; nothing if it can."""
        if not self.is_going_on:
            return f"the run is {self.state.lower()}"
        return drop_problem(self.members[name], self.members.values(), self._topology.failure)

    def add_problem(self, name: str) -> str:
        """Return why a site cannot be started while the run goes on; nothing if it can."""
        if not self.is_going_on:
            return f"the run is {self.state.lower()}"
        return self._returns.add_problem(self.members[name])

    @property
    def _may_lose(self) -> bool:
        """Whether the run can go on without a site."""
        return self._record.progress.may_lose

    @property
    def _outside(self) -> list[str]:
        return [site.name for site in self.members.values() if site.is_outside]

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> Iterator[Action]:
        """Decide on one event, step by step. Late, repeated and impossible ones change nothing.

        Actions are to be carried out in order, and what is written down is to be applied to the
        record before the next is asked for. `now_s` is the coordinator's monotonic clock, never
        less than in the call before.
        """
        # An agent may be there for a site that takes no part.
        if getattr(event, "site", None) not in {None, *self.members}:
            return
        match event:
            case run_events.AgentCame():
                for each in self._came(event):
                    yield from self.handle(each, now_s)
                return
            case run_events.AgentMissed():
                site = event.site
                why = f"site {site}: its agent has not come back to this coordinator{event.but}"
                yield from self.handle(run_events.SiteLost(site, why, event.silent_s), now_s)
                return
        if not self.state.is_terminal:
            yield from self._take(event, now_s)
            yield from self._tell_epochs(event, now_s)
            yield from self._do_what_is_due(now_s)
        elif isinstance(event, run_events.SitePrepared | run_events.SiteRunning):
            yield self._departures.stop(self.members[event.site], "the run has ended")

    def _came(self, event: run_events.AgentCame) -> Iterator[Event]:
        """An agent has joined that this coordinator has not known, or not lately."""
        site = event.site
        if site in self.awaited and (event.had_session or not event.has_run):
            if event.had_session:
                yield run_events.SiteReturned(site, event.host, event.epoch, event.has_run)
                return
            yield run_events.SiteLost(site, f"site {site}: its agent began anew{event.but}")
        yield run_events.SiteJoined(site, event.host, event.epoch)

    def _take(self, event: Event, now_s: float) -> Iterator[Action]:
        """Write down what an event says."""
        sites, wan, ending = self._sites, self._forming.wan, self._record.failures.ending
        match event:
            case run_events.SiteJoined():
                yield from sites.joined(event)
            case run_events.SiteLost():
                yield from sites.lost(event, now_s)
            case run_events.CertificateSeen():
                yield from certificate_watch.look(self._record.certificates.get(event.name), event)
            case run_events.SiteReturned():
                yield from sites.returned(event)
            case run_events.SessionBroken():
                yield RecordEvent(EventKind.SESSION_BROKEN, event.site, {"message": event.message})
            case run_events.SessionResumed():
                yield from sites.resumed(event)
            case run_events.AgentEnded():
                yield from sites.agent_ended(event, now_s)
            case run_events.SiteFetching():
                self._forming.put_off(now_s)
            case run_events.SitePrepared():
                yield from sites.prepared(event)
            case run_events.SiteRunning():
                yield from sites.running(event)
            case run_events.SiteDone():
                yield from sites.done(event)
            case run_events.SiteEnded():
                self._reports.forget_stalls(event.site)
                yield from sites.ended(event, now_s, brings_back=self.brings_back)
            case run_events.NamespacesOpened():
                yield from wan.opened(event.namespaces)
            case run_events.NamespacesRefused():
                yield from self._namespaces_refused(event, now_s)
            case run_events.RelayOpened():
                yield from wan.relay_opened(event.ways)
            case run_events.EmulatorEnded():
                message = f"the WAN emulator is gone: {event.message}"
                yield from self._failures.fail(
                    "LAUNCH_FAILED", message, now_s, log_path=event.log_path
                )
            case run_events.CancelRequested() if not ending.has_begun:
                yield RecordEvent(EventKind.RUN_CANCEL_REQUESTED, detail={"message": event.message})
            case run_events.DropRequested():
                yield from self._departures.drop(event)
            case run_events.AddRequested():
                yield RecordEvent(EventKind.SITE_ADD_REQUESTED, event.site)
            case run_events.EpochEntered():
                behind = {"behind": event.behind} if event.behind else {}
                detail = {"epoch": event.epoch, "round": event.round, **behind}
                yield RecordEvent(EventKind.SITE_RESUMED, event.by, detail)
            case run_events.StallReported() if not ending.has_begun:
                yield from self._stalled(event, now_s)
            case run_events.StepTaken():
                yield from self._step_taken(event)
            case run_events.Ticked():
                yield from self._reports.explained(now_s)
            case _ if isinstance(event, Outcome):
                yield from self._carry_out(event, now_s)
            case _ if isinstance(event, run_events.RankReport):
                is_outside = self.members[event.site].is_outside
                found = self._reports.take(
                    event, now_s, is_outside=is_outside, is_ending=ending.has_begun
                )
                yield from self._failures.take_found(found, now_s)

    def _namespaces_refused(
        self, event: run_events.NamespacesRefused, now_s: float
    ) -> Iterator[Action]:
        """Fall back to the relay where the topology leaves the choice."""
        wan = self._forming.wan
        if wan.awaits_namespaces and wan.may_fall_back:
            yield from wan.fall_back(event.why)
        elif wan.awaits_namespaces:
            message = f"emulator: netns was asked for, and cannot be here: {event.why}"
            yield from self._failures.fail("LAUNCH_FAILED", message, now_s)

    def _step_taken(self, event: run_events.StepTaken) -> Iterator[Action]:
        """Note once which awaited sites cannot be started, for lack of a state to begin with."""
        progress, members = self._record.progress, self.members.values()
        if event.site in progress.stepped:
            return
        is_first = not progress.has_steps
        yield RecordEvent(EventKind.SITE_STEPPED, event.site)
        outside = [site for site in members if site.is_outside and not site.is_new]
        awaited = [site.name for site in outside if not site.has_ended_early]
        awaited += [site.name for site in members if site.is_new and site.wish is Wish.IN]
        if is_first and progress.lacks_state and awaited:
            note = f"not started: {', '.join(awaited)}: {self._returns.problem}"
            yield RecordEvent(EventKind.RUN_STATE_MISSING, detail={"note": note})

    def _stalled(self, event: run_events.StallReported, now_s: float) -> Iterator[Action]:
        """Stop a site of which a rank hangs while others wait: others go on once it has ended."""
        for recorded, failure in self._reports.take_stall(event, now_s):
            yield recorded
            yield from self._failures.take((failure,), now_s)
            if self.is_going_on and not self._contacts[failure.site].is_told_to_stop:
                yield self._departures.stop(self.members[failure.site], failure.message)

    # ------------------------------------------------------------ epochs

    def _begin_epochs(self) -> Epochs:
        return Epochs(self._rules, self._record, self._contacts)

    def _begin_with_epochs(self, now_s: float) -> Iterator[Action]:
        """Have the epochs begin with all that has become of the sites before."""
        yield from self._tell_epochs(run_events.Ticked(), now_s)
        epoch = self._record.epochs.epoch
        for name in epoch.members:
            if name not in epoch.follows and self.members[name].is_returning:
                # the coordinator before could not say so any more
                yield from self._departures.rejoin(run_events.SiteRejoined(name, epoch.from_round))
        for site in self.members.values():
            is_up = site.stage is Stage.RUNNING and site.is_returning
            if is_up and site.name not in epoch.members:
                yield from self._tell_epochs(run_events.SiteRunning(site.name), now_s)
        for site in self._departures.awaited:
            wanted = run_events.DropRequested(site.name, site.why_dropped)
            yield from self._tell_epochs(wanted, now_s)

    def _tell_epochs(self, event: Event, now_s: float) -> Iterator[Action]:
        """Have the epochs hear of an event, and do what they decide."""
        epochs, is_over = self._epochs, self._departures.is_released or not self.is_going_on
        if epochs is None or is_over or isinstance(event, Outcome):
            return
        before = epochs.epoch
        yield from self._decided(epochs.handle(event, now_s), now_s)
        if epochs.epoch is not before:
            yield EpochBegun(epochs.epoch, epochs.dead_links(now_s))

    def _decided(self, decided: Iterator[Action | Outcome], now_s: float) -> Iterator[Action]:
        for action in decided:
            if isinstance(action, Outcome):
                yield from self._carry_out(action, now_s)
            else:
                yield action

    def _carry_out(self, outcome: Outcome, now_s: float) -> Iterator[Action]:
        """Do for the run what its epochs have decided."""
        match outcome:
            case run_events.GoOnWithout():
                yield from self._departures.exclude(outcome, now_s)
            case run_events.DropRefused():
                yield from self._departures.refuse_drop(outcome)
            case run_events.SiteEndedEarly():
                yield from self._departures.end_early(outcome, now_s)
            case run_events.SiteRejoined():
                yield from self._departures.rejoin(outcome)
            case run_events.CannotGoOn() if self.is_going_on:
                yield from self._failures.cannot_go_on(outcome, now_s)

    # ------------------------------------------------------------ what is due

    def _do_what_is_due(self, now_s: float) -> Iterator[Action]:
        yield from self._form(now_s)
        if self.state is RunState.ACTIVE and self._epochs is None:
            self._epochs = self._begin_epochs()
            yield from self._begin_with_epochs(now_s)
        yield from self._note_first_step()
        if self.is_going_on:
            yield from self._departures.see_off(now_s)
            yield from self._returns.keep_out()
        yield from self._bring_back(now_s)
        yield from self._release_if_done()
        yield from self._stop_if_due(now_s)
        yield from self._finish_if_over(now_s)

    def _form(self, now_s: float) -> Iterator[Action]:
        """Take all sites one stage further while the run begins."""
        record = self._record
        if record.failures.ending.has_begun or record.state is not RunState.FORMING:
            return
        was_rolling_back = record.is_rolling_back
        yield from self._forming.next()
        if was_rolling_back and not record.is_rolling_back:
            self._reports.begin_again(self._outside)
        if not record.is_rolling_back and self._forming.is_up:
            yield RecordEvent(EventKind.RUN_ACTIVE)

    def _note_first_step(self) -> Iterator[Action]:
        """Note once that all who take part have taken a step."""
        present = {site.name for site in self._record.present}
        if not self._may_lose and self.is_going_on and present <= self._record.progress.stepped:
            yield RecordEvent(EventKind.RUN_FIRST_STEP)

    def _bring_back(self, now_s: float) -> Iterator[Action]:
        """Start sites again that were lost, where nothing of the run is left there."""
        # An earlier coordinator may have ended between a drop and what comes of it.
        for site in self.members.values():
            if site.is_dropped and site.is_returning:
                yield from self._departures.give_return_up(site, site.why_dropped)
        if self.brings_back:
            coming_back = () if self._epochs is None else self._epochs.coming_back
            yield from self._returns.next(now_s, coming_back)

    def _release_if_done(self) -> Iterator[Action]:
        """Let all gateways go once every site is done: one that is lost before may need them."""
        is_due = self.is_going_on and not self._departures.is_released
        if is_due and self._record.are_all_done:
            yield from self._departures.release()

    def _stop_if_due(self, now_s: float) -> Iterator[Action]:
        """Stop all sites: for a cancellation, a failure that was waited for, or a late start."""
        ending = self._record.failures.ending
        is_late = self.state is RunState.FORMING and self._forming.is_late(now_s)
        if is_late and not ending.has_begun:
            site, message = self._forming.why_late()
            yield from self._failures.fail(
                "START_TIMED_OUT", message, now_s, site=site, is_last=True
            )
        if not ending.is_stop_due(now_s, self._timeouts.collect_s):
            return
        reason = ending.verdict.reason
        detail = {"reason": reason, "note": f"all sites are stopped: {reason}"}
        yield RecordEvent(EventKind.RUN_STOPPING, detail=detail)
        for name in self.awaited:
            yield self._departures.stop(self.members[name], reason)

    def _finish_if_over(self, now_s: float) -> Iterator[Action]:
        """End the run once nothing of it is left, or a site has had long enough to say so."""
        record, members = self._record, self.members.values()
        ending, is_released = record.failures.ending, self._departures.is_released
        has_success = any(site.has_finished for site in record.present)
        is_done = (has_success or is_released) and all(
            site.has_finished or site.is_outside or (is_released and site.stage.is_over)
            for site in members
        )
        if is_done and not ending.has_begun:
            differing = self._reports.flush(now_s)
            if not differing:
                for site in members:
                    if site.is_returning:
                        yield self._departures.stop(site, "the run has ended")
                yield from self._finish(self._success(), now_s)
                return
            yield from self._failures.take_found(differing, now_s)
        if not ending.has_begun:
            return
        remaining = self.awaited
        if remaining and not self._is_confirmed(now_s):
            return
        for name in remaining:
            yield RecordEvent(EventKind.SITE_UNCONFIRMED, name)
        yield from self._finish(ending.verdict, now_s)

    def _is_confirmed(self, now_s: float) -> bool:
        """Whether sites had long enough after Stop to say that nothing is left.

        Their agents' leases end by then. Each coordinator gives them that time anew.
        """
        stopped_s = self._record.failures.ending.stopped_s
        within_s = self._timeouts.stop_grace_s + self._timeouts.lease_s
        return stopped_s is not None and now_s >= max(stopped_s, self._begun_s) + within_s

    def _success(self) -> Verdict:
        checkpoint_problem = self._record.progress.checkpoint_problem(
            is_wanted=self._settings.saves
        )
        allows_losses = self._topology.failure.allows_losses
        members = list(self.members.values())
        return success(members, checkpoint_problem, allows_losses=allows_losses)

    def _finish(self, verdict: Verdict, now_s: float) -> Iterator[Action]:
        failure = verdict.failure
        detail: dict[str, object] = {
            "state": verdict.state.value,
            "reason_code": verdict.code,
            "reason": verdict.reason,
            "failure": detail_of(failure) if failure else None,
            "active_s": self.active_for_s(now_s),
        }
        if note := note_of_missing(list(self.members.values())):
            detail["note"] = note
        yield RecordEvent(EventKind.RUN_ENDED, detail=detail)
        yield run_events.FinishRun(verdict.state, verdict.code, verdict.reason, failure)
