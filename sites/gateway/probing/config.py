"""What a gateway is told that measures links instead of reducing gradients."""

from __future__ import annotations

import dataclasses

from sites.gateway.config import GatewayConfig, PeerLink
from topology.job import Probe
from topology.world import Topology

_WINDOW_MIN_BYTES = 2 << 20
_WINDOW_MAX_BYTES = 16 << 20
"""What a connection may hold that was not yet read is twice that; with the kernel's own limits (6
MiB by default) one connection never gets beyond it, and many together must not fill a machine's
memory."""


def probing(config: GatewayConfig, probe: Probe, topology: Topology) -> GatewayConfig:
    """Return a site's configuration for a probe: one gateway, and all links that lead both ways.

    Args:
        config: Of the site's first gateway.
        probe: What to measure.
        topology: Of the run.
    """
    links = [
        PeerLink(site=link.target, bytes_per_s=link.bytes_per_s, rtt_s=link.rtt_s)
        for link in topology.links
        if link.source == config.site and topology.link(link.target, link.source) is not None
    ]
    held = max((int(link.bytes_per_s * link.rtt_s) for link in links), default=0)
    return dataclasses.replace(
        config,
        links=tuple(links),
        nodes_per_site=(1,) * len(config.sites),
        window_bytes=min(max(held, _WINDOW_MIN_BYTES), _WINDOW_MAX_BYTES),
        probe=probe,
    )
