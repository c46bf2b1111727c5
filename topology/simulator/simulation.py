"""One simulated run: its steps, their load on the links, and the cost of failures. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from isthmus.topology.faults.script import TimedChange
from isthmus.topology.simulator.engine import SimulationError
from isthmus.topology.simulator.settings import Chance, Outage, Outages, Settings
from isthmus.topology.simulator.step_work import StepWork, step_work
from isthmus.topology.simulator.training import DelayedTraining, LocalTraining, Step, Training
from isthmus.topology.simulator.wan_links import Hop, require_simulated
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Topology

STUCK_MAX = 1000
"""Consecutive failures without progress after which a run counts as endless."""
FIRST_KEPT = 3
"""First steps whose buckets are always recorded: sites/worker/exchange/step_records.py."""


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """The load of one step on a directed link; with rounds, the mean."""

    source: str
    target: str
    sent_bytes: float
    """Bytes of frames and their headers."""
    raw_bytes: float
    """Bytes in float32 of the chunks in them."""
    busy_s: float
    """Seconds at the link's rate, headers of packets included."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The steps, link loads and failures of a simulated run."""

    work: StepWork
    steps: tuple[Step, ...]
    """The steps that were not lost, in order. Buckets only if the job records timelines."""
    links: tuple[LinkLoad, ...]
    """The load of a step on each link that carries something."""
    outages: tuple[Outage, ...]
    changes: tuple[TimedChange, ...]
    """The changes of links that were made before the run ended."""
    num_actions: int
    """The number of actions that were simulated."""

    @property
    def wall_s(self) -> float:
        """The seconds from the beginning to the last site's end."""
        return max(site.end_s for site in self.steps[-1])

    @property
    def goodput(self) -> float:
        """Share of the wall time spent on steps that were not lost."""
        lost_s = sum(each.until_s - each.at_s for each in self.outages)
        made_s = math.fsum(
            max(site.end_s for site in step) - min(site.begin_s for site in step)
            for step in self.steps
        )
        return 1.0 if not self.outages else min(1.0 - lost_s / self.wall_s, made_s / self.wall_s)

    def step_s(self, site: int, skip: int = 0) -> float:
        """Return the mean over a site's steps after the first `skip`."""
        steps = [step[site] for step in self.steps[skip:]]
        return math.fsum(each.end_s - each.begin_s for each in steps) / len(steps)

    def tokens(self, site: int, skip: int = 0) -> float:
        """Return a site's mean tokens of a step after the first `skip`: some are left out."""
        steps = [step[site] for step in self.steps[skip:]]
        return self.work.sites[site].tokens * fmean(not each.is_left_out for each in steps)

    @property
    def mean_step_s(self) -> float:
        """The mean seconds of a step over all sites and steps."""
        sites = range(len(self.work.sites))
        return math.fsum(self.step_s(site) for site in sites) / len(sites)


def simulate(job: Job, topology: Topology, settings: Settings | None = None) -> SimulatedRun:
    """Simulate a run of a job.

    Compute is always modelled. A job with its own script must describe its model and each site's
    cut.

    Raises:
        ConfigError: the job's tree does not fit the topology.
        SimulationError: failures are so frequent that the run never ends, a link is cut for ever,
            or a change of a link cannot be simulated.
    """
    assert job.entrypoint is None or job.workload is not None, "nothing is known of a script"
    settings = settings or Settings()
    require_simulated(settings.changes, is_fair=settings.sharing == "fair")
    work = step_work(job, topology, settings)
    maker = _Made(job, work, settings)
    steps, outages = maker.run()
    ended_s = max(site.end_s for site in steps[-1])
    return SimulatedRun(
        work=work,
        steps=tuple(steps),
        links=link_loads(work),
        outages=tuple(outages),
        changes=tuple(each for each in settings.changes if each.at_s <= ended_s),
        num_actions=maker.num_actions,
    )


def simulate_alone(job: Job, topology: Topology, settings: Settings | None = None) -> SimulatedRun:
    """Simulate each site by itself: nothing crosses, and no site fails."""
    settings = dataclasses.replace(settings or Settings(), outages=None, changes=())
    exchange = dataclasses.replace(job.exchange, schedule="off")
    return simulate(dataclasses.replace(job, exchange=exchange), topology, settings)


def coding_s(work: StepWork) -> list[tuple[float, float]]:
    """Return the mean CPU seconds that one gateway of each site encodes and decodes in a step."""
    if work.schedule == "off":
        return [(0.0, 0.0) for _ in work.sites]
    seconds = []
    for index, site in enumerate(work.sites):
        encode_s = decode_s = 0.0
        for segment in (each for segments in work.segments for each in segments):
            num_parts = work.plan.num_sites
            if not work.plan.is_gather:
                num_parts = 1 + len(work.plan.trees[segment.tree].children(index))
            coding = site.gateway.coding_s(segment, 1, num_parts)
            encode_s, decode_s = encode_s + coding[0], decode_s + coding[1]
        seconds.append((encode_s / work.round_steps, decode_s / work.round_steps))
    return seconds


