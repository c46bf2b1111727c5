"""The NUMA nodes of this machine: which cards and network interfaces are on which.

A machine with several processors has memory and devices at each: a node. What a process of another
node reads or writes there crosses the link between the processors. All is read from /sys and /proc,
without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from isthmus.topology.spec.machine_facts import NumaDevice

ROOT = Path("/")
_NODES = "sys/devices/system/node"
_INTERFACES = "sys/class/net"
_DEVICES = "sys/bus/pci/devices"
_CARDS = "proc/driver/nvidia/gpus"
_ROUTES = "proc/net/route"


def nodes(root: Path = ROOT) -> list[int]:
    """Return the machine's nodes; none where the kernel tells of none."""
    return sorted(int(each.name[4:]) for each in (root / _NODES).glob("node[0-9]*"))


def node_of_interface(name: str, root: Path = ROOT) -> int | None:
    """Return the node of a network interface; None: it has no device, or the kernel does not know.

    One that is made of others, as a bond or a VLAN, is where all of these are.
    """
    folder = root / _INTERFACES / name
    if (folder / "device").exists():
        return _node(folder / "device" / "numa_node")
    lower = [each.name.removeprefix("lower_") for each in folder.glob("lower_*")]
    found = {node_of_interface(each, root) for each in lower}
    return found.pop() if len(found) == 1 else None


def visible_cards(environ: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """Return the PCI addresses of the cards that CUDA counts, in its order."""
    addresses = sorted(each.name for each in (root / _CARDS).glob("*"))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return addresses
    found = []
    for each in map(str.strip, chosen.split(",")):
        address = _card_named(each, addresses, root)
        if address is None:
            break  # as CUDA does
        found.append(address)
    return found


def _card_named(name: str, addresses: list[str], root: Path) -> str | None:
    """Return the address of the card with an index, or with the begin of a UUID."""
    if name.isdecimal():
        return addresses[int(name)] if int(name) < len(addresses) else None
    for address in addresses if name else ():
        found = re.search(
            r"^GPU UUID:\s*(\S+)", _read(root / _CARDS / address / "information"), re.MULTILINE
        )
        if found and found[1].startswith(name):
            return address
    return None


def default_interface(root: Path = ROOT) -> str | None:
    """Return the interface of the default route (IPv4)."""
    rows = (line.split() for line in _read(root / _ROUTES).splitlines()[1:])
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def devices(
    interfaces: Iterable[str], environ: Mapping[str, str], root: Path = ROOT
) -> tuple[NumaDevice, ...]:
    """Return the nodes of all cards and of some interfaces, as far as they are known."""
    named = [("interface", each, node_of_interface(each, root)) for each in interfaces]
    cards = enumerate(visible_cards(environ, root))
    named += [("card", str(index), _node_of_address(each, root)) for index, each in cards]
    return tuple(
        NumaDevice(kind=kind, name=name, node=node)
        for kind, name, node in named
        if node is not None
    )


def _node_of_address(address: str, root: Path) -> int | None:
    return _node(root / _DEVICES / address / "numa_node")


def _node(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None  # -1: not known


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
