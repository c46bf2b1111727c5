"""Which connections cross an emulated WAN: every site's to every gateway that it has links with."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.core.events import Endpoint
from orchestrator.emulator.config import RelayEndpoint
from topology.world import Topology


def dialled(topology: Topology, listening: Iterable[Endpoint]) -> tuple[RelayEndpoint, ...]:
    """Return one endpoint for each gateway and each site that has links to and from it."""
    return tuple(
        RelayEndpoint(
            source=site.name,
            target=gateway.site,
            node=gateway.node,
            host=gateway.host,
            port=gateway.port,
        )
        for gateway in listening
        for site in topology.sites
        if topology.link(site.name, gateway.site) and topology.link(gateway.site, site.name)
    )
