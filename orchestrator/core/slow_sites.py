"""Finds the site that others wait for, from the waiting times of their steps. Pure.

A site's step says for how long it has waited for slower ones (WAIT_S). Who is late itself waits
least: so what a site costs the others is how much longer they wait than it does, as the mean of
them; of one that waits longest it is below 0. One long step says little: a checkpoint or an
evaluation may be in it. So the median of WINDOW steps counts. Where sites meet once in several
steps, these count as one.

What sites cost is added up, and told once it is much: `SlowAccounts`. A rank that is late inside
its site makes the site late, too: orchestrator/core/slow_ranks.py tells which one it is.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from isthmus.protos import metrics

WINDOW = 10
"""Steps over which a site is judged."""
LEAST_SHARE = 0.02
LEAST_S = 30.0
"""What somebody has to cost the others, as a share of the time and in all, to be told of."""
OPEN_STEPS = 64
"""Steps of which some site's record may be missing."""
MAX_PERIODS = 50
"""Who is told of; the oldest go first."""


@dataclass(slots=True)
class SlowPeriod:
    """How long one site has kept the others waiting, or one rank those of its site."""

    site: str
    since_step: int
    last_step: int
    num_steps: int = 0
    total_s: float = 0.0
    """What it has cost each other site, on average, less what others have cost it."""
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
    shares_machine: bool = False
    """Whether its site is on one machine with another: `why` says with which."""

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

    def count(self, last_step: int, num_steps: int, total_s: float, for_s: float) -> None:
        """Add some steps."""
        self.last_step = last_step
        self.num_steps += num_steps
        self.total_s += total_s
        self.for_s += for_s


@dataclass(slots=True)
class _Account:
    """What somebody costs the others."""

    period: SlowPeriod
    excess_s: float = 0.0
    """Beyond LEAST_SHARE of the time."""
    is_told: bool = False


class SlowAccounts:
    """Adds up what some cost each other; tells who costs much, once each.

    An account is credited with what somebody costs the others, and charged with what they cost him
    and with LEAST_SHARE of the time; it is closed at 0. So all times at which somebody is late
    count together, those who are late in turn cancel out, and what has passed is forgotten: at most
    LEAST_S are held against anybody.
    """

    def __init__(self) -> None:
        self.periods: list[SlowPeriod] = []
        """One for each site or rank that was named, over all the times that it was slow."""
        self._accounts: dict[tuple[str, int | None], _Account] = {}

    @property
    def now(self) -> Sequence[SlowPeriod]:
        """Those that are slow now."""
        return [each for each in self.periods if not each.is_over]

    def add(self, who: SlowPeriod, num_steps: int, share: float, for_s: float) -> SlowPeriod:
        """Take some steps of somebody, and return his period.

        Args:
            who: Who, and the first and the last of the steps.
            num_steps: How many they are.
            share: Of the others' time, what he has cost them; below 0: they have cost him.
            for_s: The time of all these steps.
        """
        account = self._accounts.get((who.site, who.rank))
        if account is None:
            if share <= LEAST_SHARE:
                return who
            account = self._accounts[who.site, who.rank] = _Account(who)
        period, excess_s = account.period, (share - LEAST_SHARE) * for_s
        account.excess_s = min(LEAST_S, account.excess_s + excess_s)
        period.count(who.last_step, num_steps, share * for_s, for_s)
        period.is_over = share < LEAST_SHARE
        if account.excess_s <= 0:
            self._close(who.site, who.rank)
        elif not account.is_told and period.total_s >= LEAST_S:
            account.is_told = True
            account.period = self._tell(period)
        return account.period

    def keep(self, sites: frozenset[str]) -> None:
        """Others take part: forget those that do not."""
        for site, rank in [key for key in self._accounts if key[0] not in sites]:
            self._close(site, rank)

    def ranks_of(self, site: str) -> list[int]:
        """Return the ranks of a site that have an account."""
        return [rank for of, rank in self._accounts if of == site and rank is not None]

    def _close(self, site: str, rank: int | None) -> None:
        self._accounts.pop((site, rank)).period.is_over = True

    def _tell(self, period: SlowPeriod) -> SlowPeriod:
        """Return the one period of whoever is told of."""
        for each in self.periods:
            if (each.site, each.rank) == (period.site, period.rank):
                each.count(period.last_step, period.num_steps, period.total_s, period.for_s)
                each.is_over = False
                return each
        self.periods = [*self.periods, period][-MAX_PERIODS:]
        return period


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
        self._accounts = SlowAccounts()
        self._open: dict[int, dict[str, tuple[float, float]]] = {}
        """Waiting time and duration of a step, by step and site."""
        self._met: int | None = None
        """The last step in which sites met; None: records do not tell."""
        self._alone_s = 0.0
        self._num_alone = 0
        """The time and the number of the steps since then."""
        self._window: deque[_Step] = deque(maxlen=WINDOW)

    @property
    def periods(self) -> Sequence[SlowPeriod]:
        """The sites that have cost the others much."""
        return self._accounts.periods

    @property
    def now(self) -> Sequence[SlowPeriod]:
        """Those that are slow now."""
        return self._accounts.now

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
                self._window.clear()  # others take part: what was before says nothing
                self._accounts.keep(members)
            self._alone_s += sum(told[name][1] for name in members) / len(members)
            self._num_alone += 1
            if self._met is None or step <= self._met:
                waits_s = {name: told[name][0] for name in members}
                total_s = math.fsum(waits_s.values())
                self._judge(_Step(step, self._num_alone, self._alone_s, waits_s, total_s))
                self._alone_s, self._num_alone = 0.0, 0
        elif len(self._open) > OPEN_STEPS:
            del self._open[min(self._open)]

    def _judge(self, step: _Step) -> None:
        self._window.append(step)
        if len(self._window) < WINDOW:
            return
        for site, share in self._costs():
            who = SlowPeriod(site, self._window[0].number, step.number)
            self._accounts.add(who, step.num_steps, share, step.step_s)

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
