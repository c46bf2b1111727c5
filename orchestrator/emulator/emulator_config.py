"""The messages between an emulator and its owner: docs/protocols.md, "Emulator"."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.orchestrator.core.run_events import Endpoint, SiteNamespace
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.topology.faults.script import KINDS, Change
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.tcp_constants import MTU_BYTES
from isthmus.topology.spec.world import CrossTraffic, Topology

MAX_SITES = 64
"""Limit on the packet emulator's sites, whose addresses share one network."""
MAX_ENDPOINTS = 4096
MAX_PORT = 65535
MAX_CHANGES = 8192
"""Limit on simultaneous changes: two per link of the largest full mesh."""
CROSS_TRAFFIC = "cross-traffic"
"""Folder of files SITE.jsonl with the cross traffic that a site received."""
NETNS_KINDS = ("shape", "cut", "heal")
"""Kinds of changes in the packet emulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayEndpoint:
    """The address at which site `source` reaches gateway number `gateway` of site `target`.

    In a configuration: the listening address. In the relay's answer: the address to dial instead.
    """

    source: str
    target: str
    gateway: int
    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 < self.port <= MAX_PORT:
            raise ConfigError(f"port: want 1 to {MAX_PORT}, got {self.port}")
        if self.gateway < 0:
            raise ConfigError(f"gateway: want 0 or more, got {self.gateway}")


class RelayConfig(Message):
    """The configuration of a relay."""

    links: tuple[LinkShape, ...]
    """Directed links, each at most once."""
    endpoints: tuple[RelayEndpoint, ...]
    seed: int = 0
    """The seed of jitter and loss."""
    bind_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        check_endpoints(self.endpoints, _pairs(self.links))


class NetnsConfig(Message):
    """The configuration of a packet emulator."""

    sites: tuple[str, ...]
    """Names of the sites, each of which gets a namespace."""
    links: tuple[LinkShape, ...]
    """Directed links, each at most once. Packets between sites without one are dropped."""
    seed: int = 0
    """The seed of jitter and loss."""
    congestion: str | None = None
    """The congestion control of TCP between sites; None: this host's."""
    cross_traffic: CrossTraffic | None = None
    """Competing flows on each link while the emulator runs; None: none."""
    cross_traffic_folder: str = ""
    """Folder for SITE.jsonl, with the cross traffic that a site received."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.sites) <= MAX_SITES:
            raise ConfigError(f"sites: want 1 to {MAX_SITES}, got {len(self.sites)}")
        for index, site in enumerate(self.sites):
            if site in self.sites[:index]:
                raise ConfigError(f"sites.{index}: {site} stands there twice")
        _pairs(self.links)
        for index, link in enumerate(self.links):
            for site in (link.source, link.target):
                if site not in self.sites:
                    raise ConfigError(f"links.{index}: {site} is not one of the sites")


class Apply(Message):
    """A request: changes of links, to be made all at once, or gateways started since."""

    changes: tuple[Change, ...] = ()
    endpoints: tuple[RelayEndpoint, ...] = ()
    """Addresses of new gateways, which replace those of the same numbers."""

    def __post_init__(self) -> None:
        if self.changes and self.endpoints:
            raise ConfigError("endpoints: want a line without changes")
        if len(self.changes) > MAX_CHANGES:
            raise ConfigError(f"changes: {len(self.changes)}, at most {MAX_CHANGES}")


class Up(Message):
    """An emulator's first message: how its sites are reached."""

    endpoints: tuple[RelayEndpoint, ...] = ()
    """Addresses to dial, in the order of the relay's configuration."""
    sites: tuple[SiteNamespace, ...] = ()
    """The sites of the packet emulator, in the order of its configuration."""


class Applied(Message):
    """The answer to a request."""

    endpoints: tuple[RelayEndpoint, ...] = ()
    """Addresses to dial instead of those requested, in the same order."""


