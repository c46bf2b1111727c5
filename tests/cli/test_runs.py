"""Runs after their coordinator has gone: read from its files, listed, removed and pruned."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from isthmus.orchestrator.cli import runs as runs_command
from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.run_folder.home import ANNOUNCED, JOB, RunFolder, run_folders
from isthmus.orchestrator.run_folder.log_files import LogWriter
from isthmus.orchestrator.run_folder.state_lock import LOCK, lock
from isthmus.protos.control.v1 import control_pb2
from tests.cli.conftest import Isthmus
from tests.cli.runs import a_folder, a_run, announce
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving

NOWHERE = "127.0.0.1:1"
DAY_S = 86_400.0


def written(journal: Journal, run_id: str, folder: Path, state: str, wall_s: float) -> None:
    """Write a run into a journal, and some of what it leaves; without `state` it goes on."""

    def append(kind: str, **detail: object) -> None:
        journal.append(kind, wall_s=wall_s, generation=1, run_id=run_id, detail=detail)

    append("run.submitted", name="test", folder=str(folder), sites=["a"], links=[])
    append("run.active")
    if state:
        append("run.ended", state=state, reason_code="", reason="", failure=None)
    line = control_pb2.LogLine(site="a", source="rank0", sequence=0, text=f"said by {run_id}")
    LogWriter(folder).append("a", [line])


def given_to(state: Path, home: Path, run_id: str, ended: str, wall_s: float = 5e8) -> RunFolder:
    """Make a run of a coordinator that has gone, whose state is on this machine."""
    folder = a_folder(home, run_id)
    folder.remember_remote(NOWHERE, str(state))
    journal = Journal(state)
    written(journal, run_id, state / "runs" / run_id, ended, wall_s)
    journal.close()
    return folder


def own(home: Path, run_id: str, ended: str = "SUCCEEDED", wall_s: float = 5e8) -> RunFolder:
    """Make a run that `launch` has started a coordinator for, which has gone."""
    folder = a_folder(home, run_id)
    journal = Journal(folder.path)
    written(journal, run_id, folder.path, ended, wall_s)
    journal.close()
    return folder


@pytest.fixture
def state(home: Path) -> Path:
    return home / "up" / "test" / "coordinator" / "state"


def test_a_run_of_a_coordinator_that_was_taken_down_is_read_from_its_files(
    isthmus: Isthmus, home: Path, state: Path
) -> None:
    given_to(state, home, "r1", "CANCELLED")
    shown = isthmus("status", "--json").envelope["data"]
    assert (shown["state"], shown["folder"]) == ("CANCELLED", str(state / "runs" / "r1"))
    assert shown["created_wall_s"] == 5e8
    (listed,) = isthmus("status", "--all", "--json").envelope["data"]["runs"]
    assert (listed["run_id"], listed["state"]) == ("r1", "CANCELLED")
    assert "said by r1" in isthmus("logs").out
    assert "run.ended" in isthmus("events").out
    assert isthmus("wait", "--json").code == 6
    assert isthmus("cancel", "--json").envelope["data"]["state"] == "CANCELLED"
    assert isthmus("report", "--json").envelope["data"]["runs"][0]["run_id"] == "r1"


def test_an_unfinished_run_is_shown_as_it_was_and_not_waited_for(
    isthmus: Isthmus, home: Path, state: Path
) -> None:
    given_to(state, home, "r1", "")
    shown = isthmus("status", "--json").envelope["data"]
    assert shown["state"] == "ACTIVE"
    assert "no coordinator leads it now" in shown["notes"][-1]
    assert "said by r1" in isthmus("logs").out
    for command in ("wait", "cancel"):
        done = isthmus(command, "--json")
        assert (done.code, done.envelope["error"]["code"]) == (4, "COORDINATOR_UNREACHABLE")


def test_a_coordinator_that_was_started_again_elsewhere_is_found_by_its_state(
    isthmus: Isthmus, home: Path, state: Path
) -> None:
    folder = given_to(state, home, "r1", "")
    scripted = ScriptedCoordinator(watched=[a_run("ACTIVE", "r1")], runs=[a_run("ACTIVE", "r1")])
    held = lock(state / LOCK)
    try:
        with serving(scripted) as address:
            announce(RunFolder(state), address)
            assert folder.coordinator_address == address
            shown = isthmus("status", "--json").envelope["data"]
            assert (shown["state"], shown["totals"]["tokens"]) == ("ACTIVE", 7000.0)
            refused = isthmus("runs", "remove", "r1", "-y", "--force", "--json")
            assert refused.envelope["error"]["code"] == "REFUSED"
    finally:
        os.close(held)
        (state / ANNOUNCED).unlink()
    assert folder.path.is_dir()


def test_a_state_folder_of_that_name_on_another_machine_is_not_taken_for_it(
    isthmus: Isthmus, home: Path, state: Path
) -> None:
    a_folder(home, "r2").remember_remote(NOWHERE, str(state))
    given_to(state, home, "r1", "SUCCEEDED")
    done = isthmus("status", "r2", "--json")
    assert (done.code, done.envelope["error"]["code"]) == (4, "COORDINATOR_UNREACHABLE")


def test_what_nobody_knows_is_unknown_and_has_its_time(isthmus: Isthmus, home: Path) -> None:
    folder = a_folder(home)
    folder.remember_remote(NOWHERE)
    os.utime(folder.path / JOB, (1.7e9, 1.7e9))
    (listed,) = isthmus("status", "--all", "--json").envelope["data"]["runs"]
    assert (listed["state"], listed["created_wall_s"]) == ("UNKNOWN", 1.7e9)
    assert "1970" not in isthmus("status", "--all").out


def test_runs_are_listed_with_what_they_take(isthmus: Isthmus, home: Path, state: Path) -> None:
    given_to(state, home, "r1", "SUCCEEDED")
    own(home, "r2", "FAILED")
    listed = isthmus("runs", "list", "--json").envelope["data"]["runs"]
    assert {each["run_id"]: each["state"] for each in listed} == {"r1": "SUCCEEDED", "r2": "FAILED"}
    assert all(each["bytes"] > 0 for each in listed)
    by_id = {each["run_id"]: each["folders"] for each in listed}
    assert by_id["r1"] == [str(home / "runs" / "r1"), str(state / "runs" / "r1")]
    assert len(isthmus("runs", "list").out.splitlines()) == 1 + 2


def test_a_removed_run_is_gone_with_all_its_files_and_its_checkpoints_stay(
    isthmus: Isthmus, home: Path, state: Path, tmp_path: Path
) -> None:
    folder = given_to(state, home, "r1", "SUCCEEDED")
    at_site = home / "up" / "test" / "sites" / "a" / "state" / "r1"
    (at_site / "node0").mkdir(parents=True)
    kept = given_to(state, home, "r2", "SUCCEEDED")
    store = tmp_path / "checkpoints" / "r1"
    store.mkdir(parents=True)
    folder.remember_checkpoints((str(store),), None)
    done = isthmus("runs", "remove", "r1", "-y", "--json").envelope["data"]
    assert done["bytes"] > 0
    assert not folder.path.exists()
    assert not (state / "runs" / "r1").exists()
    assert not at_site.exists()
    assert list((home / "runs").iterdir()) == [kept.path]
    assert store.is_dir()
    assert isthmus("status", "r1", "--json").envelope["error"]["code"] == "RUN_NOT_FOUND"
    assert isthmus("runs", "remove", "r1", "-y", "--json").code != 0


def test_without_a_terminal_nothing_is_asked_and_nothing_removed(
    isthmus: Isthmus, home: Path
) -> None:
    folder = own(home, "r1")
    for more in ((), ("--json",)):
        done = isthmus("runs", "remove", "r1", *more)
        assert (done.code, "-y" in done.err + done.out) == (2, True)
    assert folder.path.is_dir()


def test_a_run_that_goes_on_or_may_is_not_removed(
    isthmus: Isthmus, home: Path, state: Path
) -> None:
    unled = given_to(state, home, "r1", "")
    elsewhere = a_folder(home, "r2")
    elsewhere.remember_remote(NOWHERE)
    living = own(home, "r3", ended="")
    with serving(ScriptedCoordinator(runs=[a_run("ACTIVE", "r3")])) as address:
        held = lock(living.path / LOCK)
        try:
            announce(living, address)
            refused = isthmus("runs", "remove", "r3", "-y", "--force", "--json")
            assert (refused.code, "ACTIVE" in refused.envelope["error"]["message"]) == (8, True)
            pruned = isthmus("runs", "prune", "--keep", "0", "-y")
            assert pruned.out.strip() == "no run to remove"
            assert pruned.err.count("stays: ") == 3
        finally:
            os.close(held)
    for folder in (unled, elsewhere):
        refused = isthmus("runs", "remove", folder.run_id, "-y", "--json")
        assert (refused.code, "--force" in refused.envelope["error"]["message"]) == (8, True)
        assert isthmus("runs", "remove", folder.run_id, "-y", "--force").code == 0
    assert [each.run_id for each in run_folders(home)] == ["r3"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("--older-than", "30d"), ["r3", "r1"]),
        (("--older-than", "36h"), ["r3"]),
        (("--keep", "1"), ["r3"]),
        (("--keep", "2", "--older-than", "90d"), ["r3", "r2", "r1"]),
        (("--keep", "0"), []),
    ],
)
def test_prune_takes_the_old_ones(
    isthmus: Isthmus, home: Path, options: tuple[str, ...], left: list[str]
) -> None:
    """r2 has ended 40 days ago, though it was launched after r1."""
    now_s = time.time()
    for order, (run_id, days) in enumerate((("r1", 2), ("r2", 40), ("r3", 0))):
        folder = own(home, run_id, wall_s=now_s - days * DAY_S)
        os.utime(folder.path / JOB, (1e9 + order, 1e9 + order))
    assert isthmus("runs", "prune", *options, "-y").code == 0
    assert [each.run_id for each in run_folders(home)] == left


def test_prune_wants_to_know_which(isthmus: Isthmus) -> None:
    assert isthmus("runs", "prune", "-y").code == 2
    assert isthmus("runs", "prune", "--older-than", "30", "-y").code == 2


def test_what_a_removal_that_was_cut_short_left_goes_with_the_next(
    isthmus: Isthmus, home: Path
) -> None:
    folder = own(home, "r1")
    left = folder.path.with_name(".r0.7.removed")
    (left / "logs").mkdir(parents=True)
    (left / JOB).touch()
    assert [each.run_id for each in run_folders(home)] == ["r1"]
    assert isthmus("runs", "remove", "r1", "-y").code == 0
    assert list((home / "runs").iterdir()) == []


def test_on_a_terminal_no_is_no(
    isthmus: Isthmus, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own(home, "r1")
    monkeypatch.setattr(runs_command, "is_terminal", lambda: True)
    monkeypatch.setattr("click.confirm", lambda text, err: "r1" not in text)
    assert isthmus("runs", "remove", "r1").code == 8
    assert folder.path.is_dir()
