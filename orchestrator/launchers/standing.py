"""The state of what `isthmus up` has started, in the folder HOME/up/NAME.

The keeper holds the lock in the folder, so the lock alone shows whether it is up.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isthmus.orchestrator.run_folder.home import is_folder_name, read_object
from isthmus.orchestrator.run_folder.run_files import strict_json, write_atomically
from isthmus.orchestrator.run_folder.state_lock import is_abandoned
from isthmus.topology.spec.hashing import topology_hash
from isthmus.topology.spec.world import Topology

FOLDER = "up"
STATE = "keeper.json"
LOG = "keeper.log"
COORDINATOR = "coordinator"
AGAIN = signal.SIGCONT
"""Signal that makes a keeper restart waiting parts at once."""

STARTING, UP, RESTARTING, FAILED, ENDED, UNKNOWN = (
    "starting",
    "up",
    "restarting",
    "failed",
    "ended",
    "unknown",
)
"""States of a part. RESTARTING: it was up, and is restarted repeatedly. FAILED: it was never up,
and is not tried again before the next `isthmus up`. UNKNOWN: the connection was lost, so it may
still run."""


@dataclass(slots=True)
class Part:
    """The coordinator, or the agent of a site."""

    state: str = STARTING
    reason: str = ""
    """A word for programs, if the part failed; else empty."""
    message: str = ""
    cure: str = ""
    restarts: int = 0


@dataclass(slots=True)
class Standing:
    """The parts that the keeper has started, with their states."""

    pid: int
    topology_hash: str
    address: str = ""
    """Address of the coordinator; empty: it does not listen yet."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Started parts by name: COORDINATOR, and `site NAME` for each site."""

    def write(self, folder: Path) -> None:
        """Write the state into the folder, atomically."""
        write_atomically(folder / STATE, strict_json(asdict(self)) + "\n")

    @property
    def sites(self) -> dict[str, Part]:
        """Return the agents, by site."""
        return {
            name.removeprefix("site "): part
            for name, part in self.parts.items()
            if name != COORDINATOR
        }


def part_of_site(site: str) -> str:
    """Return the name of a site's part."""
    return f"site {site}"


def folder_of(home: Path, topology: Topology) -> Path:
    """Return the keeper's folder for a topology of that name."""
    return home / FOLDER / (topology.name if is_folder_name(topology.name) else "topology")


def is_up(folder: Path) -> bool:
    """Whether a keeper holds the folder."""
    return not is_abandoned(folder)


def read(folder: Path) -> Standing | None:
    """Return the state that the keeper wrote last; None: no valid one."""
    state = read_object(folder / STATE)
    try:
        parts = state["parts"]
        assert isinstance(parts, Mapping)
        return Standing(
            pid=_number(state["pid"]),
            topology_hash=str(state["topology_hash"]),
            address=str(state["address"]),
            parts={str(name): Part(**_mapping(part)) for name, part in parts.items()},
        )
    except (KeyError, TypeError, ValueError, AssertionError):
        return None


def coordinator_of(home: Path, topology: Topology) -> str | None:
    """Return the address of a running coordinator for exactly this topology; None: none."""
    folder = folder_of(home, topology)
    standing = read(folder) if folder.is_dir() and is_up(folder) else None
    if standing is None or standing.topology_hash != topology_hash(topology):
        return None
    return standing.address or None


def _number(value: object) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError("want a pid")
    return value


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("want an object")
    return value
