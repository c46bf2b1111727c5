"""Folders of runs: which is the latest, and whether a run's coordinator still lives."""

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from isthmus.orchestrator.cli.command_errors import describe
from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.run_folder.home import (
    ANNOUNCED,
    JOB,
    LOG,
    NUMBER,
    RunFolder,
    claim_run_folder,
    find_run,
    home_folder,
    is_folder_name,
    new_run_id,
    run_folders,
)
from isthmus.protos.errors import NotFoundError
from isthmus.protos.security import token_path
from tests.cli.runs import full_disk
from tests.fakes.waiting import wait_for

FIRST_THREAD_ENDS = """
import ctypes, sys, threading
from pathlib import Path
from isthmus.orchestrator.coordinator.journal import Journal
journal = Journal(Path(sys.argv[1]))
threading.Thread(target=sys.stdin.read).start()
print("locked", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def make(home: Path, run_id: str) -> RunFolder:
    folder, is_new = claim_run_folder(home, run_id, "version: 1\n")
    assert is_new
    return folder


def announce(folder: RunFolder) -> None:
    fields = {"address": "127.0.0.1:7443", "pid": os.getpid(), "generation": 1}
    (folder.path / ANNOUNCED).write_text(json.dumps(fields))


def date(folder: RunFolder, changed_s: float) -> None:
    for path in folder.path.iterdir():
        os.utime(path, (changed_s, changed_s))


def test_the_latest_is_the_last_submitted_whatever_its_name_and_the_clock(tmp_path: Path) -> None:
    for run_id, clock_s in (("zebra", 300.0), ("newt", 200.0), ("aardvark", 100.0)):
        date(make(tmp_path, run_id), clock_s)
    assert [folder.run_id for folder in run_folders(tmp_path)] == ["aardvark", "newt", "zebra"]
    assert find_run(tmp_path, "").run_id == "aardvark"
    assert find_run(tmp_path, "newt").run_id == "newt"


def test_the_latest_of_a_copy_is_the_same(tmp_path: Path) -> None:
    for run_id in ("first", "second", "third"):
        make(tmp_path / "home", run_id)
    # As `cp -r` does, in the order of the folder.
    for run_id in ("third", "first", "second"):
        shutil.copytree(tmp_path / "home/runs" / run_id, tmp_path / "copy/runs" / run_id)
        date(RunFolder(tmp_path / "copy/runs" / run_id), float(len(run_id) + ord(run_id[0])))
    assert find_run(tmp_path / "copy", "").run_id == "third"
    make(tmp_path / "copy", "fourth")
    assert find_run(tmp_path / "copy", "").run_id == "fourth"


def test_a_run_whose_folder_was_used_before_is_the_latest(tmp_path: Path) -> None:
    make(tmp_path, "mine").give_back()
    make(tmp_path, "other")
    make(tmp_path, "mine")
    assert find_run(tmp_path, "").run_id == "mine"


def test_runs_from_before_there_were_numbers_come_last(tmp_path: Path) -> None:
    for run_id, clock_s in (("b", 200.0), ("a", 300.0), ("c", 100.0)):
        folder = make(tmp_path, run_id)
        (folder.path / NUMBER).unlink()
        date(folder, clock_s)
    date(make(tmp_path, "new"), 0.0)
    assert [folder.run_id for folder in run_folders(tmp_path)] == ["new", "a", "b", "c"]


@pytest.mark.parametrize("written", ["", "[]", '{"number": "7"}', '{"number": null}'])
def test_a_number_that_cannot_be_read_is_none(tmp_path: Path, written: str) -> None:
    damaged = make(tmp_path, "damaged")
    (damaged.path / NUMBER).write_text(written)
    make(tmp_path, "whole")
    assert find_run(tmp_path, "").run_id == "whole"


def test_a_folder_that_is_given_back_keeps_what_others_wrote(tmp_path: Path) -> None:
    folder, _ = claim_run_folder(tmp_path, "mine", "version: 1\n")
    folder.remember_remote("127.0.0.1:7443")
    (folder.path / LOG).write_text("why it did not start\n")
    folder.give_back()
    assert [each.name for each in folder.path.iterdir()] == [LOG]
    again, is_new = claim_run_folder(tmp_path, "mine", "version: 1\n")
    assert is_new
    (again.path / LOG).unlink()
    again.give_back()
    assert not again.path.exists()


@pytest.mark.parametrize("run_id", ["none", "../escape", "/etc", ".", "a b", ""])
def test_no_such_run(tmp_path: Path, run_id: str) -> None:
    (tmp_path / "escape").mkdir()
    (tmp_path / "escape" / JOB).write_text("")
    with pytest.raises(NotFoundError, match="no run"):
        find_run(tmp_path, run_id)


def test_a_folder_without_its_job_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "half").mkdir(parents=True)
    (tmp_path / "runs" / "stray-file").write_text("")
    assert run_folders(tmp_path) == []


def test_a_run_is_claimed_once(tmp_path: Path) -> None:
    first, is_new = claim_run_folder(tmp_path, "r", "version: 1\n")
    again, is_new_again = claim_run_folder(tmp_path, "r", "version: 2\n")
    assert (is_new, is_new_again) == (True, False)
    assert first == again
    assert (first.path / JOB).read_text() == "version: 1\n"


def test_a_run_whose_job_cannot_be_written_is_none(tmp_path: Path) -> None:
    with full_disk(0), pytest.raises(OSError, match="File too large") as raised:
        claim_run_folder(tmp_path, "r", "version: 1\n")
    assert raised.value.filename == str(tmp_path / "runs" / "r" / JOB)
    assert run_folders(tmp_path) == []
    _, is_new = claim_run_folder(tmp_path, "r", "version: 1\n")
    assert is_new


def test_ids() -> None:
    made = {new_run_id() for _ in range(50)}
    assert all(is_folder_name(run_id) for run_id in made)
    assert not any(map(is_folder_name, ["", ".hidden", "a/b", "-f", "x" * 65, "ü", "a\n"]))


def test_the_coordinator_of_a_folder_lives_as_long_as_the_lock_is_held(tmp_path: Path) -> None:
    folder = make(tmp_path, "r")
    assert folder.living_coordinator() is None
    with Journal(folder.path):
        assert folder.living_coordinator() is None, "it does not listen yet"
        announce(folder)
        assert folder.living_coordinator() == "127.0.0.1:7443"
    assert folder.living_coordinator() is None, "it was killed: its announcement is still there"


@pytest.mark.multiprocess
def test_a_coordinator_whose_other_threads_still_run_is_not_gone(tmp_path: Path) -> None:
    """A SIGKILL takes a process's threads one by one; the lock goes with the last."""
    folder = make(tmp_path, "r")
    announce(folder)
    child = subprocess.Popen(
        [sys.executable, "-c", FIRST_THREAD_ENDS, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        wait_for(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        assert folder.living_coordinator() is not None
    finally:
        child.kill()
        child.communicate(timeout=30)
    assert folder.living_coordinator() is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"pid": 1}', '{"address": 0}', '{"address": ""}']
)
def test_a_damaged_announcement_counts_as_none(tmp_path: Path, content: str) -> None:
    folder = make(tmp_path, "r")
    (folder.path / ANNOUNCED).write_text(content)
    with Journal(folder.path):
        assert folder.living_coordinator() is None


def test_a_remote_coordinator_is_remembered(tmp_path: Path) -> None:
    folder = make(tmp_path, "r")
    assert folder.remote_address is None
    folder.remember_remote("127.0.0.4:99")
    assert folder.remote_address == "127.0.0.4:99"


def test_home_is_the_option_else_the_platforms_folder(tmp_path: Path) -> None:
    assert home_folder(tmp_path) == tmp_path
    assert home_folder(Path("here")) == Path.cwd() / "here"
    assert home_folder(None).name == "isthmus"


def test_a_user_without_a_home_is_told_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_STATE_HOME", "ISTHMUS_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert home_folder(tmp_path) == tmp_path
    with pytest.raises(FileNotFoundError, match="set HOME, or both") as caught:
        home_folder(None)
    assert describe(caught.value).code == "FILE_ERROR"
    with pytest.raises(FileNotFoundError, match="ISTHMUS_TOKEN_FILE"):
        token_path()
