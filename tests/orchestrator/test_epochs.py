"""Epochs, change by change. Whole runs with many faults at once: tests/sim."""

import copy
import dataclasses
from collections.abc import Iterable, Sequence

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epoch_changes import Action
from isthmus.orchestrator.core.epochs import EpochRules, Epochs
from isthmus.orchestrator.core.event_kinds import EventKind, kind_named
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.members import Absence, Contact, Standing
from isthmus.orchestrator.core.quorum import Limits
from isthmus.orchestrator.core.run_events import (
    CannotGoOn,
    DropRefused,
    DropRequested,
    EpochEntered,
    GoOnWithout,
    Reached,
    RecordEvent,
    SendCancel,
    SendPause,
    SendResume,
    SessionBroken,
    SiteDone,
    SiteEnded,
    SiteJoined,
    SiteLost,
    SitePaused,
    SiteRejoined,
    SiteRunning,
    Suspected,
    Ticked,
    TreesEnded,
    TreesWanted,
)
from isthmus.topology.spec.epoch import Epoch, Finished, Handover
from isthmus.topology.spec.shares import Shares
from tests.fakes.run_worlds import applied, read_again
from tests.sim.plans import all_pairs, followed_plan, links_of, plan_of

NAMES = ("ap", "eu", "sa")
LIMITS = Limits(min_sites=1, detect_s=15, ride_out_s=600, alone_s=3600, collect_s=2)
FIRST = Epoch(0, NAMES, plan_of(NAMES, NAMES, frozenset(), 0), 0)


class Core(Epochs):
    """Epochs, and what the run makes of their outcomes."""

    def __init__(self, limits: Limits, names: tuple[str, ...]) -> None:
        self._names = names
        self._first = Epoch(0, names, plan_of(names, names, frozenset(), 0), 0)
        rules = EpochRules(
            ranks={name: 2 if name == "eu" else 1 for name in names},
            links=all_pairs(names),
            limits=limits,
            make_plan=lambda *of: followed_plan(names, *of, 0),
            links_of=lambda reduction: links_of(names, reduction),
        )
        self._begin_with(rules, ())

    def _begin_with(self, rules: EpochRules, records: Iterable[RecordEvent]) -> None:
        self._kept = JournaledRun("run", self._names, self._first)
        for number, each in enumerate(records):
            self._kept.apply(read_again(each, number))
        super().__init__(rules, self._kept, {name: Contact() for name in self._names})

    def restore(self, records: Iterable[RecordEvent]) -> None:
        """Go on with what another coordinator has written down."""
        self._begin_with(self._rules, records)
        applied(self.resume(), self._kept, 0.0)

    def tell(self, event: run_events.Event, now_s: float) -> list[Action]:
        """Take an event as a run does; return what comes of it."""
        site = self._sites.get(getattr(event, "site", ""))
        is_back = isinstance(event, SiteRunning) and site and site.standing is Standing.OUTSIDE
        if is_back and site:
            self._keep(EventKind.SITE_RETURNING, site.name)
            self._keep(EventKind.SITE_RUNNING, site.name)
        match event:
            case SiteLost() if event.silent_s:
                self._contacts[event.site].miss(Absence.SILENT, event.message, now_s)
            case SiteLost():
                self._keep(EventKind.SITE_GONE, event.site, message=event.message)
            case SiteEnded():
                why = event.failures[0].reason if event.failures else "it has ended"
                succeeded = event.succeeded and not self._sites[event.site].absence
                self._keep(EventKind.SITE_ENDED, event.site, succeeded=succeeded, why=why)
            case SiteDone():
                self._keep(EventKind.SITE_DONE, event.site, round=event.round)
        actions = []
        for each in self.handle(event, now_s):
            match each:
                case RecordEvent():
                    self._keep(each.kind, each.site, **each.detail)
                case GoOnWithout():
                    detail = {"message": each.why, "is_out": True}
                    self._keep(EventKind.SITE_LOST, each.site, **detail)
                case SiteRejoined():
                    self._keep(EventKind.SITE_RETURNED, each.site)
            actions.append(each)
        return actions

    def _keep(self, kind: EventKind, site: str, **detail: object) -> None:
        """Have the fold take what the run would write down."""
        self._kept.apply(read_again(RecordEvent(kind, site, detail), 0))


def machine(limits: Limits = LIMITS, names: tuple[str, ...] = NAMES) -> Core:
    return Core(limits, names)


def kinds(actions: Sequence[Action]) -> list[str]:
    return [each.kind if isinstance(each, RecordEvent) else type(each).__name__ for each in actions]


def settled(site: str, epoch: int, round_: int, *chunks: tuple[int, int]) -> SitePaused:
    """A site that has completed the round before `round_`, and these runs of chunks of it."""
    finished = (Finished(round_, 0, chunks),) if chunks else ()
    return SitePaused(
        site=site,
        epoch=epoch,
        round=round_,
        finished=finished,
        chain=round_ + 100,
        chain_round=round_ - 1,
    )


