"""Decides who takes part in an active run, and by which trees gradients cross: its epochs.

Pure: events in, actions out. Every change of an epoch goes the same way.

1. A proposal gets a number that no proposal of the run has had, and is written down.
2. Settle goes to its members; each answers how far it has got. Where somebody is lost, or a tree's
   link is dead, chunks of older epochs stop crossing before a site answers.
3. Once all have answered, the epoch is written down with all that follows from the answers: its
   first round, and who gives whom the chunks that some have finished and others not.
4. Resume tells all members. What was written down is final: a coordinator that starts on the same
   journal tells it again. A proposal that was not finished is superseded by one with a higher
   number.

A site that was lost comes back in two steps, and so comes one that the run did not begin with.
First it *follows*: it takes over the members' state and gets the results of all later rounds, and
nobody waits for it. Once it says that it is level, it enters: rounds count its part from one on
that all ranks have agreed on. Where chunks have to be done again while it follows, it has to begin
anew, for it may have had other results; unless nobody else is left.

A failure while sites settle begins a new proposal. Some changes are not urgent: other trees, a site
that joins, or one that the operator drops. Such a change waits until nothing is wrong, and stops
nothing, for it begins with a round that no site has begun. It can be cancelled. A site that is
dropped *leaves*: it takes part in the rounds before, and ends. If it does not get so far, it is
lost like any other.

A site is dead when its agent says that its processes have ended, when its agent's session is gone
and others say that its gateways are, or when its lease has ended. A link is dead when both its ends
live and one of them suspects the other. Members are the largest part of the live sites that are
linked with one another. Where no two sites reach each other, the fault is with the network between
all: nobody is dropped for `ride_out_s`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.orchestrator.core.handovers import share_finished
from isthmus.orchestrator.core.run_events import RecordEvent
from isthmus.orchestrator.core.run_view import RecordedEvent
from isthmus.topology.spec.epoch import Epoch, Finished, Handover, Runs, merged, numbers_of
from isthmus.topology.spec.json_fields import read_json, to_json
from isthmus.topology.spec.run_spec import CodedPlan

Pair = tuple[str, str]
"""Two sites that are linked, in ascending order."""
UNANSWERED = 2.0
"""Times `detect_s`: after this a site that lives but does not settle is lost."""
CHAINS_KEPT = 256
"""Rounds of which it is known what all have had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When sites and links count as lost, and when a run does."""

    min_sites: int
    """The fewest sites that a run goes on with."""
    detect_s: float
    """Seconds after which silence is a failure."""
    ride_out_s: float
    """Seconds that an outage between all sites may last."""
    alone_s: float
    """Seconds that all sites may go on without a coordinator that hears of any."""
    collect_s: float
    """Seconds from the first news of a dead link, for further ones that belong to it."""
    ends_on_early_end: bool = False
    """A site that is done while others go on ends the run; else they go on without it."""


# ---------------------------------------------------------------- in


@dataclass(frozen=True, slots=True)
class SiteGone:
    """The site's processes have ended before the work was done; nothing of the run is left."""

    site: str
    why: str


@dataclass(frozen=True, slots=True)
class SiteDone:
    """The site's ranks are done with the job. Its gateways keep what others may need."""

    site: str
    round: int = -1
    """The last that they have begun; -1: not known."""


@dataclass(frozen=True, slots=True)
class RoundBegun:
    """How far a site has got, said again and again: the latest round that a rank there has begun.

    0 where none has.
    """

    site: str
    round: int


@dataclass(frozen=True, slots=True)
class SiteFinished:
    """The site has ended: done with the job, or with its last round where it leaves."""

    site: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The connection of the site's agent broke; its lease may go on."""

    site: str
    why: str


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The site's agent was silent for as long as its lease."""

    site: str
    why: str


@dataclass(frozen=True, slots=True)
class SiteHeard:
    """A session of the site's agent begins, or goes on after a break."""

    site: str
    epoch: int | None = None
    """The latest epoch that has begun at the site; None: it has missed nothing."""


@dataclass(frozen=True, slots=True)
class Suspected:
    """A site cannot reach another."""

    by: str
    site: str
    is_gone: bool
    """Whether the other refuses or said that it ends; else it has been silent for `detect_s`."""
    why: str


@dataclass(frozen=True, slots=True)
class Reached:
    """A site reaches another again."""

    by: str
    site: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSettled:
    """A site's answer to Settle."""

    site: str
    epoch: int
    round: int
    """The latest that it has begun; -1: none."""
    finished: tuple[Finished, ...] = ()
    """Finished chunks of rounds that others may not have finished."""
    chain: int = 0
    """What the digests of all rounds up to `chain_round` add up to."""
    chain_round: int = -1
    """The latest that it has completed; -1: none."""
    why: str = ""
    """Why it cannot take part; empty: it can."""
    must_keep_codecs: bool = False
    """Why it cannot: its ranks encode, and a chunk would have another codec."""


@dataclass(frozen=True, slots=True)
class TreesWanted:
    """Gradients shall cross by other trees."""

    members: tuple[str, ...]
    """The sites that the trees were made for."""
    reduction: CodedPlan
    why: str


@dataclass(frozen=True, slots=True)
class SiteEnters:
    """A site that was lost is ready to take over the members' state, and to take part."""

    site: str


@dataclass(frozen=True, slots=True)
class SiteLevel:
    """A site that follows has taken all results that there are: from now on it can take part."""

    site: str
    behind: int = 0
    """Where it never has: how many rounds it may be behind, and others then wait for."""


@dataclass(frozen=True, slots=True)
class EntryBegun:
    """The ranks of a member have begun the first round of an epoch in which a site enters.

    The site that follows says so once its ranks have begun a round together with the others.
    """

    by: str
    epoch: int
    round: int
    behind: int = 0
    """How many rounds the site that follows may still lack (`SiteLevel.behind`); 0 for a member."""


@dataclass(frozen=True, slots=True)
class DropWanted:
    """Somebody wants a site to leave after a round."""

    site: str
    why: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


