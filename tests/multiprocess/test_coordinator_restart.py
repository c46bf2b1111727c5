"""The coordinator is killed while two sites train, and started again: the same run succeeds."""

import json
import os
import signal

import pytest

from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS = 600


def test_the_same_run_succeeds_and_no_step_is_lost(run: Bench) -> None:
    topology = topology_yaml([(1, 1), (1, 1)], emulate=False, detect_within="5s")
    job = run.write(topology, job_yaml(steps=STEPS))
    topology_path, state = str(run.folder / "topology.yaml"), run.folder / "coordinator"
    announced = state / "coordinator.json"

    def start(bind: str) -> str:
        run.start(
            *("coordinator", "--topology", topology_path, "--state", str(state), "--bind", bind)
        )
        run.wait_for("the coordinator", announced.exists, 30)
        address = json.loads(announced.read_text())["address"]
        assert isinstance(address, str)
        return address

    address = start("127.0.0.4:0")
    for site in ("a", "b"):
        run.start(
            *("agent", "--site", site, "--coordinator", address, "--topology", topology_path),
            *("--state", str(run.folder / f"agent-{site}")),
        )
    launched = run.isthmus(
        *("launch", str(job), "--coordinator", address, "--run-id", "one", "--detach", "--json")
    )
    assert launched.code == 0, launched.err
    metrics = state / "runs" / "one" / "metrics.jsonl"

    def steps() -> list[tuple[str, int]]:
        if not metrics.exists():
            return []
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [(each["site"], each["step"]) for each in records if each["kind"] == "step"]

    run.wait_for("first steps", lambda: len(steps()) > 40)

    os.kill(run.pids("orchestrator.coordinator")[0], signal.SIGKILL)
    announced.unlink()
    assert start(address) == address

    done = run.isthmus("wait", "one", "--coordinator", address, "--json", "--timeout", "100s")
    assert done.code == 0, f"{done.out}\n{done.err}\n{run.logs()}"
    assert sorted(set(steps())) == [
        (site, step) for site in ("a", "b") for step in range(1, STEPS + 1)
    ]
    assert len(steps()) < 2 * STEPS + 10, "but for what was just on the way"
    events = run.isthmus("events", "one", "--coordinator", address, "--json").check()
    kinds = [each["kind"] for each in events.envelope["data"]["events"]]
    assert kinds.count("run.submitted") == kinds.count("run.resumed") == 1
    assert kinds.count("site.returned") == 2
    assert kinds.count("site.prepared") == kinds.count("site.running") == 2
    assert kinds[-1] == "run.ended"
