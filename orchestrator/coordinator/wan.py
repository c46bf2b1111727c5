"""What a run needs of an emulated WAN, where its topology asks for one.

The emulator predicts nothing and leads nothing, so no run on real links loads it: it is found by
its name, here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.topology.spec.world import Topology

_EMULATED = "isthmus.orchestrator.emulator.run_wan"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What is to happen to the WAN and the sites of a run."""

    script: object
    """As the emulator's `load_faults_file` returns it."""
    seed: int | None
    """None: the script's own."""
    agent_pid: Callable[[str], int | None]
    """Return the process of a site's agent; None: it has none by now."""


class Wan(Protocol):
    """An emulated WAN of one run."""

    def open(self, asked: run_events.OpenNamespaces | run_events.OpenRelay) -> None:
        """Begin to open what the core asks for; it is told what came of it."""

    def play(self) -> None:
        """Begin with the faults; their times count from now. A second call changes nothing."""

    async def close(self) -> None:
        """End the faults and the emulator; return when it is gone. Idempotent."""


class _Emulation(Protocol):
    """What the emulator's module has."""

    def load_faults_file(self, path: Path, topology: Topology) -> object: ...

    def RunWan(  # noqa: N802 - a class
        self,
        topology: Topology,
        faults: FaultPlan | None,
        folder: Path,
        *,
        handle: Callable[[run_events.Event], None],
        record: Callable[[EventKind, str, dict[str, Any]], None],
        add_metrics: Callable[[Iterable[Mapping[str, Any]]], None],
    ) -> Wan: ...


def emulation() -> _Emulation:
    """Load the emulator."""
    return cast("_Emulation", importlib.import_module(_EMULATED))
