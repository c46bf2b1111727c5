"""Sites that train step by step, each at its own pace as far as the exchange lets it. Pure.

A site's step begins when the gradients of the one before are in place, as in sites/trainer/modelled.py.
Buckets leave as backward makes them (`overlap`) or once it has ended (`serial`), are reduce-scattered
inside the site one after another, cross, and are all-gathered in their order.

**Steps that repeat themselves.** Without stragglers all that a step depends on is how far apart the sites
began it, and what the steps before had left on the links: whatever site was early, nothing of two steps
before can be. So once two consecutive steps had the same offsets as two before, p steps apart, every step is
that of p before, p steps' time later. Offsets count as the same within REPEATS of a step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from topology.changes import Change
from topology.simulator.chance import Chance
from topology.simulator.engine import Engine, SimulationError
from topology.simulator.exchange import StepExchange
from topology.simulator.network import Network
from topology.simulator.parts import BucketTimes, Parts, parts_of
from topology.simulator.servers import Server
from topology.simulator.settings import Settings
from topology.simulator.step_work import StepWork

REPEATS = 1e-9
"""Of a step: rounding."""
_PERIOD_MAX = 16


@dataclass(frozen=True, slots=True)
class SiteStep:
    """One step at one site, in seconds since the simulation began."""

    begin_s: float
    computed_s: float
    end_s: float
    parts: Parts
    buckets: tuple[BucketTimes, ...]
    """Empty where nobody keeps them."""

    def later(self, shift_s: float) -> SiteStep:
        """Return the same, some seconds later."""
        return SiteStep(
            self.begin_s + shift_s,
            self.computed_s + shift_s,
            self.end_s + shift_s,
            self.parts,
            tuple(each.later(shift_s) for each in self.buckets),
        )

    def without_buckets(self) -> SiteStep:
        """Return the same for those who do not draw it."""
        return dataclasses.replace(self, buckets=())


Step = tuple[SiteStep, ...]
"""One step, at all sites."""


@dataclass(slots=True)
class _Open:
    """A step that a site is in."""

    begin_s: float
    computed_s: float
    submitted_s: list[float]
    reduced_s: list[float | None]
    finished_s: list[float]
    num_gathering: int = 0
    """Buckets whose all-gather has begun, the first ones."""


class Training:
    """Makes steps, one after another and without end."""

    def __init__(self, work: StepWork, settings: Settings, chance: Chance) -> None:
        """Let all sites begin at 0.

        Args:
            work: what a step is.
            settings: how it is simulated.
            chance: of stragglers.
        """
        self._work = work
        self._settings = settings
        self._chance = chance
        self._engine = Engine()
        self._network = Network(self._engine, work, is_fair=settings.sharing == "fair")
        self._gateways = [Server() for _ in work.sites]
        self._scatter = [Server() for _ in work.sites]
        self._gather = [Server() for _ in work.sites]
        self._num_begun = [0] * len(work.sites)
        self._open: dict[tuple[int, int], _Open] = {}
        """By step and site."""
        self._posted_s: dict[int, list[list[float]]] = {}
        """By step, site and bucket."""
        self._exchanges: dict[int, StepExchange] = {}
        self._ended: dict[int, dict[int, SiteStep]] = {}
        for each in settings.changes:
            assert isinstance(each.change, Change), "checked by require_simulated"
            self._engine.at(each.at_s, self._network.change, each.change)

    @property
    def num_actions(self) -> int:
        """Of the engine."""
        return self._engine.num_actions

    def steps(self) -> Iterator[tuple[Step, float]]:
        """Yield step after step, each with how much later it is than it says."""
        for site in range(len(self._work.sites)):
            self._begin(site)
        latest: list[Step] = []
        while True:
            latest.append(self._simulated(len(latest)))
            yield latest[-1], 0.0
            if len(latest) > _PERIOD_MAX + 2:
                latest[-_PERIOD_MAX - 3] = ()
            period = self._period(latest)
            if period:
                yield from _repeated(latest[-period:])

    def _simulated(self, step: int) -> Step:
        """Return the next step, once all sites have ended it."""
        num_sites = len(self._work.sites)
        while len(self._ended.get(step, ())) < num_sites:
            if not self._engine.step():
                raise SimulationError(f"step {step + 1} never ends: a link that it needs stays cut")
        ended = self._ended.pop(step)
        self._exchanges.pop(step, None)
        self._posted_s.pop(step, None)
        return tuple(ended[site] for site in range(num_sites))

    def _period(self, latest: list[Step]) -> int:
        """Return after how many steps they repeat themselves; 0: not that one could tell."""
        settings = self._settings
        if settings.stragglers is not None or settings.changes or not settings.reuse_steps:
            return 0
        last = len(latest) - 1
        for period in range(1, min(_PERIOD_MAX, last - 1) + 1):
            if _alike(latest[last], latest[last - period]) and _alike(
                latest[last - 1], latest[last - 1 - period]
            ):
                return period
        return 0

    def _begin(self, site: int) -> None:
        """Begin a site's next step now: compute is known from here on."""
        work, now_s = self._work, self._engine.now_s
        step = self._num_begun[site]
        self._num_begun[site] += 1
        factor = 1.0
        if self._settings.stragglers is not None:
            factor = self._settings.stragglers.factor(self._chance, work.sites[site].num_ranks)
        computed_s = now_s + factor * work.sites[site].compute_s
        ready_s = [
            computed_s if work.schedule == "serial" else now_s + factor * each_s
            for each_s in work.sites[site].ready_s
        ]
        num_buckets = len(ready_s)
        self._open[step, site] = _Open(
            now_s, computed_s, ready_s, [None] * num_buckets, [0.0] * num_buckets
        )
        if step not in self._posted_s:
            self._posted_s[step] = [[0.0] * num_buckets for _ in work.sites]
            self._exchanges[step] = StepExchange(
                self._engine,
                self._network,
                work,
                self._gateways,
                step,
                functools.partial(self._reduced, step),
            )
        for bucket, at_s in enumerate(ready_s):
            took_s = work.sites[site].collective_s[bucket]
            _, posted_s = self._scatter[site].serve(at_s, at_s, took_s, took_s)
            self._posted_s[step][site][bucket] = posted_s
            self._engine.at(posted_s, self._post, step, site, bucket)

    def _post(self, step: int, site: int, bucket: int) -> None:
        if self._work.schedule == "off":
            self._reduced(step, site, bucket)
        else:
            self._exchanges[step].post(site, bucket)

    def _reduced(self, step: int, site: int, bucket: int) -> None:
        """Begin the all-gathers whose turn it is: those before are done or on their way."""
        opened, now_s = self._open[step, site], self._engine.now_s
        opened.reduced_s[bucket] = now_s
        took_s = self._work.sites[site].collective_s
        while (
            opened.num_gathering < len(took_s)
            and opened.reduced_s[opened.num_gathering] is not None
        ):
            index = opened.num_gathering
            _, done_s = self._gather[site].serve(now_s, now_s, took_s[index], took_s[index])
            opened.finished_s[index] = done_s
            opened.num_gathering += 1
        if opened.num_gathering == len(took_s):
            # Backward may end later than the last bucket comes back.
            done_s = max(opened.computed_s, *opened.finished_s)
            self._engine.at(done_s, self._end, step, site)

    def _end(self, step: int, site: int) -> None:
        opened, now_s = self._open.pop((step, site)), self._engine.now_s
        buckets = tuple(
            self._bucket(step, site, index, opened) for index in range(len(opened.finished_s))
        )
        crosses = self._work.schedule != "off"
        parts = parts_of(opened.begin_s, opened.computed_s, now_s, buckets, crosses=crosses)
        self._ended.setdefault(step, {})[site] = SiteStep(
            opened.begin_s, opened.computed_s, now_s, parts, buckets
        )
        self._begin(site)

    def _bucket(self, step: int, site: int, index: int, opened: _Open) -> BucketTimes:
        reduced_s = opened.reduced_s[index]
        assert reduced_s is not None
        posted_s = self._posted_s[step][site][index]
        wait_s = 0.0
        if self._work.schedule != "off":
            latest_s = max(each[index] for each in self._posted_s[step])
            wait_s = max(0.0, min(reduced_s, latest_s) - posted_s)
        return BucketTimes(
            opened.submitted_s[index], posted_s, reduced_s, opened.finished_s[index], wait_s
        )


def _alike(one: Step, other: Step) -> bool:
    """Whether the sites ended two steps equally far apart, and took as long for them."""
    tolerance_s = REPEATS * max(each.end_s - each.begin_s for each in one)
    return all(
        abs((a.end_s - one[0].end_s) - (b.end_s - other[0].end_s)) <= tolerance_s
        and abs((a.end_s - a.begin_s) - (b.end_s - b.begin_s)) <= tolerance_s
        for a, b in zip(one, other, strict=True)
    )


def _repeated(pattern: list[Step]) -> Iterator[tuple[Step, float]]:
    """Yield the steps of a period again and again, each time later by its length."""
    period_s = pattern[-1][0].end_s - pattern[0][0].begin_s
    shift_s = 0.0
    while True:
        shift_s += period_s
        yield from ((step, shift_s) for step in pattern)