def begun(actions: Sequence[Action]) -> tuple[Epoch, tuple[Handover, ...]]:
    resume = next(each for each in actions if isinstance(each, SendResume))
    return resume.epoch, resume.handovers


def lose_sa(core: Core) -> list[Action]:
    """Carry the loss of one site out; return what the last answer led to."""
    core.tell(SiteLost("sa", "rank 0 was killed"), 10)
    core.tell(settled("ap", 1, 5, (0, 1)), 11)
    return core.tell(settled("eu", 1, 5), 11)


def test_a_lost_site_leaves_the_others_with_what_any_of_them_has_finished() -> None:
    core = machine()
    actions = core.tell(SiteLost("sa", "rank 0 was killed"), 10)
    assert kinds(actions) == ["epoch.proposed", "SendPause", "SendPause"]
    assert actions[1] == SendPause("ap", 1, ("sa",), is_redo=True)
    assert core.tell(settled("ap", 1, 5, (0, 1)), 11) == []
    actions = core.tell(settled("eu", 1, 5), 11)
    assert kinds(actions) == ["epoch.begun", "SendResume", "SendResume", "GoOnWithout"]
    epoch, handovers = begun(actions)
    assert (epoch.number, epoch.members, epoch.from_round) == (1, ("ap", "eu"), 5)
    assert handovers == (Handover("ap", "eu", 5, 0, ((0, 1),)),)
    assert actions[-1] == GoOnWithout("sa", "rank 0 was killed")


def test_a_site_that_is_done_is_asked_what_it_has_until_all_are() -> None:
    core = machine()
    assert core.tell(SiteDone("ap"), 10) == []
    actions = lose_sa(core)
    assert begun(actions)[1] == (Handover("ap", "eu", 5, 0, ((0, 1),)),)
    assert core.tell(SiteDone("eu"), 12) == []
    assert core.tell(SiteLost("ap", "its gateway was killed"), 13) == [], "nobody needs it"


def test_who_is_lost_when_all_others_are_done_needs_no_epoch() -> None:
    core = machine()
    for name in ("ap", "eu"):
        core.tell(SiteDone(name), 10)
    assert core.tell(SiteLost("sa", "gone"), 11) == [GoOnWithout("sa", "gone")]


def test_answers_to_other_proposals_and_of_strangers_count_nothing() -> None:
    core = machine()
    core.tell(SiteLost("sa", "gone"), 10)
    for event in (settled("ap", 2, 5), settled("sa", 1, 5), settled("xx", 1, 5)):
        assert core.tell(event, 11) == []


def test_a_failure_while_sites_settle_begins_a_proposal_with_a_higher_number() -> None:
    core = machine()
    core.tell(SiteLost("sa", "gone"), 10)
    actions = core.tell(SiteLost("ap", "gone, too"), 11)
    assert actions[1:] == [SendPause("eu", 2, ("ap", "sa"), is_redo=True)]
    assert core.tell(settled("eu", 1, 5), 11) == []
    assert begun(core.tell(settled("eu", 2, 5), 11))[0].members == ("eu",)


def test_a_site_that_lives_and_does_not_settle_is_lost() -> None:
    core = machine()
    core.tell(SiteLost("sa", "gone"), 10)
    core.tell(settled("eu", 1, 5), 11)
    actions = core.tell(Ticked(), 41)
    assert kinds(actions) == ["epoch.refused", "epoch.proposed", "SendPause"]
    assert [each.site for each in actions if isinstance(each, SendPause)] == ["eu"]


def test_trees_go_around_a_dead_link() -> None:
    core = machine()
    assert core.tell(Suspected("ap", "sa", False, "silent"), 10) == []
    assert kinds(core.tell(Ticked(), 12)) == ["epoch.proposed", *["SendPause"] * 3]
    for name in NAMES[:2]:
        core.tell(settled(name, 1, 5), 13)
    epoch, _ = begun(core.tell(settled("sa", 1, 5), 13))
    assert epoch.members == NAMES
    assert ("ap", "sa") not in links_of(NAMES, epoch.reduction)


def test_a_site_is_dead_by_its_session_and_what_others_see() -> None:
    core = machine()
    assert core.tell(SessionBroken("sa", "broke"), 10) == []
    assert "epoch.proposed" in kinds(core.tell(Suspected("eu", "sa", True, "refuses"), 10))


def test_the_larger_part_goes_on() -> None:
    core = machine()
    for by in ("ap", "eu"):
        core.tell(Suspected(by, "sa", False, "silent"), 10)
    actions = core.tell(Ticked(), 12)
    assert [each.site for each in actions if isinstance(each, SendPause)] == ["ap", "eu"]


def test_an_outage_between_all_is_ridden_out() -> None:
    core = machine(names=("ap", "eu"))
    core.tell(Suspected("ap", "eu", False, "silent"), 10)
    assert kinds(core.tell(Ticked(), 13)) == ["run.waiting"]
    assert core.tell(Ticked(), 600) == []
    assert kinds(core.tell(Reached("ap", "eu"), 601)) == ["run.went_on"]
    assert core.epoch.number == 0


