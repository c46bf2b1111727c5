"""Configurations of both emulators of a WAN: two sites, eu and us, and a link between them."""

from __future__ import annotations

import itertools

from isthmus.orchestrator.emulator.emulator_config import NetnsConfig, RelayConfig, RelayEndpoint
from isthmus.orchestrator.emulator.link_shape import LinkShape

SITES = ("eu", "us")


def relay_config(port: int, bytes_per_s: float = 1e9, delay_s: float = 0.0) -> RelayConfig:
    """Return a relay's, whose one endpoint is a port of this host that eu dials as us."""
    return RelayConfig(
        links=_links(bytes_per_s, delay_s),
        endpoints=(
            RelayEndpoint(source="eu", target="us", gateway=1, host="127.0.0.1", port=port),
        ),
    )


def netns_config(
    bytes_per_s: float = 1.25e8, delay_s: float = 0.0, loss: float = 0.0
) -> NetnsConfig:
    """Return one of network namespaces."""
    return NetnsConfig(sites=SITES, links=_links(bytes_per_s, delay_s, loss), seed=7)


def _links(bytes_per_s: float, delay_s: float, loss: float = 0.0) -> tuple[LinkShape, ...]:
    return tuple(
        LinkShape(source=source, target=target, bytes_per_s=bytes_per_s, delay_s=delay_s, loss=loss)
        for source, target in itertools.permutations(SITES)
    )
