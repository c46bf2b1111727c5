"""A run over the wall clock: its pace, when it stood still, and what each site did meanwhile. Pure.

All times are seconds since the run became active.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent
from isthmus.orchestrator.core.run_events import SiteState

STALL_STEPS = 8.0
"""A run stands still if its next step takes so many times the usual one,"""
LEAST_STALL_S = 3.0
"""and at least so long."""
_MAX_SAMPLE, _MAX_LONGEST = 4096, 500
"""Gaps between steps that are kept: of all, to know what is usual; and the longest."""
MAX_POINTS = 160
"""Intervals whose pace is drawn, at most."""
_STEPS_OF_POINT = 4
"""Steps that an interval holds at least, as a mean: with fewer the pace would jump."""
TRAINING, STARTING, CATCHING_UP, OUT = "training", "starting", "catching up", "out"
_OUT = frozenset({SiteState.LOST, SiteState.DROPPED, SiteState.ABSENT})
_ALL_SITES = frozenset(
    {EventKind.RUN_SUBMITTED, EventKind.RUN_ACTIVE, EventKind.EPOCH_BEGUN, EventKind.RUN_ENDED}
)
"""Events after which any site may do something else."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """When a step's first record came, and what the step amounted to."""

    at_s: float
    step: int
    amount: float
    """Tokens of all sites; 1 where none are counted."""


