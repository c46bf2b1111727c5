"""What becomes of a site that is added while the run goes on."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.orchestrator.coordinator.run_epochs import epoch_rules, first_epoch
from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.run import Run, RunSettings
from isthmus.orchestrator.core.run_events import Action, Event, RecordEvent
from tests.fakes.run_specs import spec_of_texts
from tests.fakes.run_worlds import applied, prepared, read_again, stepped
from tests.fakes.worlds import JOB, topology_text

SPEC = spec_of_texts(f"{JOB}begin_with: [a, b]\n", topology_text(3, min_sites=1))


class Led:
    """A run of sites a and b, to which site c may be added, and all that was ever asked for."""

    def __init__(self, records: Sequence[RecordEvent] = ()) -> None:
        self.record = JournaledRun("run", SPEC.site_names, first_epoch(SPEC))
        for number, each in enumerate(records):
            self.record.apply(read_again(each, number), 0.0)
        settings = RunSettings(may_return=True)
        self.led = Run(SPEC.topology, epoch_rules(SPEC), settings, self.record, 0.0)
        self.actions = applied(self.led.resume(0.0), self.record, 0.0) if records else []

    def tell(self, *events: Event) -> list[Action]:
        new = []
        for event in events:
            new += applied(self.led.handle(event, 1.0), self.record, 1.0)
        self.actions += new
        return new

    def begin(self) -> None:
        self.tell(*(run_events.SiteJoined(site, "h") for site in "abc"))
        self.tell(*(prepared(site) for site in "ab"))
        self.tell(*(run_events.SiteRunning(site) for site in "ab"))
        self.tell(run_events.StateOffered("a"), *stepped(*"ab"), run_events.AddRequested("c"))

    def settle(self, *sites: str, round_: int) -> None:
        """Have sites answer the latest proposal."""
        records = [each for each in self.actions if isinstance(each, RecordEvent)]
        number = [each.detail["epoch"] for each in records if each.kind == "epoch.proposed"][-1]
        epoch = int(str(number))
        self.tell(*(run_events.SitePaused(site=site, epoch=epoch, round=round_) for site in sites))

    def enter(self) -> None:
        """Have site c follow, and take part."""
        self.tell(prepared("c"), run_events.SiteRunning("c"))
        self.settle("a", "b", round_=4)
        self.tell(run_events.EpochEntered("a", 1, 6), run_events.EpochEntered("c", 1, 7))
        self.settle("a", "b", "c", round_=8)
        self.tell(run_events.EpochEntered("a", 2, 10))
        epoch = self.led.epoch
        assert epoch is not None
        assert (epoch.members, epoch.follows) == (("a", "b", "c"), ())

    def restarted(self) -> Led:
        return Led([each for each in self.actions if isinstance(each, RecordEvent)])


def of(actions: Sequence[Action], kind: type[Action]) -> list[str]:
    return [getattr(each, "site", "") for each in actions if isinstance(each, kind)]


def test_it_follows_once_its_ranks_are_there() -> None:
    run = Led()
    run.begin()
    epoch = run.led.epoch
    assert epoch is not None
    assert (epoch.members, epoch.reduction) == (("a", "b"), SPEC.first)
    run.tell(prepared("c"))
    settles = of(run.tell(run_events.SiteRunning("c")), run_events.SendPause)
    assert settles == ["a", "b"]


def test_a_connection_that_breaks_while_it_starts_costs_nothing() -> None:
    run = Led()
    run.begin()
    for more in (prepared("c"), run_events.Ticked()):
        run.tell(run_events.SessionBroken("c", "reset"), run_events.SessionResumed("c", 1.0), more)
    assert of(run.actions, run_events.SendStop) == []
    assert run.led.members["c"].is_coming_up


def test_it_goes_on_under_the_next_coordinator_before_it_follows() -> None:
    for is_there in (False, True):
        run = Led()
        run.begin()
        run.tell(prepared("c"), *([run_events.SiteRunning("c")] if is_there else []))
        later = run.restarted()
        came = [run_events.AgentCame(site, "h", had_session=True, has_run=True) for site in "abc"]
        actions = later.tell(*came)
        if not is_there:
            assert of(actions, run_events.SendPause) == []
            actions = later.tell(run_events.SiteRunning("c"))
        assert of(later.actions, run_events.SendStop) == []
        assert set(of(actions, run_events.SendPause)) == {"a", "b"}


def test_its_parameters_are_compared_under_the_next_coordinator() -> None:
    run = Led()
    run.begin()
    run.enter()
    later = run.restarted()
    later.tell(
        *(run_events.AgentCame(site, "h", 2, had_session=True, has_run=True) for site in "abc")
    )
    for site, combined in {"a": 1, "b": 1, "c": 2}.items():
        later.tell(run_events.DigestReported(site, 0, 20, combined, (combined,), ("weight",)))
    (failure,) = [
        each.detail
        for each in later.actions
        if isinstance(each, RecordEvent) and each.kind == "failure.reported"
    ]
    assert (failure["code"], failure["site"]) == ("PARAMETERS_DIFFER", "c")


def test_sites_that_are_lost_are_not_waited_for_under_the_next_coordinator() -> None:
    run = Led()
    run.begin()
    run.tell(run_events.SiteLost("b", "its agent has left"))
    run.settle("a", round_=4)
    later = run.restarted()
    later.tell(run_events.AgentCame("a", "h", 1, had_session=True, has_run=True))
    later.tell(run_events.DigestReported("a", 0, 20, 1, (1,), ("weight",)))
    assert later.led.verified_steps == 1
