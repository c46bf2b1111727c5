"""A run's machine with a clock, and what its sites say."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import TypeVar

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epoch_changes import Action
from isthmus.orchestrator.core.epochs import EpochRules, Epochs
from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent
from isthmus.orchestrator.core.members import Member
from isthmus.orchestrator.core.quorum import Limits
from isthmus.orchestrator.core.run import Run, RunSettings
from isthmus.orchestrator.core.run_events import Endpoint, RecordEvent, RunState
from isthmus.protos.failure import Failure
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.run_spec import CodedPlan
from tests.fakes.worlds import topology

START_S = 30.0
LEASE_S = 5.0
GRACE_S = 1.0
COLLECT_S = 1.0


Act = TypeVar("Act")
GATHER = CodedPlan(ReductionPlan(3, (), ""), ("fp32",))
_RULES = EpochRules(
    ranks={},
    links=frozenset(),
    limits=Limits(
        min_sites=1, detect_s=LEASE_S, ride_out_s=15.0, alone_s=60.0, collect_s=COLLECT_S
    ),
    make_plan=lambda *_: GATHER,
    links_of=lambda _: frozenset(),
)


class _NoEpochs(Epochs):
    """Decides nothing: tests say what the epochs have decided."""

    def handle(self, event: run_events.Event, now_s: float) -> Iterator[Action]:
        yield from ()


class _RunAlone(Run):
    def _begin_epochs(self) -> Epochs:
        return _NoEpochs(self._rules, self._record, self._contacts)


class World:
    """A run with a clock, and everything that it ever asked for."""

    def __init__(
        self,
        num_sites: int = 2,
        *,
        ranks: int = 1,
        emulate: bool = False,
        emulator: str = "auto",
        needs_all: bool = True,
        may_return: bool = False,
        refuses_same_data: bool = True,
        drops_corrupt: bool = False,
        begin_with: str = "",
        cut: str = "",
        saves: bool = False,
        **settings: bool,
    ) -> None:
        """`needs_all`: as where failure.min_sites is the number of the sites.

        `cut`: two sites without a link. `settings`: of the topology's failure section.
        """
        self.needs_all = needs_all
        self.sites = tuple("abcdefgh"[:num_sites])
        self.now_s = 100.0
        described = topology(num_sites, ranks=ranks, emulate=emulate, emulator=emulator)
        failure = dataclasses.replace(
            described.failure,
            max_restarts=3 if may_return else described.failure.max_restarts,
            min_sites=described.failure.min_sites if needs_all else 1,
            **settings,
        )
        described = dataclasses.replace(described, failure=failure)
        links = [each for each in described.links if {each.source, each.target} != {*cut}]
        described = dataclasses.replace(described, links=tuple(links))
        self._described = described
        self._settings = RunSettings(
            may_return=may_return,
            refuses_same_data=refuses_same_data,
            drops_corrupt=drops_corrupt,
            saves=saves,
        )
        first = tuple(begin_with) or self.sites
        self._first = Epoch(0, first, GATHER, 0)
        self.actions: list[run_events.Action] = []
        self.recall(())

    def recall(self, records: Iterable[RecordEvent]) -> None:
        """Have another coordinator go on with what was written down."""
        self.record = JournaledRun("run", self.sites, self._first)
        told = [read_again(each, number) for number, each in enumerate(records)]
        for each in told:
            self.record.apply(each, self.now_s)
        self.machine = _RunAlone(self._described, _RULES, self._settings, self.record, self.now_s)
        self.actions += self._applied(self.machine.resume(self.now_s)) if told else []

    def _applied(self, actions: Iterable[run_events.Action]) -> list[run_events.Action]:
        return applied(actions, self.record, self.now_s)

    def member(self, site: str) -> Member:
        return self.machine.members[site]

    def tell(self, *told: run_events.Event) -> list[run_events.Action]:
        new = []
        for event in told:
            new += self._applied(self.machine.handle(event, self.now_s))
            if not self.needs_all or not isinstance(
                event, run_events.SiteLost | run_events.SiteEnded
            ):
                continue
            if event.site in self.sites and not self.member(event.site).has_finished:
                too_few = run_events.CannotGoOn("SITE_LOST", f"{event.site} is lost")
                new += self._applied(self.machine.handle(too_few, self.now_s))
        self.actions += new
        return new

    def wait(self, seconds: float) -> list[run_events.Action]:
        self.now_s += seconds
        return self.tell(run_events.Ticked())

    def sent(self, kind: type[run_events.Action]) -> list[str]:
        return [action.site for action in self.actions if isinstance(action, kind)]  # type: ignore[union-attr]

    def is_in(self, state: RunState) -> bool:
        return self.machine.state is state

    @property
    def finish(self) -> run_events.FinishRun:
        (found,) = [each for each in self.actions if isinstance(each, run_events.FinishRun)]
        return found

    def join(self) -> None:
        self.tell(*(run_events.SiteJoined(site, f"host-{site}") for site in self.sites))

    def prepare(self) -> None:
        self.join()
        self.tell(*(prepared(site) for site in self.sites))

    def activate(self, *, steps: bool = True) -> None:
        """Have all sites run; `steps`: each has taken one."""
        self.prepare()
        self.tell(*(run_events.SiteRunning(site) for site in self.sites))
        assert self.is_in(RunState.ACTIVE)
        if steps:
            self.tell(*stepped(*self.sites))


def stepped(*sites: str) -> list[run_events.StepTaken]:
    """Return that each of these sites has taken a step: the run can go on without one."""
    return [run_events.StepTaken(site) for site in sites]


def prepared(site: str) -> run_events.SitePrepared:
    return run_events.SitePrepared(site, (Endpoint(site, 0, "127.0.0.1", 1000 + ord(site)),))


def failure(world: World, code: str, site: str, age_s: float = 0.0, **more: object) -> Failure:
    return Failure(
        code=code,
        site=site,
        reported_by=site,
        at_s=world.now_s - age_s,
        **{"message": f"{code} at site {site}", **more},  # type: ignore[arg-type]
    )


def digest(site: str, number: int) -> run_events.DigestReported:
    return run_events.DigestReported(site, 0, 5, number, (1, number), ("0.weight", "2.weight"))


def read_again(record: RecordEvent, sequence: int, wall_s: float = 0.0) -> RecordedEvent:
    """Return a record as a later coordinator reads it from the journal."""
    return RecordedEvent(
        sequence=sequence,
        wall_s=wall_s,
        run_id="run",
        generation=1,
        kind=record.kind,
        site=record.site,
        detail=json.loads(json.dumps(record.detail)),
    )


def applied(actions: Iterable[Act], record: JournaledRun, now_s: float) -> list[Act]:
    """Return actions; what is written down is applied before the next is asked for."""
    done = []
    for action in actions:
        if isinstance(action, RecordEvent):
            record.apply(read_again(action, 0), now_s)
        done.append(action)
    return done


def recorded_events(world: World) -> list[run_events.RecordEvent]:
    return [action for action in world.actions if isinstance(action, run_events.RecordEvent)]
