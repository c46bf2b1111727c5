"""Finds the regime that a run is to have on its links as they are. Pure.

A run whose job permits it begins in sync, goes down a ladder of regimes that wait less, and comes
back. What counts is how long steps are measured to wait for the links. The site that computes
longest tells: the others wait for it, too. Of its latest steps there is

    busy      seconds of a step in which it does not wait
    crossing  seconds that an exchange takes
    hidden    seconds of that behind which sync computes, as it was last measured there

and what would be waited for in a step is crossing - hidden in sync, crossing - busy in delayed, and
crossing / H in rounds of H steps. The run is to have the most exact regime in which that is at most
`gain` of busy; or where there is none, the one that waits least. Down it goes if that saves `gain`
of a step, and up if what is waited for is half as much, for as long as `lasting`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from isthmus.protos import metrics
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.units import format_duration

SAMPLES = 5
"""Steps of which figures are the median."""
ROUNDS = 3
"""Exchanges of which the crossing is the median: few, for in rounds they are rare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A regime that the run is to go over to."""

    kind: str
    why: str
    step_s: float = 1.0
    """Measured seconds of a step."""
    after_s: float = 1.0
    """Expected seconds of a step in that regime."""
    busy_s: float = 0.0
    """The part of `after_s` that no link changes."""
    is_forced: bool = False
    """A script cannot train in the present regime: nothing is waited for."""


@dataclass(slots=True)
class _Steps:
    """The latest steps of a site, in the present regime."""

    busy_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    exposed_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    crossing_s: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))

    @property
    def is_known(self) -> bool:
        return len(self.busy_s) == SAMPLES and len(self.crossing_s) == ROUNDS


class RegimeWatch:
    """Finds the regime that a run should have, by what its steps wait for exchanges."""

    def __init__(self, spec: RunSpec, settings: Replan) -> None:
        """Know no steps."""
        self._ladder, self._settings = spec.ladder, settings
        self._place = 0
        """The place of the present regime in the ladder."""
        self._members: tuple[str, ...] = ()
        self._steps: dict[str, _Steps] = {}
        self._unable: set[str] = set()
        """Sites whose scripts keep sync."""
        self._hidden_s = 0.0
        """How much of an exchange the latest step in sync hid."""
        self._since_s: float | None = None
        """When another regime began to be the one to have."""
        self._is_up = False
        """Whether the regime to have is a more exact one than the present."""
        self._found: Move | None = None
        self._is_due = False

    def add(self, site: str, values: Mapping[str, float]) -> None:
        """Take a step of a site."""
        if len(self._ladder) == 1 or values.get(metrics.SITE_TOKENS, 0.0) == 0.0:
            return
        rung = values.get(metrics.RUNG)
        if rung is None:
            self._unable.add(site)
        if rung != self._place:
            return
        self._unable.discard(site)
        steps = self._steps.setdefault(site, _Steps())
        exposed_s = values.get(metrics.EXPOSED_INTER_S, 0.0)
        waited_s = exposed_s + values.get(metrics.WAIT_S, 0.0)
        steps.busy_s.append(values.get(metrics.STEP_S, 0.0) - waited_s)
        steps.exposed_s.append(exposed_s)
        if crossing_s := values.get(metrics.INTER_S, 0.0):
            steps.crossing_s.append(crossing_s)
            if rung == 0:
                self._hidden_s = values.get(metrics.HIDDEN_INTER_S, 0.0)

    def look(self, epoch: Epoch, now_s: float) -> None:
        """Find the regime for the members that there are."""
        kinds = [each.kind for each in self._ladder]
        place = kinds.index(epoch.rung.kind) if epoch.rung.kind in kinds else 0
        if (place, epoch.members) != (self._place, self._members):
            self._place, self._members = place, epoch.members
            self._steps, self._unable, self._since_s = {}, set(), None
        found = self._best()
        is_up = found is not None and kinds.index(found.kind) < place
        if found is None or is_up != self._is_up:
            self._since_s = None
        if found is not None and self._since_s is None:
            self._since_s = now_s
        self._found, self._is_up = found, is_up
        for_s = 0.0 if self._since_s is None else now_s - self._since_s
        self._is_due = for_s >= self._settings.lasting_s

    @property
    def due(self) -> Move | None:
        """Return the regime to go over to; None: the present one stays."""
        if self._found is None or not (self._is_due or self._found.is_forced):
            return None
        return self._found

    def let_be(self) -> None:
        """Forget what was found, for it has been decided on, and look anew."""
        self._found, self._since_s, self._is_due = None, None, False

    def _best(self) -> Move | None:
        """Return the regime to have; None: the present one."""
        if self._unable:
            return self._forced() if self._place else None
        known = [self._steps.get(name, _Steps()) for name in self._members]
        if len(known) < 2 or not all(each.is_known for each in known):
            return None
        slowest = max(known, key=lambda steps: median(steps.busy_s))
        busy_s, crossing_s = median(slowest.busy_s), median(slowest.crossing_s)
        waits_s = [self._waits_s(place, crossing_s, busy_s) for place in range(len(self._ladder))]
        if not self._ladder[self._place].is_local:
            waits_s[self._place] = median(slowest.exposed_s)
        enough = (
            place
            for place, each in enumerate(waits_s)
            if each <= self._settings.gain * busy_s * (0.5 if place < self._place else 1.0)
        )
        best = next(enough, waits_s.index(min(waits_s)))
        step_s, after_s = busy_s + waits_s[self._place], busy_s + waits_s[best]
        saves = after_s <= (1 - self._settings.gain) * step_s
        if best == self._place or (best > self._place and not saves):
            return None
        return Move(
            kind=self._ladder[best].kind,
            why=self._why(best, busy_s, crossing_s, waits_s[self._place]),
            step_s=step_s,
            after_s=after_s,
            busy_s=busy_s,
        )

    def _waits_s(self, place: int, crossing_s: float, busy_s: float) -> float:
        """Return what a step in a regime would wait for the links."""
        regime = self._ladder[place]
        if regime.is_local:
            return crossing_s / regime.sync_every
        return max(0.0, crossing_s - (self._hidden_s if regime.is_sync else busy_s))

    def _why(self, best: int, busy_s: float, crossing_s: float, waits_s: float) -> str:
        crossing, busy, waits = map(_time, (crossing_s, busy_s, waits_s))
        if best > self._place:
            return f"an exchange takes {crossing}, and a step of {busy} waits {waits} for it"
        return f"an exchange takes {crossing} by now, which hides behind a step of {busy}"

    def _forced(self) -> Move:
        who = ", ".join(sorted(self._unable))
        return Move(
            kind=self._ladder[0].kind,
            why=f"the script at {who} trains in no other",
            is_forced=True,
        )


def _time(duration_s: float) -> str:
    return format_duration(float(f"{max(duration_s, 1e-6):.3g}"))
