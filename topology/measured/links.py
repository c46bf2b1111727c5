"""A topology as its links were measured while a run used them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from topology.world import Link, Topology

Pair = tuple[str, str]
"""Source and target, by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What is known of one directed link; None: nothing was measured."""

    bytes_per_s: float | None = None
    rtt_s: float | None = None


def with_measured(topology: Topology, figures: Mapping[Pair, LinkFigures], at: str) -> Topology:
    """Return a topology with measured figures in place of those that it counts on.

    Of a link that is shared with others a run uses no more than its share, whatever it could carry.

    Args:
        topology: Described in full.
        figures: By directed link; links that are not there stay as they are.
        at: When, in ISO 8601.
    """
    links = tuple(
        _measured(link, figures[link.source, link.target], at)
        if (link.source, link.target) in figures
        else link
        for link in topology.links
    )
    return dataclasses.replace(topology, links=links)


def _measured(link: Link, figures: LinkFigures, at: str) -> Link:
    if figures.bytes_per_s is not None:
        most = link.bytes_per_s if link.share < 1 else figures.bytes_per_s
        link = dataclasses.replace(
            link,
            bytes_per_s=min(figures.bytes_per_s, most),
            bandwidth_origin="measured",
            described_bytes_per_s=link.described_bytes_per_s or link.bytes_per_s,
            measured_at=at,
        )
    if figures.rtt_s is not None:
        link = dataclasses.replace(
            link,
            rtt_s=figures.rtt_s,
            rtt_origin="measured",
            described_rtt_s=link.described_rtt_s or link.rtt_s,
            measured_at=at,
        )
    return link
