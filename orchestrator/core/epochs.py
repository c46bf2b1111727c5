"""Decides who takes part in an active run, and by which trees gradients cross: its epochs.

Pure: events in, actions out; what is decided is written down, and applied by the journal's fold
before anything else is decided (run.py). Every change of an epoch goes in two phases.

1. *Pause and report.* A proposal gets a number that no proposal of the run has had, and is written
   down. Its members begin no new round; each reports how far it has got. Where somebody is lost,
   or a tree's link is dead, chunks of older epochs stop crossing before a site reports.
2. *Resume.* Once all have reported, the epoch is written down with all that follows: its first
   round, and who gives whom the chunks that some have finished and others not. Then all members are
   told. What was written down is final: a coordinator that starts on the same journal tells it
   again. A proposal that was not finished is superseded by one with a higher number.

A site that was lost comes back in two epochs, and so comes one that the run did not begin with.
In the first it *catches up*: it takes over the members' state and gets the results of all later
rounds, and nobody waits for it. Once it says that it has caught up, it *rejoins*: rounds count its
part from one on that all ranks have agreed on. Where chunks have to be done again while it catches
up, it has to begin anew, for it may have had other results; unless nobody else is left.

A failure while sites are paused begins a new proposal. Some changes are not urgent: other trees, a
site that comes back, or one that the operator drops. Such a change waits until nothing is wrong,
and stops nothing, for it begins with a round that no site has begun. It can be cancelled. A site
that is dropped *leaves*: it takes part in the rounds before, and ends. If it does not get so far,
it is lost like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epoch_changes import (
    Action,
    CatchUp,
    Chains,
    Change,
    Entry,
    Proposal,
    Rejoin,
    Return,
    members_after,
    refused_change,
    too_few,
    why_not,
)
from isthmus.orchestrator.core.epoch_record import detail_of
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.handovers import share_finished
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.members import Absence, Contact
from isthmus.orchestrator.core.presence import Presence, Saying
from isthmus.orchestrator.core.quorum import (
    Limits,
    Reason,
)
from isthmus.orchestrator.core.reach import Pair
from isthmus.orchestrator.core.run_events import (
    CannotGoOn,
    DropRequested,
    EpochEntered,
    GoOnWithout,
    RecordEvent,
    SendCancel,
    SendResume,
    SitePaused,
    SiteRejoined,
    TreesEnded,
    TreesWanted,
)
from isthmus.topology.spec.epoch import Epoch, Finished, Handover
from isthmus.topology.spec.regime import Rung
from isthmus.topology.spec.run_spec import CodedPlan
from isthmus.topology.spec.shares import Shares

MakePlan = Callable[[tuple[str, ...], frozenset[Pair], tuple[str, ...]], CodedPlan]
"""Makes the reduction of some members that are linked, around the links that are dead, and of sites
that catch up."""
LinksOf = Callable[[CodedPlan], frozenset[Pair]]
"""Tells which links a reduction uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRules:
    """What a run's epochs are made of."""

    ranks: dict[str, int]
    """Ranks of each site, in the run's order."""
    links: frozenset[Pair]
    """Sites that can reach each other when nothing is wrong."""
    limits: Limits
    """When something is lost."""
    make_plan: MakePlan
    links_of: LinksOf


