"""bench.json: what is written is read again, and nothing else is.

The tables: every figure in its row, and nothing that a terminal would obey.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from isthmus.orchestrator.evidence.bench.bench_tables import scaling_tables
from isthmus.orchestrator.evidence.record.bench_record import Bench, read_bench, write_bench
from isthmus.topology.spec.errors import ConfigError
from tests.fakes.benches import a_bench, an_interrupted_bench


@pytest.mark.parametrize("bench", [a_bench(), an_interrupted_bench()], ids=["whole", "interrupted"])
def test_what_is_written_is_read_again(tmp_path: Path, bench: object) -> None:
    path = tmp_path / "bench.json"
    write_bench(path, bench)  # type: ignore[arg-type]
    assert read_bench(path) == bench
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda data: data.update(schema_version=2), "[schema_version]"),
        (lambda data: data.update(extra=1), "[extra]"),
        (lambda data: data["question"].update(steps="20"), "[question.steps]"),
        (lambda data: data["settings"][0]["result"].pop("efficiency"), "efficiency"),
        (lambda data: data["settings"][0]["runs"][0].update(measured=None), "measured or failed"),
        (lambda data: data["settings"][0]["runs"][0].update(site=None), "want a site"),
    ],
)
def test_anything_else_is_refused_with_its_place(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], place: str
) -> None:
    path = tmp_path / "bench.json"
    write_bench(path, a_bench())
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as raised:
        read_bench(path)
    assert place in str(raised.value)
    assert str(path) in str(raised.value)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text('{"name": ')
    with pytest.raises(ConfigError, match="JSON"):
        read_bench(path)


def rendered(bench: Bench, width: int = 160, encoding: str = "utf-8") -> str:
    console = Console(
        file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), width=width, color_system=None
    )
    with console.capture() as captured:
        console.print(scaling_tables(bench))
    return captured.get()


def test_settings_have_a_row_with_their_figures() -> None:
    shown = rendered(a_bench())
    assert "modelled compute" in shown
    assert "user space (relay)" in shown
    assert "20 steps after 5" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("20ms")]
    # 0.4 s of 0.4 + 0.32 + 0.01 s; each repeat is a thousandth slower than the one before.
    assert rows[0][:5] == ["20ms", "50Mbit/s", "0.547", "±", "0.001"]
    assert any("virginia → oregon" in line for line in shown.splitlines())
    assert "egress, 1e9 tokens" in shown


def test_what_is_not_measured_is_a_dash() -> None:
    shown = rendered(an_interrupted_bench())
    rows = [line.split() for line in shown.splitlines() if line.startswith("80ms")]
    assert rows[0][2:] == ["-", "-", "-", "-", "-", "-", "0", "-", "-"]


def test_before_the_first_repeat_there_is_nothing_to_tabulate() -> None:
    bench = an_interrupted_bench()
    shown = rendered(dataclasses.replace(bench, settings=bench.settings[1:]))
    assert "no repeat is complete yet" in shown
    assert "where a step's time went" not in shown


def test_a_narrow_terminal_shows_the_first_columns() -> None:
    assert all(len(line) <= 60 for line in rendered(a_bench(), width=60).splitlines())


def test_ascii_is_enough() -> None:
    assert rendered(a_bench(), encoding="ascii").isascii()


def test_names_are_words() -> None:
    bench = dataclasses.replace(a_bench(), name="a\x1b[31m[red]b")
    shown = rendered(bench)
    assert "\x1b" not in shown
    assert "[red]b" in shown