def test_after_an_outage_that_is_too_long_the_part_with_more_ranks_goes_on() -> None:
    core = machine(names=("ap", "eu"))
    core.tell(Suspected("ap", "eu", False, "silent"), 10)
    core.tell(Ticked(), 13)
    actions = core.tell(Ticked(), 614)
    assert [each.site for each in actions if isinstance(each, SendPause)] == ["eu"]


def test_too_few_sites_end_the_run_where_none_can_come_back() -> None:
    core = machine(dataclasses.replace(LIMITS, min_sites=3))
    actions = core.tell(SiteLost("sa", "gone"), 10)
    assert actions == [CannotGoOn("SITE_LOST", "2 sites are left, want at least 3")]
    assert core.tell(SiteLost("eu", "gone"), 11) == []


def test_a_silent_site_is_lost_where_the_others_reach_each_other() -> None:
    core = machine()
    assert core.tell(SiteLost("sa", "silent for 15 s", 3.0), 10) == []
    assert "epoch.proposed" in kinds(core.tell(Ticked(), 13))


def test_a_site_that_is_done_is_no_loss() -> None:
    core = machine()
    core.tell(SiteEnded("sa", succeeded=True), 10)
    core.tell(Suspected("ap", "sa", True, "it ends"), 10)
    assert core.tell(Ticked(), 100) == []


def test_other_trees_begin_with_a_round_that_nobody_has_begun() -> None:
    core = machine()
    trees = plan_of(NAMES, NAMES, frozenset(), 1)
    actions = core.tell(TreesWanted(NAMES, trees, "a link is slow"), 10)
    assert actions[1] == SendPause("ap", 1, (), is_redo=False, reduction=trees)
    for name, round_ in (("ap", 5), ("eu", 6)):
        core.tell(settled(name, 1, round_), 10)
    actions = core.tell(settled("sa", 1, 5), 10)
    epoch, _ = begun(actions)
    assert (epoch.from_round, epoch.reduction) == (7, trees)
    assert isinstance(actions[-1], TreesEnded)


def test_parts_of_the_batch_come_with_an_epoch_and_stay_in_later_ones() -> None:
    core = machine()
    core.tell(TreesWanted(NAMES, FIRST.reduction, "ap is slow", (2, 5, 5)), 10)
    for name in NAMES:
        core.tell(settled(name, 1, 5), 10)
    assert core.epoch.shares == Shares(1, (2, 5, 5))
    core.tell(TreesWanted(NAMES, FIRST.reduction, "a link is slow"), 10)
    for name in NAMES:
        core.tell(settled(name, 2, 9), 10)
    core.tell(SiteLost("sa", "gone"), 20)
    for name in ("ap", "eu"):
        core.tell(settled(name, 3, 9), 20)
    assert (core.epoch.members, core.epoch.shares) == (("ap", "eu"), Shares(1, (2, 5, 5)))
    assert Epoch.from_bytes(core.epoch.to_bytes()) == core.epoch


def test_a_change_that_nobody_needs_is_cancelled_when_a_site_cannot() -> None:
    core = machine()
    core.tell(TreesWanted(NAMES, plan_of(NAMES, NAMES, frozenset(), 1), "slow"), 10)
    refused = dataclasses.replace(settled("eu", 1, 5), why="ranks encode", must_keep_codecs=True)
    actions = core.tell(refused, 10)
    assert kinds(actions) == ["epoch.cancelled", *["SendCancel"] * 3, "TreesEnded"]
    assert isinstance(actions[-1], TreesEnded)
    assert (actions[-1].site, actions[-1].why) == ("eu", "ranks encode")
    assert actions[-1].must_keep_codecs


def drop_sa(core: Core) -> list[Action]:
    """Have all settle for a drop, one of them a round ahead; return what the last led to."""
    actions = core.tell(DropRequested("sa", "an operator wants it"), 10)
    assert actions[1] == SendPause("ap", 1, (), is_redo=False)
    core.tell(settled("ap", 1, 6), 10)
    core.tell(settled("eu", 1, 5), 10)
    return core.tell(settled("sa", 1, 5), 10)


def test_a_dropped_site_has_its_part_in_all_rounds_that_have_begun_and_none_stops() -> None:
    core = machine()
    actions = drop_sa(core)
    assert kinds(actions) == ["epoch.begun", *["SendResume"] * 3]
    assert begun(actions) == (dataclasses.replace(core.epoch, members=("ap", "eu")), ())
    assert core.epoch.from_round == 7
    assert core.tell(SiteJoined("sa", "host", 0), 11) == [SendResume("sa", core.epoch, ())]
    assert core.tell(SiteEnded("sa", succeeded=True), 11) == []
    assert core.tell(SessionBroken("sa", "its agent has ended"), 11) == []
    assert kinds(core.tell(SiteJoined("sa", "host", 1), 12)) == ["GoOnWithout"]


