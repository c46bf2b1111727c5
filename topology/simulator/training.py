"""Sites that train step by step, each at its own pace as far as the exchange lets it. Pure.

A site's step begins when the gradients of the one before are in place, as in
sites/trainer/modelled.py. Buckets leave as backward makes them (`overlap`) or once it has ended
(`serial`), are reduce-scattered inside the site one after another, cross, and are all-gathered in
their order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from topology.simulator.chance import Chance
from topology.simulator.engine import Engine, SimulationError
from topology.simulator.exchange import StepExchange
from topology.simulator.network import changing_network
from topology.simulator.parts import BucketTimes, parts_of
from topology.simulator.servers import Server
from topology.simulator.settings import Settings
from topology.simulator.site_step import SiteStep, Step, repeating
from topology.simulator.step_work import StepWork


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
        self._network = changing_network(self._engine, work, settings)
        self._gateways = [Server() for _ in work.sites]
        self._scatter = [[Server() for _ in range(site.num_lanes)] for site in work.sites]
        self._gather = [[Server() for _ in range(site.num_lanes)] for site in work.sites]
        self._num_begun = [0] * len(work.sites)
        self._open: dict[tuple[int, int], _Open] = {}
        """By step and site."""
        self._posted_s: dict[int, list[list[float]]] = {}
        """By step, site and bucket."""
        self._exchanges: dict[int, StepExchange] = {}
        self._ended: dict[int, dict[int, SiteStep]] = {}

    @property
    def num_actions(self) -> int:
        """Of the engine."""
        return self._engine.num_actions

    def steps(self) -> Iterator[tuple[Step, float]]:
        """Yield step after step, each with how much later it is than it says."""
        for site in range(len(self._work.sites)):
            self._begin(site)
        yield from repeating(self._simulated, reuse=self._settings.may_reuse_steps)

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
            took_s = work.sites[site].scatter_s[bucket]
            lane = self._scatter[site][work.sites[site].lanes[bucket]]
            _, posted_s = lane.serve(at_s, at_s, took_s, took_s)
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
        took_s, lanes = self._work.sites[site].gather_s, self._work.sites[site].lanes
        while (
            opened.num_gathering < len(took_s)
            and opened.reduced_s[opened.num_gathering] is not None
        ):
            index = opened.num_gathering
            lane = self._gather[site][lanes[index]]
            _, done_s = lane.serve(now_s, now_s, took_s[index], took_s[index])
            opened.finished_s[index] = done_s
            opened.num_gathering += 1
        if opened.num_gathering == len(took_s):
            # Backward may end later than the last bucket comes back.
            done_s = max(opened.computed_s, *opened.finished_s)
            self._engine.at(done_s + self._work.sites[site].tail_s, self._end, step, site, done_s)

    def _end(self, step: int, site: int, done_s: float) -> None:
        """End a step whose gradients were in place at `done_s`."""
        opened, now_s = self._open.pop((step, site)), self._engine.now_s
        buckets = tuple(
            self._bucket(step, site, index, opened) for index in range(len(opened.finished_s))
        )
        crosses = self._work.schedule != "off"
        parts = parts_of(opened.begin_s, opened.computed_s, done_s, buckets, crosses=crosses)
        parts = dataclasses.replace(parts, compute_s=parts.compute_s + now_s - done_s)
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
            index, opened.submitted_s[index], posted_s, reduced_s, opened.finished_s[index], wait_s
        )
