"""The life of one run: all sites start together or none does, and every end has one first cause.

Pure: events in, actions out, time an argument. Once the run is active its epochs (epochs.py) hear
every event, too; what they decide for the run comes back as an `Outcome`, an event like any other.

- FORMING: all sites come up together, or are rolled back and begin again (forming.py).
- ACTIVE: all sites are running, except those that are lost, and those that the run did not begin
  with and nobody has added yet. Until all have taken a step, none may be lost: the first failure is
  the run's. So is one of the script, whenever it comes, unless the topology says otherwise. A site
  that fails later is lost, and the run goes on without it, as long as enough are left.
- STOPPING: something failed (and the other sites had a moment to report theirs), or somebody
  cancelled the run. Stop went to every site that was told to prepare.
- SUCCEEDED: every site that was not lost ended by itself, well; WITH_LOSSES where one was lost and
  did not come back, or the last checkpoint was not written. FAILED. CANCELLED.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epochs import EpochRules, Epochs
from isthmus.orchestrator.core.first_failure import first_failure
from isthmus.orchestrator.core.forming import Forming
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.members import GONE, Absence, Member, Stage, Standing, Wish
from isthmus.orchestrator.core.rank_reports import RankReports
from isthmus.orchestrator.core.returns import Returns
from isthmus.orchestrator.core.run_end import (
    LOSES_SITE,
    SCRIPT_FAILED,
    Verdict,
    note_of_missing,
    success,
)
from isthmus.orchestrator.core.run_events import (
    Action,
    Endpoint,
    EpochBegun,
    EpochReport,
    Event,
    Outcome,
    RecordEvent,
    RunState,
)
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Topology

DROPPED = "dropped by an operator"
NOT_HERE = "the run is not going on here"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What of a run's job decides about its life."""

    may_return: bool = False
    """A site that is lost can be given the run's state."""
    refuses_same_data: bool = True
    """Sites that train on the same data end the run."""
    trains: bool = True
    """Ranks take steps; else links are probed."""
    saves: bool = False
    """The job wants checkpoints."""