def test_a_dropped_site_that_ends_before_its_last_round_is_lost() -> None:
    core = machine()
    drop_sa(core)
    actions = core.tell(SiteLost("sa", "rank 0 was killed"), 11)
    assert kinds(actions) == ["epoch.proposed", "SendPause", "SendPause"]
    core.tell(settled("ap", 2, 6), 11)
    actions = core.tell(settled("eu", 2, 6, (0, 1)), 11)
    assert kinds(actions) == ["epoch.begun", "SendResume", "SendResume", "GoOnWithout"]
    assert core.epoch.from_round == 6


def test_a_site_that_is_to_be_dropped_and_does_not_settle_is_lost() -> None:
    core = machine()
    core.tell(DropRequested("sa", "an operator wants it"), 10)
    core.tell(settled("ap", 1, 5), 10)
    core.tell(settled("eu", 1, 5), 10)
    actions = core.tell(Ticked(), 26)
    assert kinds(actions)[:1] == ["epoch.cancelled"]
    assert [each.site for each in actions if isinstance(each, SendPause)] == ["ap", "eu"]


def test_a_site_whose_drop_has_failed_stays_where_no_other_is_left_and_that_is_said() -> None:
    core = machine()
    drop = DropRequested("sa", "an operator wants it")
    core.tell(drop, 10)
    core.tell(Ticked(), 26)
    core.tell(SiteLost("ap", "rank 0 was killed"), 27)
    core.tell(SiteLost("eu", "rank 0 was killed"), 27)
    told = [action for now_s in range(28, 120) for action in core.tell(Ticked(), now_s)]
    ended = [each for each in told if isinstance(each, DropRefused)]
    assert ended == [DropRefused("sa", "no other site is left")]
    assert any(isinstance(each, SendPause) and each.site == "sa" for each in told)


def test_the_next_coordinator_knows_who_leaves() -> None:
    core, later = machine(), machine()
    actions = [*core.tell(DropRequested("sa", "an operator wants it"), 10)]
    for name in NAMES:
        actions += core.tell(settled(name, 1, 5), 10)
    later.restore([each for each in actions if isinstance(each, RecordEvent)])
    assert later.tell(SiteJoined("sa", "host", 0), 100) == [SendResume("sa", later.epoch, ())]


def test_who_has_failed_before_it_left_has_failed_whatever_is_told_later() -> None:
    core, later = machine(), machine()
    actions = [*core.tell(DropRequested("sa", "an operator wants it"), 10)]
    for name in NAMES:
        actions += core.tell(settled(name, 1, 5), 10)
    later.restore([each for each in actions if isinstance(each, RecordEvent)])
    assert later.tell(SiteLost("sa", "its gateway was killed"), 100) == []
    assert later.tell(SiteEnded("sa", succeeded=True), 100) == [], "it is asked by each coordinator"
    assert later.tell(SiteJoined("ap", "host", 1), 101) == []
    assert kinds(later.tell(SiteJoined("eu", "host", 1), 101))[:2] == [
        "epoch.proposed",
        "SendPause",
    ]
    later.tell(settled("ap", 2, 6), 102)
    assert GoOnWithout("sa", "its gateway was killed") in later.tell(settled("eu", 2, 6), 102)


def test_what_was_written_down_is_told_again_by_the_next_coordinator() -> None:
    core, journal = machine(), [RecordEvent(EventKind.RUN_ACTIVE)]
    for event in (SiteLost("sa", "gone"), settled("ap", 1, 5, (0, 1)), settled("eu", 1, 5)):
        journal += [each for each in core.tell(event, 10) if isinstance(each, RecordEvent)]
    later = machine()
    later.restore(journal)
    assert later.epoch == core.epoch
    again = later.tell(SiteJoined("eu", "host", 0), 100)
    assert begun(again)[1] == (Handover("ap", "eu", 5, 0, ((0, 1),)),)
    assert kinds(later.tell(SiteJoined("sa", "host", 0), 101)) == ["GoOnWithout"]


def test_an_unfinished_proposal_is_superseded_by_the_next_coordinator() -> None:
    core, later = machine(), machine()
    proposed = core.tell(SiteLost("sa", "gone"), 10)
    later.restore([each for each in proposed if isinstance(each, RecordEvent)])
    for name in ("ap", "eu"):
        assert later.tell(SiteJoined(name, "host", 0), 100) == []
    actions = later.tell(SiteJoined("sa", "host", 0), 100)
    assert [each.epoch for each in actions if isinstance(each, SendPause)] == [2, 2, 2]


def test_a_cancelled_change_is_told_to_a_site_that_missed_it() -> None:
    core = machine()
    core.tell(TreesWanted(NAMES, plan_of(NAMES, NAMES, frozenset(), 1), "slow"), 10)
    core.tell(Ticked(), 30)
    assert core.tell(SiteJoined("eu", "host", 0), 31) == [SendCancel("eu", 1)]


