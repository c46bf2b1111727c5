"""Simulated training: sites take step after step, each as fast as the exchange lets it. Pure.

`Training` exchanges gradients in every step. A site's step begins when the gradients of the one
before are in place, as in sites/trainer/modelled.py. Buckets leave as backward makes them
(`overlap`) or once it has ended (`serial`). They are reduce-scattered inside the site one after
another, cross, and are all-gathered in their order.

`DelayedTraining` (`regime: delayed`) does so too, but a step applies the gradients of the step
before. These have to be back when its own first bucket is ready: one round is under way at a time.

`LocalTraining` exchanges parameters once a round. At the end of a step, once all collectives inside
the site are done, the fragment that is due leaves, all of it at once. A step ends when its own work
is done and the results that the next step needs are in place. The outer optimizer's step is left
out. Where rounds wait for nobody, a site begins no step that is expected to end later than the
fastest site's last one by more than LATE of it. It leaves numbers of steps out, which then take no
time and have no tokens. Nobody is passed over.

**Periodic steps.** Without stragglers a step depends only on the offsets at which sites began it,
and on flows that earlier steps left on the links, at most two rounds back. So once two consecutive
rounds have the same offsets as two rounds p rounds earlier, steps are periodic with period p, and
are not simulated again. With an exchange in every step a round is a step. Offsets count as the same
within REPEATS of a step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from isthmus.topology.simulator.engine import Engine, Server, SimulationError
from isthmus.topology.simulator.settings import Chance, Settings
from isthmus.topology.simulator.step_work import StepWork
from isthmus.topology.simulator.tree_exchange import ExchangeWork, StepExchange
from isthmus.topology.simulator.wan_links import changing_network
from isthmus.topology.spec.regime import LATE
from isthmus.topology.spec.step_parts import Crossing, Interval, RoundTimes, StepParts, step_parts


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """The times of one bucket at one site, in seconds since the simulation began."""

    index: int
    """The bucket's index among those of the step work."""
    submitted_s: float
    posted_s: float
    reduced_s: float
    finished_s: float
    wait_s: float
    """Seconds until the last other site had posted its part."""

    def later(self, shift_s: float) -> BucketTimes:
        """Return these times, each some seconds later."""
        return BucketTimes(
            self.index,
            self.submitted_s + shift_s,
            self.posted_s + shift_s,
            self.reduced_s + shift_s,
            self.finished_s + shift_s,
            self.wait_s,
        )


def parts_of(
    begin_s: float,
    computed_s: float,
    end_s: float,
    buckets: Sequence[BucketTimes],
    *,
    crosses: bool = True,
) -> StepParts:
    """Divide a step whose last bucket was submitted at `computed_s` into its parts.

    If its buckets did not cross the WAN, the exposed time was inside the site.
    """
    round_ = RoundTimes(((computed_s, end_s),), _crossings(buckets) if crosses else ())
    return step_parts(begin_s, end_s, [round_])


def _crossings(buckets: Sequence[BucketTimes]) -> tuple[Crossing, ...]:
    return tuple(Crossing(each.posted_s, each.reduced_s, each.wait_s) for each in buckets)


REPEATS = 1e-9
"""Share of a step by which offsets may differ and count as the same: rounding."""
_ALIKE_ROUNDS = 2
_PERIOD_MAX = 16
"""Longest period in rounds; shorter with several steps per round, because sites converge within
some exchanges."""
_PERIOD_STEPS_MAX = 64


@dataclass(frozen=True, slots=True)
class SiteStep:
    """One step at one site, in seconds since the simulation began."""

    begin_s: float
    computed_s: float
    end_s: float
    parts: StepParts
    buckets: tuple[BucketTimes, ...] | None
    """Times of the buckets that left in the step; None: not recorded."""

    @property
    def is_left_out(self) -> bool:
        """Whether the site had no step of that number."""
        return self.end_s == self.begin_s

    def later(self, shift_s: float) -> SiteStep:
        """Return these times, each some seconds later."""
        return SiteStep(
            self.begin_s + shift_s,
            self.computed_s + shift_s,
            self.end_s + shift_s,
            self.parts,
            None if self.buckets is None else tuple(each.later(shift_s) for each in self.buckets),
        )


