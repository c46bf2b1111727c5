"""Who of a run's members is there, by all that is said of them. Pure.

Their agents say when processes have ended; leases, when an agent is silent; other sites, whom they
do not reach (reach.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epoch_record import EpochRecord
from isthmus.orchestrator.core.members import Absence, Member
from isthmus.orchestrator.core.quorum import (
    Facts,
    Limits,
    MemberFacts,
    Outage,
    Quorum,
    who_takes_part,
)
from isthmus.orchestrator.core.reach import Pair, Reach
from isthmus.topology.spec.epoch import Epoch, Finished, Handover

Saying = (
    run_events.SessionBroken
    | run_events.SiteDone
    | run_events.RoundBegun
    | run_events.Suspected
    | run_events.Reached
)
"""What is said of a site that goes on."""


class Presence:
    """Owns what is known of the members of a run's epochs."""

    def __init__(
        self,
        ranks: Mapping[str, int],
        links: Iterable[Pair],
        limits: Limits,
        members: Mapping[str, Member],
        record: EpochRecord,
    ) -> None:
        """Begin with sites of which nothing is said yet."""
        self._ranks, self._limits, self._sites, self._record = ranks, limits, members, record
        self.reach = Reach(links, detect_s=limits.detect_s, collect_s=limits.collect_s)
        self.unheard: set[str] = set()
        """Members that a coordinator which has just begun has not heard of."""
        self.num_chances = 0
        """How often those who could not go on were asked again since the epoch began."""
        self._outage: Outage | None = None
        """Too few sites reach each other; None: enough do."""

    # ------------------------------------------------------------ facts

    def note(
        self,
        event: Saying,
        now_s: float,
    ) -> None:
        """Take what is said of a site."""
        site = self._sites[event.site]
        match event:
            case run_events.SessionBroken():
                site.session_lost = event.message
            case run_events.SiteDone() if event.site in self._record.epoch.members:
                site.finish_ranks(event.round)
            case run_events.RoundBegun():
                site.begun = max(site.begun, event.round)
            case run_events.Suspected():
                self.reach.suspect(event, now_s)
            case run_events.Reached():
                self.reach.clear(event)

    def lose(self, event: run_events.SiteEnded | run_events.SiteLost, now_s: float) -> bool:
        """Take a site's end, or its silence; return whether it is gone before its work was done."""
        site = self._sites[event.site]
        if isinstance(event, run_events.SiteLost) and event.silent_s > 0:
            site.silent = Absence(event.message, now_s)
            self.unheard.discard(event.site)
            return False
        if isinstance(event, run_events.SiteEnded) and event.succeeded and not event.failures:
            if site.name not in self._record.epoch.members:
                self.reach.forget(event.site)
            return False
        self.reach.forget(event.site)
        return True

    # ------------------------------------------------------------ members

    def members(self) -> list[Member]:
        """Return the members of the epoch, in the run's order."""
        return [self._sites[name] for name in self._record.epoch.members]

    def working(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those that are not done with the job."""
        return tuple(name for name in names if not self._sites[name].is_successful)

    def is_gone(self, site: Member) -> bool:
        """Whether nothing of a site is left, by its agent's word or by all signs."""
        is_unheard = bool(site.session_lost or site.silent)
        return bool(site.gone) or (
            is_unheard and self.reach.is_called_gone(site.name, self._is_live)
        )

    def is_left(self, site: Member) -> bool:
        """Whether something of a site is there, and has work to do."""
        return not (self.is_gone(site) or site.is_successful)

    def is_dead(self, name: str) -> bool:
        """Whether no round may wait for a site."""
        site = self._sites[name]
        return not site.is_live or self.is_gone(site)

    def why_lost(self, name: str) -> str:
        """Return why a site is not to be a member any more."""
        site = self._sites[name]
        absences = [each.why for each in (site.left_out, site.silent) if each is not None]
        reported = [site.gone, *absences, site.session_lost if self.is_dead(name) else ""]
        return next(filter(None, reported), "") or self.reach.why_not(name)

    def dead_links(self, now_s: float, among: Iterable[str] | None = None) -> frozenset[Pair]:
        """Return the links between live sites, all or some, that are not to be used."""
        dead, names = self.reach.dead_links(self._is_live, now_s), {*(among or self._sites)}
        return frozenset(pair for pair in dead if names.issuperset(pair))

    def is_linked(self, members: tuple[str, ...], now_s: float) -> bool:
        """Whether sites are linked with one another, with those that catch up and without."""
        dead, follows = self.dead_links(now_s), self._record.epoch.follows
        others = [name for name in members if name not in follows] or members
        return all(len(self.reach.parts(each, dead)) == 1 for each in (members, others))

    def _is_live(self, name: str) -> bool:
        return self._sites[name].is_live

    # ------------------------------------------------------------ who goes on

    def awaits_news(self, now_s: float) -> bool:
        """Whether it is too early to decide anything."""
        members = self.members()
        if any(site.name in self.unheard and site.is_live for site in members):
            return True  # leases of those that do not come will end
        heard_by_s = now_s - self._limits.collect_s
        # Others are about to say whether they still reach it.
        return any(site.silent and site.silent.since_s > heard_by_s for site in members)

    def quorum(self, now_s: float) -> Quorum:
        """Return who goes on, and remember what has to be known of an outage."""
        members = self.members()
        present = [site.name for site in members if self.is_left(site) and not site.left_out]
        live = [site.name for site in members if not self.is_dead(site.name)]
        facts = Facts(
            members=tuple(self._facts_of(site) for site in members),
            parts=tuple(self.reach.parts(live, self.dead_links(now_s))),
            any_reach=self.reach.any_reach(present),
            awaits_leaving=not all(map(self.is_dead, self._record.leaving)),
            has_had_chance=bool(self.num_chances),
            outage=self._outage,
            limits=self._limits,
        )
        quorum = who_takes_part(facts, now_s)
        self._outage = quorum.outage
        return quorum

    def _facts_of(self, site: Member) -> MemberFacts:
        return MemberFacts(
            name=site.name,
            num_ranks=self._ranks[site.name],
            is_gone=self.is_gone(site),
            is_left_out=site.left_out is not None,
            is_done=site.is_done,
            has_finished=site.is_successful,
        )

    def give_second_chance(self, now_s: float) -> list[run_events.DropRequested]:
        """Where no other site is left, ask those again that could not go on, or were to be dropped.

        The time between two attempts doubles. Returns the drops that do not come with that.
        """
        limits = self._limits
        wait_s = min(limits.detect_s * 2**self.num_chances, limits.ride_out_s)
        due = [
            (site, site.left_out)
            for site in self.members()
            if site.left_out and self.is_left(site) and now_s >= site.left_out.since_s + wait_s
        ]
        for site, _ in due:
            site.left_out = None
        self.num_chances += bool(due)
        return [absence.drop for _, absence in due if absence.drop is not None]

    def all_done(self) -> list[run_events.Outcome]:
        """Return what follows once all are done that are there: others are lost.

        Those that catch up count where only they are left, with the results of all rounds.
        """
        members, record = self.members(), self._record
        left = [site.name for site in members if self.is_left(site)]
        lost = [each.name for each in members if self.is_gone(each) and not each.is_successful]
        lost += sorted(record.leaving)
        is_alone = bool(left) and set(left) <= set(record.epoch.follows)
        from_round = record.epoch.from_round
        rejoined = [run_events.SiteRejoined(name, from_round) for name in left if is_alone]
        return [*rejoined, *(run_events.GoOnWithout(name, self.why_lost(name)) for name in lost)]

    def begin_epoch(
        self,
        epoch: Epoch,
        handovers: tuple[Handover, ...] = (),
        kept: tuple[Finished, ...] = (),
        *,
        lost: Mapping[str, str] | None = None,
        is_redo: bool = False,
    ) -> None:
        """Go on with other members; `kept` is what is finished of their first round."""
        self.num_chances = 0
        sites, record = self._sites, self._record
        record.begin(epoch, handovers, kept, sites, lost=lost or {}, is_redo=is_redo)

    # ------------------------------------------------------------ early ends

    def leave_early_out(self, now_s: float) -> list[run_events.SiteEndedEarly]:
        """Leave members out that are done while another is in a later round, and say so.

        All may end with the same round, at unlike times. The round that waits is done again.
        """
        live = [site for site in self.members() if site.is_live]
        first = max(live, key=lambda site: site.begun, default=None)
        if first is None:
            return []
        last_rounds = [(site, self._last_round(site)) for site in live]
        early = [
            (site, last_round)
            for site, last_round in last_rounds
            if last_round is not None and last_round < first.begun
        ]
        num_left = len(self.members()) - len(early)
        num_left -= sum(not (site.is_live or site.is_successful) for site in self.members())
        for site, last_round in early:
            why = f"it ended after round {last_round}, and site {first.name} is in "
            site.leave_out(f"{why}round {first.begun}", now_s)
        return [
            run_events.SiteEndedEarly(site.name, last_round, first.name, first.begun, num_left)
            for site, last_round in early
        ]

    def _last_round(self, site: Member) -> int | None:
        """Return with which round a site's ranks were done; None: they are not, or nobody knows.

        Who catches up may have nothing left to do after the state that it took over.
        """
        if site.last_round is None or site.last_round >= 0:
            return site.last_round
        return site.since_round - 1 if site.name in self._record.epoch.follows else None
