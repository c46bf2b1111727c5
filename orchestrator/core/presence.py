"""Who of a run's members is there, by all that is said of them. Pure.

Their agents say when processes have ended; leases, when an agent is silent; other sites, whom they
do not reach (reach.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.members import FINAL, Absence, Contact, Member, Reason
from isthmus.orchestrator.core.quorum import (
    Facts,
    Limits,
    MemberFacts,
    Outage,
    Quorum,
    who_takes_part,
)
from isthmus.orchestrator.core.reach import Pair, Reach

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
        record: JournaledRun,
        contacts: Mapping[str, Contact],
    ) -> None:
        """Begin with sites of which nothing is said yet."""
        self._ranks, self._limits, self._contacts = ranks, limits, contacts
        self._sites, self._record = record.members, record.epochs
        self.reach = Reach(links, detect_s=limits.detect_s, collect_s=limits.collect_s)
        self.unheard: set[str] = set()
        """Members that a coordinator which has just begun has not heard of."""
        self._awaits_certificates_until_s = -math.inf
        """Sites whose certificates were renewed have until then to reach each other again."""
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
        contact = self._contacts[event.site]
        match event:
            case run_events.SessionBroken():
                contact.why_disconnected = event.message
            case run_events.SiteDone() | run_events.RoundBegun():
                contact.begun = max(contact.begun, event.round)
            case run_events.Suspected() if event.by in self._record.epoch.members:
                self.reach.suspect(event, now_s)
            case run_events.Suspected():
                pass  # what it says of sites that it has no part with may be of long ago
            case run_events.Reached():
                self.reach.clear(event)

    def lose(self, event: run_events.SiteEnded | run_events.SiteLost) -> bool:
        """Take a site's end, or its silence; return whether it is gone before its work was done."""
        site = self._sites[event.site]
        if isinstance(event, run_events.SiteLost) and event.silent_s > 0:
            self.unheard.discard(event.site)
            return False
        if site.absence is Absence.FINISHED and event.site in self._record.epoch.members:
            return False
        self.reach.forget(event.site)
        return isinstance(event, run_events.SiteLost) or not (
            event.succeeded and not event.failures
        )

    # ------------------------------------------------------------ members

    def members(self) -> list[Member]:
        """Return the members of the epoch, in the run's order."""
        return [self._sites[name] for name in self._record.epoch.members]

    def working(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those that are not done with the job."""
        return tuple(name for name in names if not self._sites[name].has_finished)

    def absence(self, name: str) -> Absence | None:
        """Return why no round may wait for a site; None: it may be alive."""
        known, contact = self._own_absence(name), self._contacts[name]
        if known in FINAL:
            return known
        is_called_gone = contact.is_unheard and self.reach.is_called_gone(name, self.is_live)
        return Absence.GONE if is_called_gone else known

    def _own_absence(self, name: str) -> Absence | None:
        """Return the same, whatever other sites say."""
        return self._sites[name].absence or self._contacts[name].absence

    def has_ended(self, site: Member) -> bool:
        """Whether nothing of a site is there that has work to do."""
        return self.absence(site.name) in FINAL

    def is_dead(self, name: str) -> bool:
        """Whether no round may wait for a site."""
        return self.absence(name) is not None

    def why_lost(self, name: str) -> str:
        """Return why a site is not to be a member any more."""
        whys = self._contacts[name].whys if self.is_dead(name) else []
        return next(filter(None, [self._sites[name].why_absent, *whys]), self.reach.why_not(name))

    def dead_links(self, now_s: float, among: Iterable[str] | None = None) -> frozenset[Pair]:
        """Return the links between live sites, all or some, that are not to be used."""
        dead, names = self.reach.dead_links(self.is_live, now_s), {*(among or self._sites)}
        return frozenset(pair for pair in dead if names.issuperset(pair))

    def is_linked(self, members: tuple[str, ...], now_s: float) -> bool:
        """Whether sites are linked with one another, with those that catch up and without."""
        dead, catching_up = self.dead_links(now_s), self._record.epoch.follows
        others = [name for name in members if name not in catching_up] or members
        return all(len(self.reach.parts(each, dead)) == 1 for each in (members, others))

    def is_live(self, name: str) -> bool:
        """Whether a round may wait for a site, whatever other sites say."""
        return self._own_absence(name) is None

    def leave_out(
        self, name: str, why: str, now_s: float, drop: run_events.DropRequested | None = None
    ) -> None:
        """Have the others go on without a site that lives."""
        self._contacts[name].miss(Absence.LEFT_OUT, why, now_s, drop)

    def _left_out(self, site: Member) -> Reason | None:
        return self._contacts[site.name].absences.get(Absence.LEFT_OUT)

    # ------------------------------------------------------------ who goes on

    def awaits_news(self, now_s: float) -> bool:
        """Whether it is too early to decide anything."""
        names = self._record.epoch.members
        if any(name in self.unheard and self.is_live(name) for name in names):
            return True  # leases of those that do not come will end
        if any(self._lacks_certificate(site, now_s) for site in self.members()):
            self._awaits_certificates_until_s = now_s + self._limits.detect_s
        if now_s < self._awaits_certificates_until_s:
            return True
        silences = [self._contacts[name].absences.get(Absence.SILENT) for name in names]
        heard_by_s = now_s - self._limits.collect_s
        # Others are about to say whether they still reach it.
        return any(silence.since_s > heard_by_s for silence in silences if silence)

    def _lacks_certificate(self, site: Member, now_s: float) -> bool:
        """Whether a site is out of reach because a certificate has expired.

        It is waited for until that is renewed, or an operator drops the site: nothing of it is
        lost, and started again it would reach nobody either.
        """
        is_awaited = not (self._left_out(site) or site.is_dropped or self.has_ended(site))
        if not (site.expired and is_awaited):
            return False
        return self._contacts[site.name].is_unheard or any(
            site.name in pair for pair in self.dead_links(now_s)
        )

    def quorum(self, now_s: float) -> Quorum:
        """Return who goes on, and remember what has to be known of an outage."""
        members = self.members()
        known = [
            MemberFacts(site.name, self._ranks[site.name], self.absence(site.name), site.is_done)
            for site in members
        ]
        present = [each.name for each in known if each.absence in {None, Absence.SILENT}]
        live = [each.name for each in known if each.absence is None]
        facts = Facts(
            members=tuple(known),
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

    def give_second_chance(self, now_s: float) -> list[run_events.DropRequested]:
        """Where no other site is left, ask those again that could not go on, or were to be dropped.

        The time between two attempts doubles. Returns the drops that do not come with that.
        """
        limits = self._limits
        wait_s = min(limits.detect_s * 2**self.num_chances, limits.ride_out_s)
        left_out = {s.name: self._left_out(s) for s in self.members() if not self.has_ended(s)}
        due = [n for n, reason in left_out.items() if reason and now_s >= reason.since_s + wait_s]
        reasons = [self._contacts[name].absences.pop(Absence.LEFT_OUT) for name in due]
        self.num_chances += bool(due)
        return [reason.drop for reason in reasons if reason.drop is not None]

    def all_done(self) -> list[run_events.Outcome]:
        """Return what comes of it once all are done that are there: others are lost.

        Those that catch up count where only they are left, with the results of all rounds.
        """
        members, record = self.members(), self._record
        left = [site.name for site in members if not self.has_ended(site)]
        lost = [site.name for site in members if self.absence(site.name) is Absence.GONE]
        lost += sorted(record.leaving)
        is_alone = bool(left) and set(left) <= set(record.epoch.follows)
        from_round = record.epoch.from_round
        rejoined = [run_events.SiteRejoined(name, from_round) for name in left if is_alone]
        return [*rejoined, *(run_events.GoOnWithout(name, self.why_lost(name)) for name in lost)]

    # ------------------------------------------------------------ early ends

    def leave_early_out(self, now_s: float) -> list[run_events.SiteEndedEarly]:
        """Leave members out that are done while another is in a later round, and say so.

        All may end with the same round, at unlike times. The round that waits is done again.
        """
        live = [site for site in self.members() if self.is_live(site.name)]
        first = max(live, key=lambda site: self._contacts[site.name].begun, default=None)
        if first is None:
            return []
        begun = self._contacts[first.name].begun
        last_rounds = [(site, self._last_round(site)) for site in live]
        early = [
            (site, last_round)
            for site, last_round in last_rounds
            if last_round is not None and last_round < begun
        ]
        num_left = len(self.members()) - len(early)
        num_left -= sum(not (self.is_live(s.name) or s.has_finished) for s in self.members())
        for site, last_round in early:
            why = f"it ended after round {last_round}, and site {first.name} is in "
            self.leave_out(site.name, f"{why}round {begun}", now_s)
        return [
            run_events.SiteEndedEarly(site.name, last_round, first.name, begun, num_left)
            for site, last_round in early
        ]

    def _last_round(self, site: Member) -> int | None:
        """Return with which round a site's ranks were done; None: they are not, or nobody knows.

        Who catches up may have nothing left to do after the state that it took over.
        """
        if site.last_round is None or site.last_round >= 0:
            return site.last_round
        return site.since_round - 1 if site.name in self._record.epoch.follows else None
