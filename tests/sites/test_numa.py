"""Where cards and network interfaces are, read from a made-up machine of two NUMA nodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.protos.usable_cores import usable_cores
from isthmus.sites.facts import numa
from isthmus.sites.gateway.numa_binding import bind_to_node
from isthmus.topology.spec.machine_facts import NumaDevice
from tests.fakes.gateway_sites import GATHER_2, gateway_config

NODES = {0: "0-7,16-23", 1: "8-15,24"}
INTERFACES = {"eth0": "0", "eth1": "1", "wlan0": "-1"}
CARDS = {"0000:17:00.0": "0", "0000:18:00.0": "0", "0000:9d:00.0": "1"}
UUIDS = ("GPU-aaaa-1", "GPU-bbbb-2", "GPU-bbbb-3")
ROUTES = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask
eth0	000200C0	00000000	0001	0	0	0	00FFFFFF
eth1	00000000	010200C0	0003	0	0	0	00000000
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of two nodes with three cards, and interfaces of both."""
    for node, cores in NODES.items():
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", f"{cores}\n")
    write(tmp_path / "sys/devices/system/node/online", "0-1\n")
    for name, of in INTERFACES.items():
        write(tmp_path / f"sys/class/net/{name}/device/numa_node", f"{of}\n")
    for name, lower in {"bond0": ["eth1"], "vlan7": ["bond0"], "both": ["eth0", "eth1"]}.items():
        for each in lower:
            write(tmp_path / f"sys/class/net/{name}/lower_{each}", "")
    write(tmp_path / "sys/class/net/lo/operstate", "unknown")
    for (address, of), uuid in zip(CARDS.items(), UUIDS, strict=True):
        write(tmp_path / f"sys/bus/pci/devices/{address}/numa_node", f"{of}\n")
        text = f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nBus Location: {address}\n"
        write(tmp_path / f"proc/driver/nvidia/gpus/{address}/information", text)
    write(tmp_path / "proc/net/route", ROUTES)
    return tmp_path


def test_nodes_have_cores(root: Path, tmp_path: Path) -> None:
    assert numa.nodes(root) == [0, 1]
    assert numa.cores_of(0, root) == {*range(8), *range(16, 24)}
    assert numa.cores_of(1, root) == {*range(8, 16), 24}
    assert numa.cores_of(2, root) == set()
    assert numa.nodes(tmp_path / "other") == []


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("eth0", 0),
        ("eth1", 1),
        ("wlan0", None),
        ("lo", None),
        ("none", None),
        ("bond0", 1),
        ("vlan7", 1),
        ("both", None),
    ],
)
def test_an_interface_is_where_its_device_is(root: Path, name: str, node: int | None) -> None:
    assert numa.node_of_interface(name, root) == node


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        (None, [0, 0, 1, None]),
        ("2,0", [1, 0, None]),
        ("GPU-bbbb-3, GPU-aaaa", [1, 0, None]),
        ("0,9,1", [0, None]),
        ("", [None]),
        ("MIG-1", [None]),
    ],
)
def test_cards_are_those_that_cuda_counts(
    root: Path, visible: str | None, nodes: list[int | None]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = [numa.node_of_card(index, environ, root) for index in range(len(nodes))]
    assert found == nodes


def test_devices_are_told_as_far_as_they_are_known(root: Path) -> None:
    assert numa.default_interface(root) == "eth1"
    found = numa.devices(["eth1", "wlan0"], {"CUDA_VISIBLE_DEVICES": "1,2"}, root)
    assert found == (
        NumaDevice(kind="interface", name="eth1", node=1),
        NumaDevice(kind="card", name="0", node=0),
        NumaDevice(kind="card", name="1", node=1),
    )


# A gateway's cores.


@pytest.fixture
def first_core() -> Iterator[int]:
    """A core that this process may use; it may use the same ones afterwards."""
    before = os.sched_getaffinity(0)
    yield min(before)
    os.sched_setaffinity(0, before)


def bound(root: Path, **settings: Any) -> set[int]:  # noqa: ANN401 - any field
    """Return the cores of a gateway with these settings."""
    before = os.sched_getaffinity(0)
    config = gateway_config(root, GATHER_2, 0, **settings)
    bind_to_node(config, {}, root)
    found = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    return found


def test_a_gateway_runs_where_the_topology_says(root: Path, first_core: int) -> None:
    everywhere = os.sched_getaffinity(0)
    write(root / "sys/devices/system/node/node0/cpulist", "9000")
    write(root / "sys/devices/system/node/node1/cpulist", f"{first_core},9001")
    assert bound(root) == everywhere
    assert bound(root, numa="nic", interface="eth1", bind_host="") == {first_core}
    assert bound(root, numa="nic", bind_host="0.0.0.0") == {first_core}, "by the default route"
    assert bound(root, numa="card", card=2) == {first_core}


def test_the_cores_of_its_node_are_those_that_count(root: Path, first_core: int) -> None:
    write(root / "sys/devices/system/node/node1/cpulist", str(first_core))
    bind_to_node(gateway_config(root, GATHER_2, 0, numa="card", card=2), {}, root)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"numa": "card", "card": 5}, "card 5: on an unknown NUMA node"),
        ({"numa": "nic", "interface": "lo"}, "interface lo: on an unknown NUMA node"),
        ({"numa": "card", "card": 0}, "may use no core of NUMA node 0, where card 0 is"),
    ],
)
def test_what_cannot_be_bound_is_told_and_runs_anywhere(
    root: Path, settings: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(root / "sys/devices/system/node/node0/cpulist", "9000")
    with caplog.at_level(logging.WARNING):
        assert bound(root, **settings) == os.sched_getaffinity(0)
    assert said in caplog.text