Step = tuple[SiteStep, ...]
"""One step, at all sites."""


def repeating(
    simulated: Callable[[int], Step], *, round_steps: int = 1, reuse: bool = True
) -> Iterator[tuple[Step, float]]:
    """Yield steps without end, each with the seconds to add to its times.

    `simulated` makes a step by its number from 0. If `reuse`, periodic rounds are simulated once.
    """
    rounds_max = max(1, min(_PERIOD_MAX, _PERIOD_STEPS_MAX // round_steps))
    latest: deque[Step] = deque(maxlen=(rounds_max + _ALIKE_ROUNDS) * round_steps)
    for number in itertools.count():
        latest.append(simulated(number))
        yield latest[-1], 0.0
        if reuse and (number + 1) % round_steps == 0:
            steps = list(latest)
            period = _period(steps, round_steps, rounds_max)
            if period:
                yield from _repeated(steps[-period:])
    raise AssertionError("numbers never end")


def _period(latest: list[Step], round_steps: int, rounds_max: int) -> int:
    """Return the period of the latest steps in steps; 0: none was found."""
    alike = _ALIKE_ROUNDS * round_steps
    for rounds in range(1, rounds_max + 1):
        period = rounds * round_steps
        if len(latest) >= alike + period and all(
            _alike(latest[-each], latest[-each - period]) for each in range(1, alike + 1)
        ):
            return period
    return 0


def _alike(one: Step, other: Step) -> bool:
    """Whether two steps have the same offsets between sites and the same lengths."""
    tolerance_s = REPEATS * max(each.end_s - each.begin_s for each in one)
    return all(
        abs((a.end_s - one[0].end_s) - (b.end_s - other[0].end_s)) <= tolerance_s
        and abs((a.end_s - a.begin_s) - (b.end_s - b.begin_s)) <= tolerance_s
        for a, b in zip(one, other, strict=True)
    )


def _repeated(pattern: list[Step]) -> Iterator[tuple[Step, float]]:
    """Yield the steps of a period repeatedly, each time later by its length."""
    period_s = pattern[-1][0].end_s - pattern[0][0].begin_s
    shift_s = 0.0
    while True:
        shift_s += period_s
        yield from ((step, shift_s) for step in pattern)


@dataclass(slots=True)
class _Open:
    """A step in progress at a site."""

    begin_s: float
    computed_s: float
    submitted_s: list[float]
    reduced_s: list[float | None]
    finished_s: list[float]
    num_gathering: int = 0
    """Number of first buckets whose all-gather has begun."""


class _Simulated:
    """Base of all kinds of training: clock, links, gateways, and ended steps."""

    def __init__(self, work: StepWork, settings: Settings, chance: Chance) -> None:
        """Let all sites begin at 0; `chance` drives the stragglers."""
        self._work = work
        self._settings = settings
        self._chance = chance
        self._engine = Engine()
        self._network = changing_network(self._engine, work, settings)
        self._shared = ExchangeWork(work)
        self._gateways = [Server() for _ in work.sites]
        self._exchanges: dict[int, StepExchange] = {}
        """The exchanges by step."""
        self._ended: dict[int, dict[int, SiteStep]] = {}
        """The ended steps, by step and site."""

    @property
    def num_actions(self) -> int:
        """The actions that the clock has run."""
        return self._engine.num_actions

    def _simulated(self, step: int) -> Step:
        """Return the next step, once all sites have ended it."""
        num_sites = len(self._work.sites)
        while len(self._ended.get(step, ())) < num_sites:
            if not self._engine.run_on():
                raise SimulationError(f"step {step + 1} never ends: a link that it needs stays cut")
        ended = self._ended.pop(step)
        return tuple(ended[site] for site in range(num_sites))

    def _keep_ended(self, step: int, site: int, ended: SiteStep) -> None:
        """Keep what a site has ended; let the clock stop once all sites have."""
        of_step = self._ended.setdefault(step, {})
        of_step[site] = ended
        if len(of_step) == len(self._work.sites):
            self._engine.stop()

    def _factor(self, site: int) -> float:
        """Return the straggler factor of a site's compute in the step that it begins."""
        if self._settings.stragglers is None:
            return 1.0
        return self._settings.stragglers.factor(self._chance, self._work.sites[site].num_ranks)

    def _exchange(self, step: int) -> StepExchange:
        """Return the exchange of a step, created when the first site needs it."""
        if step not in self._exchanges:
            reduced = functools.partial(self._reduced, step)
            self._exchanges[step] = StepExchange(
                self._engine, self._network, self._shared, self._gateways, step, reduced
            )
        return self._exchanges[step]

    def _reduced(self, step: int, site: int, bucket: int) -> None:
        """Go on with a bucket whose sum has reached a site."""
        raise NotImplementedError


class Training(_Simulated):
    """Steps that exchange their gradients, one after another and without end."""

    def __init__(self, work: StepWork, settings: Settings, chance: Chance) -> None:
        """Let all sites begin at 0."""
        super().__init__(work, settings, chance)
        self._scatter = [[Server() for _ in range(site.num_lanes)] for site in work.sites]
        self._gather = [[Server() for _ in range(site.num_lanes)] for site in work.sites]
        self._num_begun = [0] * len(work.sites)
        self._open: dict[tuple[int, int], _Open] = {}
        """The open steps, by step and site."""
        self._posted_s: dict[int, list[list[float]]] = {}
        """Seconds at which buckets were posted, by step, site and bucket."""

    def steps(self) -> Iterator[tuple[Step, float]]:
        """Yield steps, each with the seconds to add to its times."""
        for site in range(len(self._work.sites)):
            self._begin(site)
        yield from repeating(self._simulated, reuse=self._settings.may_reuse_steps)

    def _simulated(self, step: int) -> Step:
        made = super()._simulated(step)
        self._exchanges.pop(step, None)
        self._posted_s.pop(step, None)
        return made

    def _begin(self, site: int) -> None:
        """Begin a site's next step now, and schedule its compute."""
        work, now_s = self._work, self._engine.now_s
        step = self._num_begun[site]
        self._num_begun[site] += 1
        factor = self._factor(site)
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
        self._submit(step, site)

    def _submit(self, step: int, site: int) -> None:
        """Reduce a step's buckets inside the site as they are ready, and send them."""
        work = self._work.sites[site]
        for bucket, at_s in enumerate(self._open[step, site].submitted_s):
            took_s = work.scatter_s[bucket]
            lane = self._scatter[site][work.lanes[bucket]]
            _, posted_s = lane.serve(at_s, at_s, took_s, took_s)
            self._posted_s[step][site][bucket] = posted_s
            self._engine.at(posted_s, self._post, step, site, bucket)

    def _post(self, step: int, site: int, bucket: int) -> None:
        if self._work.schedule == "off":
            self._reduced(step, site, bucket)
        else:
            self._exchange(step).post(site, bucket)

    def _reduced(self, step: int, site: int, bucket: int) -> None:
        """Begin the all-gathers whose turn it is, in order of the buckets."""
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
            self._all_back(step, site)

    def _all_back(self, step: int, site: int) -> None:
        """Go on with a step whose buckets are back, once the last is gathered."""
        opened = self._open[step, site]
        # Backward may end later than the last bucket comes back.
        done_s = max(opened.computed_s, *opened.finished_s)
        self._engine.at(done_s + self._work.sites[site].tail_s, self._end, step, site, done_s)

    def _end(self, step: int, site: int, done_s: float) -> None:
        """End a step whose gradients were in place at `done_s`."""
        opened, now_s = self._open.pop((step, site)), self._engine.now_s
        buckets = self._buckets(step, site, opened)
        crosses = self._work.schedule != "off"
        parts = parts_of(opened.begin_s, opened.computed_s, done_s, buckets, crosses=crosses)
        parts = dataclasses.replace(parts, compute_s=parts.compute_s + now_s - done_s)
        ended = SiteStep(opened.begin_s, opened.computed_s, now_s, parts, buckets)
        self._keep_ended(step, site, ended)
        self._begin(site)

    def _buckets(self, step: int, site: int, opened: _Open) -> tuple[BucketTimes, ...]:
        return tuple(
            self._bucket(step, site, index, opened) for index in range(len(opened.finished_s))
        )

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


class DelayedTraining(Training):
    """Steps that exchange their gradients, and apply those of the step before."""

    def __init__(self, work: StepWork, settings: Settings, chance: Chance) -> None:
        """Let all sites begin at 0."""
        super().__init__(work, settings, chance)
        self._away: set[tuple[int, int]] = set()
        """The steps whose buckets are under way, by step and site."""
        self._stalled: set[int] = set()
        """The sites whose first bucket is ready, while those of the step before are under way."""
        self._stalls: dict[tuple[int, int], Interval] = {}
        """The time for which a site's first bucket waited, by step and site."""
        self._over_s: dict[tuple[int, int], float] = {}
        """Seconds at which a site ended a step, by step and site, until it is reported."""
        self._before: list[tuple[BucketTimes, ...]] = [() for _ in work.sites]
        """The buckets of the step that was reported last, by site."""

    def _submit(self, step: int, site: int) -> None:
        self._engine.at(min(self._open[step, site].submitted_s), self._begin_round, step, site)

    def _begin_round(self, step: int, site: int) -> None:
        """Send a step's buckets, or wait until those of the step before are back."""
        if (step - 1, site) in self._away:
            self._stalled.add(site)
            return
        opened, now_s = self._open[step, site], self._engine.now_s
        ready_s = min(opened.submitted_s)
        self._stalls[step, site] = (ready_s, now_s)
        late_s = now_s - ready_s
        opened.computed_s += late_s
        # Not before now, whatever the sum rounds to.
        opened.submitted_s = [max(now_s, each_s + late_s) for each_s in opened.submitted_s]
        self._away.add((step, site))
        super()._submit(step, site)
        ends_s = max(now_s, opened.computed_s) + self._work.sites[site].tail_s
        self._engine.at(ends_s, self._end_step, step, site)

    def _all_back(self, step: int, site: int) -> None:
        self._engine.at(max(self._open[step, site].finished_s), self._back, step, site)

    def _back(self, step: int, site: int) -> None:
        self._away.remove((step, site))
        if site in self._stalled:
            self._stalled.remove(site)
            self._begin_round(step + 1, site)
        self._report(step, site)

    def _end_step(self, step: int, site: int) -> None:
        self._over_s[step, site] = self._engine.now_s
        self._begin(site)
        self._report(step, site)

    def _report(self, step: int, site: int) -> None:
        """Report a step that has ended, once its buckets are back."""
        if (step, site) not in self._over_s or (step, site) in self._away:
            return
        opened, end_s = self._open.pop((step, site)), self._over_s.pop((step, site))
        own = self._buckets(step, site, opened)
        stalled_s, until_s = self._stalls.pop((step, site))
        parts = step_parts(
            opened.begin_s,
            end_s,
            [
                RoundTimes(((stalled_s, until_s),), _crossings(self._before[site])),
                RoundTimes((), _crossings(own)),
            ],
        )
        inter_s = max(each.reduced_s for each in own) - min(each.posted_s for each in own)
        self._before[site] = own
        parts = dataclasses.replace(parts, inter_s=inter_s)
        ended = SiteStep(opened.begin_s, opened.computed_s, end_s, parts, own)
        self._keep_ended(step, site, ended)


@dataclass(slots=True)
class _Made:
    """A step that a site has begun."""

    step: int
    begin_s: float
    computed_s: float
    done_s: float
    """Seconds of the clock at which the step's own work is done."""
    end_s: float = 0.0


@dataclass(slots=True)
class _Sent:
    """The buckets that left a site at the end of a step."""

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
    """The steps that a site has begun and not yet reported."""

    def __init__(self) -> None:
        self.gather = Server()
        self.opened: _Made | None = None
        """The step in progress; None: none."""
        self.is_done = False
        """Whether that step's own work is done."""
        self.closed: deque[_Made] = deque()
        """Ended steps whose buckets may still be under way."""
        self.sent: dict[int, _Sent] = {}
        """Sent buckets by step, as far as an unreported step may have waited for them."""
        self.missing: dict[int, int] = {}
        """Number of buckets without a result, by step."""
        self.round_began_s = 0.0


class LocalTraining(_Simulated):
    """Steps of sites that exchange their parameters once a round, without end."""

    def __init__(self, work: StepWork, settings: Settings, chance: Chance) -> None:
        """Let all sites begin at 0; `work` has rounds."""
        super().__init__(work, settings, chance)
        assert work.rounds is not None, "training has a class of its own"
        self._rounds, self._gather_s = work.rounds.rounds, work.rounds.gather_s
        self._due = work.rounds.due()
        self._sites = [_Site() for _ in work.sites]
        self._alone_s = [site.alone_s(1.0, is_serial=False)[1] for site in work.sites]
        self._posted_s: dict[int, float] = {}
        """Seconds at which the latest site sent its buckets, by step."""
        self._num_back: dict[int, int] = {}
        """Number of sites with all results, by step."""

    def steps(self) -> Iterator[tuple[Step, float]]:
        """Yield steps, each with the seconds to add to its times."""
        for site in range(len(self._sites)):
            self._begin(site, 0)
        yield from repeating(
            self._simulated,
            round_steps=self._rounds.steps,
            reuse=self._settings.may_reuse_steps,
        )

    def _begin(self, site: int, step: int) -> None:
        work, now_s = self._work.sites[site], self._engine.now_s
        computed_s, done_s = work.alone_s(
            self._factor(site), is_serial=self._work.schedule == "serial"
        )
        opened = _Made(step, now_s, now_s + computed_s, now_s + done_s)
        self._sites[site].opened, self._sites[site].is_done = opened, False
        self._engine.at(opened.done_s, self._done, site)

    def _done(self, site: int) -> None:
        """End a step's own work, and send the buckets that are due."""
        state, now_s = self._sites[site], self._engine.now_s
        opened = state.opened
        assert opened is not None
        state.is_done = True
        if self._rounds.min_steps is not None:
            self._leave_out(site, opened)
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

    def _leave_out(self, site: int, opened: _Made) -> None:
        """Have a step be the site's last one of its round, if the next one would end too late."""
        now_s, began_s = self._engine.now_s, self._sites[site].round_began_s
        taken = opened.step % self._rounds.steps + 1
        late_s = now_s + (1 - LATE) * self._alone_s[site]
        ends_s = began_s + self._rounds.steps * min(self._alone_s)
        if taken < (self._rounds.min_steps or 0) or late_s <= ends_s:
            return
        last = opened.step + self._rounds.steps - taken
        at_s = opened.begin_s
        for number in range(opened.step, last):
            none = SiteStep(at_s, at_s, at_s, parts_of(at_s, at_s, at_s, ()), None)
            self._keep_ended(number, site, none)
        opened.step = last

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
        """End a site's step once its work is done and the next step's results are back."""
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
        if (opened.step + 1) % self._rounds.steps == 0:
            state.round_began_s = self._engine.now_s
        self._begin(site, opened.step + 1)
        self._tell(site)

    def _tell(self, site: int) -> None:
        """Report ended steps, in order, once all their buckets are back."""
        state = self._sites[site]
        while state.closed and all(step > state.closed[0].step for step in state.missing):
            ended = state.closed.popleft()
            self._keep_ended(ended.step, site, self._site_step(site, ended))
            gone = [
                step
                for step, sent in state.sent.items()
                if step not in state.missing and max(sent.finished_s.values()) <= ended.end_s
            ]
            for step in gone:
                del state.sent[step]

    def _site_step(self, site: int, ended: _Made) -> SiteStep:
        """Divide a step into its parts; its own work after backward is no wait for the WAN."""
        sent = self._sites[site].sent
        away = [each for one in sent.values() for each in one.times()]
        own = sent[ended.step].times() if ended.step in sent else ()
        parts = parts_of(ended.begin_s, ended.done_s, ended.end_s, away)
        intra_s = ended.done_s - ended.computed_s - self._work.sites[site].tail_s
        parts = dataclasses.replace(
            parts,
            compute_s=parts.compute_s - intra_s,
            intra_s=parts.intra_s + intra_s,
            inter_s=max((each.reduced_s - each.posted_s for each in own), default=0.0),
        )
        return SiteStep(ended.begin_s, ended.computed_s, ended.end_s, parts, own)
