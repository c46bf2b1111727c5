"""The regime follows the links: when a run goes over to another one, and when it comes back."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.orchestrator.core import replan_machine, run_events
from isthmus.orchestrator.core.replan_machine import (
    PlanAgain,
    PlanningFailed,
    ReplanMachine,
    SiteStepped,
    SwitchPlanned,
)
from isthmus.orchestrator.core.run_events import EpochBegun, RecordEvent, TreesEnded, TreesWanted
from isthmus.protos import metrics
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.regime import Rung, regime_of
from tests.fakes.run_specs import spec_of
from tests.fakes.worlds import topology

SITES = ("a", "b")
SETTINGS = Replan(lasting_s=10.0, shares="fixed", regime="follow")
RUNGS = (regime_of("delayed"), regime_of("diloco", sync_every=10))
SPEC = dataclasses.replace(spec_of(Job(name="j", topology=""), topology(2), SETTINGS), rungs=RUNGS)
BUSY_S, HIDDEN_S = 1.0, 0.4
"""Of a step, and of it the time behind which sync hides an exchange."""
BETTER = SwitchPlanned(form="star at b", reduction=SPEC.reduction, before_s=4.0, after_s=1.0)
FAILED = PlanningFailed(why="the script's model is not described")


class World:
    """A run whose sites step as their regime has them wait for the links."""

    def __init__(self) -> None:
        self.epoch = Epoch(0, SITES, SPEC.reduction, 0)
        self.machine = ReplanMachine(SPEC, self.epoch)
        self.now_s = 100.0
        self.num_steps = 0
        self.answer: SwitchPlanned | PlanningFailed = FAILED
        self.can = True
        self.is_refused = False
        self.moves: list[tuple[str, float]] = []
        """Regimes that the run has gone over to, and when."""
        self.kinds: list[str] = []

    def tell(self, event: replan_machine.Event) -> None:
        for action in self.machine.handle(event, self.now_s):
            match action:
                case PlanAgain():
                    self.tell(self.answer)
                case TreesWanted() if self.is_refused:
                    self.tell(TreesEnded(None, why="site c is coming back"))
                case TreesWanted():
                    self.begin(action)
                case RecordEvent():
                    self.kinds.append(action.kind)
                    if action.kind == "run.regime":
                        self.moves.append((str(action.detail["regime"]), self.now_s))

    def begin(self, wanted: TreesWanted) -> None:
        number = self.epoch.number + 1
        rung = self.epoch.rung if wanted.regime is None else Rung(number, wanted.regime)
        self.epoch = dataclasses.replace(
            self.epoch, number=number, rung=rung, reduction=wanted.reduction
        )
        self.tell(TreesEnded(self.epoch))
        self.tell(EpochBegun(self.epoch, frozenset()))

    def go(self, seconds: float, crossing_s: float) -> None:
        """Take steps for so long, with links on which an exchange takes so long."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.num_steps += 1
            kinds = [each.kind for each in SPEC.ladder]
            place = kinds.index(self.epoch.rung.kind or "sync")
            crosses = place < 2 or self.num_steps % 10 == 0
            hidden_s = (HIDDEN_S, BUSY_S, 0.0)[place]
            exposed_s = max(0.0, crossing_s - hidden_s) if crosses else 0.0
            self.now_s += BUSY_S + exposed_s
            values = {
                metrics.SITE_TOKENS: 10.0,
                metrics.STEP_S: BUSY_S + exposed_s,
                metrics.EXPOSED_INTER_S: exposed_s,
                metrics.INTER_S: crossing_s if crosses else 0.0,
                metrics.HIDDEN_INTER_S: min(hidden_s, crossing_s) if crosses else 0.0,
                **({metrics.RUNG: float(place)} if self.can else {}),
            }
            for name in SITES:
                self.tell(SiteStepped(name, values))
            self.tell(run_events.Ticked())


def test_links_that_keep_no_step_waiting_change_nothing() -> None:
    world = World()
    world.go(1000, 0.44)
    assert world.kinds == []


@pytest.mark.parametrize(
    ("crossing_s", "regime"),
    [(0.8, "delayed"), (1.04, "delayed"), (1.5, "diloco"), (9.0, "diloco")],
)
def test_a_run_goes_over_to_the_most_exact_regime_that_does_not_wait(
    crossing_s: float, regime: str
) -> None:
    """At once, and not rung by rung."""
    world = World()
    world.go(20, 0.3)
    world.go(100, crossing_s)
    ((kind, at_s),) = world.moves
    assert kind == regime
    steps_s = 10 * (crossing_s + BUSY_S)
    assert SETTINGS.lasting_s <= at_s - 120.0 <= SETTINGS.lasting_s + steps_s


def test_it_comes_back_once_links_are_as_they_were_and_rests_grow() -> None:
    world = World()
    for gap_s in (SETTINGS.gap_s, 9 * SETTINGS.gap_s):
        at = len(world.moves)
        world.go(2 * gap_s + 100, 9.0)
        world.go(4 * gap_s + 100, 0.3)
        assert [kind for kind, _ in world.moves[at:]] == ["diloco", "sync"]
        (_, down_s), (_, up_s) = world.moves[at:]
        assert up_s - down_s >= gap_s
    world = World()
    for _ in range(60):
        world.go(30, 9.0)
        world.go(30, 0.3)
    assert len(world.moves) <= 5, "a link that comes and goes for an hour is not chased"


def test_trees_that_do_it_come_first() -> None:
    world = World()
    world.answer = BETTER
    world.go(30, 0.8)
    assert world.kinds == ["run.replanned"]
    world = World()
    world.answer = dataclasses.replace(BETTER, after_s=3.0)
    world.go(100, 3.0)
    assert world.kinds == ["run.replanned", "run.regime"], "a quarter less is not enough"


def test_a_script_that_trains_in_no_other_regime_stays_in_sync() -> None:
    world = World()
    world.can = False
    world.go(200, 9.0)
    assert world.moves == []


def test_a_script_that_turns_out_to_train_in_no_other_regime_goes_back_at_once() -> None:
    world = World()
    world.go(100, 9.0)
    assert [kind for kind, _ in world.moves] == ["diloco"]
    world.can = False
    world.go(2, 9.0)
    assert [kind for kind, _ in world.moves] == ["diloco", "sync"]
    world.go(1000, 9.0)
    assert len(world.moves) == 2


def test_what_sites_cannot_do_now_is_asked_for_again_after_a_while() -> None:
    world = World()
    world.is_refused = True
    world.go(200, 9.0)
    assert world.moves == []
    assert 2 <= world.kinds.count("plan.kept") <= 200 / SETTINGS.lasting_s
    world.is_refused = False
    world.go(100, 9.0)
    assert [kind for kind, _ in world.moves] == ["diloco"]
    world.can, world.is_refused = False, True
    world.go(200, 9.0)
    assert world.kinds.count("plan.kept") <= 400 / SETTINGS.lasting_s
    assert len(world.moves) == 1
    world.is_refused = False
    world.go(20, 9.0)
    assert [kind for kind, _ in world.moves] == ["diloco", "sync"]


def test_a_run_that_may_not_change_has_no_other_regime() -> None:
    machine = ReplanMachine(dataclasses.replace(SPEC, rungs=()), Epoch(0, SITES, SPEC.reduction, 0))
    world = World()
    world.machine = machine
    world.go(200, 9.0)
    assert world.moves == []