def test_sites_that_differ_when_they_settle_end_the_run() -> None:
    core = machine()
    core.tell(SiteLost("sa", "gone"), 20)
    assert core.tell(settled("ap", 1, 5), 21) == []
    (end,) = core.tell(dataclasses.replace(settled("eu", 1, 5), chain=666), 21)
    assert isinstance(end, CannotGoOn)
    assert end.code == "PARAMETERS_DIFFER"


def test_different_results_of_one_round_end_the_run() -> None:
    core = machine()
    lose_sa(core)
    core.tell(SiteLost("ap", "gone"), 20)
    forked = dataclasses.replace(settled("eu", 2, 5), chain=666)
    assert [each.code for each in core.tell(forked, 21) if isinstance(each, CannotGoOn)] == [
        "PARAMETERS_DIFFER"
    ]


def let_sa_enter(core: Core) -> list[Action]:
    """Have a lost site be ready, and return what the last answer led to."""
    assert kinds(core.tell(SiteRunning("sa"), 20)) == [
        "epoch.proposed",
        "SendPause",
        "SendPause",
    ]
    assert core.tell(SiteRunning("sa"), 20) == [], "told twice"
    core.tell(settled("ap", 2, 7), 21)
    return core.tell(settled("eu", 2, 8), 21)


def test_a_site_follows_from_the_round_that_ranks_have_agreed_on() -> None:
    core = machine()
    lose_sa(core)
    actions = let_sa_enter(core)
    assert kinds(actions) == ["epoch.entering", "SendResume", "SendResume"]
    resume = [each for each in actions if isinstance(each, SendResume)]
    assert [each.site for each in resume] == ["ap", "eu"], "it is told the round, later"
    assert [each.rejoins for each in resume] == [("sa",)] * 2
    assert (resume[0].epoch.members, resume[0].epoch.from_round) == (NAMES, 10)
    before = core.epoch
    actions = core.tell(EpochEntered("eu", 2, 75), 40)
    assert kinds(actions) == ["epoch.begun", *["SendResume"] * 3]
    resume = [each for each in actions if isinstance(each, SendResume)]
    assert {each.epoch.from_round for each in resume} == {75}
    assert [(each.site, each.rejoins) for each in resume] == [
        ("ap", ()),
        ("eu", ()),
        ("sa", ("sa",)),
    ]
    assert core.tell(EpochEntered("ap", 2, 75), 41) == []
    assert (before.members, core.epoch.members) == (NAMES[:2], NAMES)
    trees = core.epoch.reduction.plan.trees
    assert core.epoch.follows == ("sa",)
    assert [each.root for each in trees] == [0, 1], "it forms no sum"
    assert all(each.followers == (2,) for each in trees)


def let_sa_follow(core: Core) -> list[Action]:
    """Have a lost site follow from round 75 on."""
    return [*let_sa_enter(core), *core.tell(EpochEntered("eu", 2, 75), 40)]


def test_a_site_that_is_level_enters_like_any_change_of_members() -> None:
    core = machine()
    lose_sa(core)
    let_sa_follow(core)
    assert core.tell(EpochEntered("sa", 2, -1), 41) == [], "its ranks have not begun"
    assert kinds(core.tell(TreesWanted(NAMES, FIRST.reduction, "other"), 41)) == ["TreesEnded"]
    proposed = ["epoch.proposed", *["SendPause"] * 3]
    assert kinds(core.tell(EpochEntered("sa", 2, 80), 42)) == proposed
    assert core.tell(EpochEntered("sa", 2, 81), 42) == [], "it is under way"
    core.tell(settled("ap", 3, 83), 43)
    core.tell(settled("eu", 3, 82), 43)
    actions = core.tell(settled("sa", 3, 81), 43)
    assert kinds(actions) == ["epoch.cancelled", *["SendCancel"] * 3], "too far behind"
    core.tell(EpochEntered("sa", 2, 97), 50)
    core.tell(settled("ap", 4, 98), 51)
    core.tell(settled("eu", 4, 98), 51)
    actions = core.tell(settled("sa", 4, 97), 51)
    assert kinds(actions) == ["epoch.entering", *["SendResume"] * 3]
    actions = core.tell(EpochEntered("ap", 4, 103), 60)
    assert kinds(actions) == ["epoch.begun", *["SendResume"] * 3, "SiteRejoined"]
    assert actions[-1] == SiteRejoined("sa", 103)
    assert (core.epoch.follows, core.epoch.from_round) == ((), 103)


