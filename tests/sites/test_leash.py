"""A leash: the child dies with its parent, and is not started for one that has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from isthmus.sites.leash import USAGE, main
from tests.fakes.waiting import wait_for

WAIT_S = 20.0

PARENT = """
import os, subprocess, sys, time
command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
child = subprocess.Popen([sys.executable, "-m", "isthmus.sites.leash", str(os.getpid()), "--", *command])
time.sleep(600)
"""


def leash(parent_pid: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a leash."""
    return subprocess.run(
        [sys.executable, "-m", "isthmus.sites.leash", str(parent_pid), "--", *command],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["12"],
        ["x", "--", "true"],
        ["12", "true", "--"],
        ["-", "--", "true"],
        ["12", "--enter", "", "--", "true"],
        ["12", "--enter", "", "", "--", "true"],
        ["-", "--enter", "u", "n", "--"],
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert USAGE in capsys.readouterr().err


@pytest.mark.multiprocess
def test_it_becomes_the_command_and_leads_a_group() -> None:
    code = "import os, sys; print(os.getpid() == os.getpgid(0) == os.getsid(0)); sys.exit(7)"
    ended = leash(os.getpid(), sys.executable, "-c", code)
    assert (ended.returncode, ended.stdout) == (7, "True\n"), ended.stderr


@pytest.mark.multiprocess
def test_a_parent_that_has_ended_is_not_waited_for() -> None:
    ended = leash(2**22 - 1, sys.executable, "-c", "print('started')")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "has ended" in ended.stderr


@pytest.mark.multiprocess
def test_a_command_that_does_not_exist_is_named() -> None:
    ended = leash(os.getpid(), "/no/such/command")
    assert ended.returncode == 127
    assert "/no/such/command: No such file" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.multiprocess
@pytest.mark.slow
def test_sigkill_of_the_parent_kills_the_child() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child: psutil.Process | None = None
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.ppid() == parent.pid
        os.kill(parent.pid, signal.SIGKILL)
        wait_for(lambda: not _lives(child), "the child's end after its parent's", WAIT_S)
    finally:
        parent.kill()
        parent.communicate()
        if child is not None and _lives(child):
            child.kill()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("user", "net", "named"),
    [
        ("", "/no/namespace", "/no/namespace: No such file or directory"),
        ("/no/user", "/proc/self/ns/net", "/no/user: No such file or directory"),
        ("", "/proc/self/ns/uts", "/proc/self/ns/uts: Invalid argument"),
    ],
)
def test_a_namespace_that_cannot_be_entered_is_named_with_a_cure(
    user: str, net: str, named: str
) -> None:
    for parent in (str(os.getpid()), "-"):
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "isthmus.sites.leash", parent, "--enter", user, net, "--"),
                *(sys.executable, "-c", "print('started')"),
            ],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert (ended.returncode, ended.stdout) == (1, "")
        (line,) = ended.stderr.splitlines()
        assert named in line or "Operation not permitted" in line
        assert line.endswith("use the relay (emulator: relay)")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