Entering = SiteEnters | SiteLevel
Change = TreesWanted | DropWanted | Entering
"""A change that nobody needs in order to go on."""
Event = (
    SiteGone
    | SiteDone
    | RoundBegun
    | SiteFinished
    | SessionLost
    | LeaseEnded
    | SiteHeard
    | Suspected
    | Reached
    | SiteSettled
    | TreesWanted
    | SiteEnters
    | EntryBegun
    | DropWanted
    | Ticked
)

# ---------------------------------------------------------------- out


@dataclass(frozen=True, slots=True)
class SendSettle:
    """Ask a site's agent how far its gateways have got."""

    site: str
    epoch: int
    lost: tuple[str, ...]
    is_redo: bool
    """Whether chunks of older epochs stop crossing; else the rounds that have begun go on."""
    reduction: CodedPlan | None = None
    """The trees that are wanted: the site says whether it can have them. None: any."""


@dataclass(frozen=True, slots=True)
class SendResume:
    """Tell a site's agent the new epoch."""

    site: str
    epoch: Epoch
    handovers: tuple[Handover, ...]
    enters: tuple[str, ...] = ()
    """Members that come back. Others begin the epoch with the round that their ranks mark."""


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell a site's agent that the change does not come."""

    site: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LoseSite:
    """The run goes on without this site: whatever is left there has to go."""

    site: str
    why: str


@dataclass(frozen=True, slots=True)
class EndsEarly:
    """A site's ranks are done with the job, and another site has begun a later round."""

    site: str
    round: int
    """Its last."""
    by: str
    by_round: int
    num_left: int
    """How many sites would go on without those that are done."""


@dataclass(frozen=True, slots=True)
class EndChange:
    """Tell what came of a change that was wanted: an epoch, or why there is none."""

    change: Change
    epoch: Epoch | None
    """The epoch that it began; None: it did not come."""
    site: str = ""
    """Who could not."""
    why: str = ""
    must_keep_codecs: bool = False
    """It could not because its ranks encode, and a chunk would have had another codec."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run cannot go on."""

    code: str
    why: str


Action = (
    RecordEvent | SendSettle | SendResume | SendCancel | LoseSite | EndsEarly | EndChange | EndRun
)

MakePlan = Callable[[tuple[str, ...], frozenset[Pair], tuple[str, ...]], CodedPlan]
"""Makes the reduction of some members that are linked, around the links that are dead, and of sites
that follow."""
LinksOf = Callable[[CodedPlan], frozenset[Pair]]
"""Tells which links a reduction uses."""


@dataclass(slots=True)
class _Site:
    """One site of the run, member or not."""

    name: str
    num_ranks: int
    gone: str = ""
    """Why none of its processes is left; empty: some are."""
    silent: str = ""
    """Why its lease has ended; empty: it has not."""
    silent_since_s: float = 0.0
    left_out: str = ""
    """Why the others go on without it though it lives; empty: they do not."""
    left_out_since_s: float = 0.0
    drop: DropWanted | None = None
    """The drop for which it is left out; None: it is left out for something else, or not at all."""
    is_unheard: bool = False
    """This coordinator has just begun, and has not heard of it."""
    session_lost: str = ""
    """Why its agent's session is gone; empty: there is one."""
    is_done: bool = False
    """Its ranks are done with the job; its gateways are members until all are."""
    begun: int = -1
    """The latest round that its ranks have begun, as far as is known."""
    has_last_round: bool = False
    """Its ranks are done, and no later one begins there."""
    has_finished: bool = False
    """Nothing is left of it, for it is done."""
    since_round: int = 0
    """The first round in which it takes part."""

    @property
    def is_live(self) -> bool:
        return not (self.gone or self.silent or self.left_out or self.has_finished)

    def note_done(self, last_round: int) -> None:
        """Its ranks have ended after their last round; -1: which is not known."""
        self.is_done = True
        if last_round >= 0:
            self.begun, self.has_last_round = last_round, True

    def begin_anew(self) -> None:
        """Nothing of its ranks that were there before holds any more."""
        self.is_done = self.has_finished = self.is_unheard = self.has_last_round = False
        self.begun = -1

    def leave_out(self, why: str, now_s: float, drop: DropWanted | None = None) -> None:
        """Have the others go on without it."""
        self.left_out, self.left_out_since_s, self.drop = why, now_s, drop


@dataclass(slots=True)
class _Suspicion:
    since_s: float
    is_gone: bool
    why: str


