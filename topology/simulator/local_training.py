"""Sites that train by themselves and exchange once a round, each at its own pace. Pure.

At the end of a step, once all collectives inside the site are done, the fragment that is due
leaves, all of it at once. A step ends when its own work is done and the results that the next step
needs are in place (topology/simulator/rounds.py). Left out: the outer optimizer's step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

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
class _Made:
    """A step that a site has begun."""

    step: int
    begin_s: float
    computed_s: float
    done_s: float
    """Its own work."""
    end_s: float = 0.0


@dataclass(slots=True)
class _Sent:
    """Buckets that left a site at the end of one step."""

    posted_s: float
    reduced_s: dict[int, float] = field(default_factory=dict)
    finished_s: dict[int, float] = field(default_factory=dict)
    wait_s: dict[int, float] = field(default_factory=dict)

    def times(self) -> tuple[BucketTimes, ...]:
        """Return each bucket's times, in their order."""
        return tuple(
            BucketTimes(
                bucket,
                self.posted_s,
                self.posted_s,
                self.reduced_s[bucket],
                self.finished_s[bucket],
                self.wait_s[bucket],
            )
            for bucket in sorted(self.finished_s)
        )


class _Site:
    """What one site has begun, and has not told yet."""

    def __init__(self) -> None:
        self.gather = Server()
        self.opened: _Made | None = None
        """The step that it is in."""
        self.is_done = False
        """With that step's own work."""
        self.closed: deque[_Made] = deque()
        """Steps that have ended, and whose buckets may still be under way."""
        self.sent: dict[int, _Sent] = {}
        """By step; those that a step that is not told yet may have waited for."""
        self.missing: dict[int, int] = {}
        """By step: buckets that are not back."""


class LocalTraining:
    """Makes steps, one after another and without end."""

    def __init__(self, work: StepWork, settings: Settings, chance: Chance) -> None:
        """Let all sites begin at 0; `work` has rounds."""
        assert work.rounds is not None, "training has a class of its own"
        self._work = work
        self._rounds, self._gather_s = work.rounds.rounds, work.rounds.gather_s
        self._due = work.rounds.due()
        self._settings = settings
        self._chance = chance
        self._engine = Engine()
        self._network = changing_network(self._engine, work, settings)
        self._gateways = [Server() for _ in work.sites]
        self._sites = [_Site() for _ in work.sites]
        self._exchanges: dict[int, StepExchange] = {}
        self._posted_s: dict[int, float] = {}
        """By step: when the last site so far sent its buckets."""
        self._num_back: dict[int, int] = {}
        """By step: sites that have all of it."""
        self._told: dict[int, dict[int, SiteStep]] = {}

    @property
    def num_actions(self) -> int:
        """Of the engine."""
        return self._engine.num_actions

    def steps(self) -> Iterator[tuple[Step, float]]:
        """Yield step after step, each with how much later it is than it says."""
        for site in range(len(self._sites)):
            self._begin(site, 0)
        yield from repeating(
            self._simulated,
            round_steps=self._rounds.steps,
            reuse=self._settings.may_reuse_steps,
        )

    def _simulated(self, step: int) -> Step:
        while len(self._told.get(step, ())) < len(self._sites):
            if not self._engine.step():
                raise SimulationError(f"step {step + 1} never ends: a link that it needs stays cut")
        told = self._told.pop(step)
        return tuple(told[site] for site in range(len(self._sites)))

    def _begin(self, site: int, step: int) -> None:
        work, now_s = self._work.sites[site], self._engine.now_s
        factor = 1.0
        if self._settings.stragglers is not None:
            factor = self._settings.stragglers.factor(self._chance, work.num_ranks)
        computed_s, done_s = work.alone_s(factor, is_serial=self._work.schedule == "serial")
        opened = _Made(step, now_s, now_s + computed_s, now_s + done_s)
        self._sites[site].opened, self._sites[site].is_done = opened, False
        self._engine.at(opened.done_s, self._done, site)

    def _done(self, site: int) -> None:
        """End a step's own work: what is due leaves."""
        state, now_s = self._sites[site], self._engine.now_s
        opened = state.opened
        assert opened is not None
        state.is_done = True
        step = opened.step
        due = self._due.get(step % self._rounds.steps, ())
        if due:
            state.sent[step] = _Sent(now_s)
            state.missing[step] = len(due)
            self._posted_s[step] = now_s
            exchange = self._exchange(step)
            for bucket in due:
                exchange.post(site, bucket)
        self._end_if_it_can(site)

    def _exchange(self, step: int) -> StepExchange:
        if step not in self._exchanges:
            self._exchanges[step] = StepExchange(
                self._engine,
                self._network,
                self._work,
                self._gateways,
                step,
                functools.partial(self._reduced, step),
            )
        return self._exchanges[step]

    def _reduced(self, step: int, site: int, bucket: int) -> None:
        """Gather a result inside the site; results come in any order."""
        state, now_s = self._sites[site], self._engine.now_s
        sent, took_s = state.sent[step], self._gather_s[site][bucket]
        sent.reduced_s[bucket] = now_s
        sent.wait_s[bucket] = max(0.0, min(now_s, self._posted_s[step]) - sent.posted_s)
        _, done_s = state.gather.serve(now_s, now_s, took_s, took_s)
        self._engine.at(done_s, self._finished, step, site, bucket)

    def _finished(self, step: int, site: int, bucket: int) -> None:
        state = self._sites[site]
        state.sent[step].finished_s[bucket] = self._engine.now_s
        state.missing[step] -= 1
        if state.missing[step]:
            return
        del state.missing[step]
        self._num_back[step] = self._num_back.get(step, 0) + 1
        if self._num_back[step] == len(self._sites):
            del self._num_back[step], self._exchanges[step], self._posted_s[step]
        self._end_if_it_can(site)
        self._tell(site)

    def _end_if_it_can(self, site: int) -> None:
        """End a site's step once its work is done and all is back that the next step needs."""
        state = self._sites[site]
        opened = state.opened
        if opened is None or not state.is_done:
            return
        needed = opened.step - self._rounds.overlap_steps
        if any(step <= needed for step in state.missing):
            return
        opened.end_s = self._engine.now_s
        state.closed.append(opened)
        state.opened = None
        self._begin(site, opened.step + 1)
        self._tell(site)

    def _tell(self, site: int) -> None:
        """Tell of steps that have ended, and all of whose buckets and those before are back."""
        state = self._sites[site]
        while state.closed and all(step > state.closed[0].step for step in state.missing):
            made = state.closed.popleft()
            self._told.setdefault(made.step, {})[site] = self._site_step(site, made)
            gone = [
                step
                for step, sent in state.sent.items()
                if step not in state.missing and max(sent.finished_s.values()) <= made.end_s
            ]
            for step in gone:
                del state.sent[step]

    def _site_step(self, site: int, made: _Made) -> SiteStep:
        """Divide a step; what it did after backward by itself is not waiting for the WAN."""
        sent = self._sites[site].sent
        away = [each for one in sent.values() for each in one.times()]
        own = sent[made.step].times() if made.step in sent else ()
        parts = parts_of(made.begin_s, made.done_s, made.end_s, away)
        intra_s = made.done_s - made.computed_s - self._work.sites[site].tail_s
        parts = dataclasses.replace(
            parts,
            compute_s=parts.compute_s - intra_s,
            intra_s=parts.intra_s + intra_s,
            inter_s=max((each.reduced_s - each.posted_s for each in own), default=0.0),
        )
        return SiteStep(made.begin_s, made.computed_s, made.end_s, parts, own)
