"""Who of a run's members goes on: one pure function of what is known now.

A site is dead when its agent says that its processes have ended, when its agent's session is gone
and others say that its gateways are, or when its lease has ended. A link is dead when both its ends
live and one of them suspects the other (reach.py). Members are the largest part of the live sites
that are linked with one another. Where no two sites reach each other, the fault is with the network
between all: nobody is dropped for `ride_out_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.members import FINAL, Absence
from isthmus.orchestrator.core.run_events import RecordEvent


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


@dataclass(frozen=True, slots=True)
class Outage:
    """Too few sites reach each other."""

    since_s: float
    was_alone: bool = False
    """Since then no site could go on for a while."""
    back_s: float | None = None
    """When the first could again after that."""
    mended_s: float | None = None
    """When enough reached each other again."""


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """What counts of one member."""

    name: str
    num_ranks: int
    absence: Absence | None
    is_done: bool
    """Its ranks are done with the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that decides who goes on."""

    members: tuple[MemberFacts, ...]
    """The members of the present epoch, in the run's order of sites."""
    parts: tuple[tuple[str, ...], ...]
    """The live members, by who is linked with whom."""
    any_reach: bool
    """Whether any two that are neither gone nor left out reach each other."""
    awaits_leaving: bool
    """Whether a site that leaves has not ended yet."""
    has_had_chance: bool
    """Whether sites that could not go on were asked again since the epoch began."""
    outage: Outage | None
    limits: Limits


class Reason(Enum):
    """Why nobody goes on; or somebody does."""

    GO_ON = auto()
    ALL_DONE = auto()
    TOO_FEW = auto()
    WAIT = auto()
    """It is not known yet."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """Who goes on, or why nobody does."""

    reason: Reason
    members: tuple[str, ...] = ()
    num_left: int = 0
    """How many sites are left, where they are too few."""
    outage: Outage | None = None
    """What has to be known of it next time."""
    note: RecordEvent | None = None
    is_nobody_linked: bool = False
    """No live member is left but those that could not go on."""


def who_takes_part(facts: Facts, now_s: float) -> Quorum:
    """Return the members that go on together, or why none do."""
    limits, outage = facts.limits, facts.outage
    left = [member for member in facts.members if member.absence not in FINAL]
    present = [member for member in left if member.absence is not Absence.LEFT_OUT]
    num_finished = sum(member.absence is Absence.FINISHED for member in facts.members)
    num_done = num_finished + sum(each.is_done for each in left)
    is_done = all(each.is_done for each in left) and not facts.awaits_leaving
    if is_done and num_done >= max(1, limits.min_sites):
        return Quorum(Reason.ALL_DONE, outage=outage)
    if not left:
        return Quorum(Reason.TOO_FEW, num_left=num_finished, outage=outage)
    best = max(facts.parts, key=lambda part: _size(part, facts.members), default=())
    num_best, is_alone = len(best) + num_finished, not best
    if len(left) + num_finished < limits.min_sites:
        num_left = len(left) + num_finished
        return Quorum(Reason.TOO_FEW, (), num_left, outage, None, is_alone)
    is_outage = len(present) > 1 and len(best) <= 1 and not facts.any_reach
    if best and not is_outage and num_best >= limits.min_sites:
        if outage is None or facts.has_had_chance:
            return Quorum(Reason.GO_ON, best, outage=outage)
        return _mended(best, len(present), outage, limits, now_s)
    why = "no two sites reach each other" if is_outage else "too few sites are left"
    if is_alone:
        why = "no agent is heard" if present else "no site can go on"
    outage, note, has_waited = _wait(why, outage, limits, now_s, is_alone=is_alone)
    if not has_waited:
        return Quorum(Reason.WAIT, (), 0, outage, note, is_alone)
    if is_alone or num_best < limits.min_sites:
        return Quorum(Reason.TOO_FEW, (), num_best, outage, note, is_alone)
    return Quorum(Reason.GO_ON, best, 0, outage, note)


def _mended(
    best: tuple[str, ...], num_present: int, outage: Outage, limits: Limits, now_s: float
) -> Quorum:
    """After an outage all have a moment to reach each other again."""
    mended_s = now_s if outage.mended_s is None else outage.mended_s
    if len(best) < num_present and now_s < mended_s + limits.detect_s:
        return Quorum(Reason.WAIT, outage=replace(outage, mended_s=mended_s))
    for_s = now_s - outage.since_s
    note = f"the run goes on after an outage of {for_s:.3g} s"
    went_on = RecordEvent(EventKind.RUN_WENT_ON, detail={"note": note, "for_s": for_s})
    return Quorum(Reason.GO_ON, best, note=went_on)


def _wait(
    why: str, known: Outage | None, limits: Limits, now_s: float, *, is_alone: bool
) -> tuple[Outage, RecordEvent | None, bool]:
    """Return the outage, a note where it is news, and whether it has lasted for long enough.

    The wait for others begins anew, once, when the first is heard after none was.
    """
    outage = known or Outage(now_s)
    is_back = outage.was_alone and not is_alone and outage.back_s is None
    outage = Outage(
        outage.since_s, outage.was_alone or is_alone, now_s if is_back else outage.back_s
    )
    since_s = outage.since_s if is_alone or outage.back_s is None else outage.back_s
    wait_s = limits.alone_s if is_alone else limits.ride_out_s
    note = RecordEvent(
        EventKind.RUN_WAITING, detail={"note": f"{why}: waiting for up to {wait_s:g} s"}
    )
    return outage, note if known is None or is_back else None, now_s >= since_s + wait_s


def _size(part: tuple[str, ...], members: Sequence[MemberFacts]) -> tuple[int, int, int]:
    """Return what the larger of two parts has more of: sites, ranks, the earlier first site."""
    ranks = sum(each.num_ranks for each in members if each.name in part)
    return len(part), ranks, -[each.name for each in members].index(part[0])
