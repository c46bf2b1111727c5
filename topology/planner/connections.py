"""Predicts the initial number of TCP connections of a link, with the reason. Pure.

A job may fix the number. Otherwise gateways decide, first by topology/trees/channels.py, and then
by the losses that their kernels count (sites/gateway/links/congestion/connections.py). A plan only
reports the prediction from the topology's figures.
"""

from __future__ import annotations

from isthmus.topology.cost.tcp import (
    CONGESTION_CONTROLS,
    WIRE_SHARE,
    Path,
    connection_bytes_per_s,
    connections_needed,
    link_bytes_per_s,
)
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.units import format_fraction, format_rate, format_size
from isthmus.topology.spec.world import Link, Topology
from isthmus.topology.trees.channels import FLOWS_MAX, SEND_BUFFER_BYTES, first_channels
from isthmus.topology.trees.wire_load import send_buffer_bytes_of

_CARRIED = 0.8
"""Share of a link that its allowed connections must reach; otherwise a plan warns."""


def first_connections(job: Job, topology: Topology, link: Link) -> tuple[int, str]:
    """Return the initial number of connections per pair of gateways, and the reason."""
    wanted = job.exchange.channels_per_link
    if wanted is not None:
        return wanted, "exchange.channels_per_link"
    most = link.max_flows or FLOWS_MAX
    buffer_bytes = send_buffer_bytes_of(topology)
    count = first_channels(None, most, link.bytes_per_s, link.rtt_s, buffer_bytes)
    return count, f"{_reason(link, count, buffer_bytes, most)}{_growth(link, count, most)}"


def _reason(link: Link, count: int, buffer_bytes: int | None, most: int) -> str:
    """Return why a link begins with `count` connections."""
    held = f"{format_size(link.bytes_per_s * link.rtt_s)} are on the way"
    if count == most:
        return f"{held}, and max_flows allows no more"
    if count == 1:
        return f"{held}: two would crowd each other out"
    if count == 2:
        return f"{held}: while one waits for a lost packet, the other carries on"
    return f"{held}, and a send buffer holds {format_size(buffer_bytes or SEND_BUFFER_BYTES)}"


def _growth(link: Link, count: int, most: int) -> str:
    """Return a phrase on how losses will increase the number of connections."""
    if link.loss <= 0:
        return ""
    needed = connections_needed(_path(link), congestion=_congestion(link))
    if needed <= count:
        return ""
    return (
        f"; with {format_fraction(link.loss)} lost, {_congestion(link)} carries "
        f"{format_rate(connection_bytes_per_s(_path(link), congestion=_congestion(link)))} a "
        f"connection, so they become {min(needed, most)}"
    )


def held_back(topology: Topology) -> list[str]:
    """Return a warning for each link whose losses reduce it below what the plan assumes."""
    warnings = []
    for link in topology.links:
        most = link.max_flows or FLOWS_MAX
        path = _path(link)
        carried = link_bytes_per_s(path, most, congestion=_congestion(link))
        if carried < _CARRIED * WIRE_SHARE * link.bytes_per_s:
            warnings.append(
                f"{link.source} → {link.target}: with {format_fraction(link.loss)} of packets lost, "
                f"{most} connections of {_congestion(link)} carry {format_rate(carried)} of "
                f"{format_rate(link.bytes_per_s)}, and the plan counts on all of it: allow more "
                "connections (max_flows), or use BBR at both ends"
            )
    return warnings


def _path(link: Link) -> Path:
    return Path(bytes_per_s=link.bytes_per_s, rtt_s=link.rtt_s, loss=link.loss)


def _congestion(link: Link) -> str:
    """Return the formula (cubic, reno, bbr) for the congestion control of a link's source."""
    if link.assumed_congestion.startswith("bbr"):
        return "bbr"
    return link.assumed_congestion if link.assumed_congestion in CONGESTION_CONTROLS else "cubic"
