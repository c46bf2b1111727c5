"""bench.json: what is written is read again, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.evidence.record.bench_record import read_bench, write_bench
from tests.fakes.benches import a_bench, an_interrupted_bench
from topology.errors import ConfigError


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
