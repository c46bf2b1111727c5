"""What a run and its epochs tell each other, and what the next coordinator makes of the journal.

Each test is a run that tests/sim has found.
"""

from collections.abc import Iterable

import pytest

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epochs import EpochRules
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.quorum import Limits
from isthmus.orchestrator.core.run import Run, RunSettings
from isthmus.orchestrator.core.run_events import (
    Action,
    AgentCame,
    AgentMissed,
    Endpoint,
    EpochEntered,
    Event,
    RecordEvent,
    RunState,
    SendPause,
    SiteDone,
    SiteEnded,
    SiteLost,
    SitePaused,
    SitePrepared,
    SiteRunning,
)
from isthmus.protos.failure import Failure
from isthmus.topology.spec.epoch import Epoch
from tests.fakes.run_worlds import applied, read_again, stepped
from tests.sim.plans import LIMITS, all_pairs, followed_plan, links_of, plan_of, world

NAMES = ("ap", "eu", "us")


class Led:
    """A run with a journal and a clock."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.now_s, self._limits = 100.0, limits
        self.records: list[RecordEvent] = []
        self.actions: list[Action] = []
        self.led = self._begin()

    def _begin(self) -> Run:
        rules = EpochRules(
            ranks=dict.fromkeys(NAMES, 2),
            links=all_pairs(NAMES),
            limits=self._limits,
            make_plan=lambda members, dead, follows: followed_plan(
                NAMES, members, dead, follows, 0
            ),
            links_of=lambda reduction: links_of(NAMES, reduction),
        )
        first = Epoch(0, NAMES, plan_of(NAMES, NAMES, frozenset(), 0), 0)
        self.record = JournaledRun("run", NAMES, first)
        for number, each in enumerate(self.records):
            self.record.apply(read_again(each, number), self.now_s)
        return Run(world(NAMES), rules, RunSettings(may_return=True), self.record, self.now_s)

    def tell(self, *events: Event) -> list[Action]:
        return [
            action for each in events for action in self._keep(self.led.handle(each, self.now_s))
        ]

    def _keep(self, actions: Iterable[Action]) -> list[Action]:
        new = applied(actions, self.record, self.now_s)
        self.actions += new
        self.records += [each for each in new if isinstance(each, RecordEvent)]
        return new

    def wait(self, seconds: float) -> list[Action]:
        self.now_s += seconds
        return self.tell(run_events.Ticked())

    def restart(self, after: str = "", site: str = "") -> None:
        """Another coordinator takes over. With `after`, the one before wrote that last."""
        if after:
            last = max(
                place
                for place, each in enumerate(self.records)
                if (each.kind, each.site) == (after, site)
            )
            self.records = self.records[: last + 1]
        self.led = self._begin()
        self._keep(self.led.resume(self.now_s))

    def come_back(self, *sites: str, epoch: int = 0, has_run: bool = True) -> list[Action]:
        came = [AgentCame(site, site, epoch, had_session=True, has_run=has_run) for site in sites]
        return self.tell(*came)

    def prepare(self) -> None:
        self.tell(*(AgentCame(site, site) for site in NAMES), *(prepared(site) for site in NAMES))

    def run(self) -> None:
        self.prepare()
        self.tell(*(SiteRunning(site) for site in NAMES), run_events.StateOffered("ap"))
        self.tell(*stepped(*NAMES))
        assert self.led.is_going_on

    def settle(self, *sites: str, round_: int = 4) -> None:
        """Have sites answer the latest proposal."""
        number = max(
            int(str(each.detail["epoch"])) for each in self.records if each.kind == "epoch.proposed"
        )
        for site in sites:
            self.tell(SitePaused(site=site, epoch=number, round=round_))

    def lose_us(self) -> None:
        self.tell(SiteEnded("us", False, (failed("us"),)))
        self.settle("ap", "eu")
        assert self.members == ("ap", "eu")

    def have_us_follow(self) -> None:
        """Lose a site, and have it back so far that it follows."""
        self.lose_us()
        self.tell(prepared("us"), SiteRunning("us"))
        self.settle("ap", "eu")
        self.tell(EpochEntered("ap", 2, 6))
        assert self.members == NAMES

    @property
    def members(self) -> tuple[str, ...]:
        assert self.led.epoch is not None
        return self.led.epoch.members

    def sent(self, kind: type[Action], new: list[Action] | None = None) -> list[str]:
        told = self.actions if new is None else new
        return [each.site for each in told if isinstance(each, kind)]  # type: ignore[union-attr]


def prepared(site: str) -> SitePrepared:
    return SitePrepared(site, (Endpoint(site, 0, site, 1),))


def failed(site: str) -> Failure:
    return Failure(code="GATEWAY_EXITED", message="it was killed", at_s=100.0, site=site)


def test_a_run_whose_sites_were_all_up_is_active_for_the_next_coordinator() -> None:
    led = Led()
    led.run()
    led.restart("site.running", "us")
    assert led.led.state is RunState.FORMING
    led.come_back(*NAMES)
    assert led.led.is_going_on
    assert led.members == NAMES


def test_sites_that_were_not_started_yet_are_started_by_the_next_coordinator() -> None:
    led = Led()
    led.run()
    led.restart("site.starting", "ap")
    new = led.come_back(*NAMES)
    assert {"eu", "us"} <= set(led.sent(run_events.SendStart, new))


def test_a_start_that_fails_fails_for_the_next_coordinator_too() -> None:
    for last in ("failure.reported", "site.ended"):
        led = Led()
        led.prepare()
        led.tell(SiteEnded("us", False, (failed("us"),)))
        led.restart(last, "us")
        led.come_back("ap", "eu")
        led.tell(SiteEnded("us", False, (failed("us"),)))
        led.wait(LIMITS.collect_s)
        assert led.sent(run_events.SendStop)[:2] == ["ap", "eu"], last


def test_a_run_that_was_being_stopped_ends_for_the_next_coordinator() -> None:
    led = Led()
    led.run()
    led.lose_us()
    led.tell(prepared("us"), SiteRunning("us"))
    led.tell(*(SiteEnded(site, False, (failed(site),)) for site in ("ap", "eu")))
    led.wait(LIMITS.collect_s)
    led.restart("run.stopping")
    led.come_back("us", has_run=False)
    led.tell(SiteEnded("us", succeeded=False))
    assert led.led.state is RunState.FAILED
    assert led.records[-1].detail["reason_code"] == "GATEWAY_EXITED"


def test_the_end_of_a_site_is_not_forgotten_where_its_loss_was_not_decided() -> None:
    led = Led()
    led.run()
    led.tell(SiteEnded("us", False, (failed("us"),)))
    led.restart("site.ended", "us")
    led.come_back("ap", "eu")
    led.come_back("us", has_run=False)
    led.settle("ap", "eu")
    assert led.members == ("ap", "eu")


def test_a_site_that_has_left_is_out_where_that_was_not_written_down() -> None:
    led = Led()
    led.run()
    led.tell(run_events.DropRequested("us", "dropped"))
    led.settle(*NAMES)
    led.tell(SiteEnded("us", succeeded=True))
    led.restart("site.ended", "us")
    led.come_back("ap", "eu")
    assert not led.led.members["us"].has_finished
    assert led.led.add_problem("us") == ""


def test_an_end_that_answers_an_earlier_stop_is_not_that_of_what_was_started_since() -> None:
    led = Led()
    led.run()
    led.lose_us()
    led.restart("epoch.begun")
    new = led.come_back("us", has_run=False)
    assert led.sent(run_events.SendStop, new) == ["us"]
    new = led.tell(SiteEnded("us", False, (failed("us"),)))  # told again
    assert led.sent(run_events.SendPrepare, new) == ["us"]
    led.tell(SiteEnded("us", succeeded=False))  # the answer
    new = led.tell(prepared("us"))
    assert led.sent(run_events.SendStart, new) == ["us"]


def test_an_agent_without_the_run_is_asked_what_is_left() -> None:
    """It began anew, and has said so to a coordinator that died before it had written that down."""
    led = Led()
    led.run()
    led.restart()
    led.come_back("ap", "eu")
    new = led.come_back("us", has_run=False)
    assert led.sent(run_events.SendStop, new) == ["us"]
    led.tell(SiteEnded("us", succeeded=False))
    led.settle("ap", "eu")
    assert led.members == ("ap", "eu")


def test_unlike_results_end_a_run_by_that_name_though_a_site_is_silent() -> None:
    led = Led()
    led.run()
    led.tell(SiteLost("us", "silent", silent_s=3.5))
    led.wait(1.0)
    for site in ("ap", "eu"):
        led.tell(SitePaused(site=site, epoch=1, round=4, chain=int(site == "eu"), chain_round=3))
    led.wait(LIMITS.collect_s)
    stopping = [each for each in led.records if each.kind == "run.stopping"]
    assert "has had other results" in str(stopping[0].detail["reason"])


def test_a_site_that_dies_before_its_last_round_holds_up_no_end() -> None:
    led = Led()
    led.run()
    led.tell(run_events.DropRequested("us", "dropped"))
    led.settle(*NAMES)
    assert led.members == ("ap", "eu")
    led.tell(*(SiteDone(site) for site in ("ap", "eu")))
    led.tell(SiteLost("us", "silent", silent_s=3.5))
    led.wait(1.0)
    assert led.sent(run_events.SendRelease) == ["ap", "eu"]


def test_a_site_that_follows_and_is_released_is_not_started_again() -> None:
    led = Led()
    led.run()
    led.have_us_follow()
    led.tell(SiteDone("us"), *(SiteDone(site) for site in ("ap", "eu")))
    led.restart()
    led.come_back("us", epoch=2)
    new = led.tell(SiteEnded("us", succeeded=True))
    assert led.sent(run_events.SendPrepare, new) == []


def test_what_comes_up_after_the_end_of_the_run_is_stopped() -> None:
    led = Led()
    led.run()
    led.lose_us()
    led.tell(*(SiteDone(site) for site in ("ap", "eu")))
    led.tell(*(SiteEnded(site, succeeded=True) for site in ("ap", "eu")))
    assert led.led.state is RunState.SUCCEEDED
    assert led.sent(run_events.SendStop, led.tell(prepared("us"))) == ["us"]


def test_a_coordinator_that_was_started_again_waits_for_agents_as_long_as_one_that_stayed() -> None:
    led = Led()
    led.run()
    led.restart()
    led.wait(LIMITS.detect_s)
    led.tell(*(AgentMissed(site, LIMITS.detect_s) for site in NAMES))
    led.wait(LIMITS.collect_s)
    assert led.records[-1].detail["note"] == "no agent is heard: waiting for up to 60 s"
    for _ in range(1100):  # more often than doubling would bear
        led.wait(LIMITS.alone_s / 1200)
    assert led.led.is_going_on
    led.come_back("ap")
    led.wait(LIMITS.detect_s / 2)
    led.come_back("eu", "us")
    assert led.records[-1].kind == "run.went_on"
    assert led.members == NAMES, "the others were as near"


def test_sites_of_which_no_agent_comes_back_are_lost_in_the_end() -> None:
    led = Led()
    led.run()
    led.restart()
    led.tell(*(AgentMissed(site, 3.0) for site in NAMES))
    led.wait(LIMITS.collect_s)
    led.wait(LIMITS.alone_s - 1.0)
    assert led.led.is_going_on
    led.wait(1.0)
    led.wait(LIMITS.collect_s)
    assert led.records[-1].detail["reason_code"] == "SITE_LOST"
    reason = str(led.records[-1].detail["reason"])
    assert "ap: its agent has not come back to this coordinator" in reason


def test_a_run_of_which_no_agent_is_back_yet_can_be_cancelled() -> None:
    led = Led()
    led.run()
    led.restart()
    led.tell(*(AgentMissed(site, 3.0) for site in NAMES))
    led.wait(LIMITS.collect_s)
    led.tell(run_events.CancelRequested("cancelled by an operator"))
    assert led.led.state is RunState.STOPPING
    assert led.sent(run_events.SendStop, led.come_back("ap")) == ["ap"]
    led.wait(10.0)
    assert led.records[-1].detail["state"] == "CANCELLED"


def test_a_run_that_was_being_stopped_ends_as_that_though_no_agent_comes_back() -> None:
    led = Led()
    led.run()
    led.tell(run_events.CancelRequested("cancelled by an operator"))
    led.restart()
    led.tell(*(AgentMissed(site, 3.0) for site in NAMES))
    assert led.led.state is RunState.CANCELLED


def test_a_run_that_had_not_begun_ends_where_no_agent_comes_back() -> None:
    led = Led()
    led.prepare()
    led.restart()
    led.tell(*(AgentMissed(site, 3.0) for site in NAMES))
    led.wait(world(NAMES).failure.start_within_s)
    assert led.records[-1].detail["reason_code"] == "START_TIMED_OUT"


def test_where_no_member_has_come_back_a_site_that_was_started_meanwhile_goes_with_the_run() -> (
    None
):
    led = Led()
    led.run()
    led.lose_us()
    led.restart()
    led.wait(4.0)
    led.tell(AgentCame("us", "us"), SiteEnded("us", succeeded=False), prepared("us"))
    led.tell(AgentMissed("ap", 4.0), AgentMissed("eu", 4.0))
    led.wait(LIMITS.collect_s)
    new = led.wait(LIMITS.alone_s) + led.wait(LIMITS.collect_s)
    assert led.sent(run_events.SendStop, new) == ["us"]


def test_a_site_that_follows_does_so_after_a_silence() -> None:
    led = Led()
    led.run()
    led.have_us_follow()
    led.tell(SiteLost("us", "silent", silent_s=3.5))
    new = led.come_back("us", epoch=2)
    assert led.sent(run_events.SendStop, new) == []
    assert led.led.members["us"].is_returning
    led.tell(SiteLost("us", "silent", silent_s=3.5))
    led.wait(1.0)
    led.settle("ap", "eu", round_=7)
    assert led.members == ("ap", "eu")
    assert not led.led.members["us"].is_returning


def test_a_site_that_has_ended_follows_no_more_for_the_next_coordinator() -> None:
    led = Led()
    led.run()
    led.have_us_follow()
    led.now_s += LIMITS.detect_s  # it was started a moment ago
    led.tell(SiteEnded("us", False, (failed("us"),)))
    led.restart("site.ended", "us")
    led.come_back(*NAMES)
    led.settle("ap", "eu", round_=7)
    assert led.members == ("ap", "eu")


def test_what_follows_once_more_under_the_next_coordinator_has_been_heard() -> None:
    run = Led()
    run.run()
    run.have_us_follow()
    run.wait(LIMITS.detect_s)
    run.tell(SiteEnded("us", False, (failed("us"),)))
    assert [each.kind for each in run.records if each.site == "us"][-1] == "site.ended"
    run.restart()
    run.come_back(*NAMES, epoch=2)
    run.settle("ap", "eu", round_=8)
    assert run.members == ("ap", "eu")
    run.tell(SiteEnded("us", False))
    run.wait(LIMITS.detect_s)
    run.tell(prepared("us"), SiteRunning("us"))
    run.settle("ap", "eu", round_=10)
    run.tell(EpochEntered("ap", 5, 12))
    assert run.sent(SendPause, run.tell(EpochEntered("us", 5, 13))) == [*NAMES], "it has been heard"


def test_a_site_whose_following_ended_with_an_epoch_begins_anew_for_the_next_coordinator() -> None:
    led = Led()
    led.run()
    led.have_us_follow()
    led.tell(EpochEntered("us", 2, 6))
    led.restart("epoch.proposed")
    led.come_back(*NAMES, epoch=2)
    led.settle("ap", "eu", round_=7)
    assert led.members == ("ap", "eu")
    led.restart("epoch.begun")
    new = led.come_back("us", epoch=2)
    assert led.sent(run_events.SendStop, new) == ["us"]
    assert not led.led.members["us"].is_returning


@pytest.mark.parametrize("enters", [True, False])
def test_the_death_of_a_site_that_is_let_in_costs_it_one_start(enters: bool) -> None:
    """What is started meanwhile would be ended once the others go on without it."""
    led = Led()
    led.run()
    if enters:  # it was asked for, and nothing of it has begun
        led.lose_us()
        led.tell(prepared("us"), SiteRunning("us"))
    else:
        led.have_us_follow()
    led.now_s += 100 * LIMITS.detect_s
    begun = len(led.records)
    led.tell(SiteEnded("us", False, (failed("us"),)))
    if not enters:
        assert led.led.state is RunState.ACTIVE
        assert "site.returning" not in [each.kind for each in led.records[begun:]]
        led.settle("ap", "eu", round_=8)
    led.wait(LIMITS.detect_s)
    kinds = [each.kind for each in led.records[begun:] if each.site == "us"]
    assert kinds.count(EventKind.SITE_RETURNING) == 1, kinds
    assert "site.lost" not in kinds, kinds
    led.tell(prepared("us"), SiteRunning("us"))
    led.settle("ap", "eu", round_=9)
    assert led.sent(SendPause)[-2:] == ["ap", "eu"]
