"""`isthmus dashboard` as a process: its first line, its end, and what it says where it cannot."""

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

import pytest

from tests.fakes.recorded_runs import record_run

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

WITHIN_S = 60.0
MAIN = [sys.executable, "-m", "isthmus.orchestrator.cli.main", "dashboard"]


@contextmanager
def started(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    pytest.importorskip("starlette", reason="wants pip install 'isthmus[dashboard]'")
    process = subprocess.Popen(
        [*MAIN, "--home", str(home), "--port", "0", *arguments],
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
    with urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
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


def test_a_port_that_is_taken_and_an_address_of_another_machine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words in (["--port", str(taken.getsockname()[1])], ["--host", "192.0.2.1"]):
            with started(tmp_path, *words) as process:
                out, err = process.communicate(timeout=WITHIN_S)
                assert (process.returncode, out) == (8, "")
                assert "error: cannot listen at " in err
                assert "Traceback" not in err


def test_without_the_extra_one_sentence_has_the_cure(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        "hidden = ('starlette', 'uvicorn')\n"
        "util.find_spec = lambda name, *more: None if name in hidden else real(name, *more)\n"
    )
    done = subprocess.run(
        MAIN,
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


def test_nothing_else_imports_what_it_needs() -> None:
    code = (
        "import sys, importlib, pkgutil, isthmus.orchestrator.cli as cli\n"
        "for each in pkgutil.iter_modules(cli.__path__):\n"
        "    importlib.import_module(f'{cli.__name__}.{each.name}')\n"
        "assert not {'starlette', 'uvicorn', 'anyio'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WITHIN_S)
