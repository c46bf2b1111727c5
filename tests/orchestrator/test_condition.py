"""What is wrong with a run now, from its journal: which site, since when, why, what comes next."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.orchestrator.coordinator.control_messages import run_message
from isthmus.orchestrator.core.epoch_record import detail_of
from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent
from isthmus.orchestrator.evidence.view.condition import BAD, FAIR, Absences, Trouble, troubles
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.world import Detection
from tests.fakes.run_worlds import GATHER

RULES = Detection(detect_within_s=15.0, start_within_s=120.0)
SITES = ("a", "b", "c")


class Written:
    """A journal that a test writes line by line."""

    def __init__(self) -> None:
        self.view, self.absences, self.num = JournaledRun("r1"), Absences(), 0
        self.add(0, "run.submitted", sites=SITES, links=[], name="n", folder="")
        for site in SITES:
            self.add(1, "site.joined", site, host="h")
            self.add(2, "site.running", site)
        self.add(3, "run.active")
        self.add(3, "run.state_offered")
        self.add(4, "run.first_step")

    def add(self, wall_s: float, kind: str, site: str = "", **detail: Any) -> None:  # noqa: ANN401
        self.num += 1
        event = RecordedEvent(
            sequence=self.num,
            wall_s=wall_s,
            run_id="r1",
            generation=1,
            kind=kind,
            site=site,
            detail=detail,
        )
        self.view.apply(event)
        self.absences.take(event, self.view)

    def epoch(self, wall_s: float, number: int, *members: str) -> None:
        epoch = Epoch(number, members, GATHER, number)
        self.add(wall_s, "epoch.begun", "", **detail_of(epoch, "of this test"))

    def lose(self, wall_s: float, site: str, **detail: object) -> None:
        known = {"message": f"{site} was silent", "is_out": True, "state": "ENDED"}
        self.add(wall_s, "site.lost", site, **{**known, **detail})

    def now(self, now_wall_s: float, **more: Any) -> list[Trouble]:  # noqa: ANN401
        run = run_message(self.view, {})
        known = {"rules": RULES, "now_wall_s": now_wall_s, **more}
        return troubles(run, self.view, self.absences, **known)


@pytest.fixture
def written() -> Written:
    return Written()


def test_a_run_that_trains_has_no_trouble(written: Written) -> None:
    assert written.now(5.0) == []


def test_a_loss_is_told_until_the_site_is_back(written: Written) -> None:
    written.add(10, "site.silent", "b", message="silent for 15 s")
    (silent,) = written.now(11.0)
    assert (silent.grade, silent.what, silent.since_wall_s) == (BAD, "Site b does not answer", 10)
    written.epoch(12, 1, "a", "c")
    written.lose(12, "b")
    (lost,) = written.now(13.0)
    assert (lost.grade, lost.what, lost.since_wall_s) == (BAD, "Site b is lost", 10)
    assert lost.why == "b was silent"
    assert lost.next == (
        "The other 2 sites keep training. It is started again as soon as its agent answers. "
        "Starting takes at most 2min 0s."
    )
    written.add(20, "site.returning", "b")
    (starting,) = written.now(21.0)
    assert (starting.grade, starting.what) == (FAIR, "Site b is starting again")
    written.add(30, "site.running", "b")
    (behind,) = written.now(31.0)
    assert (behind.what, behind.since_wall_s) == ("Site b is catching up", 10)
    written.epoch(42, 2, *SITES)
    written.add(42, "site.returned", "b")
    assert written.now(43.0) == []
    written.epoch(50, 3, "a", "c")
    written.lose(50, "b")
    assert written.now(51.0)[0].next.endswith("The last return took 22s.")


def test_a_site_that_does_not_come_back_has_the_command(written: Written) -> None:
    written.epoch(10, 1, "a", "c")
    written.lose(10, "b")
    for at_s in (11, 12, 13):
        written.add(at_s, "site.returning", "b")
        written.lose(at_s + 0.5, "b", message="its ranks did not come up")
    (used_up,) = written.now(14.0)
    assert "`failure.max_restarts` (3 an hour) is used up" in used_up.next
    assert "`isthmus sites add r1 b` starts it again." in used_up.next
    written.add(20, "site.drop_requested", "b", message="by hand")
    written.add(20, "site.dropped", "b", message="by hand", is_out=True, state="ENDED")
    assert written.now(21.0)[0].what == "Site b was dropped"


def test_a_pause_before_the_next_start_is_told(written: Written) -> None:
    written.lose(10, "b")
    written.add(11, "site.returning", "b")
    written.lose(12, "b")
    assert "It is started again at 1970-01-01 " in written.now(13.0)[0].next


def test_sites_with_the_same_story_stand_once(written: Written) -> None:
    written.epoch(10, 1, "a")
    written.lose(10, "b")
    written.lose(11, "c")
    (both,) = written.now(12.0)
    assert both.what == "Site b is lost (and 1 other)"
    assert both.next.startswith("Site a keeps training.")


def test_an_outage_a_stall_and_a_failed_checkpoint(written: Written) -> None:
    (stalled,) = written.now(90.0, stalled_wall_s=60.0)
    assert (stalled.what, stalled.since_wall_s) == ("Training has stalled", 60.0)
    written.add(70, "run.waiting", note="no two sites reach each other: waiting for up to 600 s")
    written.add(71, "checkpoint.failed", "a", step=40, reason="no space left on device")
    written.add(72, "run.waiting", note="no two sites reach each other: waiting for up to 600 s")
    paused, unsaved = written.now(90.0, stalled_wall_s=60.0)
    assert (paused.what, paused.since_wall_s) == ("Training is paused", 70)
    assert "no space left on device" in unsaved.why
    written.add(95, "run.went_on", note="the run continues", for_s=25)
    written.add(99, "checkpoint.written", step=80)
    assert written.now(100.0, slow=["site a costs the others 1s a step"]) == [
        Trouble(grade=FAIR, what="Slow, not hung", why="site a costs the others 1s a step")
    ]
    assert written.absences.saved_wall_s == 99


def test_an_end_says_how_to_go_on(written: Written) -> None:
    written.add(50, "checkpoint.written", step=40)
    end = {"state": "FAILED", "reason_code": "RANK_KILLED", "reason": "rank 1 was killed"}
    written.add(60, "run.ended", **end, failure=None)
    (failed,) = written.now(61.0)
    assert (failed.grade, failed.what) == (BAD, "The run failed (RANK_KILLED)")
    assert failed.next == (
        "`isthmus launch JOB --resume r1` continues from the checkpoint of step 40."
    )
