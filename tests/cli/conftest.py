"""How tests run the command line: in this process, with its streams kept apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.cli.main import main
from isthmus.topology.presets.templates import job_yaml, topology_yaml

SMALL_TOPOLOGY = """\
version: 1
name: three
accelerators: {chip: {peak: {bf16: 50MFLOP/s}, memory: 4GiB, mfu: 0.5}}
sites:
  - {name: a, nodes: 1, accelerators_per_node: 2, accelerator: chip, wan: {address: 127.0.0.2}}
  - {name: b, like: a, accelerators_per_node: 1}
  - {name: c, like: b}
links:
  - {between: [a, b], bandwidth: 100Mbit/s, rtt: 10ms}
  - {between: [b, c], bandwidth: 100kbit/s, rtt: 10ms}
  - {between: [a, c], bandwidth: 100kbit/s, rtt: 10ms}
emulate: true
"""
SMALL_JOB = """\
version: 1
name: job
topology: topology.yaml
exchange: {codec: fp32}
trainer:
  global_batch: 12
  micro_batch: 4
  model: {layers: 1, heads: 1, width: 32, context: 16}
"""
"""Planned in a fraction of a second: links that differ a hundredfold, a model of some kilobytes."""


@dataclass(frozen=True)
class Result:
    """What one command line left on its streams."""

    code: int
    out: str
    err: str

    @property
    def envelope(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        (line,) = self.out.splitlines()
        value: dict[str, Any] = json.loads(line)
        return value

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The JSON Lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


Isthmus = Callable[..., Result]


@pytest.fixture
def isthmus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> Isthmus:
    """Run one command line with a HOME of its own."""
    monkeypatch.setenv("ISTHMUS_HOME", str(home))
    monkeypatch.delenv("ISTHMUS_COORDINATOR", raising=False)

    def run(*arguments: str | Path) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The command line's HOME."""
    return tmp_path / "home"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the files of `isthmus init`."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "topology.yaml").write_text(topology_yaml())
    (folder / "job.yaml").write_text(job_yaml())
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job of three small sites, which is planned quickly."""
    (tmp_path / "topology.yaml").write_text(SMALL_TOPOLOGY)
    (tmp_path / "job.yaml").write_text(SMALL_JOB)
    return tmp_path / "job.yaml"
