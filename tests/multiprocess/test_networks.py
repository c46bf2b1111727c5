"""Whole runs on networks as they are: IPv6, and a site behind NAT on emulated links."""

from __future__ import annotations

import json

import pytest

from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]

SITES = [(1, 1), (1, 2)]


def test_a_run_over_ipv6_alone(run: Bench) -> None:
    topology = topology_yaml(SITES, emulate=False, addresses=['"::1"', '"::1"'])
    job = run.write(topology + 'coordinator: {bind: "[::1]:0"}\n', job_yaml(steps=3))
    path, state = str(run.folder / "topology.yaml"), run.folder / "coordinator"
    run.start("coordinator", "--topology", path, "--state", str(state))
    run.wait_for("the coordinator", (state / "coordinator.json").exists, 30)
    address = json.loads((state / "coordinator.json").read_text())["address"]
    assert address.startswith("[::1]:")
    for site in ("a", "b"):
        agent_state = str(run.folder / f"agent-{site}")
        given = ("--coordinator", address, "--topology", path, "--state", agent_state)
        run.start("agent", "--site", site, *given)
    result = run.isthmus("launch", str(job), "--coordinator", address, "--json").check()
    assert result.envelope["data"]["verified_steps"] == 1 + 3


@pytest.mark.parametrize("emulator", ["relay", "netns"])
def test_a_site_behind_nat_on_emulated_links(run: Bench, emulator: str) -> None:
    topology = topology_yaml(SITES, emulator=emulator, addresses=["127.0.0.1", "127.0.0.1"])
    topology = topology.replace("address: 127.0.0.1", "inbound: false", 1)
    job = run.write(topology, job_yaml(steps=3))
    result = run.isthmus("launch", str(job), "--json").check()
    assert result.envelope["data"]["verified_steps"] == 1 + 3