def test_a_site_that_never_gets_level_enters_as_far_behind_as_it_says() -> None:
    core = machine()
    for round_, expected in ((80, "epoch.cancelled"), (81, "epoch.entering")):
        core = machine()
        lose_sa(core)
        let_sa_follow(core)
        core.tell(EpochEntered("sa", 2, 80, behind=9), 42)
        core.tell(settled("ap", 3, 91), 43)
        core.tell(settled("eu", 3, 90), 43)
        actions = core.tell(settled("sa", 3, round_), 43)
        assert kinds(actions)[0] == expected
        said = next(each for each in actions if isinstance(each, RecordEvent))
        note = str(said.detail.get("note", ""))
        is_told = "9 rounds behind the others, which wait for it once" in note
        assert is_told == (expected == "epoch.entering")
    core.tell(EpochEntered("ap", 3, 99), 44)
    assert (core.epoch.follows, core.epoch.from_round) == ((), 99)
    core.tell(SiteLost("sa", "it could not keep up"), 50)
    core.tell(settled("ap", 4, 99), 51)
    core.tell(settled("eu", 4, 99), 51)
    assert (core.epoch.members, core.epoch.from_round) == (("ap", "eu"), 99)


def test_a_site_that_hangs_when_it_is_to_enter_holds_the_others_up_once() -> None:
    core = machine()
    lose_sa(core)
    let_sa_follow(core)
    core.tell(EpochEntered("sa", 2, 80), 42)
    core.tell(settled("ap", 3, 81), 43)
    core.tell(settled("eu", 3, 81), 43)
    assert core.tell(Ticked(), 42 + LIMITS.detect_s - 0.1) == []
    actions = core.tell(Ticked(), 42 + LIMITS.detect_s)
    assert kinds(actions) == [
        *["epoch.cancelled", *["SendCancel"] * 3],
        *["epoch.proposed", *["SendPause"] * 2],
    ]
    core.tell(settled("ap", 4, 82), 60)
    actions = core.tell(settled("eu", 4, 82), 60)
    assert core.epoch.members == ("ap", "eu")
    assert [each.site for each in actions if isinstance(each, GoOnWithout)] == ["sa"]


def test_a_site_that_is_silent_before_it_has_entered_holds_nobody_up() -> None:
    core = machine()
    lose_sa(core)
    let_sa_follow(core)
    core.tell(EpochEntered("sa", 2, 80), 42)
    told = [each for name in NAMES for each in core.tell(settled(name, 3, 81), 43)]
    assert kinds(told) == ["epoch.entering", *["SendResume"] * 3]
    core.tell(SiteLost("sa", "its agent was silent", 3.0), 50)
    core.tell(Ticked(), 50 + LIMITS.collect_s)
    core.tell(settled("ap", 4, 85), 60)
    core.tell(settled("eu", 4, 85), 60)
    assert core.epoch.members == ("ap", "eu")


def test_a_site_that_follows_begins_anew_where_chunks_are_done_again() -> None:
    core = machine()
    lose_sa(core)
    let_sa_follow(core)
    actions = core.tell(SiteLost("ap", "gone"), 41)
    assert kinds(actions) == ["epoch.proposed", "SendPause"]
    actions = core.tell(settled("eu", 3, 80), 42)
    assert (core.epoch.members, core.epoch.follows) == (("eu",), ())
    assert {each.site for each in actions if isinstance(each, GoOnWithout)} == {"ap", "sa"}


def test_a_site_that_follows_goes_on_where_nobody_else_is_left() -> None:
    core = machine(names=("ap", "eu"))
    core.tell(SiteLost("eu", "gone"), 0)
    core.tell(settled("ap", 1, 7), 1)
    core.tell(SiteRunning("eu"), 20)
    core.tell(settled("ap", 2, 9), 21)
    core.tell(EpochEntered("ap", 2, 75), 30)
    assert kinds(core.tell(SiteLost("ap", "gone"), 41)) == ["epoch.proposed", "SendPause"]
    actions = core.tell(settled("eu", 3, 78), 42)
    assert (core.epoch.members, core.epoch.follows) == (("eu",), ("eu",))
    assert core.epoch.from_round == 78
    assert kinds(actions)[-2:] == ["epoch.proposed", "SendPause"], "and enters"
    lost = copy.deepcopy(core)
    (end,) = (each for each in lost.tell(SiteLost("eu", "too"), 43) if isinstance(each, CannotGoOn))
    assert end.code == "PEER_LOST"
    assert "launch --resume" in end.why
    core.tell(settled("eu", 4, 79), 43)
    assert "SiteRejoined" in kinds(core.tell(EpochEntered("eu", 4, 85), 50))


def test_a_round_that_a_site_enters_with_is_asked_for_where_its_number_was_lost() -> None:
    core = machine()
    lose_sa(core)
    let_sa_enter(core)
    actions = core.tell(SiteJoined("eu", "host", 2), 40)
    (resume,) = (each for each in actions if isinstance(each, SendResume))
    assert (resume.site, resume.epoch.number, resume.rejoins) == ("eu", 2, ("sa",))


def test_a_site_that_has_entered_is_told_so_by_the_next_coordinator() -> None:
    core = machine()
    lost, entering = lose_sa(core), let_sa_enter(core)
    told = [*lost, *entering, *core.tell(EpochEntered("eu", 2, 75), 40)]
    again = machine()
    again.restore([each for each in told if isinstance(each, RecordEvent)])
    (resume,) = again.tell(SiteJoined("sa", "host", 0), 50)
    assert isinstance(resume, SendResume)
    assert (resume.epoch.number, resume.rejoins) == (2, ("sa",))
    assert again.tell(SiteJoined("ap", "host", 2), 50) == []


