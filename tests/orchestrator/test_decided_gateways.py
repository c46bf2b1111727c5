"""A coordinator decides how many gateways a node gets, by the cores that agents have told."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from isthmus.orchestrator.coordinator.control import Control
from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.lanes import decide_lanes
from isthmus.topology.spec.run_spec import RunSpec
from tests.fakes.coordinators import coordinating

TOPOLOGY = """\
version: 1
name: two
accelerators: {chip: {peak: {bf16: 1TFLOP/s}, memory: 4GiB}}
sites:
  - {name: a, nodes: 1, accelerators_per_node: 4, accelerator: chip}
  - {name: b, like: a}
links: [{between: [a, b], bandwidth: 100Gbit/s, rtt: 1ms}]
security: {mode: insecure}
"""


def test_the_run_has_as_many_as_each_sites_cores_allow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> list[int]:
        async with coordinating(tmp_path, TOPOLOGY) as bench:
            agents = [await bench.dial("a", usable_cores=8), await bench.dial("b", usable_cores=6)]
            for agent in agents:
                await agent.hear("welcome")
            await bench.submit()
            prepares = [(await agent.hear("prepare")).prepare for agent in agents]
            assert prepares[0].run_spec == prepares[1].run_spec
            spec = RunSpec.from_bytes(prepares[0].run_spec)
            return [site.gateways_per_node for site in spec.topology.sites]

    with caplog.at_level("INFO"):
        assert asyncio.run(run()) == [2, 1]
    assert (
        "site a: gateways a node: 2; links ask for 9, ranks allow 4, cores allow 2; limited by cores"
    ) in caplog.messages


def test_an_agent_that_is_not_there_or_says_nothing_has_one(tmp_path: Path) -> None:
    async def run() -> list[int]:
        async with coordinating(tmp_path, TOPOLOGY) as bench:
            first = await bench.dial("a", usable_cores=0)
            await first.hear("welcome")
            await bench.submit()
            second = await bench.dial("b", usable_cores=64)
            await second.hear("welcome")
            spec = RunSpec.from_bytes((await first.hear("prepare")).prepare.run_spec)
            return [site.gateways_per_node for site in spec.topology.sites]

    assert asyncio.run(run()) == [1, 1]


def test_sites_that_are_all_here_share_the_cores_of_this_machine(tmp_path: Path) -> None:
    async def run() -> dict[str, int]:
        world = load_topology(TOPOLOGY, "topology.yaml")
        with closing(Journal(tmp_path)) as journal:
            control = Control(world, journal, tmp_path / "runs", own_cores=16)
            decided = decide_lanes(world, control.machines())
            await control.close()
            return {site: lanes.num_gateways for site, lanes in decided.items()}

    assert asyncio.run(run()) == {"a": 2, "b": 2}
