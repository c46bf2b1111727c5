"""Where cards and network interfaces are, read from a made-up machine of two NUMA nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.sites.facts import numa
from isthmus.topology.spec.machine_facts import NumaDevice

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


def test_nodes_are_counted(root: Path, tmp_path: Path) -> None:
    assert numa.nodes(root) == [0, 1]
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
        (None, [0, 0, 1]),
        ("2,0", [1, 0]),
        ("GPU-bbbb-3, GPU-aaaa", [1, 0]),
        ("0,9,1", [0]),
        ("", []),
        ("MIG-1", []),
    ],
)
def test_cards_are_those_that_cuda_counts(
    root: Path, visible: str | None, nodes: list[int]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = [device.node for device in numa.devices([], environ, root)]
    assert found == nodes


def test_devices_are_told_as_far_as_they_are_known(root: Path) -> None:
    assert numa.default_interface(root) == "eth1"
    found = numa.devices(["eth1", "wlan0"], {"CUDA_VISIBLE_DEVICES": "1,2"}, root)
    assert found == (
        NumaDevice(kind="interface", name="eth1", node=1),
        NumaDevice(kind="card", name="0", node=0),
        NumaDevice(kind="card", name="1", node=1),
    )