def test_a_site_that_has_entered_and_is_behind_all_the_same_begins_anew() -> None:
    core = machine()
    lose_sa(core)
    let_sa_follow(core)
    core.tell(EpochEntered("sa", 2, 80), 42)
    for name in NAMES:
        core.tell(settled(name, 3, 81), 43)
    core.tell(EpochEntered("ap", 3, 85), 50)
    core.tell(SiteLost("ap", "gone"), 51)
    core.tell(settled("eu", 4, 85, (0, 3)), 52)
    actions = core.tell(settled("sa", 4, 82), 52)
    assert kinds(actions)[:2] == ["epoch.refused", "epoch.proposed"]


def test_where_nobody_can_go_on_they_are_asked_ever_more_seldom_and_not_for_ever() -> None:
    core = machine(names=("ap", "eu"))
    actions = core.tell(SiteLost("eu", "killed"), 0)
    now_s, written, chances = 0.0, 0, 0
    while not any(isinstance(each, CannotGoOn) for each in actions):
        now_s += 5
        actions = core.tell(Ticked(), now_s)
        settles = [each for each in actions if isinstance(each, SendPause)]
        if settles:
            chances += 1
            number = settles[0].epoch
            actions += core.tell(
                dataclasses.replace(settled("ap", number, 5), why="it cannot"), now_s
            )
        written += sum(isinstance(each, RecordEvent) for each in actions)
        assert now_s < 2 * LIMITS.alone_s
    assert now_s > LIMITS.alone_s
    assert 3 < chances < 15
    assert written < 40


def test_who_is_heard_first_after_all_were_silent_waits_for_the_others() -> None:
    core = machine(dataclasses.replace(LIMITS, min_sites=3))
    for name in NAMES:
        core.tell(SiteLost(name, "silent", 3.0), 100)
    assert kinds(core.tell(Ticked(), 102)) == ["run.waiting"]
    now_s = 102 + 2 * LIMITS.ride_out_s
    assert core.tell(Ticked(), now_s) == []
    assert kinds(core.tell(SiteJoined("eu", "host", 0), now_s)) == ["run.waiting"]
    assert core.tell(SiteLost("eu", "silent", 3.0), now_s + 20) == []
    assert core.tell(SiteJoined("eu", "host", 0), now_s + 40) == [], (
        "that is no reason to wait for longer"
    )
    assert core.tell(Ticked(), now_s + LIMITS.ride_out_s - 1) == []
    assert kinds(core.tell(Ticked(), now_s + LIMITS.ride_out_s)) == ["CannotGoOn"]


def test_a_site_that_is_lost_before_it_enters_keeps_nobody_waiting() -> None:
    core = machine()
    lose_sa(core)
    let_sa_enter(core)
    actions = core.tell(SiteLost("sa", "killed again"), 30)
    assert kinds(actions) == ["GoOnWithout", "epoch.proposed", "SendPause", "SendPause"]
    assert core.tell(EpochEntered("ap", 2, 75), 31) == []
    core.tell(settled("ap", 3, 75), 32)
    assert begun(core.tell(settled("eu", 3, 75), 32))[0].members == ("ap", "eu")


def test_an_entry_is_tried_again_after_another_loss() -> None:
    core = machine()
    lose_sa(core)
    let_sa_enter(core)
    assert kinds(core.tell(SiteLost("eu", "killed"), 30)) == ["epoch.proposed", "SendPause"]
    actions = core.tell(settled("ap", 3, 9), 31)
    assert begun(actions)[0].members == ("ap",)
    assert kinds(actions)[-2:] == ["epoch.proposed", "SendPause"], "sa enters, by another number"


def test_a_coordinator_that_begins_anew_gives_an_entry_up() -> None:
    core = machine()
    records = [each for each in lose_sa(core) if isinstance(each, RecordEvent)]
    records += [each for each in let_sa_enter(core) if isinstance(each, RecordEvent)]
    again = machine()
    again.restore(records)
    again.tell(SiteJoined("ap", "host", 1), 50)
    actions = again.tell(SiteJoined("eu", "host", 1), 50)
    assert kinds(actions) == ["epoch.proposed", "SendPause", "SendPause"]
    assert isinstance(actions[1], SendPause)
    assert actions[1].epoch == 3
    assert kinds(again.tell(SiteJoined("sa", "host", 0), 51)) == ["GoOnWithout"]


def test_a_site_that_follows_and_has_had_all_rounds_ends_the_run_well_where_it_is_alone() -> None:
    core = machine(names=("ap", "eu"))
    core.tell(SiteLost("eu", "gone"), 0)
    core.tell(settled("ap", 1, 7), 1)
    core.tell(SiteRunning("eu"), 20)
    core.tell(settled("ap", 2, 9), 21)
    core.tell(EpochEntered("ap", 2, 75), 30)
    assert core.tell(SiteDone("eu"), 40) == []
    actions = core.tell(SiteLost("ap", "gone"), 41)
    assert actions == [SiteRejoined("eu", core.epoch.from_round), GoOnWithout("ap", "gone")]


