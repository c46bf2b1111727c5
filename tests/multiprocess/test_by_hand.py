"""The same job file across real address spaces.

Every process started by hand, each site on its own address.
"""

import json

import pytest

from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]

SITES = [(1, 1), (2, 1)]


def test_coordinator_and_agents_as_separate_commands(run: Bench) -> None:
    topology = topology_yaml(SITES, emulate=False, addresses=["127.0.0.2", "127.0.0.3"])
    job = run.write(topology, job_yaml(steps=3))
    topology_path, state = str(run.folder / "topology.yaml"), run.folder / "coordinator"
    run.start(
        *("coordinator", "--topology", topology_path, "--state", str(state)),
        *("--bind", "127.0.0.4:0"),
    )
    announced = state / "coordinator.json"
    run.wait_for("the coordinator", announced.exists, 30)
    address = json.loads(announced.read_text())["address"]
    assert address.startswith("127.0.0.4:")
    agents = {
        site: run.start(
            *("agent", "--site", site, "--coordinator", address),
            *("--topology", topology_path, "--state", str(run.folder / f"agent-{site}")),
        )
        for site in ("a", "b")
    }

    result = run.isthmus("launch", str(job), "--coordinator", address, "--json").check()

    assert result.envelope["data"]["verified_steps"] == 1 + 3
    again = run.isthmus("launch", str(job), "--coordinator", address, "--json").check()
    assert again.envelope["data"]["run_id"] != result.envelope["data"]["run_id"]
    gateways = " ".join(path.read_text() for path in run.folder.rglob("metrics.jsonl"))
    assert '"source": "a"' in gateways
    for agent in agents.values():
        agent.terminate()
    for site, agent in agents.items():
        assert agent.wait(30) in (0, 143), f"agent {site}\n{run.logs()}"
