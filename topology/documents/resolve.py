"""Resolves a checked topology file: follows `like`, and gives links their figures."""

import dataclasses
from typing import Any

from isthmus.topology.catalogue.accelerators import catalogue
from isthmus.topology.documents.references import ancestry
from isthmus.topology.spec.geography import great_circle_km, rtt_of_distance
from isthmus.topology.spec.units import format_duration
from isthmus.topology.spec.world import AUTO, Detection, Link, Measured, Site, Topology
from isthmus.topology.text.yaml_document import Document

_GATEWAYS = ("wan", "gateways_per_node")
_OF_LIKE = {
    "nodes": ("nodes",),
    "accelerators_per_node": ("accelerators_per_node",),
    "accelerator": ("accelerator",),
    "fabric": ("fabric",),
    "launcher": ("launcher",),
    "prologue": ("prologue",),
    "nic_bytes_per_s": ("wan", "nic"),
    "gateways_per_node": _GATEWAYS,
}
"""The fields that a site has from the one that it is like, with their keys."""


def resolve(document: Document, written: Topology) -> Topology:
    """Return the topology of a document that has no problems so far.

    Problems that only the resolved figures show are added to the document.
    """
    sites = tuple(_site(document, written, index) for index in range(len(written.sites)))
    _check_gateways(document, sites)
    _check_hosts(document, sites)
    links = [_link(each, sites, written.emulation.described) for each in written.links]
    _check_rtts(document, written.failure, links)
    both_ways = (
        direction
        for link in links
        for direction in ([link] if link.is_oneway else [link, _reversed(link)])
    )
    return dataclasses.replace(written, accelerators={}, sites=sites, links=tuple(both_ways))


def _site(document: Document, written: Topology, index: int) -> Site:
    """Return a site whose missing keys come from its chain of `like`."""
    own, chain = written.sites[index], ancestry(document, index)
    values: dict[str, Any] = {}
    for name, path in _OF_LIKE.items():
        having = (at for at in chain if document.get("sites", at, *path) is not None)
        if (at := next(having, None)) is not None:
            values[name] = getattr(written.sites[at], name)
            if path == _GATEWAYS:
                values["chooses_gateways"] = document.get("sites", at, *path) == AUTO
    name = values["accelerator"].name
    accelerator = written.accelerators.get(name) or catalogue()[name].accelerator
    values["accelerator"] = dataclasses.replace(accelerator, name=name)
    values.setdefault("chooses_gateways", True)
    return dataclasses.replace(own, index=index, like=None, **values)


def _check_gateways(document: Document, sites: tuple[Site, ...]) -> None:
    """Add a problem if a node's ranks or ports cannot be divided among its gateways."""
    for site in sites:
        ranks, gateways = site.accelerators_per_node, site.gateways_per_node
        path = ("sites", site.index)
        if site.ports is not None and len(site.ports) < gateways:
            message = (
                f"want {gateways} ports or more, one for each gateway of a node; "
                f"got {len(site.ports)}"
            )
            document.add((*path, "wan", "ports"), message)
        if ranks % gateways == 0:
            continue
        fits = ", ".join(str(count) for count in range(1, ranks + 1) if ranks % count == 0)
        message = (
            f"{gateways} gateways cannot divide the {ranks} ranks of a node evenly: want "
            f"gateways_per_node to be one of {fits}"
        )
        if document.get(*path, *_GATEWAYS) is not None:
            document.add((*path, *_GATEWAYS), message)
        elif document.get(*path, "accelerators_per_node") is not None:
            document.add((*path, "accelerators_per_node"), message)


def _check_hosts(document: Document, sites: tuple[Site, ...]) -> None:
    """Add a problem if a site names hosts, but not one per node."""
    for site in sites:
        if site.hosts and len(site.hosts) != site.nodes:
            message = f"want one a node, and {site.name!r} has {site.nodes}; got {len(site.hosts)}"
            document.add(("sites", site.index, "hosts"), message)
        elif site.launcher.kind == "slurm" and site.hosts:
            message = "has no use with launcher: slurm, which says where nodes are"
            document.add(("sites", site.index, "hosts"), message, at_key=True)
        elif site.launcher.kind == "ssh" and site.nodes > 1 and not site.hosts:
            message = f"want hosts, one a node: {site.name!r} has {site.nodes} nodes over ssh"
            document.add(("sites", site.index), message)


def _link(link: Link, sites: tuple[Site, ...], stated: float) -> Link:
    """Return a written link with its figures; measured ones win.

    A run is given `stated` times its bandwidth.
    """
    measured, usable = link.measured, link.share * stated
    bandwidth = measured.bytes_per_s or link.described_bytes_per_s
    assert bandwidth is not None, "isthmus.topology.documents.references has checked it"
    distance_km = _distance_km(link, sites)
    rtt_s, rtt_origin = _described_rtt(link, distance_km)
    described_rtt_s = None
    if measured.rtt_s is not None:
        described_rtt_s, rtt_s, rtt_origin = rtt_s, measured.rtt_s, "measured"
    assert rtt_s is not None, "isthmus.topology.documents.references has checked it"
    is_measured, described = measured.bytes_per_s is not None, link.described_bytes_per_s
    return dataclasses.replace(
        link,
        bytes_per_s=bandwidth * usable,
        bandwidth_origin="measured" if is_measured else "bandwidth",
        described_bytes_per_s=described * usable if is_measured and described else None,
        rtt_s=rtt_s,
        rtt_origin=rtt_origin,
        described_rtt_s=described_rtt_s,
        distance_km=distance_km,
        jitter_s=link.jitter_s if measured.jitter_s is None else measured.jitter_s,
        loss=link.loss if measured.loss is None else measured.loss,
        measured=Measured(),
        measured_at=measured.at,
    )


def _distance_km(link: Link, sites: tuple[Site, ...]) -> float | None:
    if link.distance_km is not None:
        return link.distance_km
    places = {site.name: site.location for site in sites}
    one, other = (places[name] for name in link.ends)
    return None if one is None or other is None else great_circle_km(one, other)


def _described_rtt(link: Link, distance_km: float | None) -> tuple[float | None, str]:
    """Return the RTT in seconds that the topology describes, and its origin."""
    if link.described_rtt_s is not None:
        return link.described_rtt_s, "rtt"
    origin = "locations" if link.distance_km is None else "distance"
    return None if distance_km is None else rtt_of_distance(distance_km), origin


def _reversed(link: Link) -> Link:
    return dataclasses.replace(link, ends=(link.target, link.source))


def _check_rtts(document: Document, failure: Detection, links: list[Link]) -> None:
    """Check that live paths answer a keepalive ping in time: in a third of detect_within."""
    for link in links:
        if 3 * link.rtt_s >= failure.detect_within_s:
            document.add(
                ("failure", "detect_within"),
                f"want more than {format_duration(3 * link.rtt_s)}, three times the RTT from "
                f"{link.source!r} to {link.target!r}; "
                f"got {format_duration(failure.detect_within_s)}",
            )