@dataclass(slots=True, kw_only=True)
class _Proposal:
    """An epoch that sites are asked to settle for."""

    number: int
    members: tuple[str, ...]
    asked: tuple[str, ...]
    """Who has to answer: all of them that are members now."""
    lost: tuple[str, ...]
    change: Change | None
    """What is changed though nothing is wrong; None: chunks are done again."""
    deadline_s: float
    answers: dict[str, SiteSettled] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An epoch in which a site follows or enters, from a round on that ranks agree on."""

    change: Entering
    epoch: Epoch
    asked: tuple[str, ...]


class Membership:
    """Owns the epochs of one active run."""

    def __init__(
        self,
        *,
        ranks: Mapping[str, int],
        links: Iterable[Pair],
        limits: Limits,
        make_plan: MakePlan,
        links_of: LinksOf,
        first: Epoch,
    ) -> None:
        """Begin with the run's first epoch.

        Args:
            ranks: Ranks of each site, in the run's order.
            links: Sites that can reach each other when nothing is wrong.
            limits: When something is lost.
            make_plan: Plans for members and links.
            links_of: What a plan uses.
            first: With which the run was started.
        """
        self._sites = {name: _Site(name, num_ranks) for name, num_ranks in ranks.items()}
        self._links = frozenset(links)
        self._limits = limits
        self._make_plan, self._links_of = make_plan, links_of
        self.epoch = first
        """The latest that was written down."""
        self._handovers: tuple[Handover, ...] = ()
        self._enters: tuple[str, ...] = ()
        """Who is new in the epoch."""
        self._counted: dict[str, tuple[int, frozenset[tuple[int, int]] | None]] = {}
        """By site lost while a round was under way: the round, and buckets and chunks of it that
        were finished with its part; None: all are to be, for it leaves after that round."""
        self._leaving: set[str] = set()
        """Sites that take part in rounds before the epoch's first one only, and have not ended."""
        self._older_links: frozenset[Pair] = frozenset()
        """What the epoch before uses for rounds that come before the present one's first."""
        self._number = first.number
        """The highest that any proposal has had."""
        self._cancelled = -1
        """The latest proposal that was cancelled."""
        self._is_unfinished = False
        """A coordinator before this one has made a proposal of which nothing came."""
        self._proposal: _Proposal | None = None
        self._changes: list[Change] = []
        self._entry: _Entry | None = None
        self._suspicions: dict[Pair, _Suspicion] = {}
        """By who suspects and who is suspected."""
        self._short_since_s: float | None = None
        """Since when too few sites reach each other."""
        self._was_alone = False
        """Since then no site could go on for a while."""
        self._back_s: float | None = None
        """When the first could again after that."""
        self._num_chances = 0
        """How often those who could not go on were asked again since the epoch began."""
        self._mended_s: float | None = None
        """When some reached each other again."""
        self._chains = _Chains()
        self._is_over = False

    def restore(self, records: Iterable[RecordEvent | RecordedEvent]) -> None:
        """Take up what coordinators before this one have written down of the run, in order."""
        for each in records:
            match each.kind:
                case "epoch.proposed" | "epoch.entering":
                    self._number = int(str(each.detail["epoch"]))
                    self._is_unfinished = True
                case "epoch.cancelled":
                    self._is_unfinished, self._cancelled = False, self._number
                case "epoch.begun":
                    epoch = read_json(Epoch, each.detail["record"])
                    handovers = read_json(tuple[Handover, ...], each.detail["handovers"])
                    kept = read_json(tuple[Finished, ...], each.detail["kept"])
                    self._begin(epoch, handovers, kept, is_redo=bool(each.detail["is_redo"]))
                    for name in epoch.members:
                        self._sites[name].gone = ""
                    self._number, self._is_unfinished = epoch.number, False
                case "site.done" if each.site in self._sites:
                    self._sites[each.site].note_done(int(str(each.detail.get("round", -1))))
                case "site.returning" if each.site in self._sites:
                    self._sites[each.site].begin_anew()
                    # Where it is a member, it followed: what is started knows nothing of that.
                    self._sites[each.site].gone = "it has ended"
                case "site.lost" | "site.dropped" | "site.let_go" if each.site in self._sites:
                    self._leaving.discard(each.site)
                    self._sites[each.site].gone = str(each.detail.get("message", "lost"))
        for site in self._members():
            site.is_unheard = True
        self._let_in_alone()

    def dead_links(self, now_s: float) -> frozenset[Pair]:
        """Return the links between members that are not to be used."""
        members = set(self.epoch.members)
        return frozenset(pair for pair in self._dead_links(now_s) if members.issuperset(pair))

    @property
    def being_let_in(self) -> frozenset[str]:
        """The sites that follow, or that are to."""
        entering = {each.site for each in self._open_changes() if isinstance(each, SiteEnters)}
        return frozenset({*self.epoch.follows, *entering})

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event. Late, repeated and impossible ones change nothing.

        Actions are to be carried out in order: what is written down comes before what is sent.
        `now_s` is the coordinator's monotonic clock, never less than in the call before.
        """
        named = {getattr(event, "site", None), getattr(event, "by", None)} - {None}
        if self._is_over or not named <= self._sites.keys():
            return []
        return [*self._apply(event, now_s), *self._decide(now_s)]

    # ------------------------------------------------------------ facts

    def _apply(self, event: Event, now_s: float) -> list[Action]:
        """Take the event into the facts; what follows for the epoch is decided later."""
        match event:
            case SiteGone():
                site = self._sites[event.site]
                site.gone = site.gone or event.why or "gone"
                self._forget(event.site)
                entering = SiteEnters(event.site)
                self._changes = [each for each in self._changes if each != entering]
            case SiteDone():
                self._sites[event.site].note_done(event.round)
            case RoundBegun():
                site = self._sites[event.site]
                site.begun = max(site.begun, event.round)
            case SiteFinished() if self._sites[event.site].gone:
                pass  # its first end counts: this answers a question of a later coordinator
            case SiteFinished() if event.site not in self.epoch.members:
                self._leaving.discard(event.site)
                self._sites[event.site].gone = "it has left"
                self._forget(event.site)
            case SiteFinished():
                self._sites[event.site].has_finished = True
            case SessionLost():
                self._sites[event.site].session_lost = event.why
            case LeaseEnded():
                site = self._sites[event.site]
                site.silent, site.is_unheard = event.why, False
                site.silent_since_s = now_s
            case SiteHeard():
                return self._heard(event, now_s)
            case Suspected():
                known = self._suspicions.get((event.by, event.site))
                if known is None or event.is_gone is not known.is_gone:
                    suspicion = _Suspicion(now_s, event.is_gone, event.why)
                    self._suspicions[event.by, event.site] = suspicion
            case Reached():
                self._suspicions.pop((event.by, event.site), None)
            case SiteSettled():
                return self._settled(event)
            case SiteEnters():
                return self._wants_to_enter(event)
            case EntryBegun():
                return self._entry_begun(event)
            case TreesWanted() | DropWanted():
                self._changes.append(event)
            case _:
                pass
        return []

    def _forget(self, site: str) -> None:
        """What others think of a site counts no more, nor what it thinks of them."""
        for pair in [each for each in self._suspicions if site in each]:
            del self._suspicions[pair]

    def _heard(self, event: SiteHeard, now_s: float) -> list[Action]:
        """Tell a site anew what it may have missed."""
        site = self._sites[event.site]
        proposal = self._proposal
        asked = () if proposal is None else proposal.asked
        site.silent = site.session_lost = ""
        site.is_unheard = False
        if any(each == SiteEnters(site.name) for each in self._open_changes()):
            return []
        if site.name not in {*self.epoch.members, *self._leaving, *asked}:
            return [LoseSite(site.name, site.gone or "the run goes on without it")]
        if site.gone or self._is_unfinished or event.epoch is None:
            return []
        actions: list[Action] = []
        is_told = site.name in self.epoch.members or site.name in self._leaving
        if is_told and event.epoch < self.epoch.number:
            enters = self._enters if site.name in self._enters else ()
            actions.append(SendResume(site.name, self.epoch, self._handovers, enters))
        if self._entry is not None:  # where it has begun, its round may never have been heard
            actions.append(self._resume_entry(site.name, self._entry))
        if proposal is not None and site.name in asked and site.name not in proposal.answers:
            actions.append(self._settle(site.name, proposal))
            proposal.deadline_s = now_s + self._settle_within_s(proposal.change)
        if proposal is None and self._cancelled > self.epoch.number:
            actions.append(SendCancel(site.name, self._cancelled))
        return actions

    def _settled(self, event: SiteSettled) -> list[Action]:
        proposal = self._proposal
        if proposal is None or event.epoch != proposal.number or event.site not in proposal.asked:
            return []
        is_whole = self._sites[event.site].since_round == 0  # else its chain begins later
        if is_whole and not self._chains.agrees(event.chain_round, event.chain):
            why = f"after round {event.chain_round} site {event.site} has had other results"
            return self._end_run("PARAMETERS_DIFFER", why)
        if is_whole:
            self._chains.note(event.chain_round, event.chain)
        proposal.answers[event.site] = event
        return []

    def _wants_to_enter(self, event: SiteEnters) -> list[Action]:
        site = self._sites[event.site]
        if site.name in self.epoch.members or any(each == event for each in self._open_changes()):
            return []
        self._forget(site.name)
        site.gone = site.silent = site.session_lost = site.left_out = ""
        site.drop = None
        site.begin_anew()
        self._changes.append(event)
        return []

    def _entry_begun(self, event: EntryBegun) -> list[Action]:
        """Begin the epoch in which a site follows or enters; who follows hears of it now.

        So do the others, once more: a later change must not come before it anywhere.
        """
        entry, present = self._entry, self.epoch
        if event.by in present.follows and event.epoch == present.number:
            if event.round >= present.from_round:
                self._want_level(SiteLevel(event.by, event.behind))
            return []
        if entry is None or event.epoch != entry.epoch.number:
            return []
        self._entry = None
        epoch, site = dataclasses.replace(entry.epoch, from_round=event.round), entry.change.site
        why = f"site {site} {'follows' if epoch.follows else 'takes part again'}"
        begun = RecordEvent("epoch.begun", detail=_described(epoch, why))
        self._begin(epoch, (), (), is_redo=False)
        told = [SendResume(name, epoch, ()) for name in entry.asked]
        if epoch.follows:
            return [begun, *told, SendResume(site, epoch, (), (site,))]
        return [begun, *told, EndChange(SiteEnters(site), epoch)]

    def _want_level(self, wanted: SiteLevel) -> None:
        """Have a site that follows enter next."""
        if not any(isinstance(each, SiteLevel) for each in self._open_changes()):
            self._changes.append(wanted)

    def _let_in_alone(self) -> None:
        """A site that follows enters at once where there is nobody left whom it could follow."""
        if self.epoch.follows == self.epoch.members:
            self._want_level(SiteLevel(self.epoch.members[0]))

    def _resume_entry(self, site: str, entry: _Entry) -> SendResume:
        return SendResume(site, entry.epoch, (), (entry.change.site,))

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
        if any(site.is_unheard and site.is_live for site in self._members()):
            return []  # leases of those that do not come will end
        heard_by_s = now_s - self._limits.collect_s
        if any(site.silent and site.silent_since_s > heard_by_s for site in self._members()):
            return []  # others are about to say whether they still reach it
        members, waits = self._wanted(now_s)
        if members is None:
            return waits
        if early := self._early():
            return [*waits, *self._end_early(*early, now_s)]
        dead = self._dead_links(now_s)
        uses = self._links_of(self.epoch.reduction) | self._older_links
        if self._entry is not None:
            return [*waits, *self._look_after_entry(self._entry, members, dead, uses, now_s)]
        is_redo_due = (
            self._is_unfinished
            or members != self._working(self.epoch.members)
            or bool(uses & dead)
            or any(self._is_dead(self._sites[name]) for name in self._leaving)
        )
        if self._proposal is None:
            if is_redo_due:
                return [*waits, *self._propose_redo(members, now_s)]
            return [*waits, *self._propose_change(members, now_s)]
        return [*waits, *self._go_on(self._proposal, members, is_redo_due, now_s)]

    def _look_after_entry(
        self,
        entry: _Entry,
        members: tuple[str, ...],
        dead: frozenset[Pair],
        uses: frozenset[Pair],
        now_s: float,
    ) -> list[Action]:
        """Give an entry up if something fails meanwhile: rounds may wait for whoever enters."""
        uses |= self._links_of(entry.epoch.reduction)
        is_lost = self._is_dead(self._sites[entry.change.site])
        if members == self._working(self.epoch.members) and not uses & dead and not is_lost:
            return []
        self._entry = None
        refused: list[Action] = []
        if isinstance(entry.change, SiteLevel):
            pass  # it is a member, and goes the way of all
        elif is_lost or uses & dead:
            refused.append(EndChange(entry.change, None, why="it was lost before it had entered"))
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
            refused = [EndChange(change, None, why="something failed meanwhile")]
            if isinstance(change, SiteEnters | DropWanted) and self._sites[change.site].is_live:
                self._changes.append(change)
                refused = []
            if isinstance(change, SiteLevel | DropWanted):
                refused = []
            return [*refused, *self._propose_redo(members, now_s)]
        missing = [site for site in proposal.asked if site not in proposal.answers]
        if change is not None:
            return self._go_on_with(proposal, change, missing, now_s)
        refusing = {name: each.why for name, each in proposal.answers.items() if each.why}
        if now_s >= proposal.deadline_s:
            refusing |= dict.fromkeys(missing, "it lives, but has not settled in time")
        if not refusing:
            return [] if missing else self._redo(proposal, now_s)
        for name, why in refusing.items():
            self._sites[name].leave_out(why, now_s)
        self._proposal, self._is_unfinished = None, True
        return [self._refused(proposal, *next(iter(refusing.items())))]

    def _go_on_with(
        self, proposal: _Proposal, change: Change, missing: Sequence[str], now_s: float
    ) -> list[Action]:
        """Take a change further that the run could do without: other trees, an entry, a drop."""
        refusing = next((each for each in proposal.answers.values() if each.why), None)
        needed = {*proposal.asked, *proposal.members}
        gone = next((name for name in needed if self._is_dead(self._sites[name])), None)
        if refusing is not None:
            why, must_keep = refusing.why, refusing.must_keep_codecs
            return self._cancel(
                proposal, change, refusing.site, why, now_s, must_keep_codecs=must_keep
            )
        if gone is not None:
            return self._cancel(proposal, change, gone, "it has ended or is lost", now_s)
        if not self._is_linked(proposal, now_s):
            return self._cancel(proposal, change, "", "not all would reach each other", now_s)
        if missing and now_s >= proposal.deadline_s:
            if isinstance(change, SiteLevel) and change.site in missing:  # it holds the others up
                why = "it follows, and has not settled in time"
                self._sites[change.site].leave_out(why, now_s)
            return self._cancel(proposal, change, missing[0], "it did not answer in time", now_s)
        if missing:
            return []
        if isinstance(change, TreesWanted | DropWanted):
            return self._carry_out(proposal, change, now_s)
        return self._await_entry(proposal, change, now_s)

    def _wanted(self, now_s: float) -> tuple[tuple[str, ...] | None, list[Action]]:
        """Return who of the members can go on together; None: that is not known yet."""
        members = self._members()
        left = [site for site in members if not self._is_gone(site) and not site.has_finished]
        present = [site for site in left if not site.left_out]
        num_finished = sum(site.has_finished for site in members)
        num_done = num_finished + sum(site.is_done for site in left)
        leaving = [self._sites[name] for name in sorted(self._leaving)]
        is_done = all(site.is_done for site in left) and all(map(self._is_dead, leaving))
        if is_done and num_done >= max(1, self._limits.min_sites):
            self._is_over = True
            lost = [site for site in members if self._is_gone(site) and not site.has_finished]
            lost += leaving
            lose = [LoseSite(site.name, self._why_lost(site.name)) for site in lost]
            return None, [*self._alone_at_the_end(left), *lose]
        if not left:
            return None, self._too_few(num_finished)
        best = max(self._parts(now_s), key=self._size, default=())
        actions = [] if best else self._second_chance(left, now_s)
        num_best = len(best) + num_finished
        if len(left) + num_finished < self._limits.min_sites:
            return None, [*actions, *self._too_few(len(left) + num_finished)]
        is_outage = len(present) > 1 and len(best) <= 1 and not self._any_reach(present)
        if not is_outage and num_best >= self._limits.min_sites and best:
            return self._mended(best, len(present), now_s)
        self._mended_s = None
        why = "no two sites reach each other" if is_outage else "too few sites are left"
        if not best:
            why = "no agent is heard" if present else "no site can go on"
        has_waited, noted = self._wait(why, now_s, is_alone=not best)
        actions += noted
        if not has_waited:
            return None, actions
        if num_best < self._limits.min_sites or not best:
            return None, [*actions, *self._too_few(num_best)]
        return best, actions

    def _wait(self, why: str, now_s: float, *, is_alone: bool) -> tuple[bool, list[Action]]:
        """Return whether that has lasted for long enough, and a note where it is news.

        It is waited anew, once, for others when the first is heard after none was.
        """
        is_new = self._short_since_s is None
        if self._short_since_s is None:
            self._short_since_s, self._back_s, self._was_alone = now_s, None, False
        is_back = self._was_alone and not is_alone and self._back_s is None
        if is_back:
            self._back_s = now_s
        self._was_alone |= is_alone
        since_s = self._short_since_s if is_alone or self._back_s is None else self._back_s
        wait_s = self._limits.alone_s if is_alone else self._limits.ride_out_s
        note = f"{why}: waiting for up to {wait_s:g} s"
        noted = [RecordEvent("run.waiting", detail={"note": note})] if is_new or is_back else []
        return now_s >= since_s + wait_s, [*noted]

    def _alone_at_the_end(self, left: Sequence[_Site]) -> list[Action]:
        """Have those that follow count where only they are left, with the results of all rounds."""
        names, follows = [site.name for site in left], self.epoch.follows
        is_alone = bool(names) and set(names) <= set(follows)
        return [EndChange(SiteEnters(name), self.epoch) for name in names if is_alone]

    def _second_chance(self, left: Sequence[_Site], now_s: float) -> list[Action]:
        """Where no other site is left, ask those again that could not go on, or were to be dropped.

        The time between two attempts doubles. A drop that is under way is refused with that.
        """
        limits = self._limits
        wait_s = min(limits.detect_s * 2**self._num_chances, limits.ride_out_s)
        due = [each for each in left if each.left_out and now_s >= each.left_out_since_s + wait_s]
        drops = [site.drop for site in due if site.drop is not None]
        for site in due:
            site.left_out, site.drop = "", None
        self._num_chances += bool(due)
        return [EndChange(each, None, why="no other site is left") for each in drops]

    def _mended(
        self, best: tuple[str, ...], num_present: int, now_s: float
    ) -> tuple[tuple[str, ...] | None, list[Action]]:
        """After an outage all have a moment to reach each other again."""
        if self._short_since_s is None or self._num_chances:
            return best, []
        if self._mended_s is None:
            self._mended_s = now_s
        if len(best) < num_present and now_s < self._mended_s + self._limits.detect_s:
            return None, []
        for_s = now_s - self._short_since_s
        self._short_since_s = self._mended_s = None
        note = f"the run goes on after an outage of {for_s:.3g} s"
        return best, [RecordEvent("run.went_on", detail={"note": note, "for_s": for_s})]

    def _too_few(self, num_left: int) -> list[Action]:
        fewest = self._limits.min_sites
        if self.epoch.follows == self.epoch.members:
            why = "no site has the whole training state any more: each was lost before another had "
            why += "taken it over; `isthmus launch --resume` goes on from the latest checkpoint"
            return self._end_run("PEER_LOST", why)
        return self._end_run("SITE_LOST", f"{num_left} sites are left, want at least {fewest}")

    def _end_run(self, code: str, why: str) -> list[Action]:
        self._is_over = True
        return [EndRun(code, why)]

    # ------------------------------------------------------------ early ends

    def _early(self) -> tuple[list[_Site], _Site] | None:
        """Return the members that are done, and one that is in a later round; None: nobody is.

        All may end with the same round, at unlike times: then none is in a later one.
        """
        live = [site for site in self._members() if site.is_live]
        first = max(live, key=lambda site: site.begun, default=None)
        if first is None:
            return None
        last_rounds = {site.name: self._last_round(site) for site in live}
        early = [
            site
            for site in live
            if (last_round := last_rounds[site.name]) is not None and last_round < first.begun
        ]
        return (early, first) if early else None

    def _last_round(self, site: _Site) -> int | None:
        """Return with which round a site's ranks were done; None: they are not, or nobody knows.

        Who follows may have nothing left to do after the state that it took over.
        """
        if site.has_last_round:
            return site.begun
        is_behind = site.is_done and site.name in self.epoch.follows
        return site.since_round - 1 if is_behind else None

    def _end_early(self, early: Sequence[_Site], by: _Site, now_s: float) -> list[Action]:
        """Go on without sites that are done, if that may be; the round that waits is done again."""
        stay = [site for site in self._members() if site.is_live or site.has_finished]
        num_left = len(stay) - len(early)
        actions: list[Action] = []
        for site in early:
            last_round = self._last_round(site)
            assert last_round is not None, "it is done"
            why = f"it ended after round {last_round}, and site {by.name} is in round {by.begun}"
            site.leave_out(why, now_s)
            actions.append(EndsEarly(site.name, last_round, by.name, by.begun, num_left))
        self._is_over = self._limits.ends_on_early_end or num_left < self._limits.min_sites
        return actions

    # ------------------------------------------------------------ sites and links

    def _members(self) -> list[_Site]:
        return [self._sites[name] for name in self.epoch.members]

    def _working(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those that are not done with the job."""
        return tuple(name for name in names if not self._sites[name].has_finished)

    def _is_gone(self, site: _Site) -> bool:
        """Whether nothing of a site is left, by its agent's word or by all signs."""
        return bool(site.gone) or (
            bool(site.session_lost or site.silent)
            and any(
                suspicion.is_gone and self._sites[by].is_live
                for (by, of), suspicion in self._suspicions.items()
                if of == site.name
            )
        )

    def _is_dead(self, site: _Site) -> bool:
        return not site.is_live or self._is_gone(site)

    def _any_reach(self, sites: Sequence[_Site]) -> bool:
        """Whether any two of some sites reach each other, for all that is known."""
        names = [site.name for site in sites]
        suspected = frozenset(_pair(*pair) for pair in self._suspicions)
        return any(ways for ways in self._ways(names, suspected).values())

    def _dead_links(self, now_s: float) -> frozenset[Pair]:
        """Return the links between live sites that are not to be used."""
        limits = self._limits
        live = {
            pair: suspicion
            for pair, suspicion in self._suspicions.items()
            if all(self._sites[name].is_live for name in pair)
        }
        dead = {
            pair
            for pair, suspicion in live.items()
            if now_s - suspicion.since_s
            >= limits.collect_s + (limits.detect_s if suspicion.is_gone else 0.0)
        }
        if dead:  # what was heard since the first belongs to it
            dead |= {pair for pair, suspicion in live.items() if not suspicion.is_gone}
        return frozenset(_pair(*pair) for pair in dead)

    def _parts(self, now_s: float) -> list[tuple[str, ...]]:
        """Return the parts of the live members that are linked, each in the run's order."""
        live = [site.name for site in self._members() if not self._is_dead(site)]
        return self._linked(live, self._dead_links(now_s))

    def _is_linked(self, proposal: _Proposal, now_s: float) -> bool:
        """Whether members are linked with one another, with those that follow and without."""
        dead, follows = self._dead_links(now_s), self.epoch.follows
        others = [name for name in proposal.members if name not in follows] or proposal.members
        return all(len(self._linked(names, dead)) == 1 for names in (proposal.members, others))

    def _linked(self, names: Sequence[str], dead: frozenset[Pair]) -> list[tuple[str, ...]]:
        """Return the parts of some sites that are linked with one another, each in their order."""
        ways = self._ways(names, dead)
        parts, left = [], list(names)
        while left:
            part, border = set(), {left[0]}
            while border:
                part |= border
                border = {other for name in border for other in ways[name]} - part
            parts.append(tuple(name for name in names if name in part))
            left = [name for name in left if name not in part]
        return parts

    def _ways(self, names: Sequence[str], dead: frozenset[Pair]) -> dict[str, set[str]]:
        """Return whom each of some sites reaches among them."""
        alive = self._links - dead
        return {
            name: {other for other in names if _pair(name, other) in alive and other != name}
            for name in names
        }

    def _size(self, part: tuple[str, ...]) -> tuple[int, int, int]:
        """Return what the larger of two parts has more of: sites, ranks, the earlier first site."""
        order = list(self._sites)
        ranks = sum(self._sites[name].num_ranks for name in part)
        return len(part), ranks, -order.index(part[0])

    # ------------------------------------------------------------ first phase

    def _propose_redo(self, members: tuple[str, ...], now_s: float) -> list[Action]:
        """Have chunks done again, without sites that follow: they may have other results."""
        follows = self.epoch.follows
        if set(members) <= set(follows):  # nobody else is left
            return self._propose(members, None, now_s)
        for name in members:
            if name in follows:
                why = "chunks are done again, of which it may have had other results"
                self._sites[name].leave_out(why, now_s)
        wanted, waits = self._wanted(now_s)
        return waits if wanted is None else [*waits, *self._propose(wanted, None, now_s)]

    def _propose(
        self, members: tuple[str, ...], change: Change | None, now_s: float
    ) -> list[Action]:
        """Ask sites to settle for another epoch."""
        self._number += 1
        self._is_unfinished = False
        asked = members if change is None else self._working(self.epoch.members)
        present = {*self.epoch.members, *self._leaving}
        lost = tuple(name for name in self._sites if name in present - {*members, *asked})
        proposal = _Proposal(
            number=self._number,
            members=members,
            asked=asked,
            lost=lost,
            change=change,
            deadline_s=now_s + self._settle_within_s(change),
        )
        self._proposal = proposal
        detail = {
            "epoch": proposal.number,
            "members": list(members),
            "lost": list(lost),
            "why": self._why(proposal),
        }
        settle = [self._settle(site, proposal) for site in proposal.asked]
        return [RecordEvent("epoch.proposed", detail=detail), *settle]

    def _settle_within_s(self, change: Change | None) -> float:
        return self._limits.detect_s * (UNANSWERED if change is None else 1.0)

    def _settle(self, site: str, proposal: _Proposal) -> SendSettle:
        change = proposal.change
        reduction = change.reduction if isinstance(change, TreesWanted) else None
        return SendSettle(site, proposal.number, proposal.lost, change is None, reduction)

    def _why(self, proposal: _Proposal) -> str:
        match proposal.change:
            case TreesWanted():
                return proposal.change.why
            case SiteEnters():
                return f"site {proposal.change.site} follows"
            case SiteLevel():
                return f"site {proposal.change.site} takes part"
            case DropWanted():
                return f"site {proposal.change.site} leaves: {proposal.change.why}"
        whys = [
            f"site {name}: {self._why_lost(name)}"
            for name in proposal.lost
            if not self._sites[name].has_finished
        ]
        return "; ".join(whys) or "trees go around a dead link"

    def _why_lost(self, name: str) -> str:
        """Return why a site is not to be a member any more."""
        site = self._sites[name]
        told = (
            site.gone
            or site.left_out
            or site.silent
            or (site.session_lost if self._is_dead(site) else "")
        )
        if told:
            return told
        whys = [
            f"{by} and {of} do not reach each other: {suspicion.why}"
            for (by, of), suspicion in self._suspicions.items()
            if name in (by, of)
        ]
        return whys[0] if whys else "the others do not reach it"

    def _propose_change(self, members: tuple[str, ...], now_s: float) -> list[Action]:
        """Begin with the next change that still makes sense."""
        follows = self.epoch.follows
        while not self._leaving and (
            due := [
                each for each in self._changes if not (follows and isinstance(each, SiteEnters))
            ]
        ):
            change, wanted = due[0], members
            self._changes.remove(change)
            match change:
                case SiteLevel():
                    if change.site not in follows:
                        continue
                case TreesWanted() if follows:
                    return [EndChange(change, None, why=f"site {follows[0]} is coming back")]
                case SiteEnters() if self._sites[change.site].is_live:
                    order = {*members, change.site}
                    wanted = tuple(name for name in self._sites if name in order)
                case DropWanted() if change.site in members and {change.site, *follows} < {
                    *members
                }:
                    wanted = tuple(name for name in members if name != change.site)
                case TreesWanted() if change.members == members and not (
                    self._links_of(change.reduction) & self._dead_links(now_s)
                ):
                    pass
                case DropWanted() if change.site in members:
                    why = "no other site has the whole training state"
                    return [EndChange(change, None, why=why)]
                case _:
                    return [EndChange(change, None, why="it makes no sense any more")]
            return self._propose(wanted, change, now_s)
        return []

    def _cancel(
        self,
        proposal: _Proposal,
        change: Change,
        site: str,
        why: str,
        now_s: float,
        *,
        must_keep_codecs: bool = False,
    ) -> list[Action]:
        """Give up a change that nobody needs. Who was to leave, and cannot, is lost."""
        self._proposal, self._cancelled = None, proposal.number
        if isinstance(change, DropWanted):
            self._sites[change.site].leave_out(change.why, now_s, change)
        detail = {"epoch": proposal.number, "why": why}
        cancel = [SendCancel(name, proposal.number) for name in proposal.asked]
        cancelled: list[Action] = [RecordEvent("epoch.cancelled", site, detail), *cancel]
        if isinstance(change, SiteLevel | DropWanted):  # it says so again; it is lost
            return cancelled
        return [*cancelled, EndChange(change, None, site, why, must_keep_codecs)]

    def _refused(self, proposal: _Proposal, site: str, why: str) -> RecordEvent:
        return RecordEvent("epoch.refused", site, {"epoch": proposal.number, "why": why})

    # ------------------------------------------------------------ second phase

    def _redo(self, proposal: _Proposal, now_s: float) -> list[Action]:
        """Begin an epoch in which unfinished chunks are done again."""
        told = [(name, each) for name in proposal.asked for each in proposal.answers[name].finished]
        # Who takes part since a round has what all before it came to. A finished chunk contains all
        # members' parts, so all have completed the rounds before.
        # Only a site that followed until now can be further behind.
        completed = {
            name: max(proposal.answers[name].chain_round, self._sites[name].since_round - 1)
            for name in proposal.members
        }
        latest = max((each.round for _, each in told), default=0)
        from_round = max(min(completed.values()) + 1, latest)
        behind = [
            name
            for name in proposal.members
            if self._sites[name].since_round > from_round or completed[name] < from_round - 1
        ]
        if behind:
            why = f"round {from_round} is done again, and it is in another"
            for name in behind:
                self._sites[name].leave_out(why, now_s)
            self._proposal, self._is_unfinished = None, True
            return [self._refused(proposal, behind[0], why)]
        finished: dict[str, dict[int, Runs]] = {name: {} for name in proposal.members}
        for name, each in told:
            if each.round == from_round:
                finished[name][each.bucket] = each.runs
        dead = self._dead_links(now_s)
        epoch = Epoch(
            number=proposal.number,
            members=proposal.members,
            reduction=self._make_plan(proposal.members, dead, ()),
            from_round=from_round,
            follows=tuple(name for name in proposal.members if name in self.epoch.follows),
        )
        ways = self._ways(proposal.members, dead)
        handovers = share_finished(from_round, finished, ways)
        kept = merged(each for _, each in told if each.round == from_round)
        resumed = self._resume(proposal, epoch, handovers, kept)
        self._let_in_alone()
        return resumed

    def _await_entry(self, proposal: _Proposal, change: Entering, now_s: float) -> list[Action]:
        """Tell members who follows or enters: all ranks hear of it before they agree on a round."""
        begun = max(answer.round for answer in proposal.answers.values())
        if isinstance(change, SiteLevel):
            behind = begun - proposal.answers[change.site].round
            if behind > change.behind + 1:
                why = "it is not level any more"
                return self._cancel(proposal, change, change.site, why, now_s)
        follows = (change.site,) if isinstance(change, SiteEnters) else ()
        others = tuple(name for name in proposal.members if name not in follows)
        epoch = Epoch(
            number=proposal.number,
            members=proposal.members,
            reduction=self._make_plan(others, self._dead_links(now_s), follows),
            from_round=max(begun + 2, self.epoch.from_round),
            follows=follows,
        )
        entry = _Entry(change, epoch, proposal.asked)
        self._proposal, self._entry = None, entry
        detail = {"epoch": epoch.number, "members": list(epoch.members)}
        told = [self._resume_entry(name, entry) for name in entry.asked]
        return [RecordEvent("epoch.entering", change.site, detail), *told]

    def _carry_out(
        self, proposal: _Proposal, change: TreesWanted | DropWanted, now_s: float
    ) -> list[Action]:
        """Begin an epoch with a round that no site has begun."""
        begun = max(answer.round for answer in proposal.answers.values())
        follows = tuple(name for name in proposal.members if name in self.epoch.follows)
        others = tuple(name for name in proposal.members if name not in follows)
        if isinstance(change, TreesWanted):
            reduction = change.reduction
        else:
            reduction = self._make_plan(others, self._dead_links(now_s), follows)
        epoch = Epoch(
            number=proposal.number,
            members=proposal.members,
            reduction=reduction,
            from_round=max(begun + 1, self.epoch.from_round),
            follows=follows,
        )
        resumed = self._resume(proposal, epoch, (), ())
        return [*resumed, EndChange(change, epoch)]

    def _resume(
        self,
        proposal: _Proposal,
        epoch: Epoch,
        handovers: tuple[Handover, ...],
        kept: tuple[Finished, ...],
    ) -> list[Action]:
        """Write the epoch down and tell it; `kept` is what is finished of its first round."""
        lost = [
            LoseSite(name, self._why_lost(name))
            for name in proposal.lost
            if not self._sites[name].has_finished
        ]
        detail = {
            "epoch": epoch.number,
            "members": list(epoch.members),
            "lost": list(proposal.lost),
            "leaves": [name for name in proposal.asked if name not in proposal.members],
            "from_round": epoch.from_round,
            "unused": self._unused(proposal, epoch.from_round, kept),
            "kept": to_json(kept),
            "why": self._why(proposal),
            "plan": epoch.reduction.plan.why,
            "is_redo": proposal.change is None,
            "record": to_json(epoch, _is_set),
            "handovers": to_json(handovers),
        }
        if proposal.change is None:  # whoever had completed more may be lost
            self._chains.forget_from(epoch.from_round)
        self._begin(epoch, handovers, kept, is_redo=proposal.change is None)
        self._proposal = None
        resume = [SendResume(name, epoch, handovers) for name in proposal.asked]
        return [RecordEvent("epoch.begun", detail=detail), *resume, *lost]

    def _unused(
        self, proposal: _Proposal, from_round: int, kept: tuple[Finished, ...]
    ) -> dict[str, int]:
        """Return by lost site the first round of which no result contains its data.

        A chunk that is finished contains the parts of all who were members when it was begun. Where
        sites that had finished it are lost before they could hand it over, it contains them no
        more, and those who were lost before count again.
        """
        if proposal.change is not None:
            return {}
        first = from_round + bool(kept)
        unused = dict.fromkeys(proposal.lost, first)
        for site, (round_, counted) in self._counted.items():
            chunks = _chunks(kept) if counted is None else counted
            still = chunks & _chunks(kept) if from_round == round_ else ()
            if from_round <= round_ and not still:
                unused[site] = min(round_, first)
        return unused

    def _begin(
        self,
        epoch: Epoch,
        handovers: tuple[Handover, ...],
        kept: tuple[Finished, ...],
        *,
        is_redo: bool,
    ) -> None:
        before, self.epoch, self._handovers = self.epoch, epoch, handovers
        self._enters = tuple(name for name in epoch.members if name not in before.members)
        self._num_chances = 0
        self._older_links = frozenset() if is_redo else self._links_of(before.reduction)
        left = set(before.members) - set(epoch.members)
        self._leaving = set() if is_redo else left
        if is_redo:
            chunks = _chunks(kept)
            still = {
                site: (round_, chunks if its is None else its & chunks)
                for site, (round_, its) in self._counted.items()
                if round_ == epoch.from_round and (chunks if its is None else its & chunks)
            }
            self._counted = {**still, **dict.fromkeys(left, (epoch.from_round, chunks))}
        else:
            self._counted |= dict.fromkeys(left, (epoch.from_round - 1, None))
        for name in epoch.members:
            if name not in before.members:
                self._sites[name].since_round = epoch.from_round


def _described(epoch: Epoch, why: str) -> dict[str, object]:
    """Return what is written down of an epoch that nobody is lost in."""
    return {
        "epoch": epoch.number,
        "members": list(epoch.members),
        "lost": [],
        "leaves": [],
        "from_round": epoch.from_round,
        "unused": {},
        "kept": [],
        "why": why,
        "plan": epoch.reduction.plan.why,
        "is_redo": False,
        "record": to_json(epoch, _is_set),
        "handovers": [],
    }


def _chunks(kept: Iterable[Finished]) -> frozenset[tuple[int, int]]:
    """Return finished chunks of one round by bucket and number."""
    return frozenset((each.bucket, chunk) for each in kept for chunk in numbers_of(each.runs))


def _is_set(field: dataclasses.Field[object], value: object) -> bool:
    return value != field.default


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


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)
