"""Folders of runs: which is the latest, and whether a run's coordinator still lives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.home import (
    ANNOUNCED,
    JOB,
    RunFolder,
    claim_run_folder,
    find_run,
    home_folder,
    is_run_id,
    new_run_id,
    run_folders,
)
from orchestrator.journal import Journal
from protos.errors import NotFoundError


def make(home: Path, run_id: str, submitted_s: float) -> RunFolder:
    folder, is_new = claim_run_folder(home, run_id, "version: 1\n")
    assert is_new
    os.utime(folder.path / JOB, (submitted_s, submitted_s))
    return folder


def announce(folder: RunFolder, pid: int) -> None:
    fields = {"address": "127.0.0.1:7443", "pid": pid, "generation": 1}
    (folder.path / ANNOUNCED).write_text(json.dumps(fields))


def test_the_latest_is_the_last_submitted_whatever_its_name(tmp_path: Path) -> None:
    make(tmp_path, "zebra", 100.0)
    make(tmp_path, "aardvark", 300.0)
    make(tmp_path, "newt", 200.0)
    assert [folder.run_id for folder in run_folders(tmp_path)] == ["aardvark", "newt", "zebra"]
    assert find_run(tmp_path, "").run_id == "aardvark"
    assert find_run(tmp_path, "newt").run_id == "newt"


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


def test_ids() -> None:
    made = {new_run_id() for _ in range(50)}
    assert all(is_run_id(run_id) for run_id in made)
    assert not any(map(is_run_id, ["", ".hidden", "a/b", "-f", "x" * 65, "ü", "a\n"]))


def test_the_coordinator_of_a_folder_lives_as_long_as_its_process(tmp_path: Path) -> None:
    folder = make(tmp_path, "r", 1.0)
    assert folder.living_coordinator() is None
    announce(folder, os.getpid())
    assert folder.living_coordinator() == "127.0.0.1:7443"


def test_a_coordinator_whose_pid_another_process_has_by_now_is_gone(tmp_path: Path) -> None:
    folder = make(tmp_path, "r", 1.0)
    with Journal(folder.path):
        announce(folder, os.getpid())
        assert folder.living_coordinator() == "127.0.0.1:7443"
    assert folder.living_coordinator() is None


@pytest.mark.multiprocess
def test_a_killed_coordinator_is_gone_before_and_after_it_is_collected(tmp_path: Path) -> None:
    folder = make(tmp_path, "r", 1.0)
    child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    try:
        announce(folder, child.pid)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
        assert folder.living_coordinator() is None
    finally:
        child.wait(30)
    assert folder.living_coordinator() is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"pid": "1"}', '{"pid": 0, "address": "x"}', '{"pid": -1}']
)
def test_a_damaged_announcement_counts_as_none(tmp_path: Path, content: str) -> None:
    folder = make(tmp_path, "r", 1.0)
    (folder.path / ANNOUNCED).write_text(content)
    assert folder.living_coordinator() is None


def test_a_remote_coordinator_is_remembered(tmp_path: Path) -> None:
    folder = make(tmp_path, "r", 1.0)
    assert folder.remote_address is None
    folder.remember_remote("127.0.0.4:99")
    assert folder.remote_address == "127.0.0.4:99"


def test_home_is_the_option_else_the_platforms_folder(tmp_path: Path) -> None:
    assert home_folder(tmp_path) == tmp_path
    assert home_folder(Path("here")) == Path.cwd() / "here"
    assert home_folder(None).name == "isthmus"
