"""A tether: what it runs ends with its stdin, with a later one, and with silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from isthmus.sites.tether import LOCK
from isthmus.topology.spec.json_lines import line_of
from isthmus.topology.spec.tether_messages import CREDENTIALS, GREETING, Spec
from tests.fakes.waiting import PROCESSES_S, wait_for

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SLEEPER = "import signal, time; signal.signal(1, 1); print('ready', flush=True); time.sleep(300)"
"""Ignores SIGHUP: nothing may depend on it."""


def tether(folder: Path, silence_s: float = 60.0) -> subprocess.Popen[bytes]:
    """Start a tether whose command has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "isthmus.sites.tether"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline().startswith(GREETING.encode())
    spec = Spec(
        folder=str(folder),
        files={"key": b"secret"},
        env={"KEY": "{folder}/credentials/key"},
        command=(sys.executable, "-c", SLEEPER),
        silence_s=silence_s,
    )
    process.stdin.write(line_of(spec))
    process.stdin.flush()
    said = process.stdout.readline()
    assert said == b"ready\n", said
    return process


def command_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    (child,) = psutil.Process(process.pid).children()
    return child


def is_clean(folder: Path) -> bool:
    return not (folder / CREDENTIALS).exists() and not (folder / LOCK).exists()


def test_the_command_ends_with_stdin(tmp_path: Path) -> None:
    with tether(tmp_path) as process:
        child = command_of(process)
        key = Path(child.environ()["KEY"])
        assert key.read_bytes() == b"secret"
        assert key.stat().st_mode & 0o777 == 0o600
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)
    assert not child.is_running()
    assert is_clean(tmp_path)


def test_a_later_one_ends_the_former(tmp_path: Path) -> None:
    with tether(tmp_path) as former, tether(tmp_path) as later:
        assert former.wait(20) == 143
        assert later.poll() is None
        later.terminate()
        assert later.wait(20) == 143
    assert is_clean(tmp_path)


def test_a_later_one_ends_the_former_where_one_was_killed_before(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("4194303")  # after a restart, numbers are shorter
    with tether(tmp_path) as former:
        assert (tmp_path / LOCK).read_text() == str(former.pid)
        with tether(tmp_path) as later:
            assert former.wait(20) == 143
            later.terminate()
            assert later.wait(20) == 143
    assert is_clean(tmp_path)


def test_the_command_ends_after_a_silence(tmp_path: Path) -> None:
    with tether(tmp_path, silence_s=0.2) as process:
        assert process.wait(20) == 143
    assert is_clean(tmp_path)


def test_the_command_ends_with_a_tether_that_is_killed(tmp_path: Path) -> None:
    with tether(tmp_path) as process:
        child = command_of(process)
        process.kill()
        process.wait(20)
        wait_for(lambda: not child.is_running(), lambda: "its command lives", 20, PROCESSES_S)
    with tether(tmp_path) as process:  # what the killed one has left is no obstacle
        process.terminate()
        process.wait(20)
    assert is_clean(tmp_path)


def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    spec = Spec(
        folder=str(tmp_path / "at"), files={"../x": b""}, env={}, command=("true",), silence_s=60.0
    )
    done = subprocess.run(
        [sys.executable, "-m", "isthmus.sites.tether"],
        input=line_of(spec),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 126
    assert b"is not the name of a file" in done.stdout
    assert not (tmp_path / "at" / "x").exists()