def test_the_next_coordinator_knows_that_a_site_which_came_back_is_not_done_again() -> None:
    core = machine()
    core.restore(
        [
            RecordEvent(EventKind.SITE_DONE, "sa"),
            RecordEvent(EventKind.SITE_LOST, "sa"),
            RecordEvent(EventKind.SITE_RETURNING, "sa"),
        ]
    )
    assert not core._sites["sa"].is_done


def test_the_last_site_that_has_the_whole_state_is_not_dropped() -> None:
    core = machine(names=("ap", "eu"))
    core.tell(SiteLost("eu", "gone"), 0)
    core.tell(settled("ap", 1, 7), 1)
    core.tell(SiteRunning("eu"), 20)
    core.tell(settled("ap", 2, 9), 21)
    core.tell(EpochEntered("ap", 2, 75), 30)
    drop = DropRequested("ap", "by an operator")
    why = "no other site has the whole training state"
    assert core.tell(drop, 40) == [DropRefused("ap", why)]


def expired(core: Core, site: str, *, is_renewed: bool = False) -> None:
    """Have the fold take what the coordinator writes down of a certificate."""
    stage = "valid" if is_renewed else "expired"
    detail = {"certificate": f"{site}.gateway", "ends_wall_s": 1.0}
    core._keep(kind_named(f"certificate.{stage}"), site, **detail)


def test_a_site_whose_certificate_has_expired_is_waited_for_until_it_is_renewed() -> None:
    core = machine()
    expired(core, "sa")
    assert core.tell(Ticked(), 5) == [], "its connections stand"
    for by, site in (("ap", "sa"), ("eu", "sa"), ("sa", "ap"), ("sa", "eu")):
        core.tell(Suspected(by, site, False, "a.pem: has expired"), 10)
    assert core.tell(Ticked(), 10 + 3 * LIMITS.ride_out_s) == []
    expired(core, "sa", is_renewed=True)
    for by, site in (("ap", "sa"), ("eu", "sa"), ("sa", "ap"), ("sa", "eu")):
        assert core.tell(Reached(by, site), 11 + 3 * LIMITS.ride_out_s) == []
    assert core.tell(Ticked(), 10 + 4 * LIMITS.ride_out_s) == []


def test_a_renewed_certificate_that_mends_nothing_is_waited_for_no_more() -> None:
    core = machine()
    expired(core, "sa")
    for by, site in (("ap", "sa"), ("eu", "sa"), ("sa", "ap"), ("sa", "eu")):
        core.tell(Suspected(by, site, False, "a.pem: has expired"), 10)
    assert core.tell(Ticked(), 100) == []
    expired(core, "sa", is_renewed=True)
    assert core.tell(Ticked(), 99 + LIMITS.detect_s) == []
    assert "epoch.proposed" in kinds(core.tell(Ticked(), 101 + LIMITS.detect_s))


def test_where_all_have_expired_nobody_is_lost() -> None:
    core = machine()
    for site in NAMES:
        expired(core, site)
        for other in NAMES:
            if other != site:
                core.tell(Suspected(site, other, False, "a.pem: has expired"), 10)
    assert core.tell(Ticked(), 10 + 3 * LIMITS.ride_out_s) == []


def test_an_agent_whose_certificate_has_expired_is_waited_for() -> None:
    core = machine()
    expired(core, "sa")
    core.tell(SessionBroken("sa", "it broke"), 10)
    core.tell(SiteLost("sa", "its lease has ended", silent_s=15.0), 25)
    assert core.tell(Ticked(), 25 + 3 * LIMITS.ride_out_s) == []


def test_an_expired_certificate_holds_up_the_loss_of_no_other_site() -> None:
    core = machine()
    expired(core, "ap")
    assert kinds(lose_sa(core))[-1] == "GoOnWithout"


def test_a_site_whose_processes_are_gone_is_not_waited_for_though_it_has_expired() -> None:
    core = machine()
    expired(core, "sa")
    assert kinds(lose_sa(core))[-1] == "GoOnWithout"


def test_an_operator_drops_a_site_whose_certificate_has_expired() -> None:
    core = machine()
    expired(core, "sa")
    core.tell(SessionBroken("sa", "it broke"), 10)
    core.tell(SiteLost("sa", "its lease has ended", silent_s=15.0), 25)
    assert core.tell(Ticked(), 1000) == []
    core._keep(EventKind.SITE_DROP_REQUESTED, "sa", message="it was dropped")
    actions = core.tell(DropRequested("sa", "it was dropped"), 1001)
    after_s = 1001 + LIMITS.detect_s
    assert "epoch.proposed" in kinds([*actions, *core.tell(Ticked(), after_s)])
