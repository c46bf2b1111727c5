"""What small topologies in code have in common: sites and links.

The sites are s0, s1, ... on this machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from isthmus.topology.spec.world import Accelerator, Detection, Link, Site, Topology


def small_site(
    index: int,
    accelerator: Accelerator,
    *,
    ranks: int = 1,
    **more: Any,  # noqa: ANN401 - any field
) -> Site:
    """Return site s`index`, of one node."""
    return Site(
        name=f"s{index}",
        index=index,
        nodes=1,
        accelerators_per_node=ranks,
        accelerator=accelerator,
        **more,
    )


def small_world(
    sites: Iterable[Site],
    links: Iterable[tuple[int, int, float, float]],
    *,
    egress: float = 0.0,
    **more: Any,  # noqa: ANN401 - any field
) -> Topology:
    """Return a topology of sites s0, s1, ... with directed links (source, target, bytes/s, RTT)."""
    return Topology(
        name="t",
        sites=tuple(sites),
        links=tuple(
            Link(
                ends=(f"s{source}", f"s{target}"),
                bytes_per_s=rate,
                rtt_s=rtt_s,
                rtt_origin="rtt",
                egress_usd_per_byte=egress,
            )
            for source, target, rate, rtt_s in links
        ),
        failure=Detection(detect_within_s=15, start_within_s=120),
        **more,
    )
