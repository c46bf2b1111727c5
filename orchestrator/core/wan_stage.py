"""How a run's WAN is emulated, as far as the run's start depends on it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.run_events import Action, Endpoint, RecordEvent, SiteNamespace
from isthmus.topology.spec.world import Topology

FALLBACK = (
    "emulating the WAN in user space: no slow start, congestion control or retransmission, because"
)


class WanStage:
    """How a run's WAN is emulated: asks for an emulator once, and knows what came of it.

    Packets are emulated in namespaces, which are there before sites prepare. A relay dials the
    gateways, so it is opened after sites have prepared, and led to those that are started later.
    """

    def __init__(self, topology: Topology) -> None:
        self.uses_relay = topology.emulate and topology.emulator == "relay"
        self.may_fall_back = topology.emulator != "netns"
        """Whether a relay will do where packets cannot be emulated."""
        needs_namespaces = topology.emulate and not self.uses_relay
        self.namespaces: Mapping[str, SiteNamespace] | None = None if needs_namespaces else {}
        """The sites' namespaces; None until they are open."""
        self._are_namespaces_asked = False
        self._is_relay_asked = False
        self._ways: dict[Endpoint, Mapping[str, Endpoint]] = {}
        """For each gateway to which a relay leads: where it is dialled instead, by the dialler."""

    @property
    def awaits_namespaces(self) -> bool:
        """Whether namespaces were asked for, and have not come."""
        return self._are_namespaces_asked and self.namespaces is None

    def ask_for_namespaces(self) -> list[Action]:
        """Return the action that opens namespaces; none where they were asked for before."""
        is_first, self._are_namespaces_asked = not self._are_namespaces_asked, True
        return [run_events.OpenNamespaces()] if is_first else []

    def ask_for_relay(self, listening: Iterable[Endpoint]) -> list[Action]:
        """Return the action that opens the relay; none where it was asked for before."""
        is_first, self._is_relay_asked = not self._is_relay_asked, True
        return [run_events.OpenRelay(tuple(listening))] if is_first else []

    def await_others(self) -> None:
        """Gateways will listen elsewhere, to which a relay has to lead anew."""
        self._is_relay_asked = False

    def lead_to(self, listening: Sequence[Endpoint]) -> list[Action]:
        """Have the relay, if there is one, lead to these gateways of a site, not to older ones."""
        if not (self.uses_relay and listening):
            return []
        site = listening[0].site
        self._ways = {each: ways for each, ways in self._ways.items() if each.site != site}
        return [run_events.OpenRelay(tuple(listening))]

    def leads_to(self, listening: Iterable[Endpoint]) -> bool:
        """Whether all these gateways can be dialled by now."""
        return not self.uses_relay or all(each in self._ways for each in listening)

    def ways(self, dialler: str, listening: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
        """Return where a site dials these gateways, as far as it can.

        Those without a port dial it, and stand there as they are.
        """
        if not self.uses_relay:
            return tuple(listening)
        found = [
            each if not each.port else self._ways.get(each, {}).get(dialler) for each in listening
        ]
        return tuple(each for each in found if each is not None)

    def relay_opened(self, ways: Mapping[Endpoint, Mapping[str, Endpoint]]) -> list[Action]:
        """Take where the relay listens for each of some gateways."""
        is_first = not self._ways
        self._ways.update(ways)
        return (
            [RecordEvent(EventKind.WAN_EMULATED, detail={"emulator": "relay"})] if is_first else []
        )

    def opened(self, namespaces: Mapping[str, SiteNamespace]) -> list[Action]:
        """Take the namespaces in which packets are emulated."""
        if not self.awaits_namespaces:
            return []
        self.namespaces = namespaces
        return [RecordEvent(EventKind.WAN_EMULATED, detail={"emulator": "netns"})]

    def fall_back(self, why: str) -> list[Action]:
        """Take the relay instead, and say what that loses."""
        self.namespaces, self.uses_relay = {}, True
        return [RecordEvent(EventKind.WAN_FALLBACK, detail={"note": f"{FALLBACK} {why}"})]