@dataclass(frozen=True, slots=True)
class Stall:
    """No step was completed for a long time."""

    begin_s: float
    end_s: float
    step: int
    """The step that ended it."""
    cause: str
    """Empty: nothing that was recorded explains it."""

    @property
    def length_s(self) -> float:
        """How long it lasted, one step included."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Phase:
    """What a site did for a while."""

    begin_s: float
    end_s: float
    what: str


@dataclass(frozen=True, slots=True)
class SiteLane:
    """One site over the run."""

    site: str
    phases: tuple[Phase, ...]


def pace(ends: Sequence[StepEnd]) -> list[tuple[float, float]]:
    """Return the middle of equal intervals, and the amount a second in each.

    A step's amount is spread over the time from the end of the step before it, so the pace is low
    where the run stood still.
    """
    if len(ends) < 2 or ends[-1].at_s <= ends[0].at_s:
        return []
    begin_s, end_s = ends[0].at_s, ends[-1].at_s
    num = max(1, min(MAX_POINTS, (len(ends) - 1) // _STEPS_OF_POINT))
    width_s = (end_s - begin_s) / num
    amounts = [0.0] * num
    for before, after in itertools.pairwise(ends):
        first = min(num - 1, int((before.at_s - begin_s) / width_s))
        last = min(num - 1, int((after.at_s - begin_s) / width_s))
        length_s = after.at_s - before.at_s
        for at in range(first, last + 1):
            within_s = min(after.at_s, begin_s + (at + 1) * width_s)
            within_s -= max(before.at_s, begin_s + at * width_s)
            amounts[at] += after.amount * (within_s / length_s if length_s > 0 else 1.0)
    return [(begin_s + (at + 0.5) * width_s, amount / width_s) for at, amount in enumerate(amounts)]


class StepGaps:
    """How long the steps of a run are apart: the longest gaps, and a sample of all."""

    def __init__(self, ends: Iterable[StepEnd] = ()) -> None:
        """Take the first steps, in order."""
        self.last: StepEnd | None = None
        """The last step that was taken."""
        self._sample_s: list[float] = []
        self._num, self._stride = 0, 1
        self._longest: list[tuple[float, float, float, int]] = []
        """Length, begin, end and the step that ended it: a heap, the shortest first."""
        for end in ends:
            self.take(end)

    def take(self, end: StepEnd) -> None:
        """Take the end of the next step."""
        before, self.last = self.last, end
        if before is None:
            return
        gap_s = end.at_s - before.at_s
        if self._num % self._stride == 0:
            self._sample_s.append(gap_s)
        self._num += 1
        if len(self._sample_s) > _MAX_SAMPLE:
            self._sample_s, self._stride = self._sample_s[::2], 2 * self._stride
        if gap_s >= LEAST_STALL_S:
            heapq.heappush(self._longest, (gap_s, before.at_s, end.at_s, end.step))
            if len(self._longest) > _MAX_LONGEST:
                heapq.heappop(self._longest)

    @property
    def limit_s(self) -> float:
        """A gap that is so long is a stall."""
        if not self._sample_s:
            return math.inf
        return max(LEAST_STALL_S, STALL_STEPS * statistics.median(self._sample_s))

    def longest_s(self, steps: Iterable[int]) -> float:
        """Return the longest gap after one of these steps that was not short; 0: none was."""
        known = {step + 1 for step in steps}
        return max((gap_s for gap_s, _, _, step in self._longest if step in known), default=0.0)

    def stalls(
        self, events: Sequence[tuple[float, str, str]], expected: Iterable[int] = ()
    ) -> tuple[Stall, ...]:
        """Return when the run stood still.

        Args:
            events: Time, kind and site of what happened, in order.
            expected: Steps that take longer for a good reason: an evaluation belongs to them.
        """
        known, limit_s, found = frozenset(expected), self.limit_s, []
        for gap_s, begin_s, end_s, step in sorted(self._longest, key=lambda each: each[1]):
            if gap_s >= limit_s:
                cause = _cause(begin_s, end_s, events)
                if cause or step not in known:
                    found.append(Stall(begin_s, end_s, step, cause))
        return tuple(found)


def _cause(begin_s: float, end_s: float, events: Sequence[tuple[float, str, str]]) -> str:
    within = [(kind, site) for at_s, kind, site in events if begin_s <= at_s <= end_s]
    for wanted, words in ((kind, kind.seen.cause) for kind in EventKind if kind.seen.cause):
        sites = dict.fromkeys(site for kind, site in within if kind == wanted)
        if sites:
            first, *others = sites
            if not others:
                return words.format(site=first)
            several = words.replace("was", "were")
            return several.format(site=f"{first} and {len(others)} more")
    return ""


class SiteLanes:
    """What each site did since the run was active, found while its events are folded."""

    def __init__(self, sites: Sequence[str]) -> None:
        """Know nothing yet of the sites, all of the run."""
        self._doing: dict[str, tuple[float, str]] = dict.fromkeys(sites, (0.0, STARTING))
        """Since when each does what, by sites."""
        self._done: dict[str, list[Phase]] = {site: [] for site in sites}

    def take(self, event: RecordedEvent, view: JournaledRun) -> None:
        """Take the next event, which `view` has taken."""
        changed = self._doing if event.kind in _ALL_SITES else [event.site]
        if view.active_s is None or event.kind == EventKind.RUN_ENDED:
            return
        at_s, counted = max(0.0, event.wall_s - view.active_s), view.counted
        for site in changed:
            if site not in self._doing or site not in view.sites:
                continue
            since_s, before = self._doing[site]
            follows = site in view.epochs.epoch.follows
            state = view.sites[site].state
            now = _doing(state, before, is_counted=site in counted, follows=follows)
            if event.kind == EventKind.RUN_ACTIVE and site in counted and state not in _OUT:
                now = TRAINING
            if now != before:
                if at_s > since_s:
                    self._done[site].append(Phase(since_s, at_s, before))
                self._doing[site] = (at_s, now)

    def until(self, for_s: float) -> tuple[SiteLane, ...]:
        """Return what each site did, until so long after the run was active."""
        return tuple(
            SiteLane(
                site, (*self._done[site], *([Phase(since_s, for_s, what)] * (for_s > since_s)))
            )
            for site, (since_s, what) in self._doing.items()
        )


def _doing(state: SiteState, before: str, *, is_counted: bool, follows: bool) -> str:
    if state is SiteState.ENDED:
        return before
    if state in _OUT:
        return OUT
    if state is SiteState.RUNNING:
        return TRAINING if is_counted else CATCHING_UP
    return CATCHING_UP if state is SiteState.RETURNING and follows else STARTING


def at_step(ends: Sequence[StepEnd], step: int) -> float | None:
    """Return when a step ended, or the first one after it; None: none did."""
    return next((each.at_s for each in ends if each.step >= step), None)
