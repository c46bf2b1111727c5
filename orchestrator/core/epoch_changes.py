"""What changes a run's epochs: what is wanted, what is proposed, and who is about to come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.orchestrator.core.members import Member
from isthmus.orchestrator.core.presence import Presence
from isthmus.orchestrator.core.quorum import Limits
from isthmus.orchestrator.core.run_events import (
    CannotGoOn,
    DropRefused,
    DropRequested,
    EpochMessage,
    GoOnWithout,
    Outcome,
    RecordEvent,
    SendPause,
    SendResume,
    SitePaused,
    TreesEnded,
    TreesWanted,
)
from isthmus.topology.spec.epoch import Epoch, Finished, Runs, merged

UNANSWERED = 2.0
"""Times `detect_s`: after this a site that lives but does not report is lost."""
CHAINS_KEPT = 256
"""Rounds of which it is known what all have had."""

NO_STATE_LEFT = (
    "no site has the whole training state any more: each was lost before another had taken it over; "
    "`isthmus launch --resume` goes on from the latest checkpoint"
)

HARDLY_BEHIND = 2
"""Rounds behind with which a site takes part again without a word."""


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


@dataclass(slots=True)
class Proposal:
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

    def within_s(self, limits: Limits) -> float:
        """Return how long a site may take to report."""
        return limits.detect_s * (UNANSWERED if self.change is None else 1.0)

    def pause(self, site: str) -> SendPause:
        """Return what a site is told."""
        reduction = self.change.reduction if isinstance(self.change, TreesWanted) else None
        return SendPause(site, self.number, self.lost, self.change is None, reduction)

    def detail(self, presence: Presence) -> dict[str, object]:
        """Return what is written down of it."""
        return {
            "epoch": self.number,
            "members": list(self.members),
            "lost": list(self.lost),
            "why": self.why(presence),
        }

    def why(self, presence: Presence) -> str:
        """Return what the change of members or trees is for."""
        match self.change:
            case TreesWanted():
                return self.change.why
            case CatchUp():
                return f"site {self.change.site} catches up"
            case Rejoin():
                return f"site {self.change.site} takes part"
            case DropRequested():
                return f"site {self.change.site} leaves: {self.change.message}"
        lost = presence.working(self.lost)
        whys = [f"site {name}: {presence.why_lost(name)}" for name in lost]
        return "; ".join(whys) or "trees go around a dead link"

    @property
    def begun(self) -> int:
        """The latest round that any site has begun, once all have reported."""
        return max(report.round for report in self.reports.values())

    def finished_in(self, round_: int) -> tuple[dict[str, dict[int, Runs]], tuple[Finished, ...]]:
        """Return the chunks of a round that are finished: by site and bucket, and by any site."""
        runs: dict[str, dict[int, Runs]] = {name: {} for name in self.members}
        finished = []
        for name in self.asked:
            for each in self.reports[name].finished:
                if each.round == round_:
                    runs[name][each.bucket] = each.runs
                    finished.append(each)
        return runs, merged(finished)

    def is_too_far_behind(self, change: Rejoin) -> bool:
        """Whether a site that is to rejoin lacks more rounds than the others wait for."""
        return self.begun - self.reports[change.site].round > change.behind + 1

    def redone_from(self, sites: Mapping[str, Member]) -> tuple[int, list[str]]:
        """Return the first round that is done again, and the members that are in another.

        Who takes part since a round has what all before it came to. A finished chunk contains all
        members' parts, so all have completed the rounds before. Only a site that has caught up just
        now can be further behind.
        """
        completed = {
            name: max(self.reports[name].chain_round, sites[name].since_round - 1)
            for name in self.members
        }
        finished = (each for name in self.asked for each in self.reports[name].finished)
        latest = max((each.round for each in finished), default=0)
        from_round = max(min(completed.values()) + 1, latest)
        behind = [
            name
            for name in self.members
            if sites[name].since_round > from_round or completed[name] < from_round - 1
        ]
        return from_round, behind


@dataclass(frozen=True, slots=True)
class Entry:
    """An epoch in which a site catches up or rejoins, from a round on that ranks agree on."""

    change: Return
    epoch: Epoch
    asked: tuple[str, ...]

    def resume(self, site: str) -> SendResume:
        """Return what a site is told before the round is known."""
        return SendResume(site, self.epoch, (), (self.change.site,))

    def detail(self) -> dict[str, object]:
        """Return what is written down of it, with a note where others wait for the site."""
        change = self.change
        detail: dict[str, object] = {
            "epoch": self.epoch.number,
            "members": list(self.epoch.members),
        }
        if isinstance(change, Rejoin) and change.behind > HARDLY_BEHIND:
            detail["note"] = (
                f"site {change.site} takes part again {change.behind} rounds behind the others, which "
                "wait for it once: its steps take as long as theirs, so it does not catch up "
                "(site.sampler would let it)"
            )
        return detail


def why_not(
    change: Change, members: tuple[str, ...], catching_up: tuple[str, ...], *, is_possible: bool
) -> str:
    """Return why a change of some members does not come; empty: it may.

    `is_possible`: the site that is to catch up lives, and no link of the trees is dead.
    """
    match change:
        case TreesWanted() if catching_up:
            return f"site {catching_up[0]} is coming back"
        case TreesWanted() if change.members == members and is_possible:
            return ""
        case CatchUp() if is_possible:
            return ""
        case DropRequested() if change.site in members:
            has_others = {change.site, *catching_up} < {*members}
            return "" if has_others else "no other site has the whole training state"
        case Rejoin():
            return ""
    return "it makes no sense any more"


def members_after(
    change: Change, members: tuple[str, ...], order: tuple[str, ...]
) -> tuple[str, ...]:
    """Return who the members are with a change, in the run's order of sites."""
    match change:
        case CatchUp():
            return tuple(name for name in order if name in {*members, change.site})
        case DropRequested():
            return tuple(name for name in members if name != change.site)
    return members


def refused_change(
    change: Change, why: str, site: str = "", must_keep_codecs: bool = False
) -> list[Action]:
    """Return what comes of a change that is given up; `site` cannot have it."""
    match change:
        case TreesWanted():
            return [TreesEnded(None, site, why, must_keep_codecs)]
        case DropRequested():
            return [DropRefused(change.site, why)]
        case CatchUp():
            return [GoOnWithout(change.site, why)]
        case Rejoin():
            return []


def too_few(epoch: Epoch, num_left: int, limits: Limits) -> CannotGoOn:
    """Return why a run ends of which so many sites are left."""
    if epoch.follows == epoch.members:
        return CannotGoOn("PEER_LOST", NO_STATE_LEFT)
    fewest = limits.min_sites
    return CannotGoOn("SITE_LOST", f"{num_left} sites are left, want at least {fewest}")


class Chains:
    """What members have said of their results, round by round."""

    def __init__(self) -> None:
        """Begin with no round."""
        self._known: dict[int, int] = {}

    def take(self, round_: int, chain: int) -> bool:
        """Note what results up to a round add up to; False: another site has had others."""
        if self._known.get(round_, chain) != chain:
            return False
        if round_ >= 0:
            self._known[round_] = chain
        while len(self._known) > CHAINS_KEPT:
            del self._known[min(self._known)]
        return True

    def forget_from(self, round_: int) -> None:
        """Forget rounds that are done again."""
        for each in [each for each in self._known if each >= round_]:
            del self._known[each]
