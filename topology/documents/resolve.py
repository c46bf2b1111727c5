"""Resolves a checked topology file: follows `like`, converts to base units, computes RTTs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from isthmus.topology.catalogue.accelerators import accelerator_of, catalogue
from isthmus.topology.documents.references import ancestry
from isthmus.topology.models.topology_model import (
    AUTO,
    LOOPBACK,
    LinkModel,
    MeasuredModel,
    TopologyModel,
    WanModel,
)
from isthmus.topology.spec.geography import great_circle_km, rtt_of_distance
from isthmus.topology.spec.units import format_duration
from isthmus.topology.spec.world import (
    Accelerator,
    Detection,
    Launcher,
    Link,
    Site,
    Topology,
)
from isthmus.topology.text.yaml_document import Document


def resolve(document: Document, model: TopologyModel) -> Topology:
    """Return the topology of a document that has no problems so far.

    Problems that only the resolved figures show are added to the document.
    """
    sites = tuple(_site(document, model, index) for index in range(len(model.sites)))
    _check_gateways(document, model, sites)
    _check_hosts(document, sites)
    links = [_link(each, sites, model.emulation.described) for each in model.links]
    failure = model.failure
    topology = Topology(
        name=model.name,
        sites=sites,
        links=tuple(
            direction
            for link, each in zip(links, model.links, strict=True)
            for direction in ([link] if each.oneway else [link, _reversed(link)])
        ),
        failure=failure,
        coordinator=model.coordinator.bind,
        coordinator_told=model.coordinator.address,
        coordinator_site=model.coordinator.site,
        security=model.security.mode,
        tls=model.security.resolved(),
        emulate=model.emulate,
        emulator=model.emulator,
        emulation=model.emulation,
    )
    _check_rtts(document, failure, links)
    return topology


def _site(document: Document, model: TopologyModel, index: int) -> Site:
    """Return a site whose missing keys come from its chain of `like`."""
    own = model.sites[index]
    chain = [model.sites[each] for each in ancestry(document, index)]

    def nearest(key: str) -> Any:  # noqa: ANN401 - each key has its type
        found = (getattr(each, key) for each in chain)
        return next((value for value in found if value is not None), None)

    wan = own.wan or WanModel(interfaces=[])
    rates = (each.wan.nic for each in chain if each.wan is not None)
    counts = (each.wan.gateways_per_node for each in chain if each.wan is not None)
    gateways = next((count for count in counts if count is not None), AUTO)
    return Site(
        name=own.name,
        index=index,
        nodes=nearest("nodes"),
        accelerators_per_node=nearest("accelerators_per_node"),
        accelerator=_accelerator(model, nearest("accelerator")),
        address=_address(wan, own.hosts),
        inbound=wan.inbound,
        listening=wan.listening(),
        hosts=tuple(own.hosts),
        proxy=wan.proxy or "",
        location=own.location,
        fabric=nearest("fabric"),
        launcher=nearest("launcher") or Launcher(),
        nic_bytes_per_s=next((rate for rate in rates if rate is not None), None),
        gateways_per_node=gateways if isinstance(gateways, int) else 1,
        chooses_gateways=gateways == AUTO,
        job_folder=own.job_folder or "",
        prologue=tuple(nearest("prologue") or ()),
    )


def _address(wan: WanModel, hosts: Sequence[str]) -> str:
    """Return the host that peers dial (of several machines the first), if the file has it."""
    if wan.interfaces:
        return wan.address or ""
    return hosts[0] if hosts else wan.address or wan.bind or LOOPBACK


def _check_gateways(document: Document, model: TopologyModel, sites: tuple[Site, ...]) -> None:
    """Add a problem if a node's ranks or ports cannot be divided among its gateways."""
    for written, site in zip(model.sites, sites, strict=True):
        ranks, gateways = site.accelerators_per_node, site.gateways_per_node
        ports = site.listening.ports
        if ports is not None and len(ports) < gateways:
            message = (
                f"want {gateways} ports or more, one for each gateway of a node; got {len(ports)}"
            )
            document.add(("sites", site.index, "wan", "ports"), message)
        if ranks % gateways == 0:
            continue
        fits = ", ".join(str(count) for count in range(1, ranks + 1) if ranks % count == 0)
        message = (
            f"{gateways} gateways cannot divide the {ranks} ranks of a node evenly: want "
            f"gateways_per_node to be one of {fits}"
        )
        if written.wan is not None and written.wan.gateways_per_node is not None:
            document.add(("sites", site.index, "wan", "gateways_per_node"), message)
        elif written.accelerators_per_node is not None:
            document.add(("sites", site.index, "accelerators_per_node"), message)


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


def _accelerator(model: TopologyModel, name: str) -> Accelerator:
    """Return the accelerator defined in the file, else that of the catalogue."""
    written = model.accelerators.get(name)
    return catalogue()[name].accelerator if written is None else accelerator_of(name, written)


def _link(written: LinkModel, sites: tuple[Site, ...], stated: float) -> Link:
    """Return the direction from the first site to the second; measured figures win.

    A run is given `stated` times its bandwidth.
    """
    source, target = written.between
    measured = written.measured or MeasuredModel()
    bandwidth = written.bandwidth if measured.bandwidth is None else measured.bandwidth
    assert bandwidth is not None, "isthmus.topology.documents.references has checked it"
    distance_km = _distance_km(written, sites)
    rtt_s, rtt_origin = _rtt(written, distance_km)
    is_measured = measured.bandwidth is not None
    described = written.bandwidth if is_measured else None
    return Link(
        source=source,
        target=target,
        bytes_per_s=bandwidth * written.share * stated,
        rtt_s=rtt_s,
        rtt_origin=rtt_origin,
        jitter_s=written.jitter if measured.jitter is None else measured.jitter,
        loss=written.loss if measured.loss is None else measured.loss,
        egress_usd_per_byte=written.egress or 0.0,
        max_flows=written.max_flows,
        congestion=written.congestion,
        window_bytes=written.window,
        distance_km=distance_km,
        share=written.share,
        schedule=tuple(written.schedule),
        bandwidth_origin="measured" if is_measured else "bandwidth",
        described_bytes_per_s=None if described is None else described * written.share * stated,
        described_rtt_s=_described_rtt_s(written, distance_km),
        measured_at=measured.at,
    )


def _distance_km(written: LinkModel, sites: tuple[Site, ...]) -> float | None:
    if written.distance is not None:
        return written.distance
    places = {site.name: site.location for site in sites}
    one, other = (places[name] for name in written.between)
    return None if one is None or other is None else great_circle_km(one, other)


def _rtt(written: LinkModel, distance_km: float | None) -> tuple[float, str]:
    """Return the RTT in seconds, and its origin."""
    if written.measured is not None and written.measured.rtt is not None:
        return written.measured.rtt, "measured"
    if written.rtt is not None:
        return written.rtt, "rtt"
    assert distance_km is not None, "isthmus.topology.documents.references has checked it"
    origin = "locations" if written.distance is None else "distance"
    return rtt_of_distance(distance_km), origin


def _described_rtt_s(written: LinkModel, distance_km: float | None) -> float | None:
    """Return the described RTT of a link that also has a measured one; else None."""
    if written.measured is None or written.measured.rtt is None:
        return None
    if written.rtt is not None:
        return written.rtt
    return None if distance_km is None else rtt_of_distance(distance_km)


def _reversed(link: Link) -> Link:
    return dataclasses.replace(link, source=link.target, target=link.source)


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
