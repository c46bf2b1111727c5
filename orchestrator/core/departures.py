"""How a run goes on without a site that is lost, done, dropped, or does not come back. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.failures import FailureReports
from isthmus.orchestrator.core.first_failure import first_failure
from isthmus.orchestrator.core.known_run import KnownRun
from isthmus.orchestrator.core.members import Absence, Member, Stage, Standing
from isthmus.orchestrator.core.policy import early_end_problem
from isthmus.orchestrator.core.rank_reports import RankReports
from isthmus.orchestrator.core.returns import Returns
from isthmus.orchestrator.core.run_events import Action, RecordEvent

DROPPED = "dropped by an operator"


class Departures:
    """Ends what is left of sites, and writes down that others go on."""

    def __init__(
        self, known: KnownRun, returns: Returns, reports: RankReports, failures: FailureReports
    ) -> None:
        """Begin with what was written down of the sites."""
        self._record, self._contacts, self._rules = known.record, known.contacts, known.rules
        self._stop_grace_s = known.timeouts.stop_grace_s
        self._returns, self._reports, self._failures = returns, reports, failures
        self.is_released = False
        """All sites are done with the job, and have been told so."""

    # ------------------------------------------------------------ what is said to sites

    def stop(self, site: Member, reason: str) -> Action:
        """Have a site end what it has of the run."""
        self._contacts[site.name].is_told_to_stop = True
        return self._stop_of(site, reason)

    def ask_what_is_left(self, site: Member) -> Action:
        """Have a site say that nothing is left."""
        return self._stop_of(site, "is anything left here?")

    def _stop_of(self, site: Member, reason: str) -> Action:
        return run_events.SendStop(site.name, reason, self._stop_grace_s)

    def release(self) -> Iterator[Action]:
        """Let all gateways go: every site is done."""
        self.is_released = True
        waiting = [site.name for site in self._record.present if site.may_have_processes]
        for name in waiting:
            yield run_events.SendRelease(name)
            silence = self._contacts[name].absences.get(Absence.SILENT)
            if silence is not None:  # nobody waits for its lease
                yield RecordEvent(EventKind.SITE_GONE, name, {"message": silence.why})

    # ------------------------------------------------------------ what operators want

    @property
    def awaited(self) -> list[Member]:
        """The sites that an operator has dropped, and that have not been told when they leave."""
        members = self._record.members.values()
        return [s for s in members if s.is_dropped and s.standing is Standing.TAKES_PART]

    def drop(self, event: run_events.DropRequested) -> Iterator[Action]:
        """Note that a site is to take part no more, and that it is not started again."""
        site = self._record.members[event.site]
        yield RecordEvent(EventKind.SITE_DROP_REQUESTED, site.name, {"message": event.message})
        if site.is_outside:
            yield from self.give_return_up(site, event.message)

    def refuse_drop(self, event: run_events.DropRefused) -> Iterator[Action]:
        """Take a drop back that nobody has begun with."""
        if self._record.members[event.site] in self.awaited:
            note = f"site {event.site} is not dropped: {event.why}"
            yield RecordEvent(EventKind.SITE_DROP_REFUSED, event.site, {"note": note})

    # ------------------------------------------------------------ who is not there any more

    def end_early(self, event: run_events.SiteEndedEarly, now_s: float) -> Iterator[Action]:
        """Note that a site is done while others go on, or end the run where that is wanted."""
        if not self._record.failures.is_going_on:
            return
        ended = self._reports.steps.early_end(event.site, event.round, event.by, event.by_round)
        if why := early_end_problem(event.num_left, self._rules):
            yield from self._failures.fail(
                "SITE_ENDED_EARLY", f"{ended}; {why}", now_s, site=event.site, is_last=True
            )
        else:
            detail = {"round": event.round, "note": f"{ended}; the others go on without it"}
            yield RecordEvent(EventKind.SITE_ENDED_EARLY, event.site, detail)

    def exclude(self, event: run_events.GoOnWithout, now_s: float) -> Iterator[Action]:
        """Go on without a site; what may be left there has to go."""
        site, record = self._record.members[event.site], self._record
        if not record.failures.is_going_on or site.has_finished:
            return
        if site.is_outside:
            yield from self.give_return_up(site, event.why)
        elif record.progress.may_lose or site.is_dropped or site.has_ended_early:
            yield from self._go_on_without(site, event.why, now_s)
        else:
            yield from self._failures.fail("PEER_LOST", event.why, now_s, site=site.name)

    def see_off(self, now_s: float) -> Iterator[Action]:
        """Go on without sites that have had their last round, and have ended."""
        for site in self._record.members.values():
            if site.standing is Standing.LEAVING and site.has_finished:
                yield from self._go_on_without(site, "it has left", now_s)

    def _go_on_without(self, site: Member, why: str, now_s: float) -> Iterator[Action]:
        """End what is left of a site that was dropped, or is lost."""
        why = first_failure(site.losses).message if site.losses else why
        note = f"the run continues without site {site.name}: {why}"
        if self._rules.max_restarts and self._returns.problem:
            note += f"; {self._returns.problem}"
        if site.is_dropped:
            note = f"site {site.name} was dropped, and the run continues without it"
            note += f": {site.why_dropped}" if site.why_dropped != DROPPED else ""
        detail: dict[str, object] = {"message": why, "note": note, "is_out": True}
        if site.has_ended_early and not site.is_dropped:  # that was said at once
            del detail["note"]
        yield from self._let_go(site, why, detail)
        yield from self._failures.take_found(self._reports.drop(site.name, now_s), now_s)

    def give_return_up(self, site: Member, why: str) -> Iterator[Action]:
        """End what is left of a site that was to come back."""
        if site.is_returning and site.may_have_processes:
            yield from self._let_go(site, why, {"message": why})

    def _let_go(self, site: Member, why: str, detail: dict[str, object]) -> Iterator[Action]:
        """Write down that a site is out, and end what is left: of one that is done, gateways."""
        has_processes, has_ended_early = site.may_have_processes, site.has_ended_early
        kind = EventKind.SITE_LET_GO if has_ended_early else EventKind.SITE_LOST
        kind = EventKind.SITE_DROPPED if site.is_dropped else kind
        state = Stage.LOST if has_processes else site.stage
        yield RecordEvent(kind, site.name, {**detail, "state": state.name})
        if has_processes:
            yield run_events.SendRelease(site.name) if has_ended_early else self.stop(site, why)

    # ------------------------------------------------------------ who is back

    def rejoin(self, event: run_events.SiteRejoined) -> Iterator[Action]:
        """A site takes part again; where all others are done, there is nothing left to do."""
        site = self._record.members[event.site]
        if not site.is_returning or self._record.are_all_done:
            return
        note = f"site {site.name} takes part{' again' if site.has_taken_part else ''}"
        yield RecordEvent(EventKind.SITE_RETURNED, site.name, {"round": event.round, "note": note})
        self._reports.regain(site.name)
