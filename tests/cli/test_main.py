"""The entry: what is imported, how each kind of end looks on both streams, pipes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from isthmus.orchestrator.cli.main import COMMANDS, cli, main
from isthmus.orchestrator.cli.output import CLOSED_PIPE
from isthmus.protos.catalogue import ExitCode
from isthmus.protos.errors import LocalProtocolError
from tests.cli.conftest import Isthmus

PROCESS_S = 60.0


def start(
    *arguments: str, env: dict[str, str] | None = None, **streams: int
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "isthmus.orchestrator.cli.main", *arguments]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(env or {})},
        stdout=streams.get("stdout", subprocess.PIPE),
        stderr=streams.get("stderr", subprocess.PIPE),
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PROCESS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


@pytest.mark.multiprocess
@pytest.mark.slow
def test_help_imports_nothing_that_is_slow() -> None:
    code = (
        "import sys; from isthmus.orchestrator.cli.main import main; main(['--help']); "
        "print(sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_S, check=True
    )
    names = eval(done.stderr)
    slow = {"torch", "grpc", "pydantic", "rich", "numpy", "google", "psutil", "asyncio"}
    assert not slow & {name.partition(".")[0] for name in names}
    assert "isthmus.sites" not in names
    assert "launch" in done.stdout


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("modules", "unused"),
    [
        ("isthmus.orchestrator.cli.run_commands", {"numpy", "pydantic", "yaml", "rich"}),
        ("isthmus.orchestrator.coordinator.__main__", {"numpy", "scipy", "rich"}),
        ("isthmus.sites.agent.__main__, isthmus.sites.node.__main__", {"numpy", "pydantic"}),
    ],
)
def test_processes_do_not_import_what_they_may_never_use(modules: str, unused: set[str]) -> None:
    code = f"import {modules}; import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_S, check=True
    )
    assert not unused & set(done.stdout.split())


def test_the_list_of_commands_is_the_commands_own_words() -> None:
    context = click.Context(cli)
    for name in COMMANDS:
        found = cli.get_command(context, name)
        assert found is not None
        assert found.name == name
        assert "--json" in {option for each in found.params for option in each.opts}
        assert found.get_short_help_str(limit=200)


def test_the_help_has_every_exit_status(isthmus: Isthmus) -> None:
    said = " ".join(isthmus("--help").out.split()).partition("Exit status: ")[2]
    statuses = [int(part.split()[0]) for part in said.partition(".")[0].split(", ")]
    assert statuses == [*map(int, ExitCode), 130, 143]


def test_version_and_help_are_results(isthmus: Isthmus) -> None:
    for arguments in (["--version"], ["--help"], ["-h"], ["launch", "--help"]):
        done = isthmus(*arguments)
        assert done.code == 0
        assert "isthmus" in done.out
        assert not done.err


def test_completions_help_has_a_line_for_each_shell(isthmus: Isthmus) -> None:
    lines = [line.strip() for line in isthmus("completion", "--help").out.splitlines()]
    assert "zsh:  isthmus completion zsh >> ~/.zshrc" in lines
    assert not [line for line in lines if line.startswith("\\b")]


def test_no_command_shows_help_as_an_error(isthmus: Isthmus) -> None:
    done = isthmus()
    assert done.code == 2
    assert not done.out
    assert "Commands:" in done.err


@pytest.mark.parametrize(
    ("arguments", "command", "word"),
    [
        (["nonsense"], "isthmus", "nonsense"),
        (["--nonsense"], "isthmus", "--nonsense"),
        (["status", "--nonsense"], "status", "--nonsense"),
        (["launch"], "launch", "JOB"),
        (["wait", "--timeout", "5"], "wait", "without a unit"),
        (["logs", "--tail", "0"], "logs", "0"),
        (["logs", "--rank", "-1"], "logs", "-1"),
        (["status", "--coordinator", "nowhere"], "status", "HOST:PORT"),
        (["completion", "tcsh"], "completion", "tcsh"),
        (["status", "--all", "--watch"], "status", "--all"),
        (["validate"], "validate", "FILE"),
        (["validate", "--schema", "job", "x.yaml"], "validate", "--schema"),
        (["launch", "job.yaml", "--run-id", "../x"], "launch", "--run-id"),
    ],
)
def test_usage_errors(isthmus: Isthmus, arguments: Sequence[str], command: str, word: str) -> None:
    plain = isthmus(*arguments)
    assert plain.code == 2
    assert not plain.out
    assert word in plain.err
    assert "Traceback" not in plain.err
    told = isthmus(*arguments, "--json")
    assert told.code == 2
    envelope = told.envelope
    assert envelope["command"] == command
    assert envelope["exit_code"] == 2
    assert envelope["status"] == "error"
    assert envelope["error"]["code"] == "USAGE"
    assert word in envelope["error"]["message"]


def test_what_is_followed_ends_in_a_terminal_line_even_when_it_never_began(
    isthmus: Isthmus,
) -> None:
    for arguments in (["status", "--watch"], ["logs", "-f"], ["events", "--follow"]):
        (last,) = isthmus(*arguments, "--json").lines
        assert last["event"] == "terminal"
        assert last["error"]["code"] == "RUN_NOT_FOUND"
        assert last["exit_code"] == 2


def test_after_two_dashes_nothing_is_an_option(isthmus: Isthmus) -> None:
    done = isthmus("wait", "--", "--json")
    assert done.code == 2
    assert not done.out
    assert "there is no run '--json'" in done.err


@pytest.mark.parametrize("bug", [ZeroDivisionError("division"), LocalProtocolError("odd answer")])
def test_a_bug_is_one_line_and_a_file(
    isthmus: Isthmus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bug: Exception
) -> None:
    def broken(self: object, *_: object) -> None:
        raise bug

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("isthmus.orchestrator.cli.main.LazyGroup.get_command", broken)
    plain = isthmus("status")
    assert plain.code == 70
    assert "Traceback" not in plain.err
    told = isthmus("status", "--json")
    assert told.code == 70
    error = told.envelope["error"]
    assert error["code"] == "INTERNAL"
    path = Path(error["where"]["traceback"])
    assert path.parent == tmp_path
    assert str(path) in error["message"]
    assert f"{type(bug).__name__}: {bug}" in path.read_text()


def test_the_file_system_may_refuse(isthmus: Isthmus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = isthmus("init", tmp_path / "file" / "below", "--json")
    assert done.code == 8
    assert done.envelope["error"]["code"] == "FILE_ERROR"
    assert "Not a directory" in done.envelope["error"]["message"]


def test_interruption_is_130(isthmus: Isthmus, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("isthmus.orchestrator.cli.main.LazyGroup.get_command", interrupted)
    assert isthmus("status").code == 130
    told = isthmus("status", "--json")
    assert told.code == told.envelope["exit_code"] == 130
    assert told.envelope["data"] == {"interrupted": True}


def test_a_second_interruption_while_the_first_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("isthmus.orchestrator.cli.main.LazyGroup.get_command", interrupted)
    monkeypatch.setattr("isthmus.orchestrator.cli.output.Output.interrupted", interrupted)
    assert main(["status"]) == 130


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_closed_pipe_is_silent() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start("validate", "--schema", "topology", stdout=writing)
    os.close(writing)
    code, _, err = finish(process)
    assert code == CLOSED_PIPE
    assert not err


@pytest.mark.multiprocess
@pytest.mark.slow
def test_sigint_of_the_process_is_130_without_a_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "from isthmus.orchestrator.cli import main\n"
        "main.LazyGroup.get_command = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(main.main(['status', '--json']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert json.loads(done.stdout)["exit_code"] == 130
    assert "Traceback" not in done.stderr


@pytest.mark.multiprocess
@pytest.mark.slow
def test_colours_are_for_terminals_without_no_color() -> None:
    for env, coloured in (({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)):
        terminal, end = os.openpty()
        process = start("nonsense", env={"TERM": "xterm", **env}, stderr=end)
        code, out, _ = finish(process)
        os.close(end)
        shown = os.read(terminal, 65536)
        os.close(terminal)
        assert (code, out) == (2, "")
        assert (b"\x1b[" in shown) is coloured


@pytest.mark.multiprocess
@pytest.mark.slow
def test_words_that_the_terminal_cannot_show_do_not_end_the_command(tmp_path: Path) -> None:
    process = start("validate", str(tmp_path / "日本.yaml"), env={"PYTHONIOENCODING": "ascii"})
    code, _, err = finish(process)
    assert code == 2
    assert "No such file or directory" in err


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_shell_can_ask_for_completions() -> None:
    env = {
        "_ISTHMUS_COMPLETE": "bash_complete",
        "COMP_WORDS": "isthmus la",
        "COMP_CWORD": "1",
    }
    code, out, _ = finish(start(env=env))
    assert code == 0
    assert out.strip() == "plain,launch"
