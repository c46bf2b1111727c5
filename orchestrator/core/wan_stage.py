"""Where the WAN of a run is emulated.

By packets in namespaces, before sites prepare; or by a relay, after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.core import events
from orchestrator.core.events import Action, Endpoint, Namespace, RecordEvent
from topology.world import Topology

FALLBACK = (
    "emulating the WAN in user space: no slow start, congestion control or retransmission, because"
)


class WanStage:
    """Pure. Asks for an emulator once, and knows what came of it."""

    def __init__(self, topology: Topology) -> None:
        self.uses_relay = topology.emulate and topology.emulator == "relay"
        self._may_fall_back = topology.emulator != "netns"
        needs_namespaces = topology.emulate and not self.uses_relay
        self.namespaces: Mapping[str, Namespace] | None = None if needs_namespaces else {}
        """By site; None until they are open."""
        self._are_namespaces_asked = False
        self._is_relay_asked = False

    @property
    def awaits_namespaces(self) -> bool:
        """Whether they were asked for, and have not come."""
        return self._are_namespaces_asked and self.namespaces is None

    def ask_for_namespaces(self) -> list[Action]:
        """Return what opens them, the first time."""
        is_first, self._are_namespaces_asked = not self._are_namespaces_asked, True
        return [events.OpenNamespaces()] if is_first else []

    def ask_for_relay(self, listening: tuple[Endpoint, ...]) -> list[Action]:
        """Return what opens it, the first time."""
        is_first, self._is_relay_asked = not self._is_relay_asked, True
        return [events.OpenRelay(listening)] if is_first else []

    def opened(self, namespaces: Mapping[str, Namespace]) -> list[Action]:
        """Packets are emulated."""
        if not self.awaits_namespaces:
            return []
        self.namespaces = namespaces
        return [RecordEvent("wan.emulated", detail={"emulator": "netns"})]

    def fall_back(self, why: str) -> list[Action] | None:
        """Take the relay instead, and say what that loses; None where the topology forbids it."""
        if not self._may_fall_back:
            return None
        self.namespaces, self.uses_relay = {}, True
        return [RecordEvent("wan.fallback", detail={"note": f"{FALLBACK} {why}"})]
