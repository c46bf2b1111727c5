"""Several gateways a node: the same bits as with one, and each is watched by itself."""

import json
import re
from pathlib import Path

import pytest

from isthmus.orchestrator.coordinator.local_agents import agent_arguments
from isthmus.orchestrator.documents import load_topology_file
from isthmus.topology.spec.run_spec import RunSpec
from tests.multiprocess.harness import (
    UNDER_BOTH_SECURITIES,
    Bench,
    bench,
    job_yaml,
    kill,
    topology_yaml,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "scripts" / "user_hash.py"


def parameters(folder: Path, gateways: int) -> set[str]:
    """Return the hashes of the parameters with which the ranks of a short run end."""
    folder.mkdir()
    # Lossy and with feedback: residuals are state that each gateway has of its own ranks.
    job = job_yaml(entrypoint=str(SCRIPT), codec="int8", tree="star")
    with bench(folder) as run:
        topology = topology_yaml([(1, 4), (1, 2)], rtt="2ms", gateways=gateways)
        result = run.launch(topology, job + 'arguments: ["6"]\n').check()
        assert result.envelope["data"]["verified_steps"] == 1 + 6
        logs = sorted(path.name for path in run.run_folder().glob("sites/a/node0/gateway*.log"))
        assert logs == [f"gateway{index}.log" for index in range(gateways)]
        said = run.isthmus("logs").check().out
    return set(re.findall(r"parameters ([0-9a-f]{64})", said))


@pytest.mark.exhaustive
def test_two_gateways_a_node_give_the_bits_of_one(tmp_path: Path) -> None:
    one, two = parameters(tmp_path / "one", 1), parameters(tmp_path / "two", 2)
    assert len(one) == 1
    assert two == one


@pytest.mark.exhaustive
def test_auto_is_as_many_as_the_cores_of_agents_allow(run: Bench) -> None:
    topology = topology_yaml(
        [(1, 2), (1, 1)],
        emulate=False,
        addresses=["127.0.0.2", "127.0.0.3"],
        bandwidth="100Gbit/s",
        gateways="auto",
    )
    job = run.write(topology, job_yaml(steps=3))
    path, state = run.folder / "topology.yaml", run.folder / "coordinator"
    run.start(
        *("coordinator", "--topology", str(path), "--state", str(state)),
        *("--bind", "127.0.0.4:0"),
    )
    announced = state / "coordinator.json"
    run.wait_for("the coordinator", announced.exists, 30)
    address = json.loads(announced.read_text())["address"]
    for site in ("a", "b"):
        folder = run.folder / f"agent-{site}"
        run.start(
            *agent_arguments(load_topology_file(path), site, address, folder),
            module="tests.fakes.agent_with_many_cores",
        )
        run.wait_for(f"site {site}", (folder / f"agent-{site}.json").exists, 30)

    result = run.isthmus("launch", str(job), "--coordinator", address, "--json").check()

    assert result.envelope["data"]["verified_steps"] == 1 + 3
    [written] = run.folder.glob("agent-a/**/run_spec.json")
    spec = RunSpec.from_bytes(written.read_bytes())
    assert [site.gateways_per_node for site in spec.topology.sites] == [2, 1]
    logs = sorted(path.name for path in run.folder.glob("agent-a/**/gateway*.log"))
    assert logs == ["gateway0.log", "gateway1.log"]


@pytest.mark.exhaustive
@UNDER_BOTH_SECURITIES
def test_a_killed_gateway_is_its_sites_failure(run: Bench) -> None:
    topology = topology_yaml([(1, 1), (1, 1)], rtt="2ms").replace(
        "name: b, nodes: 1, accelerators_per_node: 1, accelerator: core, wan: {gateways_per_node: 1",
        "name: b, nodes: 1, accelerators_per_node: 2, accelerator: core, wan: {gateways_per_node: 2",
    )
    job = run.write(topology, job_yaml(steps=100_000))
    process = run.start("launch", str(job), "--json")
    metrics = "runs/*/metrics.jsonl"
    run.wait_for(
        "first steps",
        lambda: any('"kind": "step"' in each.read_text() for each in run.home.glob(metrics)),
    )
    agent = run.pids("isthmus.sites.agent", "--site b")[0]
    gateways = run.children(agent, "isthmus.sites.gateway")
    assert len(gateways) == 2
    kill(gateways[1])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, f"{out}\n{err}\n{run.logs()}"
    error = json.loads(out)["error"]
    where = error["where"]
    assert (error["code"], where["site"], where["node"]) == ("GATEWAY_EXITED", "b", 0), error
    assert where["gateway"] == 1, error
    run.wait_for_nothing_left(20)
