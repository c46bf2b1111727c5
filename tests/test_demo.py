"""scripts/demo ends with the report of its own run, and of no other."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

DEMO = Path(__file__).parents[1] / "scripts" / "demo"
FAKE = """#!{python}
import json, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "report":
    print("/runs/" + sys.argv[2].removeprefix("--run-id="))
sys.exit({statuses!r}.get(sys.argv[1], 0))
"""


@pytest.mark.parametrize("launched", [0, 1, 7, 8])
@pytest.mark.parametrize("arguments", [[], ["--run-id", "mine"], ["--run-id=mine", "--home", "/h"]])
def test_the_last_line_is_the_report_of_the_run_that_was_launched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    launched: int,
    arguments: list[str],
) -> None:
    program, calls = tmp_path / "isthmus", tmp_path / "calls"
    text = FAKE.format(python=sys.executable, calls=str(calls), statuses={"launch": launched})
    program.write_text(text)
    program.chmod(0o755)
    own = SimpleNamespace(
        ROOT=tmp_path,
        ensure=lambda *_: None,
        ensure_compiled=lambda: "compiled with cc",
        tool=lambda _: str(program),
    )
    monkeypatch.setitem(sys.modules, "environment", own)
    assert runpy.run_path(str(DEMO))["main"](arguments) == launched
    commands = {each[0]: each[1:] for each in map(json.loads, calls.read_text().splitlines())}
    launch = commands["launch"]
    if launched == 8:  # refused: there is no run
        assert "report" not in commands
        return
    name = commands["report"][0]
    assert name in launch or f"--run-id={name}" in launch
    assert (name == "mine") == bool(arguments)
    assert ("--home" in commands["report"]) == ("--home" in arguments)
    assert capfd.readouterr().out.splitlines()[-1] == f"report: /runs/{name}"
