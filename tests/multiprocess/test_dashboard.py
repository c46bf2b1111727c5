"""The dashboard as a process, by its command and by launch: first line, end, and refusals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.fakes.dashboards import growing_run
from tests.fakes.recorded_runs import record_run
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

WITHIN_S = 60.0
MAIN = [sys.executable, "-m", "isthmus.orchestrator.cli.main"]


@contextmanager
def started(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    pytest.importorskip("starlette", reason="wants pip install 'isthmus[dashboard]'")
    process = subprocess.Popen(
        [*MAIN, "dashboard", "--home", str(home), "--port", "0", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read(url: str) -> str:
    """Return what is at an address; a token in it is shown by a header, as programs do."""
    address, _, token = url.partition("?token=")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(address, headers=headers)
    with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_line_is_the_address_until_a_signal(
    tmp_path: Path, signum: int, status: int
) -> None:
    record_run(tmp_path)
    with started(tmp_path) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        assert "hello-wan" in read(url)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read(url.partition("?")[0])
        process.send_signal(signum)
        out, err = process.communicate(timeout=WITHIN_S)
        assert (process.returncode, out, err) == (status, "", "")


def test_where_others_can_reach_it_the_address_has_a_token(tmp_path: Path) -> None:
    with started(tmp_path, "--host", "0.0.0.0") as process:
        assert process.stdout is not None
        printed = process.stdout.readline().strip()
        assert printed.startswith(f"http://{socket.gethostname()}:")
        assert "?token=" in printed
        url = printed.replace(socket.gethostname(), "127.0.0.1", 1)
        assert read(url)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read(url.partition("?")[0])


def test_a_token_can_be_done_without_on_loopback_only(tmp_path: Path) -> None:
    with started(tmp_path, "--no-token") as process:
        assert process.stdout is not None
        assert "every user of this machine can read it" in read(process.stdout.readline().strip())
    for words in (["--host", "0.0.0.0"], ["--allow-actions"]):
        with started(tmp_path, "--no-token", *words) as process:
            assert process.stdout is not None
            assert "?token=" in process.stdout.readline()


def test_a_port_that_is_taken_and_an_address_of_another_machine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words in (["--port", str(taken.getsockname()[1])], ["--host", "192.0.2.1"]):
            with started(tmp_path, *words) as process:
                out, err = process.communicate(timeout=WITHIN_S)
                assert (process.returncode, out) == (8, "")
                assert "error: cannot listen at " in err
                assert "Traceback" not in err


@pytest.mark.parametrize("words", [["dashboard"], ["launch", "absent.yaml", "--dashboard"]])
def test_without_the_extra_one_sentence_has_the_cure(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        "hidden = ('starlette', 'uvicorn')\n"
        "util.find_spec = lambda name, *more: None if name in hidden else real(name, *more)\n"
    )
    done = subprocess.run(
        [*MAIN, *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "ISTHMUS_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error: ")]
    assert "pip install 'isthmus[dashboard]'" in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.exhaustive
def test_launch_has_it_beside_the_run_which_it_outlives(run: Bench) -> None:
    pytest.importorskip("starlette", reason="wants pip install 'isthmus[dashboard]'")
    job = run.write(topology_yaml([(1, 1), (1, 1)], rtt="2ms"), job_yaml(steps=100_000))
    following = run.start("launch", str(job), "--dashboard", "--run-id", "r")
    assert following.stdout is not None
    assert following.stderr is not None
    first = following.stderr.readline().strip()
    assert following.stdout.readline().strip() == "r"
    assert first.startswith("dashboard: http://127.0.0.1:"), first
    assert "/runs/r?token=" in first
    url = first.removeprefix("dashboard: ")
    assert "run r" in read(url)
    run.wait_for("ranks", lambda: bool(run.pids("isthmus.sites.node.rank")))
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=WITHIN_S)
    run.wait_for("the page", lambda: "ACTIVE" in read(url))
    run.isthmus("cancel", "r").check()
    run.isthmus("wait", "r", "--timeout", "60s").check(6)
    assert "CANCELLED" in read(url)
    (pid,) = run.pids("isthmus.orchestrator.dashboard")
    token = url.partition("?token=")[2]
    assert not [each for each in psutil.Process(pid).cmdline() if token in each]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        read(url.partition("?")[0])
    os.kill(pid, signal.SIGTERM)
    run.wait_for_nothing_left(30)
    assert (run.run_folder("r") / "dashboard.log").read_text() == ""


def test_the_dashboard_of_a_run_ends_once_it_is_over_and_nobody_looks(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="wants pip install 'isthmus[dashboard]'")
    with growing_run(tmp_path) as run, socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor = listener.fileno()
        command = [
            *(sys.executable, "-m", "isthmus.orchestrator.dashboard", "--run", "g1"),
            *("--home", str(tmp_path), "--listener", str(descriptor), "--idle", "0"),
        ]
        process = subprocess.Popen(
            command,
            env={**os.environ, "ISTHMUS_DASHBOARD_TOKEN": "of-this-test"},
            pass_fds=(descriptor,),
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/runs/g1?token=of-this-test"
            assert "ACTIVE" in read(url)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2.5)  # the run goes on
            run.event("run.ended", state="SUCCEEDED", reason_code="", reason="", failure=None)
            _, err = process.communicate(timeout=WITHIN_S)
            assert (process.returncode, err) == (0, "")
        finally:
            process.kill()
            process.communicate()


def test_nothing_else_imports_what_it_needs() -> None:
    code = (
        "import sys, importlib, pkgutil, isthmus.orchestrator.cli as cli\n"
        "for each in pkgutil.iter_modules(cli.__path__):\n"
        "    importlib.import_module(f'{cli.__name__}.{each.name}')\n"
        "assert not {'starlette', 'uvicorn', 'anyio'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WITHIN_S)
