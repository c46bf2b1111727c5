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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epoch_record import EpochRecord, detail_of
from isthmus.orchestrator.core.first_failure import first_failure
from isthmus.orchestrator.core.handovers import share_finished
from isthmus.orchestrator.core.members import Absence, Member
from isthmus.orchestrator.core.quorum import (
    Facts,
    Limits,
    MemberFacts,
    Outage,
    Reason,
    who_takes_part,
)
from isthmus.orchestrator.core.reach import Pair, Reach
from isthmus.orchestrator.core.run_events import (
    CannotGoOn,
    DropRefused,
    DropRequested,
    EpochEntered,
    EpochMessage,
    GoOnWithout,
    Outcome,
    RecordEvent,
    SendCancel,
    SendPause,
    SendResume,
    SiteEndedEarly,
    SiteLeaves,
    SitePaused,
    SiteRejoined,
    TreesEnded,
    TreesWanted,
)
from isthmus.topology.spec.epoch import Epoch, Finished, Handover, Runs, merged
from isthmus.topology.spec.run_spec import CodedPlan

UNANSWERED = 2.0
"""Times `detect_s`: after this a site that lives but does not report is lost."""
CHAINS_KEPT = 256
"""Rounds of which it is known what all have had."""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """A site's ranks are there: it can take over the members' state, and get all results."""

    site: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """A site that catches up has all results that there are: from now on it can take part."""

    site: str
    behind: int = 0
    """Where it never has: how many rounds it may be behind, and others then wait for."""


Return = CatchUp | Rejoin
Change = TreesWanted | DropRequested | Return
"""A change that nobody needs in order to go on."""
Action = RecordEvent | EpochMessage | TreesEnded | Outcome

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


