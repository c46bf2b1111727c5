"""Processes that tests start do not outlive a pytest that is killed or interrupted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.reaper import MARK
from tests.fakes.waiting import wait_for

TEST = """
import os, subprocess, sys, time

def test_that_is_killed():
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(sleeper.pid, os.getpid(), file=open("pids", "w"), flush=True)
    os.rename("pids", "written")
    sleeper.wait()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_what_a_pytest_that_is_ended_has_started_is_ended(
    tmp_path: Path, signum: signal.Signals
) -> None:
    (tmp_path / "test_killed.py").write_text(TEST)
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    root = Path(__file__).parents[1]
    tests = subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"),
            *("--rootdir", str(tmp_path), "test_killed.py"),
        ],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(root)},
        stdout=subprocess.DEVNULL,
    )
    written = tmp_path / "written"
    try:
        wait_for(written.exists, "the test to begin", 60)
        sleeper, process = (int(each) for each in written.read_text().split())
        assert process == tests.pid
    finally:
        tests.send_signal(signum)
        tests.wait(60)
    wait_for(lambda: not Path(f"/proc/{sleeper}").exists(), "its child to be ended", 60)