def losable_failures(topology: Topology) -> frozenset[str]:
    """Return the codes of failures that a run survives where all have taken a step."""
    is_fatal = topology.failure.ends_on_script_error
    return LOSES_SITE if is_fatal else LOSES_SITE | {SCRIPT_FAILED}


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
        self._timeouts = Timeouts.derive(topology.failure)
        self.state = record.state
        self.members, self._epoch_record = record.members, record.epochs
        self._progress, self._failures = record.progress, record.failures
        self._failures.losable = losable_failures(topology)
        self._ending = record.failures.ending
        self._ending.collect_s = self._timeouts.collect_s
        if self._ending.stopped_s is not None:
            self._ending.stopped_s = now_s
        self._active_s = record.active_s
        self._progress.may_lose |= not settings.trains
        self._forming = Forming(topology, self.members, self._timeouts.start_s, now_s)
        self._forming.is_rolling_back = record.is_rolling_back
        self._forming.has_begun_again = record.has_begun_again
        self._returns = Returns(
            topology,
            self.members,
            self._progress,
            self._forming,
            may_return=settings.may_return,
        )
        self._reports = RankReports(
            topology,
            self._progress,
            collect_s=self._timeouts.collect_s,
            refuses_same_data=settings.refuses_same_data,
        )
        self._reports.begin_again(self._out)
        self._epochs: Epochs | None = None
        """Set once the run is active."""
        self._is_released = False
        """All sites are done with the job, and have been told so."""

    def resume(self, now_s: float, verified_steps: int = 0) -> list[Action]:
        """Go on where an earlier coordinator ended; return what it could not do any more."""
        self._reports.recall(self.members.values(), verified_steps)
        if self.state is not RunState.ACTIVE:
            return []
        self._epochs = self._begin_epochs()
        self._epochs.await_members()
        return self._tell_epochs_of_begin(now_s)

    # ------------------------------------------------------------ questions

    @property
    def epoch(self) -> Epoch | None:
        """The latest that has begun; None: the run is not active yet."""
        return None if self._epochs is None else self._epochs.epoch

    @property
    def is_going_on(self) -> bool:
        """Whether the run is active, and nothing is known that will end it."""
        return self._failures.is_going_on

    @property
    def has_done_sites(self) -> bool:
        """Whether the ranks of any site are done with the job."""
        return any(site.is_done for site in self._all())

    @property
    def brings_back(self) -> bool:
        """Whether the run goes on, and a site that is lost now may come back."""
        is_open = self.is_going_on and not self._is_released
        return is_open and self._progress.has_state and not self._returns.problem

    @property
    def restarts_agents(self) -> bool:
        """Whether an agent that has ended is of use to the run once it is started again."""
        is_forming = self._forming.is_rolling_back and not self._ending.has_begun
        return self.brings_back or is_forming

    def awaits_step_of(self, site: str) -> bool:
        """Whether it is news that the site has taken a step."""
        return not self._progress.may_lose and site not in self._progress.stepped

    def endpoints_of(self, site: str, dialler: str) -> tuple[Endpoint, ...]:
        """Return where another site dials a site's gateways."""
        return self._forming.wan.ways(dialler, self.members[site].endpoints)

    @property
    def verified_steps(self) -> int:
        """Steps after which the parameters of all ranks of all sites were seen to be equal."""
        return self._reports.verified_steps

    def active_for_s(self, now_s: float) -> float:
        """Return for how long the run has been active, or was until it was stopped."""
        if self._active_s is None:
            return 0.0
        stopped_s = self._ending.stopped_s
        return (now_s if stopped_s is None else stopped_s) - self._active_s

    @property
    def awaited(self) -> list[str]:
        """Sites where something of the run may be alive."""
        return [site.name for site in self._all() if site.may_have_processes]

    def drop_problem(self, name: str) -> str:
        """Return why a site cannot be dropped; nothing if it can."""
        site, fewest = self.members[name], self._topology.failure.min_sites
        stay = [each for each in self._present() if not each.is_dropped and each is not site]
        if not self.is_going_on:
            return f"the run is {self.state.lower()}"
        if site.is_new and site.wish is not Wish.IN:
            return f"site {name} takes no part yet"
        if site.is_dropped:
            return f"site {name} is dropped already"
        if site.is_successful:
            return f"site {name} is done"
        if not site.is_out and len(stay) < fewest:
            return f"without site {name} {len(stay)} would be left, want at least {fewest}"
        return ""

    def add_problem(self, name: str) -> str:
        """Return why a site cannot be started while the run goes on; nothing if it can."""
        if not self.is_going_on:
            return f"the run is {self.state.lower()}"
        return self._returns.add_problem(self.members[name])

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event. Late, repeated and impossible ones change nothing.

        Actions are to be carried out in order. `now_s` is the coordinator's monotonic clock, never
        less than in the call before.
        """
        # An agent may be there for a site that takes no part.
        if getattr(event, "site", None) not in {None, *self.members}:
            return []
        match event:
            case run_events.AgentCame():
                return [done for each in self._came(event) for done in self.handle(each, now_s)]
            case run_events.AgentMissed():
                site = event.site
                why = f"site {site}: its agent has not come back to this coordinator{event.but}"
                return self.handle(run_events.SiteLost(site, why, event.silent_s), now_s)
            case run_events.SitePrepared() | run_events.SiteRunning() if self.state.is_terminal:
                return [self._stop(self.members[event.site], "the run has ended")]
        actions = [] if isinstance(event, EpochReport) else self._live(event, now_s)
        return [*actions, *self._tell_epochs(event, now_s)]

    def _came(self, event: run_events.AgentCame) -> Iterator[Event]:
        """An agent has joined that this coordinator has not known, or not lately."""
        site = event.site
        if site in self.awaited and (event.had_session or not event.has_run):
            if event.had_session:
                yield run_events.SiteReturned(site, event.host, event.epoch, event.has_run)
                return
            yield run_events.SiteLost(site, f"site {site}: its agent began anew{event.but}")
        yield run_events.SiteJoined(site, event.host, event.epoch)

    def _live(self, event: Event, now_s: float) -> list[Action]:
        """Apply an event to the run's life, and do what is due."""
        if self.state.is_terminal:
            return []
        actions = self._apply(event, now_s)
        actions += self._form(now_s)
        actions += self._note_first_step()
        actions += self._bring_back(now_s)
        actions += self._release_if_done()
        actions += self._stop_if_due(now_s)
        actions += self._finish_if_over(now_s)
        if self.state is RunState.ACTIVE and self._epochs is None:
            self._epochs = self._begin_epochs()
            actions += self._tell_epochs_of_begin(now_s)
        return actions

    # ------------------------------------------------------------ epochs

    def _begin_epochs(self) -> Epochs:
        return Epochs(self._rules, self.members, self._epoch_record)

    def _tell_epochs_of_begin(self, now_s: float) -> list[Action]:
        """Have the epochs begin with all that has become of the sites before."""
        actions = self._tell_epochs(run_events.Ticked(), now_s)
        epoch = self._epoch_record.epoch
        for name in epoch.members:
            if name not in epoch.follows and self.members[name].is_returning:
                # the coordinator before could not say so any more
                actions += self._live(run_events.SiteRejoined(name, epoch.from_round), now_s)
        for site in self._all():
            is_up = site.stage is Stage.RUNNING and site.is_returning
            if is_up and site.name not in epoch.members:
                actions += self._tell_epochs(run_events.SiteRunning(site.name), now_s)
        for name, why in self._epoch_record.lost.items():
            if self.members[name].standing in {Standing.TAKES_PART, Standing.LEAVING}:
                actions += self._live(run_events.GoOnWithout(name, why), now_s)
        for site in self._awaiting_drop:
            wanted = run_events.DropRequested(site.name, DROPPED)
            actions += self._tell_epochs(wanted, now_s)
        return actions

    def _tell_epochs(self, event: Event, now_s: float) -> list[Action]:
        """Have the epochs hear of an event, and do what they decide."""
        actions: list[Action] = []
        if isinstance(event, run_events.EpochEntered):
            behind = {"behind": event.behind} if event.behind else {}
            detail = {"epoch": event.epoch, "round": event.round, **behind}
            actions.append(RecordEvent("site.resumed", event.by, detail))
        epochs = self._epochs
        if epochs is None or not self.is_going_on:
            return actions
        before = epochs.epoch
        for action in epochs.handle(event, now_s):
            if isinstance(action, Outcome):
                actions += self._live(action, now_s)
            else:
                actions.append(action)
        if epochs.epoch is not before:
            actions.append(EpochBegun(epochs.epoch, epochs.dead_links(now_s)))
        return actions

    # ------------------------------------------------------------ facts

    def _apply(self, event: Event, now_s: float) -> list[Action]:
        """Take the event into the facts; nothing is decided here."""
        match event:
            case run_events.SiteJoined():
                return self._joined(event)
            case run_events.SiteLost():
                return self._lost(event, now_s)
            case run_events.SiteReturned():
                return self._returned(event)
            case run_events.SessionBroken():
                return [RecordEvent("session.broken", event.site, {"message": event.message})]
            case run_events.SessionResumed():
                self.members[event.site].has_agent = True
                after = {"silent_s": round(event.silent_s, 3)}
                return [RecordEvent("session.resumed", event.site, after)]
            case run_events.AgentEnded():
                return self._agent_ended(event, now_s)
            case run_events.SitePrepared():
                return self._prepared(event)
            case run_events.SiteRunning():
                return self._running(event)
            case run_events.SiteDone():
                return self._done(event)
            case run_events.SiteEnded():
                return self._ended(event, now_s)
            case run_events.NamespacesOpened():
                return self._forming.wan.opened(event.namespaces)
            case run_events.NamespacesRefused():
                return self._namespaces_refused(event, now_s)
            case run_events.RelayOpened():
                return self._forming.wan.relay_opened(event.ways)
            case run_events.EmulatorEnded():
                message = f"the WAN emulator is gone: {event.message}"
                return self._failures.fail("LAUNCH_FAILED", message, now_s, log_path=event.log_path)
            case run_events.CancelRequested():
                return self._ending.cancel(event.message)
            case run_events.DropRequested():
                return self._drop_requested(event)
            case run_events.AddRequested():
                self.members[event.site].wish = Wish.IN
                return [RecordEvent("site.add_requested", event.site)]
            case run_events.Ticked():
                return [*self._reports.explained(now_s)]
        return [*self._report(event, now_s), *self._follow(event, now_s)]

    def _report(self, event: Event, now_s: float) -> list[Action]:
        """Take what ranks report."""
        match event:
            case run_events.StallReported():
                return [] if self._ending.has_begun else self._stalled(event, now_s)
            case run_events.StepTaken():
                return self._step_taken(event)
            case _ if isinstance(event, run_events.RankReport):
                is_out = self.members[event.site].is_out
                is_ending = self._ending.has_begun
                found = self._reports.take(event, now_s, is_out=is_out, is_ending=is_ending)
                return self._failures.take_found(found, now_s)
        return []

    def _follow(self, event: Event, now_s: float) -> list[Action]:
        """Do what follows for the run from what its epochs have decided."""
        match event:
            case run_events.GoOnWithout():
                return self._dropped(event, now_s)
            case run_events.SiteLeaves():
                self.members[event.site].become_leaving()
            case run_events.DropRefused():
                return self._drop_refused(event)
            case run_events.SiteEndedEarly():
                return self._ended_early(event, now_s)
            case run_events.SiteRejoined():
                return self._rejoined(event)
            case run_events.CannotGoOn():
                return self._failures.cannot_go_on(event, now_s) if self.is_going_on else []
        return []

    def _joined(self, event: run_events.SiteJoined) -> list[Action]:
        site = self.members[event.site]
        site.has_agent = True
        recorded = RecordEvent("site.joined", site.name, {"host": event.host})
        if site.stage is Stage.ABSENT:
            site.stage = Stage.JOINED
            return [recorded]
        if site.stage is Stage.LOST or (site.is_out and site.stage is Stage.ENDED):
            # The run goes on without it: whatever is left there has to go. Its answer comes after
            # all that it has yet to tell of its end.
            site.stage = Stage.LOST
            if self.is_going_on and not site.is_out:
                site.losses.clear()  # it was only silent
            return [recorded, self._stop(site, "the site was lost")]
        return []

    def _returned(self, event: run_events.SiteReturned) -> list[Action]:
        """Tell a site again what an earlier coordinator may not have got across.

        An agent that has heard it before changes nothing.
        """
        site = self.members[event.site]
        detail = {"host": event.host, "has_run": event.has_run}
        recorded = RecordEvent("agent.returned", site.name, detail)
        is_gone = not event.has_run and site.stage not in {Stage.JOINED, Stage.PREPARING}
        site.has_agent = True
        if site.is_out and (is_gone or not site.is_returning):
            site.stage = Stage.LOST
            site.become_outside_again()
        elif self.is_going_on:
            site.losses.clear()  # it was only silent
        is_over = self._ending.stopped_s is not None or self._forming.is_rolling_back
        if site.stage in GONE or is_over:
            return [recorded, self._stop(site, NOT_HERE)]
        if is_gone:
            # It has yet to tell its end, or has told a coordinator that died of it. The answer
            # comes after that.
            why, grace_s = "is anything left here?", self._timeouts.stop_grace_s
            return [recorded, run_events.SendStop(site.name, why, grace_s)]
        if site.stage is Stage.PREPARING and site.is_returning:
            return [recorded, self._returns.prepare(site)]
        if site.stage in {Stage.JOINED, Stage.PREPARING}:
            return [recorded, run_events.SendPrepare(site.name)]
        if site.stage is Stage.STARTING:
            endpoints = self._forming.address_book()[site.name]
            return [recorded, run_events.SendStart(site.name, endpoints)]
        return [recorded, *([run_events.SendRelease(site.name)] if self._is_released else [])]

    def _lost(self, event: run_events.SiteLost, now_s: float) -> list[Action]:
        site = self.members[event.site]
        is_decided = not (self.is_going_on and self._progress.may_lose)
        is_silent = not is_decided and not self._is_released and event.silent_s > 0
        site.has_agent = False
        if site.stage is Stage.ABSENT or site.stage is Stage.LOST:
            return []
        # Whether one that catches up does so no more is decided with its epoch.
        if not (is_silent and site.stage is Stage.RUNNING):
            site.become_outside_again()
        detail = {"message": event.message}
        if not site.may_have_processes:
            site.stage = Stage.ABSENT if site.stage is Stage.JOINED else site.stage
            return [RecordEvent("site.left", site.name, detail)]
        if self._is_released:  # all are done, and it has been told to go
            site.stage, site.gone = Stage.LOST, site.gone or event.message
            return [RecordEvent("site.gone", site.name, detail)]
        if self._may_roll_back(site, now_s):
            return self._roll_back(site, event.message, now_s)
        if is_silent:
            site.silent = Absence(event.message, now_s)
        else:
            site.stage, site.gone = Stage.LOST, site.gone or event.message
        # The failure is as old as the silence.
        failed = self._failures.fail(
            "SITE_LOST", event.message, now_s, site=site.name, at_s=now_s - event.silent_s
        )
        kind = "site.lost" if is_decided else "site.silent" if is_silent else "site.gone"
        return [*failed, RecordEvent(kind, site.name, detail)]

    def _may_roll_back(self, lost: Member, now_s: float) -> bool:
        """Whether all sites can begin again for one that is lost: nothing has come of the run."""
        is_begun = self._progress.has_steps or any(
            site.is_done or site.is_successful for site in self._present()
        )
        is_forming = self.state is RunState.FORMING and not self._ending.has_begun
        return is_forming and not is_begun and self._returns.may_restart(lost, now_s)

    def _roll_back(self, lost: Member, why: str, now_s: float) -> list[Action]:
        """Stop what has begun of a run that is forming; all begin again once the site is back."""
        rolled_back = self._forming.roll_back(lost, why, now_s)
        waiting = [site for site in self._present() if site.may_have_processes]
        stops = [self._stop(site, why) for site in waiting if not site.is_told_to_stop]
        return [rolled_back, *stops]

    def _agent_ended(self, event: run_events.AgentEnded, now_s: float) -> list[Action]:
        site = self.members[event.site]
        if site.stage is not Stage.ABSENT or site.is_new or self._ending.has_begun:
            return []  # its session told, or will tell; or nobody waits for it
        return self._failures.fail(
            "LAUNCH_FAILED", event.message, now_s, site=event.site, log_path=event.log_path
        )

    def _prepared(self, event: run_events.SitePrepared) -> list[Action]:
        """Note where a site's gateways listen: once, after it was told to prepare."""
        site = self.members[event.site]
        if site.stage in GONE:  # it heard Prepare twice, and had ended in between
            return [self._stop(site, NOT_HERE)]
        if site.stage is not Stage.PREPARING:
            return []
        site.stage, site.endpoints = Stage.PREPARED, event.endpoints
        listed = [f"{each.host}:{each.port}" for each in event.endpoints]
        recorded = RecordEvent("site.prepared", site.name, {"gateways": listed})
        led = self._forming.wan.lead_to(site.endpoints) if site.is_returning else []
        return [recorded, *led]

    def _running(self, event: run_events.SiteRunning) -> list[Action]:
        site = self.members[event.site]
        if site.stage is not Stage.STARTING:
            return []
        site.stage = Stage.RUNNING
        if site.is_returning and site.name not in self._epoch_record.epoch.members:
            site.begin_anew()
        return [RecordEvent("site.running", site.name)]

    def _done(self, event: run_events.SiteDone) -> list[Action]:
        site = self.members[event.site]
        has_part = site.is_returning or not site.is_out
        if site.is_done or not has_part or not site.may_have_processes:
            return []
        site.finish_ranks(event.round)
        self._progress.stepped.add(site.name)  # what it has told of its steps may be lost
        return [RecordEvent("site.done", site.name, {"round": event.round})]

    def _ended_early(self, event: run_events.SiteEndedEarly, now_s: float) -> list[Action]:
        """Note that a site is done while others go on, or end the run where that is wanted."""
        site, failure = self.members[event.site], self._topology.failure
        if not self.is_going_on:
            return []
        site.has_ended_early = True
        ended = self._reports.steps.early_end(event.site, event.round, event.by, event.by_round)
        if failure.ends_on_early_end:
            why = f"{ended}; failure.on_early_end is end"
        elif event.num_left < failure.min_sites:
            why = f"{ended}; {event.num_left} sites would go on, want at least {failure.min_sites}"
        else:
            detail = {"round": event.round, "note": f"{ended}; the others go on without it"}
            return [RecordEvent("site.ended_early", site.name, detail)]
        return self._failures.fail("SITE_ENDED_EARLY", why, now_s, site=site.name, is_last=True)

    def _ended(self, event: run_events.SiteEnded, now_s: float) -> list[Action]:
        site, before = self.members[event.site], self.members[event.site].stage
        if before in {Stage.ABSENT, Stage.JOINED, Stage.ENDED}:
            return []
        is_asked = event.succeeded or event.failures or site.is_told_to_stop
        is_new_start = site.is_returning or self._forming.has_begun_again
        if is_new_start and before is Stage.PREPARING and not is_asked:
            return []  # it answers a Stop from before it was started again
        is_let_go = self._is_released or site.has_ended_early
        was_lost = before is Stage.LOST and not is_let_go
        site.stage, was_returning = Stage.ENDED, site.is_returning
        site.become_outside_again()
        self._reports.forget_stalls(site.name)
        is_over = was_lost or self._forming.is_rolling_back
        was_started = before not in {Stage.PREPARING, Stage.PREPARED}
        has_succeeded = event.succeeded and not event.failures and not is_over
        site.is_successful = has_succeeded and (was_started or site.is_told_to_stop)
        detail: dict[str, object] = {"succeeded": site.is_successful}
        if not site.is_successful:
            failures = event.failures
            detail["why"] = first_failure(failures).reason if failures else "it has ended"
            site.gone = site.gone or str(detail["why"])
        elif site.name not in self._epoch_record.epoch.members:
            self._epoch_record.leaving.discard(site.name)
            site.gone = site.gone or "it has left"
        if site.is_out and event.failures:
            # No failure of the run: what else would say why it did not come back?
            first = first_failure(event.failures)
            detail["message"] = first.message
            if was_returning:
                detail["note"] = self._returns.note_in_vain(
                    site, first.reason, now_s, brings_back=self.brings_back
                )
            elif not first.is_collateral:  # others saw it go, and could not say why
                detail["note"] = f"site {site.name} ended: {first.reason}"
        ended = RecordEvent("site.ended", site.name, detail)
        has_left = site.standing is Standing.LEAVING and site.is_successful
        is_out = site.is_out
        if has_left:
            site.become_outside()
        if is_out or self._is_released or self._forming.is_rolling_back:
            return [ended]
        if has_left:
            return [ended, *self._go_on_without(site, "it has left", now_s)]
        # The next coordinator takes the end for known, and hears of no failure any more.
        failed = self._failures.take(event.failures, now_s)
        is_explained = event.failures or was_lost or site.is_told_to_stop
        if not is_explained and not site.is_successful:
            message = "its agent ended the site's processes without being asked to"
            failed += self._failures.fail("SITE_LOST", message, now_s, site=site.name)
        return [*failed, ended]

    def _note_first_step(self) -> list[Action]:
        """Note once that all who take part have taken a step."""
        present = {site.name for site in self._present()}
        progress = self._progress
        if progress.may_lose or not self.is_going_on or not present <= progress.stepped:
            return []
        progress.may_lose = True
        return [RecordEvent("run.first_step")]

    def _step_taken(self, event: run_events.StepTaken) -> list[Action]:
        """Note once which awaited sites cannot be started, for lack of a state to begin with."""
        progress = self._progress
        if event.site in progress.stepped:
            return []
        stepped = RecordEvent("site.stepped", event.site)
        progress.stepped.add(event.site)
        is_first, progress.has_steps = not progress.has_steps, True
        outside = [site for site in self._all() if site.is_out and not site.is_new]
        awaited = [site.name for site in outside if not site.has_ended_early]
        awaited += [each.name for each in self._all() if each.is_new and each.wish is Wish.IN]
        if not is_first or not progress.lacks_state or not awaited:
            return [stepped]
        note = f"not started: {', '.join(awaited)}: {self._returns.problem}"
        return [stepped, RecordEvent("run.state_missing", detail={"note": note})]

    def _stalled(self, event: run_events.StallReported, now_s: float) -> list[Action]:
        """Stop a site of which a rank hangs while others wait: others go on once it has ended."""
        actions: list[Action] = []
        for recorded, failure in self._reports.take_stall(event, now_s):
            site = self.members[failure.site]
            actions += [recorded, *self._failures.take((failure,), now_s)]
            if self.is_going_on and not site.is_told_to_stop:
                actions.append(self._stop(site, failure.message))
        return actions

    def _namespaces_refused(
        self, event: run_events.NamespacesRefused, now_s: float
    ) -> list[Action]:
        """Fall back to the relay where the topology leaves the choice."""
        wan = self._forming.wan
        if not wan.awaits_namespaces:
            return []
        if wan.may_fall_back:
            return wan.fall_back(event.why)
        message = f"emulator: netns was asked for, and cannot be here: {event.why}"
        return self._failures.fail("LAUNCH_FAILED", message, now_s)

    # ------------------------------------------------------------ who comes and goes

    @property
    def _awaiting_drop(self) -> list[Member]:
        """The sites that an operator has dropped, and that have not been told when they leave."""
        present = [site for site in self._all() if site.standing is Standing.TAKES_PART]
        return [site for site in present if site.is_dropped]

    def _drop_requested(self, event: run_events.DropRequested) -> list[Action]:
        """Note that a site is to take part no more, and that it is not started again."""
        site = self.members[event.site]
        site.wish = Wish.OUT
        asked = RecordEvent("site.drop_requested", site.name, {"message": event.message})
        return [asked, *(self._give_return_up(site, event.message) if site.is_out else [])]

    def _drop_refused(self, event: run_events.DropRefused) -> list[Action]:
        """Take a drop back that nobody has begun with."""
        site = self.members[event.site]
        if site not in self._awaiting_drop:
            return []
        site.wish = Wish.NONE
        note = f"site {site.name} is not dropped: {event.why}"
        return [RecordEvent("site.drop_refused", site.name, {"note": note})]

    def _dropped(self, event: run_events.GoOnWithout, now_s: float) -> list[Action]:
        """Go on without a site; what may be left there has to go."""
        site = self.members[event.site]
        if not self.is_going_on or site.is_successful:
            return []
        if site.is_out:
            return self._give_return_up(site, event.why)
        if not (self._progress.may_lose or site.is_dropped or site.has_ended_early):
            return self._failures.fail("PEER_LOST", event.why, now_s, site=site.name)
        return self._go_on_without(site, event.why, now_s)

    def _go_on_without(self, site: Member, why: str, now_s: float) -> list[Action]:
        """End what is left of a site that was dropped, or is lost."""
        site.become_outside()
        self._epoch_record.leaving.discard(site.name)
        stop: list[Action] = []
        if site.may_have_processes:
            stop = [self._let_go(site, why)]
            site.stage = Stage.LOST
        site.why_out = first_failure(site.losses).message if site.losses else why
        note = f"the run goes on without site {site.name}: {site.why_out}"
        if self._topology.failure.max_restarts and self._returns.problem:
            note += f"; {self._returns.problem}"
        if site.is_dropped:
            note = f"site {site.name} was dropped, and the run goes on without it"
        detail: dict[str, object] = {"message": site.why_out, "note": note, "is_out": True}
        if site.has_ended_early and not site.is_dropped:  # that was said at once
            del detail["note"]
        site.gone = site.gone or site.why_out
        gone = self._gone(site, detail)
        return [
            gone,
            *stop,
            *self._failures.take_found(self._reports.drop(site.name, now_s), now_s),
        ]

    def _let_go(self, site: Member, why: str) -> Action:
        """End what is left of a site; where its ranks are done, only gateways are."""
        return run_events.SendRelease(site.name) if site.has_ended_early else self._stop(site, why)

    def _give_return_up(self, site: Member, why: str) -> list[Action]:
        if not site.is_returning or not site.may_have_processes:
            return []
        site.stage, site.gone = Stage.LOST, site.gone or why
        site.become_outside_again()
        return [self._gone(site, {"message": why}), self._let_go(site, why)]

    def _gone(self, site: Member, detail: dict[str, object]) -> RecordEvent:
        kind = "site.let_go" if site.has_ended_early else "site.lost"
        kind = "site.dropped" if site.is_dropped else kind
        return RecordEvent(kind, site.name, {**detail, "state": site.stage.name})

    def _rejoined(self, event: run_events.SiteRejoined) -> list[Action]:
        """A site takes part again; where all others are done, there is nothing left to do."""
        site = self.members[event.site]
        if not site.is_returning or self._are_all_done:
            return []
        note = f"site {site.name} takes part{' again' if site.has_taken_part else ''}"
        site.become_taking_part()
        self._reports.regain(site.name)
        return [RecordEvent("site.returned", site.name, {"round": event.round, "note": note})]

    def _bring_back(self, now_s: float) -> list[Action]:
        """Start sites again that were lost, where nothing of the run is left there."""
        # An earlier coordinator may have ended between a drop and what comes of it.
        dropped = [site for site in self._all() if site.is_dropped and site.is_returning]
        actions = [each for site in dropped for each in self._give_return_up(site, DROPPED)]
        if not self.brings_back:
            return actions
        being_let_in = () if self._epochs is None else self._epochs.being_let_in
        return [*actions, *self._returns.next(now_s, being_let_in)]

    # ------------------------------------------------------------ decisions

    def _form(self, now_s: float) -> list[Action]:
        """Take all sites one stage further while the run begins."""
        if self._ending.has_begun or self.state is not RunState.FORMING:
            return []
        if self._forming.may_begin_again:
            self._forming.begin_again()
            self._reports.begin_again(self._out)
        if self._forming.is_rolling_back:
            return []
        actions = self._forming.next()
        if actions or not self._forming.is_up:
            return actions
        self.state, self._active_s = RunState.ACTIVE, now_s
        self._failures.is_active = True
        for site in self._all():
            if site.stage in GONE and not (site.is_successful or site.gone):
                losses = site.losses
                site.gone = first_failure(losses).reason if losses else "it has ended"
        return [RecordEvent("run.active")]

    def _release_if_done(self) -> list[Action]:
        """Let all gateways go once every site is done: one that is lost before may need them."""
        if self._is_released or not self.is_going_on or not self._are_all_done:
            return []
        self._is_released = True
        waiting = [site for site in self._present() if site.may_have_processes]
        released: list[Action] = [run_events.SendRelease(site.name) for site in waiting]
        for site in waiting:
            if site.silent:  # nobody waits for its lease
                site.stage, site.gone = Stage.LOST, site.gone or site.silent.why
                detail = {"message": site.silent.why}
                released.append(RecordEvent("site.gone", site.name, detail))
        return released

    @property
    def _are_all_done(self) -> bool:
        """Whether the ranks of all sites that take part are done with the job."""
        sites = self._present()
        return bool(sites) and all(site.is_done or site.is_successful for site in sites)

    def _stop_if_due(self, now_s: float) -> list[Action]:
        """Stop all sites: for a cancellation, a failure that was waited for, or a late start."""
        actions: list[Action] = []
        is_late = self.state is RunState.FORMING and self._forming.is_late(now_s)
        if is_late and not self._ending.has_begun:
            site, message = self._forming.why_late()
            actions += self._failures.fail(
                "START_TIMED_OUT", message, now_s, site=site, is_last=True
            )
        if not self._ending.is_stop_due(now_s):
            return actions
        reason = self._ending.verdict.reason
        self._ending.stopped_s = now_s
        self.state, self._failures.is_active = RunState.STOPPING, False
        detail = {"reason": reason, "note": f"all sites are stopped: {reason}"}
        actions.append(RecordEvent("run.stopping", detail=detail))
        actions += [self._stop(site, reason) for site in self._all() if site.may_have_processes]
        return actions

    def _stop(self, site: Member, reason: str) -> Action:
        site.is_told_to_stop = True
        return run_events.SendStop(site.name, reason, self._timeouts.stop_grace_s)

    def _finish_if_over(self, now_s: float) -> list[Action]:
        """End the run once nothing of it is left, or a site has had long enough to say so."""
        actions: list[Action] = []
        has_success = any(site.is_successful for site in self._all())
        is_done = (has_success or self._is_released) and all(
            site.is_successful or site.is_out or (self._is_released and site.stage in GONE)
            for site in self._all()
        )
        if is_done and not self._ending.has_begun:
            differing = self._reports.flush(now_s)
            if not differing:
                late = [site for site in self._all() if site.is_returning]
                stops = [self._stop(site, "the run has ended") for site in late]
                return [*stops, *self._finish(self._success(), now_s)]
            actions += self._failures.take_found(differing, now_s)
        if not self._ending.has_begun:
            return actions
        remaining = [site for site in self._all() if site.may_have_processes]
        stopped_s = self._ending.stopped_s
        if remaining and (stopped_s is None or now_s < stopped_s + self._confirm_s):
            return actions
        actions += [RecordEvent("site.unconfirmed", site.name) for site in remaining]
        return actions + self._finish(self._ending.verdict, now_s)

    def _success(self) -> Verdict:
        checkpoint_problem = self._progress.checkpoint_problem(is_wanted=self._settings.saves)
        allows_losses = self._topology.failure.allows_losses
        return success(self._all(), checkpoint_problem, allows_losses=allows_losses)

    @property
    def _confirm_s(self) -> float:
        """After Stop, for a site to say that nothing is left; its agent's lease ends by then."""
        return self._timeouts.stop_grace_s + self._timeouts.lease_s

    def _finish(self, verdict: Verdict, now_s: float) -> list[Action]:
        failure = verdict.failure
        detail: dict[str, object] = {
            "state": verdict.state.value,
            "reason_code": verdict.code,
            "reason": verdict.reason,
            "failure": failure.to_json() if failure else None,
            "active_s": self.active_for_s(now_s),
        }
        if note := note_of_missing(self._all()):
            detail["note"] = note
        if self._ending.stopped_s is None:
            self._ending.stopped_s = now_s
        self.state, self._failures.is_active = verdict.state, False
        recorded = RecordEvent("run.ended", detail=detail)
        finish = run_events.FinishRun(verdict.state, verdict.code, verdict.reason, failure)
        return [recorded, finish]

    def _all(self) -> Sequence[Member]:
        return list(self.members.values())

    def _present(self) -> Sequence[Member]:
        return [site for site in self._all() if not site.is_out]

    @property
    def _out(self) -> Collection[str]:
        return [site.name for site in self._all() if site.is_out]
