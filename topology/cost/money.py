"""The price of a run: accelerators by the hour, traffic between sites by the byte. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.topology.spec.world import Topology

Hop = tuple[str, str]
"""The names of the sites that a directed link leads from and to."""


def accelerators_usd(topology: Topology, ranks: Mapping[str, int], seconds: float) -> float:
    """Return the price of `ranks` accelerators by site for a time, idle or not."""
    total = 0.0
    for name, num_ranks in ranks.items():
        price = topology.site(name).accelerator.price_usd_per_h or 0.0
        total += num_ranks * price * seconds / 3600
    return total


def egress_usd(topology: Topology, sent_bytes: Mapping[Hop, float]) -> float:
    """Return the price of the bytes sent over each directed link.

    Raises:
        ValueError: bytes are sent where there is no link.
    """
    total = 0.0
    for (source, target), amount in sent_bytes.items():
        link = topology.link(source, target)
        if link is None:
            raise ValueError(f"sent_bytes: there is no link from {source} to {target}")
        total += amount * link.egress_usd_per_byte
    return total