def link_loads(work: StepWork) -> tuple[LinkLoad, ...]:
    """Return the mean load of a step on each link, in the topology's order."""
    if work.schedule == "off":
        return ()
    wire: dict[Hop, float] = {}
    raw: dict[Hop, float] = {}
    for segment in (each for segments in work.segments for each in segments):
        for hop in work.plan.hops(segment.tree):
            wire[hop] = wire.get(hop, 0.0) + segment.wire_bytes
            raw[hop] = raw.get(hop, 0.0) + segment.raw_bytes
    index = {site.name: site.index for site in work.topology.sites}
    loads = []
    for link in work.topology.links:
        hop = (index[link.source], index[link.target])
        if hop in wire:
            on_wire, raw_bytes = wire[hop] / work.round_steps, raw[hop] / work.round_steps
            sent_bytes, busy_s = on_wire * work.frame_share, on_wire / link.bytes_per_s
            loads.append(LinkLoad(link.source, link.target, sent_bytes, raw_bytes, busy_s))
    return tuple(loads)


class _Made:
    """Simulates steps, with failures, until enough are completed."""

    def __init__(self, job: Job, work: StepWork, settings: Settings) -> None:
        self._every = job.timeline_every
        self._work = work
        self._settings = settings
        self._stragglers = Chance(settings.seed)
        self._failures = Chance(~settings.seed)
        self._training: Training | LocalTraining | None = None
        self._before = 0
        """The number of actions of trainings that a failure ended."""
        self._made: list[tuple[Step, float]] = []
        self._making = self._train()

    @property
    def num_actions(self) -> int:
        """The number of actions that were simulated."""
        return self._before + (self._training.num_actions if self._training else 0)

    def run(self) -> tuple[list[Step], list[Outage]]:
        steps: list[Step] = []
        outages: list[Outage] = []
        began_s, fails_s = 0.0, self._next_failure_s(0.0)
        most_kept = num_stuck = 0
        while True:
            failed_s = self._attempt(steps, began_s, fails_s)
            if failed_s is None:
                return steps, outages
            settings = self._settings.outages
            assert settings is not None
            kept = len(steps) - len(steps) % settings.checkpoint_every
            num_stuck = 0 if kept > most_kept else num_stuck + 1
            most_kept = max(most_kept, kept)
            if num_stuck == STUCK_MAX:
                raise SimulationError(
                    f"{num_stuck} failures in a row, and never more than {most_kept} steps kept: "
                    "want failures less often, or checkpoints more often"
                )
            began_s = failed_s + settings.recovery_s
            site = self._work.sites[int(self._failures.uniform() * len(self._work.sites))].name
            outages.append(Outage(failed_s, began_s, site, len(steps) - kept))
            del steps[kept:]
            fails_s = self._next_failure_s(began_s)

    def _attempt(self, steps: list[Step], began_s: float, fails_s: float) -> float | None:
        """Add steps until there are enough (None), or a site fails (return the time)."""
        for step, later_s in self._from_the_beginning():
            shift_s = began_s + later_s
            if shift_s + max(site.end_s for site in step) > fails_s:
                return fails_s
            if not self._keeps(len(steps) + 1):
                step = tuple(dataclasses.replace(site, buckets=None) for site in step)
            steps.append(tuple(site.later(shift_s) for site in step))
            if len(steps) == self._settings.steps:
                return None
        raise AssertionError("training never ends by itself")

    def _from_the_beginning(self) -> Iterator[tuple[Step, float]]:
        """Yield the steps after a start.

        Without stragglers all starts are alike, so one is simulated.
        """
        if self._settings.stragglers is not None:
            yield from self._train()
            return
        yield from self._made
        for each in self._making:
            self._made.append(each)
            yield each

    def _train(self) -> Iterator[tuple[Step, float]]:
        self._before = self.num_actions
        kind: type[Training | LocalTraining] = Training
        if self._work.rounds is not None:
            kind = LocalTraining
        elif self._work.is_delayed:
            kind = DelayedTraining
        self._training = kind(self._work, self._settings, self._stragglers)
        yield from self._training.steps()

    def _keeps(self, step: int) -> bool:
        if not self._every or step <= FIRST_KEPT or step % self._every == 0:
            return self._every > 0
        if step > FIRST_KEPT * self._work.round_steps:
            return False
        return self._work.exchanged(step) > self._work.exchanged(step - 1)

    def _next_failure_s(self, now_s: float) -> float:
        outages: Outages | None = self._settings.outages
        if outages is None:
            return math.inf
        return now_s + self._failures.exponential(outages.mtbf_s / len(self._work.sites))
