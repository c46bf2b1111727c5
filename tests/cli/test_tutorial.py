"""The tutorial shows what its commands print, but for numbers and which site is first."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.protos.own_processes import own_command
from tests.cli.conftest import Isthmus

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("init", "validate", "plan")
LONGER = ("launch", "events")
NUMBER = re.compile(r"[-~]?\b\d[\w.:,/%-]*%?|\(#\)|[▁▂▃▄▅▆▇█]+")
SITE = re.compile("ashburn|chicago")


def examples(*commands: str) -> Iterator[tuple[list[str], str]]:
    """Yield the arguments and the output of each of these commands in the second step."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    step = page.partition("\n## 2.")[2].partition("\n## 3.")[0]
    for block in re.findall(r"```\n\$ isthmus (.*?)```", step, re.DOTALL):
        line, _, output = block.partition("\n")
        arguments = line.split()
        if arguments[0] in commands:
            yield arguments, output


def masked(text: str) -> str:
    """Return a text with its numbers and sites masked, and without its lines' ends and columns."""
    words = " ".join(SITE.sub("SITE", NUMBER.sub("#", text)).split())
    return re.sub(r"#( #)+", "#", words)


def assert_shown(output: str, printed: str) -> None:
    """Every part of an output, between its ellipses, was printed, in that order."""
    rest = masked(printed)
    for part in filter(None, (masked(part) for part in output.split("…\n"))):
        assert part in rest, f"the tutorial shows\n{part}\nand printed was\n{rest}"
        rest = rest.partition(part)[2]


def test_the_tutorial_shows_what_is_written_checked_and_planned(
    isthmus: Isthmus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = list(examples(*QUICK))
    assert [arguments[0] for arguments, _ in found] == list(QUICK)
    for arguments, output in found:
        done = isthmus(*arguments)
        assert done.code == 0, done.err
        assert_shown(output, done.out + done.err)


@pytest.mark.exhaustive
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tutorial_shows_what_a_run_prints(tmp_path: Path, home: Path) -> None:
    def printed(*arguments: str) -> str:
        done = subprocess.run(
            own_command("isthmus.orchestrator.cli.main", *arguments),
            cwd=tmp_path,
            env={**os.environ, "ISTHMUS_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    printed(*next(examples("init"))[0])
    found = list(examples(*LONGER))
    assert [arguments[0] for arguments, _ in found] == list(LONGER)
    for arguments, output in found:
        assert_shown(output, printed(*arguments))
