"""Launches a job for a benchmark, and reads what the run wrote."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.protos.own_processes import own_command

Records = list[dict[str, Any]]


def launched(
    topology: str,
    trainer: Mapping[str, object],
    settings: Sequence[str],
    *,
    within_s: float,
    more: Sequence[str] = (),
) -> Records:
    """Return all metrics of a run; none, and why on stdout, if it failed.

    Args:
        topology: YAML.
        trainer: the job's section.
        settings: of `--set`.
        within_s: deadline.
        more: arguments of `launch`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "topology.yaml").write_text(topology)
        job = {"version": 1, "name": "bench", "topology": "topology.yaml", "trainer": trainer}
        (folder / "job.yaml").write_text(json.dumps(job))
        arguments = ["launch", str(folder / "job.yaml"), "--home", str(folder / "home"), *more]
        for each in settings:
            arguments += ["--set", each]
        done = subprocess.run(
            own_command("isthmus.orchestrator.cli.main", *arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )
        if done.returncode != 0:
            print(done.stderr[-2000:], flush=True)
            return []
        (metrics,) = folder.glob("home/runs/*/metrics.jsonl")
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def of_kind(records: Records, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the records of one kind."""
    return (each for each in records if each["kind"] == kind)
