"""What becomes of a site's processes in a run, as its agent says or no longer says. Pure.

Each method takes one event, and returns what is written down and said for it, step by step: see
run.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.departures import Departures
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.failures import FailureReports
from isthmus.orchestrator.core.first_failure import detail_of, first_failure
from isthmus.orchestrator.core.forming import Forming
from isthmus.orchestrator.core.known_run import KnownRun
from isthmus.orchestrator.core.members import NODE_FAULTS, Absence, Member, Stage, Standing
from isthmus.orchestrator.core.policy import may_restart
from isthmus.orchestrator.core.returns import Returns
from isthmus.orchestrator.core.run_events import Action, RecordEvent, RunState

NOT_HERE = "the run is not going on here"


class SiteEvents:
    """Writes down what happens at the sites of one run."""

    def __init__(
        self,
        known: KnownRun,
        forming: Forming,
        returns: Returns,
        departures: Departures,
        failures: FailureReports,
    ) -> None:
        """Begin with what was written down of the sites."""
        self._record, self._contacts, self._rules = known.record, known.contacts, known.rules
        self._forming, self._returns = forming, returns
        self._departures, self._failures = departures, failures

    def joined(self, event: run_events.SiteJoined) -> Iterator[Action]:
        """An agent of the site is there."""
        site = self._record.members[event.site]
        self._contacts[site.name].has_agent = True
        recorded = RecordEvent(EventKind.SITE_JOINED, site.name, {"host": event.host})
        if site.stage is Stage.NO_AGENT:
            yield recorded
        elif site.stage is Stage.LOST or (site.is_outside and site.stage is Stage.ENDED):
            # The run goes on without it: whatever is left there has to go. Its answer comes after
            # all that it has yet to tell of its end.
            yield recorded
            yield self._departures.stop(site, "the site was lost")

    def returned(self, event: run_events.SiteReturned) -> Iterator[Action]:
        """Tell a site again what an earlier coordinator may not have got across.

        An agent that has heard it before changes nothing.
        """
        site = self._record.members[event.site]
        self._contacts[site.name].has_agent = True
        is_gone = not event.has_run and site.stage not in {Stage.JOINED, Stage.PREPARING}
        detail = {"host": event.host, "has_run": event.has_run}
        yield RecordEvent(EventKind.AGENT_RETURNED, site.name, detail)
        is_stopped = self._record.failures.ending.stopped_s is not None
        if site.stage.is_over or is_stopped or self._record.is_rolling_back:
            yield self._departures.stop(site, NOT_HERE)
        elif is_gone:
            # It has yet to tell its end, or has told a coordinator that died of it. The answer
            # comes after that.
            yield self._departures.ask_what_is_left(site)
        elif site.stage is Stage.PREPARING and site.is_returning:
            yield self._returns.prepare(site)
        elif site.stage in {Stage.JOINED, Stage.PREPARING}:
            yield run_events.SendPrepare(site.name)
        elif site.stage is Stage.STARTING:
            yield run_events.SendStart(site.name, self._forming.address_book()[site.name])
        elif self._departures.is_released:
            yield run_events.SendRelease(site.name)

    def resumed(self, event: run_events.SessionResumed) -> Iterator[Action]:
        """The agent's session goes on."""
        self._contacts[event.site].has_agent = True
        after = {"silent_s": round(event.silent_s, 3)}
        yield RecordEvent(EventKind.SESSION_RESUMED, event.site, after)

    def lost(self, event: run_events.SiteLost, now_s: float) -> Iterator[Action]:
        """The agent has gone, or is silent."""
        site, failures = self._record.members[event.site], self._record.failures
        is_decided = not (failures.is_going_on and self._record.progress.may_lose)
        is_silent = not is_decided and not self._departures.is_released and event.silent_s > 0
        contact, detail = self._contacts[site.name], {"message": event.message}
        contact.has_agent = False
        if site.stage in {Stage.NO_AGENT, Stage.LOST}:
            return
        if not site.may_have_processes:
            yield RecordEvent(EventKind.SITE_LEFT, site.name, detail)
            return
        if self._departures.is_released:  # all are done, and it has been told to go
            yield RecordEvent(EventKind.SITE_GONE, site.name, detail)
            return
        if self._may_roll_back(site, now_s):
            yield from self._roll_back(site, event.message, now_s)
            return
        if is_silent:
            contact.miss(Absence.SILENT, event.message, now_s)
        # The failure is as old as the silence.
        at_s = now_s - event.silent_s
        yield from self._failures.fail("SITE_LOST", event.message, now_s, site=site.name, at_s=at_s)
        kind = (
            EventKind.SITE_LOST
            if is_decided
            else EventKind.SITE_SILENT
            if is_silent
            else EventKind.SITE_GONE
        )
        yield RecordEvent(kind, site.name, detail)

    def _may_roll_back(self, lost: Member, now_s: float) -> bool:
        """Whether all sites can begin again for one that is lost: nothing has come of the run."""
        record = self._record
        is_forming = record.state is RunState.FORMING and not record.failures.ending.has_begun
        is_begun = record.progress.has_steps or any(
            site.is_done or site.has_finished for site in record.present
        )
        return is_forming and not is_begun and may_restart(lost, self._rules, now_s)

    def _roll_back(self, lost: Member, why: str, now_s: float) -> Iterator[Action]:
        """Stop what has begun of a run that is forming; all begin again once the site is back."""
        yield self._forming.roll_back(lost, why, now_s)
        for site in self._record.present:
            if site.may_have_processes and not self._contacts[site.name].is_told_to_stop:
                yield self._departures.stop(site, why)

    def agent_ended(self, event: run_events.AgentEnded, now_s: float) -> Iterator[Action]:
        """An agent ended that has never joined."""
        site, ending = self._record.members[event.site], self._record.failures.ending
        if site.stage is not Stage.NO_AGENT or site.is_new or ending.has_begun:
            return  # its session told, or will tell; or nobody waits for it
        yield from self._failures.fail(
            "LAUNCH_FAILED", event.message, now_s, site=event.site, log_path=event.log_path
        )

    def prepared(self, event: run_events.SitePrepared) -> Iterator[Action]:
        """Note where a site's gateways listen: once, after it was told to prepare."""
        site = self._record.members[event.site]
        if site.stage.is_over:  # it heard Prepare twice, and had ended in between
            yield self._departures.stop(site, NOT_HERE)
        if site.stage is not Stage.PREPARING:
            return
        listed = [f"{each.host}:{each.port}" for each in event.endpoints]
        yield RecordEvent(EventKind.SITE_PREPARED, site.name, {"gateways": listed})
        if site.is_returning:
            yield from self._forming.wan.lead_to(site.endpoints)

    def running(self, event: run_events.SiteRunning) -> Iterator[Action]:
        """All its ranks are there."""
        if self._record.members[event.site].stage is Stage.STARTING:
            yield RecordEvent(EventKind.SITE_RUNNING, event.site)

    def done(self, event: run_events.SiteDone) -> Iterator[Action]:
        """Its ranks are done with the job."""
        site = self._record.members[event.site]
        has_part = site.is_returning or not site.is_outside
        if has_part and site.may_have_processes and not site.is_done:
            yield RecordEvent(EventKind.SITE_DONE, site.name, {"round": event.round})

    def ended(
        self, event: run_events.SiteEnded, now_s: float, *, brings_back: bool
    ) -> Iterator[Action]:
        """Nothing is left of its processes. `brings_back`: it may be started again."""
        site, record = self._record.members[event.site], self._record
        before, is_released = site.stage, self._departures.is_released
        is_told_to_stop = self._contacts[site.name].is_told_to_stop
        if before in {Stage.NO_AGENT, Stage.JOINED, Stage.ENDED}:
            return
        is_asked = event.succeeded or event.failures or is_told_to_stop
        is_new_start = site.is_returning or record.has_begun_again
        if is_new_start and before is Stage.PREPARING and not is_asked:
            return  # it answers a Stop from before it was started again
        was_lost = before is Stage.LOST and not (is_released or site.has_ended_early)
        was_started = before not in {Stage.PREPARING, Stage.PREPARED} or is_told_to_stop
        is_void = was_lost or record.is_rolling_back or not was_started
        succeeded = event.succeeded and not event.failures and not is_void
        detail: dict[str, object] = {"succeeded": succeeded}
        if not succeeded:
            failures = event.failures
            detail["why"] = first_failure(failures).reason if failures else "it has ended"
        if site.is_outside and event.failures:
            # No failure of the run: what else would say why it did not come back?
            first = first_failure(event.failures)
            detail["message"] = first.message
            if first.code in NODE_FAULTS:
                detail["fault"] = detail_of(first)
            if site.is_returning:
                detail["note"] = self._returns.note_in_vain(
                    site, first.reason, now_s, brings_back=brings_back
                )
            elif not first.is_collateral:  # others saw it go, and could not say why
                detail["note"] = f"site {site.name} ended: {first.reason}"
        ended = RecordEvent(EventKind.SITE_ENDED, site.name, detail)
        has_left = site.standing is Standing.LEAVING and succeeded
        if site.is_outside or has_left or is_released or record.is_rolling_back:
            yield ended
        else:
            # The next coordinator takes the end for known, and hears of no failure any more.
            yield from self._failures.take(event.failures, now_s)
            if not (event.failures or was_lost or is_told_to_stop or succeeded):
                message = "its agent ended the site's processes without being asked to"
                yield from self._failures.fail("SITE_LOST", message, now_s, site=site.name)
            yield ended
