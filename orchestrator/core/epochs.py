"""Decides who takes part in an active run, and by which trees gradients cross: its epochs.

Pure: events in, actions out. Every change of an epoch goes in two phases.

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
from collections.abc import Callable, Iterator, Sequence
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
    refused_change,
)
from isthmus.orchestrator.core.epoch_record import EpochRecord, detail_of
from isthmus.orchestrator.core.handovers import share_finished
from isthmus.orchestrator.core.members import Member
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
    SiteLeaves,
    SitePaused,
    SiteRejoined,
    TreesEnded,
    TreesWanted,
)
from isthmus.topology.spec.epoch import Epoch, Finished, Handover, Runs, merged
from isthmus.topology.spec.run_spec import CodedPlan

NO_STATE_LEFT = (
    "no site has the whole training state any more: each was lost before another had taken it over; "
    "`isthmus launch --resume` goes on from the latest checkpoint"
)

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

    def __init__(self, rules: EpochRules, members: dict[str, Member], record: EpochRecord) -> None:
        """Begin with a run's first epoch, or with what was written down of later ones."""
        self._rules, self._limits, self._sites = rules, rules.limits, members
        self.record = record
        self._presence = Presence(rules.ranks, rules.links, rules.limits, members, record)
        self._proposal: Proposal | None = None
        self._changes: list[Change] = []
        self._entry: Entry | None = None
        self._chains = Chains()
        self._is_over = False

    def await_members(self) -> None:
        """Another coordinator has begun: nothing is decided before it has heard of all."""
        self._presence.unheard = {*self.epoch.members}
        self._let_in_alone()

    @property
    def epoch(self) -> Epoch:
        """The latest that was written down."""
        return self.record.epoch

    def dead_links(self, now_s: float) -> frozenset[Pair]:
        """Return the links between members that are not to be used."""
        return self._presence.dead_links(now_s, self.epoch.members)

    @property
    def being_let_in(self) -> frozenset[str]:
        """The sites that catch up, or that are to."""
        coming = {each.site for each in self._open_changes() if isinstance(each, CatchUp)}
        return frozenset({*self.epoch.follows, *coming})

    def handle(self, event: run_events.Event, now_s: float) -> list[Action]:
        """Apply one event. Late, repeated and impossible ones change nothing.

        Actions are to be carried out in order: what is written down comes before what is sent.
        `now_s` is the coordinator's monotonic clock, never less than in the call before.
        """
        named = {getattr(event, "site", None), getattr(event, "by", None)} - {None}
        if self._is_over or not named <= self._sites.keys():
            return []
        actions = self._apply(event, now_s)
        return [] if actions is None else [*actions, *self._decide(now_s)]

    # ------------------------------------------------------------ facts

    def _apply(self, event: run_events.Event, now_s: float) -> list[Action] | None:
        """Take the event into the facts; None: it is nothing to the epochs."""
        if isinstance(event, Saying):
            self._presence.note(event, now_s)
            return []
        match event:
            case run_events.SiteEnded() | run_events.SiteLost():
                if self._presence.lose(event, now_s):
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
        return []

    def _heard(self, name: str, epoch: int | None, now_s: float) -> list[Action]:
        """Tell a site anew what it may have missed.

        `epoch` is the latest that has begun there; None: it has missed nothing.
        """
        site, proposal = self._sites[name], self._proposal
        asked = () if proposal is None else proposal.asked
        site.is_heard()
        self._presence.unheard.discard(name)
        if CatchUp(name) in self._open_changes():
            return []
        if name not in {*self.epoch.members, *self.record.leaving, *asked}:
            return [GoOnWithout(name, site.gone or "the run goes on without it")]
        if site.gone or self.record.is_unfinished or epoch is None:
            return []
        actions: list[Action] = []
        is_told = name in self.epoch.members or name in self.record.leaving
        if is_told and epoch < self.epoch.number:
            rejoins = self.record.rejoins if name in self.record.rejoins else ()
            actions.append(SendResume(name, self.epoch, self.record.handovers, rejoins))
        if self._entry is not None:  # where it has begun, its round may never have been heard
            actions.append(self._entry.resume(name))
        if proposal is not None and name in asked and name not in proposal.reports:
            actions.append(proposal.pause(name))
            proposal.deadline_s = now_s + proposal.within_s(self._limits)
        if proposal is None and self.record.cancelled > self.epoch.number:
            actions.append(SendCancel(name, self.record.cancelled))
        return actions

    def _paused(self, event: SitePaused) -> list[Action]:
        proposal = self._proposal
        if proposal is None or event.epoch != proposal.number or event.site not in proposal.asked:
            return []
        is_whole = self._sites[event.site].since_round == 0  # else its chain begins later
        if is_whole and not self._chains.take(event.chain_round, event.chain):
            why = f"after round {event.chain_round} site {event.site} has had other results"
            return self._end_run("PARAMETERS_DIFFER", why)
        proposal.reports[event.site] = event
        return []

    def _let_in(self, name: str) -> None:
        """Have a site catch up whose ranks are there."""
        if name in self.epoch.members or CatchUp(name) in self._open_changes():
            return
        self._presence.reach.forget(name)
        self._sites[name].begin_anew()
        self._presence.unheard.discard(name)
        self._changes.append(CatchUp(name))

    def _entered(self, event: EpochEntered) -> list[Action]:
        """Begin the epoch in which a site catches up or rejoins; who catches up hears of it now.

        So do the others, once more: a later change must not come before it anywhere.
        """
        entry, present = self._entry, self.epoch
        if event.by in present.follows and event.epoch == present.number:
            if event.round >= present.from_round:
                self._want_rejoin(Rejoin(event.by, event.behind))
            return []
        if entry is None or event.epoch != entry.epoch.number:
            return []
        self._entry = None
        epoch, site = dataclasses.replace(entry.epoch, from_round=event.round), entry.change.site
        why = f"site {site} {'follows' if epoch.follows else 'takes part again'}"
        begun = RecordEvent("epoch.begun", detail=detail_of(epoch, why))
        self._presence.begin_epoch(epoch)
        told = [SendResume(name, epoch, ()) for name in entry.asked]
        if epoch.follows:
            return [begun, *told, SendResume(site, epoch, (), (site,))]
        return [begun, *told, SiteRejoined(site, epoch.from_round)]

    def _want_rejoin(self, wanted: Rejoin) -> None:
        """Have a site that catches up rejoin next."""
        if not any(isinstance(each, Rejoin) for each in self._open_changes()):
            self._changes.append(wanted)

    def _let_in_alone(self) -> None:
        """A site that catches up rejoins at once where nobody is left whom it could catch up."""
        if self.epoch.follows == self.epoch.members:
            self._want_rejoin(Rejoin(self.epoch.members[0]))

    def _open_changes(self) -> Iterator[Change]:
        yield from self._changes
        if self._entry is not None:
            yield self._entry.change
        if self._proposal is not None and self._proposal.change is not None:
            yield self._proposal.change

    # ------------------------------------------------------------ decisions

    def _decide(self, now_s: float) -> list[Action]:
        """Do what is due. Each step leads at most to the next one, so this ends."""
        actions: list[Action] = []
        while not self._is_over and (more := self._next(now_s)):
            actions += more
        return actions

    def _next(self, now_s: float) -> list[Action]:
        if self._presence.awaits_news(now_s):
            return []
        wanted, waits = self._who_goes_on(now_s)
        if wanted is None:
            return waits
        if early := self._presence.leave_early_out(now_s):
            num_left, limits = early[0].num_left, self._limits
            self._is_over = limits.ends_on_early_end or num_left < limits.min_sites
            return [*waits, *early]
        dead = self._presence.dead_links(now_s)
        uses = self._rules.links_of(self.epoch.reduction)
        if self.record.older is not None:
            uses |= self._rules.links_of(self.record.older)
        if self._entry is not None:
            return [*waits, *self._look_after_entry(self._entry, wanted, dead, uses, now_s)]
        is_redo_due = (
            self.record.is_unfinished
            or wanted != self._presence.working(self.epoch.members)
            or bool(uses & dead)
            or any(self._presence.is_dead(name) for name in self.record.leaving)
        )
        if self._proposal is None:
            if is_redo_due:
                return [*waits, *self._propose_redo(wanted, now_s)]
            return [*waits, *self._propose_change(wanted, now_s)]
        return [*waits, *self._go_on(self._proposal, wanted, is_redo_due, now_s)]

    def _look_after_entry(
        self,
        entry: Entry,
        members: tuple[str, ...],
        dead: frozenset[Pair],
        uses: frozenset[Pair],
        now_s: float,
    ) -> list[Action]:
        """Give an entry up if something fails meanwhile: rounds may wait for whoever comes back."""
        uses |= self._rules.links_of(entry.epoch.reduction)
        is_lost = self._presence.is_dead(entry.change.site)
        if (
            members == self._presence.working(self.epoch.members)
            and not uses & dead
            and not is_lost
        ):
            return []
        self._entry = None
        refused: list[Action] = []
        if isinstance(entry.change, Rejoin):
            pass  # it is a member, and goes the way of all
        elif is_lost or uses & dead:
            refused = [GoOnWithout(entry.change.site, "it was lost before it had entered")]
        else:
            self._changes.append(entry.change)
        return [*refused, *self._propose_redo(members, now_s)]

    def _go_on(
        self, proposal: Proposal, members: tuple[str, ...], is_redo_due: bool, now_s: float
    ) -> list[Action]:
        """Take the open proposal further: superseded, refused, given up or begun."""
        change = proposal.change
        is_whole = set(proposal.members) <= set(members) and self._presence.is_linked(
            proposal.members, now_s
        )
        if change is None and not is_whole:
            return self._propose_redo(members, now_s)
        if change is not None and is_redo_due:
            refused: list[Action] = []
            if isinstance(change, CatchUp | DropRequested) and self._sites[change.site].is_live:
                self._changes.append(change)
            elif isinstance(change, CatchUp | TreesWanted):
                refused = refused_change(change, "something failed meanwhile")
            return [*refused, *self._propose_redo(members, now_s)]
        missing = [site for site in proposal.asked if site not in proposal.reports]
        if change is not None:
            return self._go_on_with(proposal, change, missing, now_s)
        refusing = {name: each.why for name, each in proposal.reports.items() if each.why}
        if now_s >= proposal.deadline_s:
            refusing |= dict.fromkeys(missing, "it lives, but has not settled in time")
        if not refusing:
            return [] if missing else self._redo(proposal, now_s)
        return self._give_up(proposal, refusing, now_s)

    def _give_up(self, proposal: Proposal, refusing: dict[str, str], now_s: float) -> list[Action]:
        """Leave out sites that cannot go on with the others, and propose anew."""
        for name, why in refusing.items():
            self._sites[name].leave_out(why, now_s)
        self._proposal, self.record.is_unfinished = None, True
        site, why = next(iter(refusing.items()))
        return [RecordEvent("epoch.refused", site, {"epoch": proposal.number, "why": why})]

    def _go_on_with(
        self, proposal: Proposal, change: Change, missing: Sequence[str], now_s: float
    ) -> list[Action]:
        """Take a change further that the run could do without: trees, a return, a drop."""
        refusing = next((each for each in proposal.reports.values() if each.why), None)
        needed = {*proposal.asked, *proposal.members}
        gone = next((name for name in needed if self._presence.is_dead(name)), None)
        if refusing is not None:
            must_keep = refusing.must_keep_codecs
            return self._cancel(proposal, change, refusing.site, refusing.why, now_s, must_keep)
        if gone is not None:
            return self._cancel(proposal, change, gone, "it has ended or is lost", now_s)
        if not self._presence.is_linked(proposal.members, now_s):
            return self._cancel(proposal, change, "", "not all would reach each other", now_s)
        if missing and now_s >= proposal.deadline_s:
            if isinstance(change, Rejoin) and change.site in missing:  # it holds the others up
                why = "it follows, and has not settled in time"
                self._sites[change.site].leave_out(why, now_s)
            return self._cancel(proposal, change, missing[0], "it did not answer in time", now_s)
        if missing:
            return []
        if isinstance(change, TreesWanted | DropRequested):
            return self._carry_out(proposal, change, now_s)
        return self._await_entry(proposal, change, now_s)

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
                return None, [*actions, *self._too_few(quorum.num_left)]
            case Reason.WAIT:
                return None, actions

    def _too_few(self, num_left: int) -> list[Action]:
        if self.epoch.follows == self.epoch.members:
            return self._end_run("PEER_LOST", NO_STATE_LEFT)
        return self._end_run(
            "SITE_LOST", f"{num_left} sites are left, want at least {self._limits.min_sites}"
        )

    def _end_run(self, code: str, why: str) -> list[Action]:
        self._is_over = True
        return [CannotGoOn(code, why)]

    # ------------------------------------------------------------ pause and report

    def _propose_redo(self, members: tuple[str, ...], now_s: float) -> list[Action]:
        """Have chunks done again, without sites that catch up: they may have other results."""
        follows = self.epoch.follows
        if set(members) <= set(follows):  # nobody else is left
            return self._propose(members, None, now_s)
        for name in members:
            if name in follows:
                why = "chunks are done again, of which it may have had other results"
                self._sites[name].leave_out(why, now_s)
        wanted, waits = self._who_goes_on(now_s)
        return waits if wanted is None else [*waits, *self._propose(wanted, None, now_s)]

    def _propose(
        self, members: tuple[str, ...], change: Change | None, now_s: float
    ) -> list[Action]:
        """Ask sites to pause for another epoch, and to report."""
        self.record.number += 1
        self.record.is_unfinished = False
        asked = members if change is None else self._presence.working(self.epoch.members)
        present = {*self.epoch.members, *self.record.leaving}
        lost = tuple(name for name in self._sites if name in present - {*members, *asked})
        proposal = Proposal(self.record.number, members, asked, lost, change, now_s)
        proposal.deadline_s = now_s + proposal.within_s(self._limits)
        self._proposal = proposal
        detail = {
            "epoch": proposal.number,
            "members": list(members),
            "lost": list(lost),
            "why": proposal.why(self._presence),
        }
        pauses = [proposal.pause(site) for site in proposal.asked]
        return [RecordEvent("epoch.proposed", detail=detail), *pauses]

    def _propose_change(self, members: tuple[str, ...], now_s: float) -> list[Action]:
        """Begin with the next change that still makes sense."""
        follows = self.epoch.follows
        while not self.record.leaving and (
            due := [each for each in self._changes if not (follows and isinstance(each, CatchUp))]
        ):
            change, wanted = due[0], members
            self._changes.remove(change)
            match change:
                case Rejoin():
                    if change.site not in follows:
                        continue
                case TreesWanted() if follows:
                    return refused_change(change, f"site {follows[0]} is coming back")
                case CatchUp() if self._sites[change.site].is_live:
                    order = {*members, change.site}
                    wanted = tuple(name for name in self._sites if name in order)
                case DropRequested() if change.site in members and {change.site, *follows} < {
                    *members
                }:
                    wanted = tuple(name for name in members if name != change.site)
                case TreesWanted() if change.members == members and not (
                    self._rules.links_of(change.reduction) & self._presence.dead_links(now_s)
                ):
                    pass
                case DropRequested() if change.site in members:
                    return refused_change(change, "no other site has the whole training state")
                case _:
                    return refused_change(change, "it makes no sense any more")
            return self._propose(wanted, change, now_s)
        return []

    def _cancel(
        self,
        proposal: Proposal,
        change: Change,
        site: str,
        why: str,
        now_s: float,
        must_keep_codecs: bool = False,
    ) -> list[Action]:
        """Give up a change that nobody needs. Who was to leave, and cannot, is lost."""
        self._proposal, self.record.cancelled = None, proposal.number
        if isinstance(change, DropRequested):
            self._sites[change.site].leave_out(change.message, now_s, change)
        detail = {"epoch": proposal.number, "why": why}
        cancel = [SendCancel(name, proposal.number) for name in proposal.asked]
        cancelled: list[Action] = [RecordEvent("epoch.cancelled", site, detail), *cancel]
        if isinstance(change, Rejoin | DropRequested):  # it says so again; it is lost
            return cancelled
        return [*cancelled, *refused_change(change, why, site, must_keep_codecs)]

    # ------------------------------------------------------------ resume

    def _redo(self, proposal: Proposal, now_s: float) -> list[Action]:
        """Begin an epoch in which unfinished chunks are done again."""
        reports = proposal.reports
        finished = [(name, each) for name in proposal.asked for each in reports[name].finished]
        from_round, behind = proposal.redone_from(self._sites)
        if behind:
            why = f"round {from_round} is done again, and it is in another"
            return self._give_up(proposal, dict.fromkeys(behind, why), now_s)
        of_round = [(name, each) for name, each in finished if each.round == from_round]
        runs: dict[str, dict[int, Runs]] = {name: {} for name in proposal.members}
        for name, each in of_round:
            runs[name][each.bucket] = each.runs
        dead = self._presence.dead_links(now_s)
        epoch = Epoch(
            number=proposal.number,
            members=proposal.members,
            reduction=self._rules.make_plan(proposal.members, dead, ()),
            from_round=from_round,
            follows=tuple(name for name in proposal.members if name in self.epoch.follows),
        )
        handovers = share_finished(
            from_round, runs, self._presence.reach.ways(proposal.members, dead)
        )
        resumed = self._resume(proposal, epoch, handovers, merged(each for _, each in of_round))
        self._let_in_alone()
        return resumed

    def _planned(
        self, proposal: Proposal, follows: tuple[str, ...], notice: int, now_s: float
    ) -> Epoch:
        """Return the epoch of a change that stops nothing: `notice` rounds after the latest."""
        if isinstance(proposal.change, TreesWanted):
            reduction = proposal.change.reduction
        else:
            others = tuple(name for name in proposal.members if name not in follows)
            reduction = self._rules.make_plan(others, self._presence.dead_links(now_s), follows)
        from_round = max(proposal.begun + notice, self.epoch.from_round)
        return Epoch(proposal.number, proposal.members, reduction, from_round, follows)

    def _await_entry(self, proposal: Proposal, change: Return, now_s: float) -> list[Action]:
        """Tell members who comes back: all ranks hear of it before they agree on a round."""
        if isinstance(change, Rejoin) and proposal.is_too_far_behind(change):
            return self._cancel(proposal, change, change.site, "it is not level any more", now_s)
        follows = (change.site,) if isinstance(change, CatchUp) else ()
        epoch = self._planned(proposal, follows, 2, now_s)
        entry = self._entry = Entry(change, epoch, proposal.asked)
        self._proposal = None
        detail = {"epoch": epoch.number, "members": list(epoch.members)}
        resumes = [entry.resume(name) for name in entry.asked]
        return [RecordEvent("epoch.entering", change.site, detail), *resumes]

    def _carry_out(
        self, proposal: Proposal, change: TreesWanted | DropRequested, now_s: float
    ) -> list[Action]:
        """Begin an epoch with a round that no site has begun."""
        follows = tuple(name for name in proposal.members if name in self.epoch.follows)
        epoch = self._planned(proposal, follows, 1, now_s)
        resumed = self._resume(proposal, epoch, (), ())
        if isinstance(change, TreesWanted):
            return [*resumed, TreesEnded(epoch)]
        return [*resumed, SiteLeaves(change.site)]

    def _resume(
        self,
        proposal: Proposal,
        epoch: Epoch,
        handovers: tuple[Handover, ...],
        kept: tuple[Finished, ...],
    ) -> list[Action]:
        """Write the epoch down and tell it; `kept` is what is finished of its first round."""
        is_redo = proposal.change is None
        whys = {name: self._presence.why_lost(name) for name in proposal.lost}
        lost = [
            GoOnWithout(name, why)
            for name, why in whys.items()
            if not self._sites[name].is_successful
        ]
        unused = self.record.unused(proposal.lost, epoch.from_round, kept) if is_redo else {}
        detail = detail_of(
            epoch,
            proposal.why(self._presence),
            lost=whys,
            leaves=[name for name in proposal.asked if name not in proposal.members],
            unused=unused,
            kept=kept,
            handovers=handovers,
            is_redo=is_redo,
        )
        if is_redo:  # whoever had completed more may be lost
            self._chains.forget_from(epoch.from_round)
        self._presence.begin_epoch(epoch, handovers, kept, lost=whys, is_redo=is_redo)
        self._proposal = None
        resume = [SendResume(name, epoch, handovers) for name in proposal.asked]
        return [RecordEvent("epoch.begun", detail=detail), *resume, *lost]
