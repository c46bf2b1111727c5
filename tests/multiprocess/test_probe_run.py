"""A probe of an emulated link: real agents and gateways, and figures that are those configured."""

from __future__ import annotations

import json

import pytest

from isthmus.topology.documents.load import load_topology
from tests.multiprocess.harness import Bench, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]

END_S = 30.0


def test_what_is_configured_is_measured_and_written_back(run: Bench) -> None:
    text = topology_yaml([(2, 4), (1, 1)], emulator="relay", rtt="10ms", bandwidth="20Mbit/s")
    path = run.folder / "topology.yaml"
    path.write_text(f"{text}# by hand\n")

    done = run.isthmus(
        *("probe", str(path), "--connections", "2", "--window", "200ms", "--write", "--json")
    ).check()

    data = done.envelope["data"]
    assert data["emulator"] == "relay"
    assert [(each["source"], each["target"]) for each in data["links"]] == [("a", "b"), ("b", "a")]
    for each in data["links"]:
        assert (each["configured_bytes_per_s"], each["configured_rtt_s"]) == (2.5e6, 0.01)
        # What was configured is the floor of the one and about the ceiling of the other.
        assert each["rtt_s_p50"] >= 0.0095, each
        assert 0 < each["bandwidth_bytes_per_s"] <= 1.3 * 2.5e6, each
        assert each["loss"] is None  # TCP ends at the relay
    after = path.read_text()
    assert after.endswith("# by hand\n")
    link = load_topology(after, "t").link("b", "a")
    assert link is not None
    assert (link.rtt_origin, link.measured_at) == ("measured", data["at"])
    run.wait_for_nothing_left(END_S)


def test_a_probe_through_a_coordinator_that_runs_already(run: Bench) -> None:
    """Coordinator and agents are started by hand, each a command of its own."""
    text = topology_yaml([(1, 1), (1, 1)], emulator="relay", rtt="10ms", bandwidth="20Mbit/s")
    path, state = run.folder / "topology.yaml", run.folder / "coordinator"
    path.write_text(text)
    run.start("coordinator", "--topology", str(path), "--state", str(state))
    announced = state / "coordinator.json"
    run.wait_for("the coordinator", announced.exists, END_S)
    address = json.loads(announced.read_text())["address"]
    for site in "ab":
        run.start(
            *("agent", "--site", site, "--coordinator", address, "--topology", str(path)),
            *("--state", str(run.folder / f"agent-{site}")),
        )
    few = ("--connections", "1", "--window", "100ms")
    asked = ("probe", str(path), "--coordinator", address, "--json", *few)

    data = run.isthmus(*asked, "--write").check().envelope["data"]

    assert data["emulator"] == "relay"
    assert [(each["source"], each["target"]) for each in data["links"]] == [("a", "b"), ("b", "a")]
    assert all(each["rtt_s_p50"] >= 0.0095 for each in data["links"]), data
    assert data["written"] == [str(path)]
    link = load_topology(path.read_text(), "t").link("a", "b")
    assert link is not None
    assert (link.rtt_origin, link.measured_at) == ("measured", data["at"])
    # To coordinator and agents the file is another topology now, which they have not read.
    refused = run.isthmus(*asked)
    assert refused.envelope["error"]["code"] == "CONFIG_MISMATCH"
