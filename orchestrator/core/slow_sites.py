"""Finds the site that others wait for, from the waiting times of their steps. Pure.

A site's step says for how long it has waited for slower ones (WAIT_S). Who is late itself waits
least: so what a site costs the others is how much longer they wait than it does, as the mean of
them. One long step says little: a checkpoint or an evaluation may be in it. So a site is slow once
the median of WINDOW steps has cost a tenth of a step, and is so until it costs less than a
twentieth, or another costs more. Where sites meet once in several steps, these count as one.

A rank that is late inside its site makes the site late, too: orchestrator/core/slow_ranks.py tells
which one it is.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isthmus.protos import metrics

WINDOW = 10
"""Steps over which a site is judged."""
BEGIN_SHARE = 0.10
END_SHARE = 0.05
"""Shares of a step that a site costs when it begins to be slow, and when it is no more."""
OPEN_STEPS = 64
"""Steps of which some site's record may be missing."""
MAX_PERIODS = 50
"""Periods that are kept; the oldest go first."""


@dataclass(slots=True)
class SlowPeriod:
    """How long one site has kept the others waiting, or one rank those of its site."""

    site: str
    since_step: int
    last_step: int
    num_steps: int = 0
    total_s: float = 0.0
    """What it has cost each other site, on average, over all of these steps."""
    for_s: float = 0.0
    """The time that those steps took."""
    is_over: bool = False
    rank: int | None = None
    """The rank's number in its site; None: the whole site is slow."""
    node: str = ""
    """The rank's node: its number in the site."""
    host: str = ""
    """The node's name."""
    why: str = ""
    """What explains it, in words; empty: nothing that is known."""

    @property
    def who(self) -> str:
        """Return `site east`, or `rank 3 of site east (node 0, host gpu17)`."""
        if self.rank is None:
            return f"site {self.site}"
        return f"rank {self.rank} of site {self.site} (node {self.node}, host {self.host})"

    @property
    def cost_s(self) -> float:
        """What a step has cost each other site, on average."""
        return self.total_s / self.num_steps

    @property
    def share(self) -> float:
        """The share of the others' time."""
        return self.total_s / self.for_s if self.for_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Step:
    """One step that all sites have told of, with those before in which they have not met."""

    number: int
    num_steps: int
    step_s: float
    """Time of them all."""
    waits_s: Mapping[str, float]
    total_wait_s: float
    """Sum over all sites. From it a site's part is taken off, so each site costs the same time."""


class SlowSites:
    """Takes the steps of a run's sites; tells who is slow."""

    def __init__(self) -> None:
        self.periods: list[SlowPeriod] = []
        """In their order; the last one may go on."""
        self._open: dict[int, dict[str, tuple[float, float]]] = {}
        """Waiting time and duration of a step, by step and site."""
        self._met: int | None = None
        """The last step in which sites met; None: records do not tell."""
        self._alone_s = 0.0
        self._num_alone = 0
        """The time and the number of the steps since then."""
        self._window: deque[_Step] = deque(maxlen=WINDOW)

    @property
    def now(self) -> SlowPeriod | None:
        """The site that is slow now."""
        return self.periods[-1] if self.periods and not self.periods[-1].is_over else None

    def add(
        self, site: str, step: int, values: Mapping[str, float], members: frozenset[str]
    ) -> None:
        """Take a step of a site, of `members` that wait for each other."""
        wait_s, step_s = values.get(metrics.WAIT_S), values.get(metrics.STEP_S)
        if site not in members or len(members) < 2 or wait_s is None or step_s is None:
            return
        if not (math.isfinite(wait_s) and math.isfinite(step_s)):
            return
        if metrics.ROUND in values:
            self._met = step
        told = self._open.setdefault(step, {})
        told[site] = (wait_s, step_s)
        if told.keys() >= members:
            for earlier in [each for each in self._open if each <= step]:
                del self._open[earlier]
            if self._window and self._window[-1].waits_s.keys() != members:
                self._begin_anew()
            self._alone_s += sum(told[name][1] for name in members) / len(members)
            self._num_alone += 1
            if self._met is None or step <= self._met:
                waits_s = {name: told[name][0] for name in members}
                total_s = math.fsum(waits_s.values())
                self._judge(_Step(step, self._num_alone, self._alone_s, waits_s, total_s))
                self._alone_s, self._num_alone = 0.0, 0
        elif len(self._open) > OPEN_STEPS:
            del self._open[min(self._open)]

    def _begin_anew(self) -> None:
        """Other sites take part: what was before says nothing."""
        self._window.clear()
        if self.now is not None:
            self.now.is_over = True

    def _judge(self, step: _Step) -> None:
        self._window.append(step)
        if (now := self.now) is not None:
            _count(now, step)
        if len(self._window) < WINDOW:
            return
        site, share = max(self._costs(), key=lambda each: each[1])
        if now is not None and (site != now.site or share < END_SHARE):
            now.is_over, now = True, None
        if now is None and share >= BEGIN_SHARE:
            first = self._window[0].number
            period = SlowPeriod(site, since_step=first, last_step=first)
            for each in self._window:
                _count(period, each)
            self.periods = [*self.periods, period][-MAX_PERIODS:]

    def _costs(self) -> Iterator[tuple[str, float]]:
        """Yield each site with what it costs the others, as a share of the window's steps."""
        steps = [each for each in self._window if each.step_s > 0]
        for site in self._window[-1].waits_s:
            shares = [_cost_s(each, site) / each.step_s for each in steps]
            yield site, statistics.median(shares) if shares else 0.0


def _cost_s(step: _Step, site: str) -> float:
    """Return for how much longer the others wait than a site, on average; it may be negative."""
    wait_s = step.waits_s[site]
    return (step.total_wait_s - wait_s) / (len(step.waits_s) - 1) - wait_s


def _count(period: SlowPeriod, step: _Step) -> None:
    period.last_step = step.number
    period.num_steps += step.num_steps
    period.total_s += max(0.0, _cost_s(step, period.site))
    period.for_s += step.step_s
