"""One run from submission to end: how its end is told, and what an interruption does to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.whole_run import run_to_end
from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.documents import Pair, load_pair
from isthmus.orchestrator.evidence.bench.experiment import Ended
from isthmus.orchestrator.evidence.record.bench_record import Failed
from isthmus.orchestrator.run_folder.home import RunFolder
from isthmus.protos.control.v1 import control_pb2
from tests.cli.runs import a_failed_run, a_folder, a_run
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving

RUN_ID = "r1"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[ScriptedCoordinator]:
    """A coordinator elsewhere, to which every submission goes."""
    coordinator = ScriptedCoordinator(runs=[control_pb2.Run(run_id=RUN_ID)])
    coordinator.runs[0].state = control_pb2.RUN_STATE_ACTIVE
    with serving(coordinator) as address:

        def submit(
            pair: Pair, home: Path, run_id: str, coordinator: str | None, faults: Sequence[str]
        ) -> RunFolder:
            folder = a_folder(home, run_id)
            folder.remember_remote(address)
            return folder

        monkeypatch.setattr("isthmus.orchestrator.cli.whole_run.submit", submit)
        monkeypatch.setattr("isthmus.orchestrator.cli.whole_run.STOP_S", 0.2)
        yield coordinator


def run(
    files: Path,
    home: Path,
    *,
    timeout_s: float = 30.0,
    show: Callable[[control_pb2.Run], None] = lambda run: None,
) -> Ended:
    pair = load_pair(files / "job.yaml")
    return run_to_end(pair, home, RUN_ID, timeout_s=timeout_s, show=show)


def test_a_run_that_succeeds(files: Path, home: Path, scripted: ScriptedCoordinator) -> None:
    scripted.watched = [a_run("ACTIVE", ""), a_run("SUCCEEDED", "")]
    shown: list[control_pb2.Run] = []
    ended = run(files, home, show=shown.append)
    assert ended == Ended("none")
    assert len(shown) == 2


def test_a_run_that_lost_a_site_is_no_measurement(
    files: Path, home: Path, scripted: ScriptedCoordinator
) -> None:
    lost = {"reason_code": "WITH_LOSSES", "reason": "site b was lost"}
    scripted.watched = [a_run("ACTIVE", ""), a_run("SUCCEEDED", "", **lost)]
    failed = Failed(code="WITH_LOSSES", message="site b was lost")
    assert run(files, home) == Ended("none", failed)


def test_what_emulated_the_wan_stands_in_the_journal(
    files: Path, home: Path, scripted: ScriptedCoordinator
) -> None:
    def record(run: control_pb2.Run) -> None:
        with Journal(home / "runs" / RUN_ID) as journal:
            journal.append(
                "wan.emulated",
                wall_s=0.0,
                generation=1,
                run_id=RUN_ID,
                detail={"emulator": "netns"},
            )

    scripted.watched = [a_run("SUCCEEDED", "")]
    assert run(files, home, show=record).emulator == "netns"


def test_it_has_not_ended_before_its_coordinator_lets_go_of_the_folder(
    files: Path, home: Path, scripted: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is gone long before; until then it writes its journal."""
    journals: list[Journal] = []
    pauses_s: list[float] = []

    def pause(duration_s: float) -> None:
        pauses_s.append(duration_s)
        if len(pauses_s) == 3:
            journals[0].close()

    monkeypatch.setattr("isthmus.orchestrator.cli.whole_run.time.sleep", pause)
    monkeypatch.setattr("isthmus.orchestrator.cli.whole_run.STOP_S", 30.0)
    scripted.watched = [a_run("SUCCEEDED", "")]
    run(files, home, show=lambda run: journals.append(Journal(home / "runs" / RUN_ID)))
    assert len(pauses_s) == 3


def test_a_run_that_fails_says_why(files: Path, home: Path, scripted: ScriptedCoordinator) -> None:
    scripted.watched = [a_failed_run("RANK_KILLED", "")]
    failed = run(files, home).failed
    assert failed is not None
    assert failed.code == "RANK_KILLED"
    assert failed.message == "rank 1 of b ended"


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_cancelled(
    files: Path, home: Path, scripted: ScriptedCoordinator
) -> None:
    scripted.watched = [a_run("ACTIVE", "")]
    scripted.holds_streams = True
    failed = run(files, home, timeout_s=0.2).failed
    assert failed is not None
    assert failed.code == "TIMED_OUT"
    assert scripted.runs[0].state == control_pb2.RUN_STATE_STOPPING


@pytest.mark.slow
def test_an_interrupted_run_is_cancelled(
    files: Path, home: Path, scripted: ScriptedCoordinator
) -> None:
    def interrupt(run: control_pb2.Run) -> None:
        raise KeyboardInterrupt

    scripted.watched = [a_run("ACTIVE", "")]
    scripted.holds_streams = True
    with pytest.raises(KeyboardInterrupt):
        run(files, home, show=interrupt)
    assert scripted.runs[0].state == control_pb2.RUN_STATE_STOPPING


def test_a_run_that_cannot_be_submitted_has_failed(
    files: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(
        pair: Pair, home: Path, run_id: str, coordinator: str | None, faults: Sequence[str]
    ) -> RunFolder:
        raise CommandError("COORDINATOR_LOST", "the coordinator does not listen")

    monkeypatch.setattr("isthmus.orchestrator.cli.whole_run.submit", refuse)
    failed = run(files, home).failed
    assert failed is not None
    assert (failed.code, failed.message) == ("COORDINATOR_LOST", "the coordinator does not listen")
