"""The real coordinator, as launch starts it and as `isthmus coordinator` becomes it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.api.submission import started_coordinator
from isthmus.orchestrator.client.coordinator_client import Client
from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.run_folder.home import ANNOUNCED, LOG, run_folders
from isthmus.orchestrator.run_folder.log_files import last_line
from isthmus.orchestrator.run_folder.state_lock import LOCK
from tests.cli.conftest import Isthmus
from tests.cli.runs import a_folder

PROCESS_S = 60.0

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a state folder, as a coordinator would."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_coordinator_that_cannot_start_says_why_and_leaves_no_run(
    isthmus: Isthmus, files: Path, home: Path
) -> None:
    with locked(home / "runs" / "mine"):
        done = isthmus("launch", files / "job.yaml", "--run-id", "mine", "--json")
    assert done.code == 4
    error = done.envelope["error"]
    assert error["code"] == "COORDINATOR_LOST"
    assert "another coordinator uses" in error["message"]
    assert Path(error["where"]["log_path"]).read_text()
    assert run_folders(home) == []
    assert f"log: {home / 'runs' / 'mine' / LOG}" in done.err


def test_one_that_does_not_listen_in_time_is_stopped(home: Path, files: Path) -> None:
    folder = a_folder(home)
    with (
        pytest.raises(CommandError, match="does not listen"),
        started_coordinator(folder, files / "topology.yaml", (), start_s=0.0),
    ):
        raise AssertionError("the block must not be entered")
    assert not children()


def test_an_interrupted_start_leaves_no_process(home: Path, files: Path) -> None:
    folder = a_folder(home)
    seen: list[int] = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        started_coordinator(folder, files / "topology.yaml", ["emulate=false"]) as address,
    ):
        seen += children()
        with Client(address) as client:
            assert client.list_runs() == []
        raise KeyboardInterrupt
    assert seen
    assert not any(psutil.pid_exists(pid) for pid in seen)
    assert folder.living_coordinator() is None
    assert not (folder.path / ANNOUNCED).exists()


def children() -> list[int]:
    """Return the coordinators that this process has started, and all below them.

    Other tests' processes may live beside them.
    """
    return [
        each.pid
        for started in psutil.Process().children()
        if "isthmus.orchestrator.coordinator" in _command(started)
        for each in [started, *started.children(recursive=True)]
    ]


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def test_the_command_becomes_the_coordinator(files: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "isthmus.orchestrator.cli.main", "coordinator", "--json"),
            *("--topology", str(files / "topology.yaml"), "--state", str(state)),
            *("--bind", "127.0.0.1:0", "--set", "emulate=false"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "listening on" in line:
                break
        announced = json.loads((state / ANNOUNCED).read_text())
        assert announced["pid"] == process.pid
        with Client(announced["address"]) as client:
            assert client.list_runs() == []
        process.terminate()
        out, err = process.communicate(timeout=PROCESS_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, err
    envelope = json.loads(out)
    assert (envelope["command"], envelope["exit_code"]) == ("coordinator", 143)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--bind", "{taken}"), "ADDRESS_IN_USE"),
        pytest.param(("--bind", "127.0.0.1:0"), "STATE_LOCKED", marks=pytest.mark.exhaustive),
    ],
)
def test_what_only_the_coordinator_itself_can_find_wrong(
    files: Path, tmp_path: Path, arguments: tuple[str, ...], code: str
) -> None:
    state = tmp_path / "state"
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        if code == "STATE_LOCKED":
            stack.enter_context(contextlib.closing(Journal(state)))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "isthmus.orchestrator.cli.main", "coordinator", "--json"),
                *("--topology", str(files / "topology.yaml"), "--state", str(state)),
                *(word.format(taken=place) for word in arguments),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
            check=False,
        )
    envelope = json.loads(done.stdout)
    assert envelope["error"]["code"] == code
    assert envelope["exit_code"] == done.returncode == 8


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_line(log) == "its log is empty"
    log.write_text("one\ntwo  \n\n")
    assert last_line(log) == "two"
    log.write_text("error: the cause\nhint: a cure\n")
    assert last_line(log) == "error: the cause"
    log.write_bytes(b"\xff\xfe" * 10_000)
    assert len(last_line(log)) <= 500