class Refused(Message):
    """The answer to a request of which nothing was done."""

    why: str


class Counted(Message):
    """The counters of the links: after each answer, once a second, and at the end."""

    links: tuple[Mapping[str, Any], ...]
    """One for each directed link: `source`, `target`, and its figures since the start."""


def check_endpoints(endpoints: Sequence[RelayEndpoint], links: Collection[tuple[str, str]]) -> None:
    """Raise ConfigError unless links lead to all endpoints, and back."""
    if len(endpoints) > MAX_ENDPOINTS:
        raise ConfigError(f"endpoints: {len(endpoints)}, at most {MAX_ENDPOINTS}")
    for index, each in enumerate(endpoints):
        for source, target in ((each.source, each.target), (each.target, each.source)):
            if (source, target) not in links:
                raise ConfigError(
                    f"endpoints.{index}: there is no link from {source} to {target}; "
                    "connections need one each way"
                )


def check_changes(
    changes: Sequence[Change], links: Collection[tuple[str, str]], kinds: Sequence[str] = KINDS
) -> None:
    """Raise ConfigError unless all changes are of these links, and of these kinds."""
    for index, change in enumerate(changes):
        if (change.source, change.target) not in links:
            raise ConfigError(
                f"changes.{index}: there is no link from {change.source} to {change.target}"
            )
        if change.kind not in kinds:
            raise ConfigError(
                f"changes.{index}: {change.kind} is the relay's alone; "
                f"want one of {', '.join(kinds)}"
            )


def shapes_of(topology: Topology) -> tuple[LinkShape, ...]:
    """Return the emulated shapes of a topology's links.

    Delay is half the RTT; bandwidth is the emulated one, not the one that the run is given; queues
    hold at least one packet.
    """
    emulation = topology.emulation
    shapes = []
    for link in topology.links:
        bytes_per_s = link.bytes_per_s / emulation.described
        queue_bytes = None
        if emulation.queue is not None:
            queue_bytes = max(MTU_BYTES, emulation.queue.bytes_of(bytes_per_s, link.rtt_s))
        shapes.append(
            LinkShape(
                source=link.source,
                target=link.target,
                bytes_per_s=bytes_per_s,
                delay_s=link.rtt_s / 2,
                jitter_s=link.jitter_s,
                loss=link.loss,
                queue_bytes=queue_bytes,
            )
        )
    return tuple(shapes)


def netns_config(topology: Topology, seed: int, folder: Path) -> NetnsConfig:
    """Return the packet emulator's configuration for a topology.

    If there is cross traffic, its files go to CROSS_TRAFFIC in `folder`.

    Raises:
        ConfigError: the topology has too many sites.
    """
    return NetnsConfig(
        sites=tuple(site.name for site in topology.sites),
        links=shapes_of(topology),
        seed=seed,
        congestion=topology.emulation.congestion,
        cross_traffic=topology.emulation.cross_traffic,
        cross_traffic_folder=str(folder / CROSS_TRAFFIC),
    )


def dialled(topology: Topology, listening: Iterable[Endpoint]) -> tuple[RelayEndpoint, ...]:
    """Return an endpoint per dialled gateway and site that is linked with it."""
    return tuple(
        RelayEndpoint(
            source=site.name,
            target=gateway.site,
            gateway=gateway.gateway,
            host=gateway.host,
            port=gateway.port,
        )
        for gateway in listening
        for site in topology.sites
        if gateway.port
        and topology.link(site.name, gateway.site)
        and topology.link(gateway.site, site.name)
    )


def _pairs(links: Sequence[LinkShape]) -> set[tuple[str, str]]:
    """Return the source and target of each link; ConfigError for duplicates."""
    pairs = set()
    for index, link in enumerate(links):
        if (link.source, link.target) in pairs:
            raise ConfigError(f"links.{index}: {link.source} to {link.target} stands there twice")
        pairs.add((link.source, link.target))
    return pairs
