"""`pip install isthmus` is enough for all commands but those that run sites; these name the cure.

They run in a Python that has what it installs, and nothing else.
"""

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from isthmus.orchestrator.cli.main import COMMANDS
from isthmus.protos.training_part import NEEDED
from tests.fakes.recorded_runs import record_run
from tests.fakes.slim_python import make_slim_python, needed

pytestmark = pytest.mark.slow

CURE = "pip install 'isthmus[train]'"
WITHIN_S = 120.0
EACH = """
import json, sys
from isthmus.orchestrator.cli.main import main
for line in sys.stdin:
    print(f"== {main(json.loads(line))}", flush=True)
"""
"""Runs command lines one after the other, in one process: its start takes longer than most."""
Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_slim_python(tmp_path_factory.mktemp("slim") / "venv")


@pytest.fixture
def python(slim: Path, tmp_path: Path) -> Python:
    """Run a program where torch is not installed, with what it reads from stdin."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"ISTHMUS_HOME": str(tmp_path / "home"), "NO_COLOR": "1"}

    def python(program: str, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(slim), "-c", program, *words],
            cwd=tmp_path,
            env=env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )

    return python


def run_each(python: Python, commands: Sequence[str]) -> list[tuple[int, str]]:
    """Run command lines; return each one's exit status and stdout."""
    lines = "\n".join(json.dumps(command.split()) for command in commands)
    done = python(EACH, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    *parts, rest = re.split(r"^== (\d+)\n", done.stdout, flags=re.MULTILINE)
    assert (len(parts), rest) == (2 * len(commands), ""), done.stderr
    return [(int(parts[at + 1]), parts[at]) for at in range(0, len(parts), 2)]


def test_a_client_needs_nothing_that_only_sites_do(python: Python) -> None:
    assert not needed("isthmus") & NEEDED.keys()
    names = [package.replace("-", "_") for package in NEEDED]
    assert all(importlib.util.find_spec(name) for name in names), "they are here"
    program = "from importlib.util import find_spec; import sys; print([*map(find_spec, sys.argv)])"
    assert python(program, *names).stdout.count("None") == 1 + len(NEEDED), "and not there"


def test_every_command_can_be_asked_for_help(python: Python) -> None:
    for command, (status, _) in zip(
        COMMANDS, run_each(python, [f"{name} --help" for name in COMMANDS]), strict=True
    ):
        assert status == 0, command


def test_what_a_client_can_do(python: Python, tmp_path: Path) -> None:
    record_run(tmp_path / "home")
    commands = (
        "init . --preset two-sites-1000km",
        "validate topology.yaml job.yaml",
        "topology show topology.yaml",
        "topology accelerators",
        "plan job.yaml",
        "simulate job.yaml",
        "certs init topology.yaml",
        "completion bash",
        "status --all",
        "status",
        "events",
        "wait",
        "report",
        "trace",
    )
    for command, (status, out) in zip(commands, run_each(python, commands), strict=True):
        assert status == 0, f"{command}: {out}"


def test_what_runs_sites_says_what_is_missing(python: Python, tmp_path: Path) -> None:
    commands = (
        "launch job.yaml --json",
        "launch job.yaml --detach --json",
        "probe topology.yaml --json",
        "doctor topology.yaml --json",
        "bench allreduce topology.yaml --json",
        "bench allreduce topology.yaml --against gloo --json",
        "bench scaling job.yaml --json",
        "bench recovery job.yaml --json",
    )
    _, *ended = run_each(python, ("init . --preset two-sites-1000km", *commands))
    for command, (status, out) in zip(commands, ended, strict=True):
        assert status == 3, f"{command}: {out}"
        error = json.loads(out.splitlines()[-1])["error"]
        assert error["code"] in {"CANNOT_TRAIN", "PREFLIGHT_FAILED"}, command
        assert "torch" in error["message"], command
        assert CURE in out, command
    assert not list(tmp_path.glob("home/runs/*")), "nothing was started"


def test_an_agent_says_so_before_it_dials(slim: Path, tmp_path: Path) -> None:
    words = "--site a --coordinator 127.0.0.1:1 --topology-hash 0 --address 127.0.0.1 --state s"
    done = subprocess.run(
        [
            *(str(slim), "-m", "isthmus.sites.agent", *words.split()),
            *("--detect-within", "5", "--start-within", "5"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "error: this machine cannot train, for google-crc32c, hpack, " in done.stderr
    assert CURE in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_is_told_the_cure(python: Python) -> None:
    done = python("import isthmus; isthmus.join(alone=True)")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "isthmus.protos.training_part.CannotTrainError: this machine cannot train, for "
    )
    assert last.endswith(CURE)