@dataclass(slots=True, kw_only=True)
class _Proposal:
    """An epoch that sites are asked to pause for."""

    number: int
    members: tuple[str, ...]
    asked: tuple[str, ...]
    """Who has to report: all of them that are members now."""
    lost: tuple[str, ...]
    change: Change | None
    """What is changed though nothing is wrong; None: chunks are done again."""
    deadline_s: float
    reports: dict[str, SitePaused] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An epoch in which a site catches up or rejoins, from a round on that ranks agree on."""

    change: Return
    epoch: Epoch
    asked: tuple[str, ...]


class Epochs:
    """Owns the epochs of one active run."""

    def __init__(self, rules: EpochRules, members: dict[str, Member], record: EpochRecord) -> None:
        """Begin with a run's first epoch, or with what was written down of later ones."""
        self._rules, self._limits, self._sites = rules, rules.limits, members
        self.record = record
        self._reach = Reach(
            rules.links, detect_s=rules.limits.detect_s, collect_s=rules.limits.collect_s
        )
        self._proposal: _Proposal | None = None
        self._changes: list[Change] = []
        self._entry: _Entry | None = None
        self._unheard: set[str] = set()
        """Members that a coordinator which has just begun has not heard of."""
        self._outage: Outage | None = None
        """Too few sites reach each other; None: enough do."""
        self._num_chances = 0
        """How often those who could not go on were asked again since the epoch began."""
        self._chains = _Chains()
        self._is_over = False

    def await_members(self) -> None:
        """Another coordinator has begun: nothing is decided before it has heard of all."""
        self._unheard = {*self.epoch.members}
        self._let_in_alone()

    @property
    def epoch(self) -> Epoch:
        """The latest that was written down."""
        return self.record.epoch

    def dead_links(self, now_s: float) -> frozenset[Pair]:
        """Return the links between members that are not to be used."""
        members = set(self.epoch.members)
        return frozenset(pair for pair in self._dead_links(now_s) if members.issuperset(pair))

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
        match event:
            case run_events.SiteEnded():
                self._ended(event)
            case run_events.SiteLost() if event.silent_s > 0:
                self._sites[event.site].silent = Absence(event.message, now_s)
                self._unheard.discard(event.site)
            case run_events.SiteLost():
                self._is_gone_for_good(event.site, event.message)
            case run_events.SessionBroken():
                self._sites[event.site].session_lost = event.message
            case (
                run_events.SessionResumed() | run_events.SiteJoined() | run_events.SiteReturned()
            ) if not self._sites[event.site].is_coming_up:  # that counts once its ranks are there
                return self._heard(event.site, getattr(event, "epoch", None), now_s)
            case run_events.SiteRunning() if self._sites[event.site].is_returning:
                self._let_in(event.site)
            case run_events.SiteDone():
                if event.site in self.epoch.members:
                    self._sites[event.site].finish_ranks(event.round)
            case run_events.RoundBegun():
                site = self._sites[event.site]
                site.begun = max(site.begun, event.round)
            case run_events.Suspected():
                self._reach.suspect(event, now_s)
            case run_events.Reached():
                self._reach.clear(event)
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

    def _ended(self, event: run_events.SiteEnded) -> None:
        """A site has ended: done with the job, with its last round where it leaves, or else."""
        site = self._sites[event.site]
        if not event.succeeded or event.failures:
            why = first_failure(event.failures).reason if event.failures else "it has ended"
            self._is_gone_for_good(event.site, why)
        elif site.gone:
            pass  # its first end counts: this answers a question of a later coordinator
        elif event.site in self.epoch.members:
            site.is_successful = True
        else:
            self.record.leaving.discard(event.site)
            site.gone = "it has left"
            self._reach.forget(event.site)

    def _is_gone_for_good(self, name: str, why: str) -> None:
        site = self._sites[name]
        site.gone = site.gone or why or "gone"
        self._reach.forget(name)
        self._changes = [each for each in self._changes if each != CatchUp(name)]

    def _heard(self, name: str, epoch: int | None, now_s: float) -> list[Action]:
        """Tell a site anew what it may have missed.

        `epoch` is the latest that has begun there; None: it has missed nothing.
        """
        site, proposal = self._sites[name], self._proposal
        asked = () if proposal is None else proposal.asked
        site.is_heard()
        self._unheard.discard(name)
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
            actions.append(_resume_entry(name, self._entry))
        if proposal is not None and name in asked and name not in proposal.reports:
            actions.append(_pause(name, proposal))
            proposal.deadline_s = now_s + self._report_within_s(proposal.change)
        if proposal is None and self.record.cancelled > self.epoch.number:
            actions.append(SendCancel(name, self.record.cancelled))
        return actions

    def _paused(self, event: SitePaused) -> list[Action]:
        proposal = self._proposal
        if proposal is None or event.epoch != proposal.number or event.site not in proposal.asked:
            return []
        is_whole = self._sites[event.site].since_round == 0  # else its chain begins later
        if is_whole and not self._chains.agrees(event.chain_round, event.chain):
            why = f"after round {event.chain_round} site {event.site} has had other results"
            return self._end_run("PARAMETERS_DIFFER", why)
        if is_whole:
            self._chains.note(event.chain_round, event.chain)
        proposal.reports[event.site] = event
        return []

    def _let_in(self, name: str) -> None:
        """Have a site catch up whose ranks are there."""
        if name in self.epoch.members or CatchUp(name) in self._open_changes():
            return
        self._reach.forget(name)
        self._sites[name].begin_anew()
        self._unheard.discard(name)
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
        self._begin(epoch, (), (), is_redo=False)
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
        while not self._is_over:
            more = self._next(now_s)
            if not more:
                break
            actions += more
        return actions

    def _next(self, now_s: float) -> list[Action]:
        members = self._members()
        if any(site.name in self._unheard and site.is_live for site in members):
            return []  # leases of those that do not come will end
        heard_by_s = now_s - self._limits.collect_s
        if any(site.silent and site.silent.since_s > heard_by_s for site in members):
            return []  # others are about to say whether they still reach it
        wanted, waits = self._who_goes_on(now_s)
        if wanted is None:
            return waits
        if early := self._early():
            return [*waits, *self._end_early(*early, now_s)]
        dead = self._dead_links(now_s)
        uses = self._rules.links_of(self.epoch.reduction)
        if self.record.older is not None:
            uses |= self._rules.links_of(self.record.older)
        if self._entry is not None:
            return [*waits, *self._look_after_entry(self._entry, wanted, dead, uses, now_s)]
        is_redo_due = (
            self.record.is_unfinished
            or wanted != self._working(self.epoch.members)
            or bool(uses & dead)
            or any(self._is_dead(name) for name in self.record.leaving)
        )
        if self._proposal is None:
            if is_redo_due:
                return [*waits, *self._propose_redo(wanted, now_s)]
            return [*waits, *self._propose_change(wanted, now_s)]
        return [*waits, *self._go_on(self._proposal, wanted, is_redo_due, now_s)]

    def _look_after_entry(
        self,
        entry: _Entry,
        members: tuple[str, ...],
        dead: frozenset[Pair],
        uses: frozenset[Pair],
        now_s: float,
    ) -> list[Action]:
        """Give an entry up if something fails meanwhile: rounds may wait for whoever comes back."""
        uses |= self._rules.links_of(entry.epoch.reduction)
        is_lost = self._is_dead(entry.change.site)
        if members == self._working(self.epoch.members) and not uses & dead and not is_lost:
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
        self, proposal: _Proposal, members: tuple[str, ...], is_redo_due: bool, now_s: float
    ) -> list[Action]:
        """Take the open proposal further: superseded, refused, given up or begun."""
        change = proposal.change
        is_whole = set(proposal.members) <= set(members) and self._is_linked(proposal, now_s)
        if change is None and not is_whole:
            return self._propose_redo(members, now_s)
        if change is not None and is_redo_due:
            refused: list[Action] = []
            if isinstance(change, CatchUp | DropRequested) and self._sites[change.site].is_live:
                self._changes.append(change)
            elif isinstance(change, CatchUp | TreesWanted):
                refused = _refused(change, "something failed meanwhile")
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

    def _give_up(self, proposal: _Proposal, refusing: dict[str, str], now_s: float) -> list[Action]:
        """Leave out sites that cannot go on with the others, and propose anew."""
        for name, why in refusing.items():
            self._sites[name].leave_out(why, now_s)
        self._proposal, self.record.is_unfinished = None, True
        site, why = next(iter(refusing.items()))
        return [RecordEvent("epoch.refused", site, {"epoch": proposal.number, "why": why})]

    def _go_on_with(
        self, proposal: _Proposal, change: Change, missing: Sequence[str], now_s: float
    ) -> list[Action]:
        """Take a change further that the run could do without: trees, a return, a drop."""
        refusing = next((each for each in proposal.reports.values() if each.why), None)
        needed = {*proposal.asked, *proposal.members}
        gone = next((name for name in needed if self._is_dead(name)), None)
        if refusing is not None:
            must_keep = refusing.must_keep_codecs
            return self._cancel(proposal, change, refusing.site, refusing.why, now_s, must_keep)
        if gone is not None:
            return self._cancel(proposal, change, gone, "it has ended or is lost", now_s)
        if not self._is_linked(proposal, now_s):
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
        members = self._members()
        present = [site.name for site in members if self._is_left(site) and not site.left_out]
        live = [site.name for site in members if not self._is_dead(site.name)]
        facts = Facts(
            members=tuple(self._facts_of(site) for site in members),
            parts=tuple(self._reach.parts(live, self._dead_links(now_s))),
            any_reach=self._reach.any_reach(present),
            awaits_leaving=not all(map(self._is_dead, self.record.leaving)),
            has_had_chance=bool(self._num_chances),
            outage=self._outage,
            limits=self._limits,
        )
        quorum = who_takes_part(facts, now_s)
        self._outage = quorum.outage
        actions: list[Action] = self._second_chance(now_s) if quorum.is_nobody_linked else []
        actions += [quorum.note] if quorum.note else []
        match quorum.reason:
            case Reason.GO_ON:
                return quorum.members, actions
            case Reason.ALL_DONE:
                return None, self._all_done()
            case Reason.TOO_FEW:
                return None, [*actions, *self._too_few(quorum.num_left)]
            case Reason.WAIT:
                return None, actions

    def _facts_of(self, site: Member) -> MemberFacts:
        return MemberFacts(
            name=site.name,
            num_ranks=self._rules.ranks[site.name],
            is_gone=self._is_gone(site),
            is_left_out=site.left_out is not None,
            is_done=site.is_done,
            has_finished=site.is_successful,
        )

    def _all_done(self) -> list[Action]:
        """Lose who is not there any more, now that all others are done.

        Those that catch up count where only they are left, with the results of all rounds.
        """
        self._is_over = True
        members = self._members()
        left = [site.name for site in members if self._is_left(site)]
        lost = [each.name for each in members if self._is_gone(each) and not each.is_successful]
        lost += sorted(self.record.leaving)
        is_alone = bool(left) and set(left) <= set(self.epoch.follows)
        from_round = self.epoch.from_round
        rejoined = [SiteRejoined(name, from_round) for name in left if is_alone]
        return [*rejoined, *(GoOnWithout(name, self._why_lost(name)) for name in lost)]

    def _second_chance(self, now_s: float) -> list[Action]:
        """Where no other site is left, ask those again that could not go on, or were to be dropped.

        The time between two attempts doubles. A drop that is under way is refused with that.
        """
        limits = self._limits
        wait_s = min(limits.detect_s * 2**self._num_chances, limits.ride_out_s)
        left = [site for site in self._members() if self._is_left(site)]
        refused: list[Action] = []
        num_chances = self._num_chances
        for site in left:
            absence = site.left_out
            if absence is None or now_s < absence.since_s + wait_s:
                continue
            site.left_out, self._num_chances = None, num_chances + 1
            if absence.drop is not None:
                refused += _refused(absence.drop, "no other site is left")
        return refused

    def _too_few(self, num_left: int) -> list[Action]:
        fewest = self._limits.min_sites
        if self.epoch.follows == self.epoch.members:
            why = "no site has the whole training state any more: each was lost before another had "
            why += "taken it over; `isthmus launch --resume` goes on from the latest checkpoint"
            return self._end_run("PEER_LOST", why)
        return self._end_run("SITE_LOST", f"{num_left} sites are left, want at least {fewest}")

    def _end_run(self, code: str, why: str) -> list[Action]:
        self._is_over = True
        return [CannotGoOn(code, why)]

    def _early(self) -> tuple[dict[str, int], Member] | None:
        """Return the last rounds of members that are done while another is in a later round.

        None: nobody is. All may end with the same round, at unlike times.
        """
        live = [site for site in self._members() if site.is_live]
        first = max(live, key=lambda site: site.begun, default=None)
        if first is None:
            return None
        last_rounds = {site.name: self._last_round(site) for site in live}
        early = {
            name: round_
            for name, round_ in last_rounds.items()
            if round_ is not None and round_ < first.begun
        }
        return (early, first) if early else None

    def _last_round(self, site: Member) -> int | None:
        """Return with which round a site's ranks were done; None: they are not, or nobody knows.

        Who catches up may have nothing left to do after the state that it took over.
        """
        if site.last_round is None or site.last_round >= 0:
            return site.last_round
        return site.since_round - 1 if site.name in self.epoch.follows else None

    def _end_early(self, early: dict[str, int], by: Member, now_s: float) -> list[Action]:
        """Go on without sites that are done, if that may be; the round that waits is done again."""
        stay = [site for site in self._members() if site.is_live or site.is_successful]
        num_left = len(stay) - len(early)
        actions: list[Action] = []
        for name, last_round in early.items():
            why = f"it ended after round {last_round}, and site {by.name} is in round {by.begun}"
            self._sites[name].leave_out(why, now_s)
            actions.append(SiteEndedEarly(name, last_round, by.name, by.begun, num_left))
        self._is_over = self._limits.ends_on_early_end or num_left < self._limits.min_sites
        return actions

    # ------------------------------------------------------------ sites and links

    def _members(self) -> list[Member]:
        return [self._sites[name] for name in self.epoch.members]

    def _working(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those that are not done with the job."""
        return tuple(name for name in names if not self._sites[name].is_successful)

    def _is_gone(self, site: Member) -> bool:
        """Whether nothing of a site is left, by its agent's word or by all signs."""
        is_unheard = bool(site.session_lost or site.silent)
        return bool(site.gone) or (
            is_unheard and self._reach.is_called_gone(site.name, self._is_live)
        )

    def _is_left(self, site: Member) -> bool:
        return not (self._is_gone(site) or site.is_successful)

    def _is_live(self, name: str) -> bool:
        return self._sites[name].is_live

    def _is_dead(self, name: str) -> bool:
        site = self._sites[name]
        return not site.is_live or self._is_gone(site)

    def _dead_links(self, now_s: float) -> frozenset[Pair]:
        return self._reach.dead_links(self._is_live, now_s)

    def _is_linked(self, proposal: _Proposal, now_s: float) -> bool:
        """Whether members are linked with one another, with those that catch up and without."""
        dead, follows = self._dead_links(now_s), self.epoch.follows
        others = [name for name in proposal.members if name not in follows] or proposal.members
        return all(len(self._reach.parts(each, dead)) == 1 for each in (proposal.members, others))

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
        asked = members if change is None else self._working(self.epoch.members)
        present = {*self.epoch.members, *self.record.leaving}
        lost = tuple(name for name in self._sites if name in present - {*members, *asked})
        proposal = self._proposal = _Proposal(
            number=self.record.number,
            members=members,
            asked=asked,
            lost=lost,
            change=change,
            deadline_s=now_s + self._report_within_s(change),
        )
        detail = {
            "epoch": proposal.number,
            "members": list(members),
            "lost": list(lost),
            "why": self._why(proposal),
        }
        pauses = [_pause(site, proposal) for site in proposal.asked]
        return [RecordEvent("epoch.proposed", detail=detail), *pauses]

    def _report_within_s(self, change: Change | None) -> float:
        return self._limits.detect_s * (UNANSWERED if change is None else 1.0)

    def _why(self, proposal: _Proposal) -> str:
        match proposal.change:
            case TreesWanted():
                return proposal.change.why
            case CatchUp():
                return f"site {proposal.change.site} follows"
            case Rejoin():
                return f"site {proposal.change.site} takes part"
            case DropRequested():
                return f"site {proposal.change.site} leaves: {proposal.change.message}"
        whys = [
            f"site {name}: {self._why_lost(name)}"
            for name in proposal.lost
            if not self._sites[name].is_successful
        ]
        return "; ".join(whys) or "trees go around a dead link"

    def _why_lost(self, name: str) -> str:
        """Return why a site is not to be a member any more."""
        site = self._sites[name]
        absences = [each.why for each in (site.left_out, site.silent) if each is not None]
        reported = [site.gone, *absences, site.session_lost if self._is_dead(name) else ""]
        return next(filter(None, reported), "") or self._reach.why_not(name)

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
                    return _refused(change, f"site {follows[0]} is coming back")
                case CatchUp() if self._sites[change.site].is_live:
                    order = {*members, change.site}
                    wanted = tuple(name for name in self._sites if name in order)
                case DropRequested() if change.site in members and {change.site, *follows} < {
                    *members
                }:
                    wanted = tuple(name for name in members if name != change.site)
                case TreesWanted() if change.members == members and not (
                    self._rules.links_of(change.reduction) & self._dead_links(now_s)
                ):
                    pass
                case DropRequested() if change.site in members:
                    return _refused(change, "no other site has the whole training state")
                case _:
                    return _refused(change, "it makes no sense any more")
            return self._propose(wanted, change, now_s)
        return []

    def _cancel(
        self,
        proposal: _Proposal,
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
        return [*cancelled, *_refused(change, why, site, must_keep_codecs)]

    # ------------------------------------------------------------ resume

    def _redo(self, proposal: _Proposal, now_s: float) -> list[Action]:
        """Begin an epoch in which unfinished chunks are done again."""
        reports = proposal.reports
        finished = [(name, each) for name in proposal.asked for each in reports[name].finished]
        # Who takes part since a round has what all before it came to. A finished chunk contains all
        # members' parts, so all have completed the rounds before.
        # Only a site that has caught up just now can be further behind.
        completed = {
            name: max(reports[name].chain_round, self._sites[name].since_round - 1)
            for name in proposal.members
        }
        latest = max((each.round for _, each in finished), default=0)
        from_round = max(min(completed.values()) + 1, latest)
        why = f"round {from_round} is done again, and it is in another"
        behind = {
            name: why
            for name in proposal.members
            if self._sites[name].since_round > from_round or completed[name] < from_round - 1
        }
        if behind:
            return self._give_up(proposal, behind, now_s)
        of_round = [(name, each) for name, each in finished if each.round == from_round]
        runs: dict[str, dict[int, Runs]] = {name: {} for name in proposal.members}
        for name, each in of_round:
            runs[name][each.bucket] = each.runs
        dead = self._dead_links(now_s)
        epoch = Epoch(
            number=proposal.number,
            members=proposal.members,
            reduction=self._rules.make_plan(proposal.members, dead, ()),
            from_round=from_round,
            follows=tuple(name for name in proposal.members if name in self.epoch.follows),
        )
        handovers = share_finished(from_round, runs, self._reach.ways(proposal.members, dead))
        resumed = self._resume(proposal, epoch, handovers, merged(each for _, each in of_round))
        self._let_in_alone()
        return resumed

    def _planned(
        self, proposal: _Proposal, follows: tuple[str, ...], notice: int, now_s: float
    ) -> Epoch:
        """Return the epoch of a change that stops nothing: `notice` rounds after the latest."""
        begun = max(report.round for report in proposal.reports.values())
        if isinstance(proposal.change, TreesWanted):
            reduction = proposal.change.reduction
        else:
            others = tuple(name for name in proposal.members if name not in follows)
            reduction = self._rules.make_plan(others, self._dead_links(now_s), follows)
        from_round = max(begun + notice, self.epoch.from_round)
        return Epoch(proposal.number, proposal.members, reduction, from_round, follows)

    def _await_entry(self, proposal: _Proposal, change: Return, now_s: float) -> list[Action]:
        """Tell members who comes back: all ranks hear of it before they agree on a round."""
        if isinstance(change, Rejoin):
            begun = max(report.round for report in proposal.reports.values())
            if begun - proposal.reports[change.site].round > change.behind + 1:
                why = "it is not level any more"
                return self._cancel(proposal, change, change.site, why, now_s)
        follows = (change.site,) if isinstance(change, CatchUp) else ()
        epoch = self._planned(proposal, follows, 2, now_s)
        entry = self._entry = _Entry(change, epoch, proposal.asked)
        self._proposal = None
        detail = {"epoch": epoch.number, "members": list(epoch.members)}
        resumes = [_resume_entry(name, entry) for name in entry.asked]
        return [RecordEvent("epoch.entering", change.site, detail), *resumes]

    def _carry_out(
        self, proposal: _Proposal, change: TreesWanted | DropRequested, now_s: float
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
        proposal: _Proposal,
        epoch: Epoch,
        handovers: tuple[Handover, ...],
        kept: tuple[Finished, ...],
    ) -> list[Action]:
        """Write the epoch down and tell it; `kept` is what is finished of its first round."""
        is_redo = proposal.change is None
        lost = [
            GoOnWithout(name, self._why_lost(name))
            for name in proposal.lost
            if not self._sites[name].is_successful
        ]
        unused = self.record.unused(proposal.lost, epoch.from_round, kept) if is_redo else {}
        detail = detail_of(
            epoch,
            self._why(proposal),
            lost=proposal.lost,
            leaves=[name for name in proposal.asked if name not in proposal.members],
            unused=unused,
            kept=kept,
            handovers=handovers,
            is_redo=is_redo,
        )
        if is_redo:  # whoever had completed more may be lost
            self._chains.forget_from(epoch.from_round)
        self._begin(epoch, handovers, kept, is_redo=is_redo)
        self._proposal = None
        resume = [SendResume(name, epoch, handovers) for name in proposal.asked]
        return [RecordEvent("epoch.begun", detail=detail), *resume, *lost]

    def _begin(
        self,
        epoch: Epoch,
        handovers: tuple[Handover, ...],
        kept: tuple[Finished, ...],
        *,
        is_redo: bool,
    ) -> None:
        self._num_chances = 0
        self.record.begin(epoch, handovers, kept, self._sites, is_redo=is_redo)


def _pause(site: str, proposal: _Proposal) -> SendPause:
    change = proposal.change
    reduction = change.reduction if isinstance(change, TreesWanted) else None
    return SendPause(site, proposal.number, proposal.lost, change is None, reduction)


def _resume_entry(site: str, entry: _Entry) -> SendResume:
    return SendResume(site, entry.epoch, (), (entry.change.site,))


def _refused(
    change: Change, why: str, site: str = "", must_keep_codecs: bool = False
) -> list[Action]:
    """Return what follows where a change does not come."""
    match change:
        case TreesWanted():
            return [TreesEnded(None, site, why, must_keep_codecs)]
        case DropRequested():
            return [DropRefused(change.site, why)]
        case CatchUp():
            return [GoOnWithout(change.site, why)]
        case Rejoin():
            return []


class _Chains:
    """What members have said of their results, round by round."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def agrees(self, round_: int, chain: int) -> bool:
        return self._known.get(round_, chain) == chain

    def forget_from(self, round_: int) -> None:
        for each in [each for each in self._known if each >= round_]:
            del self._known[each]

    def note(self, round_: int, chain: int) -> None:
        if round_ >= 0:
            self._known[round_] = chain
        while len(self._known) > CHAINS_KEPT:
            del self._known[min(self._known)]
