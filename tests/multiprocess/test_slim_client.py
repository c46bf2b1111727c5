"""Coordinator and client of a run need no torch: only the sites' agents have what trains."""

import json
from pathlib import Path

import pytest

from tests.fakes.slim_python import make_slim_python
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]


def test_a_run_led_and_read_without_torch(run: Bench, tmp_path: Path) -> None:
    slim = str(make_slim_python(tmp_path / "venv"))
    topology = topology_yaml([(1, 1), (1, 1)], emulate=False, addresses=["127.0.0.2", "127.0.0.3"])
    job = run.write(topology, job_yaml(steps=3))
    path, state = str(run.folder / "topology.yaml"), run.folder / "coordinator"
    run.start(
        *("coordinator", "--topology", path, "--state", str(state), "--bind", "127.0.0.4:0"),
        python=slim,
    )
    announced = state / "coordinator.json"
    run.wait_for("the coordinator", announced.exists, 30)
    address = json.loads(announced.read_text())["address"]
    for site in ("a", "b"):
        run.start(
            *("agent", "--site", site, "--coordinator", address),
            *("--topology", path, "--state", str(run.folder / f"agent-{site}")),
        )
    launch = ("launch", str(job), "--run-id", "one", "--coordinator", address, "--json")
    result = run.isthmus(*launch, python=slim).check()
    assert result.envelope["data"]["verified_steps"] == 1 + 3
    for words in (("status", "one"), ("logs", "one"), ("events", "one"), ("report", "one")):
        run.isthmus(*words, "--json", python=slim).check()