class Epochs:
    """Owns the epochs of one active run."""

    def __init__(
        self, rules: EpochRules, record: JournaledRun, contacts: Mapping[str, Contact]
    ) -> None:
        """Begin with a run's first epoch, or with what was written down of later ones."""
        self._rules, self._limits, self._sites = rules, rules.limits, record.members
        self.record = record.epochs
        self._contacts = contacts
        self._presence = Presence(rules.ranks, rules.links, rules.limits, record, contacts)
        self._proposal: Proposal | None = None
        self._changes: list[Change] = []
        self._entry: Entry | None = None
        self._chains = Chains()
        self._is_over = False

    def resume(self) -> Iterator[Action]:
        """Another coordinator has begun: nothing is decided before it has heard of all."""
        self._presence.unheard = {*self.epoch.members}
        self._let_in_alone()
        yield from self._let_lost_go()

    @property
    def epoch(self) -> Epoch:
        """The latest that was written down."""
        return self.record.epoch

    def dead_links(self, now_s: float) -> frozenset[Pair]:
        """Return the links between members that are not to be used."""
        return self._presence.dead_links(now_s, self.epoch.members)

    @property
    def coming_back(self) -> frozenset[str]:
        """The sites that catch up, or that are to."""
        coming = {each.site for each in self._open_changes() if isinstance(each, CatchUp)}
        return frozenset({*self.epoch.follows, *coming})

    def handle(self, event: run_events.Event, now_s: float) -> Iterator[Action]:
        """Decide on one event, step by step, as `Run.handle` does.

        Late, repeated and impossible ones change nothing.
        """
        named = {getattr(event, "site", None), getattr(event, "by", None)} - {None}
        if self._is_over or not named <= self._sites.keys():
            return
        actions = self._take(event, now_s)
        if actions is None:
            return
        yield from actions
        has_more = True
        while has_more and not self._is_over:  # each step leads at most to the next one
            has_more = False
            for action in self._next(now_s):
                has_more = True
                yield action

    # ------------------------------------------------------------ facts

    def _take(self, event: run_events.Event, now_s: float) -> Iterable[Action] | None:
        """Take the event into the facts; None: it is nothing to the epochs."""
        if isinstance(event, Saying):
            self._presence.note(event, now_s)
            return ()
        match event:
            case run_events.SiteEnded() | run_events.SiteLost():
                if self._presence.lose(event):
                    gone = CatchUp(event.site)
                    self._changes = [each for each in self._changes if each != gone]
            case (
                run_events.SessionResumed() | run_events.SiteJoined() | run_events.SiteReturned()
            ) if not self._sites[event.site].is_coming_up:  # that counts once its ranks are there
                return self._heard(event.site, getattr(event, "epoch", None), now_s)
            case run_events.SiteRunning() if self._sites[event.site].is_returning:
                self._let_in(event.site)
            case SitePaused():
                return self._paused(event)
            case EpochEntered():
                return self._entered(event)
            case TreesWanted() | DropRequested():
                self._changes.append(event)
            case run_events.Ticked():
                pass
            case _:
                return None
        return ()

    def _heard(self, name: str, epoch: int | None, now_s: float) -> Iterator[Action]:
        """Tell a site anew what it may have missed.

        `epoch` is the latest that has begun there; None: it has missed nothing.
        """
        site, proposal = self._sites[name], self._proposal
        asked = () if proposal is None else proposal.asked
        self._contacts[name].hear()
        self._presence.unheard.discard(name)
        if CatchUp(name) in self._open_changes():
            return
        if name not in {*self.epoch.members, *self.record.leaving, *asked}:
            yield GoOnWithout(name, site.why_absent or "the run continues without it")
            return
        if site.absence is Absence.GONE or self._is_unfinished or epoch is None:
            return
        is_told = name in self.epoch.members or name in self.record.leaving
        if is_told and epoch < self.epoch.number:
            rejoins = self.record.rejoins if name in self.record.rejoins else ()
            yield SendResume(name, self.epoch, self.record.handovers, rejoins)
        if self._entry is not None:  # where it has begun, its round may never have been heard
            yield self._entry.resume(name)
        if proposal is not None and name in asked and name not in proposal.reports:
            yield proposal.pause(name)
            proposal.deadline_s = now_s + proposal.within_s(self._limits)
        if proposal is None and self.record.cancelled > self.epoch.number:
            yield SendCancel(name, self.record.cancelled)

    @property
    def _is_unfinished(self) -> bool:
        """Whether nothing comes any more of what was proposed last: sites may wait for it."""
        is_open = self._proposal is not None or self._entry is not None
        return self.record.is_unfinished and not is_open

    def _paused(self, event: SitePaused) -> Iterator[Action]:
        proposal = self._proposal
        if proposal is None or event.epoch != proposal.number or event.site not in proposal.asked:
            return
        is_whole = self._sites[event.site].since_round == 0  # else its chain begins later
        if is_whole and not self._chains.take(event.chain_round, event.chain):
            why = f"after round {event.chain_round} site {event.site} has had other results"
            self._is_over = True
            yield CannotGoOn("PARAMETERS_DIFFER", why)
            return
        proposal.reports[event.site] = event

    def _let_in(self, name: str) -> None:
        """Have a site catch up whose ranks are there."""
        if name in self.epoch.members or CatchUp(name) in self._open_changes():
            return
        self._presence.reach.forget(name)
        self._contacts[name].begin_anew()
        self._presence.unheard.discard(name)
        self._changes.append(CatchUp(name))

    def _entered(self, event: EpochEntered) -> Iterator[Action]:
        """Begin the epoch in which a site catches up or rejoins; who catches up hears of it now.

        So do the others, once more: a later change must not come before it anywhere.
        """
        entry, present = self._entry, self.epoch
        if event.by in present.follows and event.epoch == present.number:
            if event.round >= present.from_round:
                self._want_rejoin(Rejoin(event.by, event.behind))
            return
        if entry is None or event.epoch != entry.epoch.number:
            return
        epoch, site = dataclasses.replace(entry.epoch, from_round=event.round), entry.change.site
        why = f"site {site} {'catches up' if epoch.follows else 'takes part again'}"
        yield from self._begin(detail_of(epoch, why))
        self._entry = None
        for name in entry.asked:
            yield SendResume(name, epoch, ())
        if epoch.follows:
            yield SendResume(site, epoch, (), (site,))
        else:
            yield SiteRejoined(site, epoch.from_round)

    def _begin(self, detail: dict[str, object]) -> Iterator[Action]:
        """Have an epoch begin: from now on it is the latest."""
        yield RecordEvent(EventKind.EPOCH_BEGUN, detail=detail)
        self._presence.num_chances = 0

    def _want_rejoin(self, wanted: Rejoin) -> None:
        """Have a site that catches up rejoin next."""
        if not any(isinstance(each, Rejoin) for each in self._open_changes()):
            self._changes.append(wanted)

    def _let_in_alone(self) -> None:
        """A site that catches up rejoins at once where nobody is left whom it could catch up."""
        if self.epoch.follows == self.epoch.members:
            self._want_rejoin(Rejoin(self.epoch.members[0]))

    def _open_changes(self) -> list[Change]:
        begun = [each.change for each in (self._entry, self._proposal) if each is not None]
        return [*self._changes, *(change for change in begun if change is not None)]

    # ------------------------------------------------------------ decisions

    def _next(self, now_s: float) -> Iterator[Action]:
        """Do the next thing that is due."""
        if self._presence.awaits_news(now_s):
            return
        wanted, waits = self._who_goes_on(now_s)
        yield from waits
        if wanted is None:
            return
        if early := self._presence.leave_early_out(now_s):
            num_left, limits = early[0].num_left, self._limits
            self._is_over = limits.ends_on_early_end or num_left < limits.min_sites
            yield from early
            return
        if self._entry is not None:
            yield from self._check_entry(self._entry, wanted, now_s)
            return
        is_redo_due = (
            self._is_unfinished
            or wanted != self._presence.working(self.epoch.members)
            or self._has_dead_link(now_s)
            or any(self._presence.is_dead(name) for name in self.record.leaving)
        )
        if self._proposal is not None:
            yield from self._go_on(self._proposal, wanted, is_redo_due, now_s)
        elif is_redo_due:
            yield from self._propose_redo(wanted, now_s)
        else:
            yield from self._propose_change(wanted, now_s)

    def _has_dead_link(self, now_s: float, *more: CodedPlan) -> bool:
        """Return whether a link is dead by which rounds cross, or would by more trees."""
        used, dead = (
            (self.epoch.reduction, self.record.older, *more),
            self._presence.dead_links(now_s),
        )
        return any(each is not None and self._rules.links_of(each) & dead for each in used)

    def _check_entry(
        self, entry: Entry, members: tuple[str, ...], now_s: float
    ) -> Iterator[Action]:
        """Give an entry up if something fails meanwhile: rounds may wait for whoever comes back."""
        is_lost = self._presence.is_dead(entry.change.site)
        is_lost |= self._has_dead_link(now_s, entry.epoch.reduction)
        if members == self._presence.working(self.epoch.members) and not is_lost:
            return
        self._entry = None
        if isinstance(entry.change, Rejoin):
            pass  # it is a member, and goes the way of all
        elif is_lost:
            yield GoOnWithout(entry.change.site, "it was lost before it had entered")
        else:
            self._changes.append(entry.change)
        yield from self._propose_redo(members, now_s)

    def _go_on(
        self, proposal: Proposal, members: tuple[str, ...], is_redo_due: bool, now_s: float
    ) -> Iterator[Action]:
        """Take the open proposal further: superseded, refused, given up or begun."""
        change = proposal.change
        is_whole = set(proposal.members) <= set(members) and self._presence.is_linked(
            proposal.members, now_s
        )
        if change is None and not is_whole:
            yield from self._propose_redo(members, now_s)
            return
        if change is not None and is_redo_due:
            if isinstance(change, CatchUp | DropRequested) and self._presence.is_live(change.site):
                self._changes.append(change)
            elif isinstance(change, CatchUp | TreesWanted):
                yield from refused_change(change, "something failed meanwhile")
            yield from self._propose_redo(members, now_s)
            return
        missing = [site for site in proposal.asked if site not in proposal.reports]
        if change is not None:
            yield from self._go_on_with(proposal, change, missing, now_s)
            return
        refusing = {name: each.why for name, each in proposal.reports.items() if each.why}
        if now_s >= proposal.deadline_s:
            within_s = proposal.within_s(self._limits)
            why = f"it is running, but did not pause within {within_s:g} s"
            refusing |= dict.fromkeys(missing, why)
        if refusing:
            yield from self._give_up(proposal, refusing, now_s)
        elif not missing:
            yield from self._redo(proposal, now_s)

    def _give_up(
        self, proposal: Proposal, refusing: dict[str, str], now_s: float
    ) -> Iterator[Action]:
        """Leave out sites that cannot go on with the others, and propose anew."""
        for name, why in refusing.items():
            self._presence.leave_out(name, why, now_s)
        self._proposal = None
        site, why = next(iter(refusing.items()))
        yield RecordEvent(EventKind.EPOCH_REFUSED, site, {"epoch": proposal.number, "why": why})

    def _go_on_with(
        self, proposal: Proposal, change: Change, missing: Sequence[str], now_s: float
    ) -> Iterator[Action]:
        """Take a change further that the run could do without: trees, a return, a drop."""
        refusing = next((each for each in proposal.reports.values() if each.why), None)
        needed = {*proposal.asked, *proposal.members}
        gone = next((name for name in needed if self._presence.is_dead(name)), None)
        must_keep_codecs, problem = False, ("", "")
        if refusing is not None:
            problem, must_keep_codecs = (refusing.site, refusing.why), refusing.must_keep_codecs
        elif gone is not None:
            problem = gone, "it has ended or is lost"
        elif not self._presence.is_linked(proposal.members, now_s):
            problem = "", "not all would reach each other"
        elif missing and now_s >= proposal.deadline_s:
            problem = missing[0], "it did not answer in time"
            if isinstance(change, Rejoin) and change.site in missing:  # it holds the others up
                why = f"it was catching up, and did not pause within {self._limits.detect_s:g} s"
                self._presence.leave_out(change.site, why, now_s)
        if problem[1]:
            yield from self._cancel(proposal, change, *problem, now_s, must_keep_codecs)
        elif isinstance(change, TreesWanted | DropRequested) and not missing:
            yield from self._carry_out(proposal, change, now_s)
        elif isinstance(change, CatchUp | Rejoin) and not missing:
            yield from self._await_entry(proposal, change, now_s)

    # ------------------------------------------------------------ who goes on

    def _who_goes_on(self, now_s: float) -> tuple[tuple[str, ...] | None, list[Action]]:
        """Return the members that can go on together; None: nobody can, or it is not known yet."""
        quorum = self._presence.quorum(now_s)
        actions: list[Action] = []
        if quorum.is_nobody_linked:
            for drop in self._presence.give_second_chance(now_s):
                actions += refused_change(drop, "no other site is left")
        actions += [quorum.note] if quorum.note else []
        match quorum.reason:
            case Reason.GO_ON:
                return quorum.members, actions
            case Reason.ALL_DONE:
                self._is_over = True
                return None, [*self._presence.all_done()]
            case Reason.TOO_FEW:
                self._is_over = True
                return None, [*actions, too_few(self.epoch, quorum.num_left, self._limits)]
            case Reason.WAIT:
                return None, actions

    # ------------------------------------------------------------ pause and report

    def _propose_redo(self, members: tuple[str, ...], now_s: float) -> Iterator[Action]:
        """Have chunks done again, without sites that catch up: they may have other results."""
        catching_up = self.epoch.follows
        if set(members) <= set(catching_up):  # nobody else is left
            yield from self._propose(members, None, now_s)
            return
        for name in members:
            if name in catching_up:
                why = "chunks are done again, of which it may have had other results"
                self._presence.leave_out(name, why, now_s)
        wanted, waits = self._who_goes_on(now_s)
        yield from waits
        if wanted is not None:
            yield from self._propose(wanted, None, now_s)

    def _propose(
        self, members: tuple[str, ...], change: Change | None, now_s: float
    ) -> Iterator[Action]:
        """Ask sites to pause for another epoch, and to report."""
        asked = members if change is None else self._presence.working(self.epoch.members)
        present = {*self.epoch.members, *self.record.leaving}
        lost = tuple(name for name in self._sites if name in present - {*members, *asked})
        proposal = Proposal(self.record.number + 1, members, asked, lost, change, now_s)
        proposal.deadline_s = now_s + proposal.within_s(self._limits)
        yield RecordEvent(EventKind.EPOCH_PROPOSED, detail=proposal.detail(self._presence))
        self._proposal = proposal
        for site in proposal.asked:
            yield proposal.pause(site)

    def _propose_change(self, members: tuple[str, ...], now_s: float) -> Iterator[Action]:
        """Begin with the next change that still makes sense."""
        catching_up = self.epoch.follows
        while not self.record.leaving and (
            due := [
                each for each in self._changes if not (catching_up and isinstance(each, CatchUp))
            ]
        ):
            change = due[0]
            self._changes.remove(change)
            if isinstance(change, Rejoin) and change.site not in catching_up:
                continue
            is_possible = isinstance(change, TreesWanted) or self._presence.is_live(change.site)
            if isinstance(change, TreesWanted):
                is_possible = not self._has_dead_link(now_s, change.reduction)
            if why := why_not(change, members, catching_up, is_possible=is_possible):
                yield from refused_change(change, why)
            else:
                wanted = members_after(change, members, tuple(self._sites))
                yield from self._propose(wanted, change, now_s)
            return

    def _cancel(
        self,
        proposal: Proposal,
        change: Change,
        site: str,
        why: str,
        now_s: float,
        must_keep_codecs: bool = False,
    ) -> Iterator[Action]:
        """Give up a change that nobody needs. Who was to leave, and cannot, is lost."""
        yield RecordEvent(EventKind.EPOCH_CANCELLED, site, {"epoch": proposal.number, "why": why})
        self._proposal = None
        if isinstance(change, DropRequested):
            self._presence.leave_out(change.site, change.message, now_s, change)
        for name in proposal.asked:
            yield SendCancel(name, proposal.number)
        if not isinstance(change, Rejoin | DropRequested):  # it says so again; it is lost
            yield from refused_change(change, why, site, must_keep_codecs)

    # ------------------------------------------------------------ resume

    def _redo(self, proposal: Proposal, now_s: float) -> Iterator[Action]:
        """Begin an epoch in which unfinished chunks are done again."""
        from_round, behind = proposal.redone_from(self._sites)
        if behind:
            why = f"round {from_round} is done again, and it is in another"
            yield from self._give_up(proposal, dict.fromkeys(behind, why), now_s)
            return
        dead = self._presence.dead_links(now_s)
        epoch = dataclasses.replace(
            self.epoch,
            number=proposal.number,
            members=proposal.members,
            reduction=self._rules.make_plan(proposal.members, dead, ()),
            from_round=from_round,
            follows=tuple(name for name in proposal.members if name in self.epoch.follows),
        )
        runs, kept = proposal.finished_in(from_round)
        ways = self._presence.reach.ways(proposal.members, dead)
        yield from self._resume(proposal, epoch, share_finished(from_round, runs, ways), kept)
        self._let_in_alone()

    def _planned(
        self, proposal: Proposal, catching_up: tuple[str, ...], notice: int, now_s: float
    ) -> Epoch:
        """Return the epoch of a change that stops nothing: `notice` rounds after the latest."""
        shares, rung = self.epoch.shares, self.epoch.rung
        if isinstance(proposal.change, TreesWanted):
            reduction = proposal.change.reduction
            if proposal.change.parts:
                shares = Shares(proposal.number, proposal.change.parts)
            if proposal.change.regime is not None:
                rung = Rung(proposal.number, proposal.change.regime)
        else:
            others = tuple(name for name in proposal.members if name not in catching_up)
            reduction = self._rules.make_plan(others, self._presence.dead_links(now_s), catching_up)
        from_round = max(proposal.begun + notice, self.epoch.from_round)
        return Epoch(
            proposal.number, proposal.members, reduction, from_round, catching_up, shares, rung
        )

    def _await_entry(self, proposal: Proposal, change: Return, now_s: float) -> Iterator[Action]:
        """Tell members who comes back: all ranks hear of it before they agree on a round."""
        if isinstance(change, Rejoin) and proposal.is_too_far_behind(change):
            why = "it has fallen behind again"
            yield from self._cancel(proposal, change, change.site, why, now_s)
            return
        catching_up = (change.site,) if isinstance(change, CatchUp) else ()
        epoch = self._planned(proposal, catching_up, 2, now_s)
        entry = Entry(change, epoch, proposal.asked)
        yield RecordEvent(EventKind.EPOCH_ENTERING, change.site, entry.detail())
        self._entry, self._proposal = entry, None
        for name in entry.asked:
            yield entry.resume(name)

    def _carry_out(
        self, proposal: Proposal, change: TreesWanted | DropRequested, now_s: float
    ) -> Iterator[Action]:
        """Begin an epoch with a round that no site has begun."""
        catching_up = tuple(name for name in proposal.members if name in self.epoch.follows)
        epoch = self._planned(proposal, catching_up, 1, now_s)
        yield from self._resume(proposal, epoch, (), ())
        if isinstance(change, TreesWanted):
            yield TreesEnded(epoch)

    def _resume(
        self,
        proposal: Proposal,
        epoch: Epoch,
        handovers: tuple[Handover, ...],
        kept: tuple[Finished, ...],
    ) -> Iterator[Action]:
        """Write the epoch down and tell it; `kept` is what is finished of its first round."""
        is_redo = proposal.change is None
        detail = detail_of(
            epoch,
            proposal.why(self._presence),
            lost={name: self._presence.why_lost(name) for name in proposal.lost},
            leaves=[name for name in proposal.asked if name not in proposal.members],
            unused=self.record.unused(proposal.lost, epoch.from_round, kept) if is_redo else {},
            kept=kept,
            handovers=handovers,
            is_redo=is_redo,
        )
        yield from self._begin(detail)
        if is_redo:  # whoever had completed more may be lost
            self._chains.forget_from(epoch.from_round)
        self._proposal = None
        for name in proposal.asked:
            yield SendResume(name, epoch, handovers)
        yield from self._let_lost_go()

    def _let_lost_go(self) -> Iterator[Action]:
        """Have whatever is left of lost members end; a coordinator may not have got so far."""
        for name, why in list(self.record.lost.items()):
            if not self._sites[name].has_finished:
                yield GoOnWithout(name, why)
