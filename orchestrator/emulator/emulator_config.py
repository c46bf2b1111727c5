"""The messages between an emulator and its owner: docs/protocols.md, "Emulator"."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from isthmus.orchestrator.core.run_events import Endpoint, SiteNamespace
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.topology.faults.script import KINDS, Change
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import read_json, to_json
from isthmus.topology.spec.tcp_constants import MTU_BYTES
from isthmus.topology.spec.world import GATEWAY_PORTS, CrossTraffic, Topology

MAX_SITES = 64
"""The most sites of the packet emulator: their addresses share one network."""
MAX_ENDPOINTS = 4096
MAX_PORT = 65535
MAX_CHANGES = 8192
"""The most changes at once: two for each link of the largest full mesh of a topology."""
CROSS_TRAFFIC = "cross-traffic"
"""The folder of what sites have received of cross traffic: SITE.jsonl each."""
NETNS_KINDS = ("shape", "cut", "heal")
"""What a link of packets can do. Resets and half-open connections follow from cuts and ends."""

Message = TypeVar("Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayEndpoint:
    """Where gateway number `gateway` of site `target` is reached from site `source`.

    In a configuration: where it listens. In what the relay answers: where to dial instead, on as
    many ports, in the same order.
    """

    source: str
    target: str
    gateway: int
    host: str
    port: int
    """The first of its ports."""
    num_ports: int = 1
    """Ports next to each other that are reached."""

    def __post_init__(self) -> None:
        if not 0 < self.port <= MAX_PORT:
            raise ConfigError(f"port: want 1 to {MAX_PORT}, got {self.port}")
        most = MAX_PORT - self.port + 1
        if not 0 < self.num_ports <= most:
            raise ConfigError(
                f"num_ports: want 1 to {most}, as port {self.port} is the first; "
                f"got {self.num_ports}"
            )
        if self.gateway < 0:
            raise ConfigError(f"gateway: want 0 or more, got {self.gateway}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """All that a relay does."""

    links: tuple[LinkShape, ...]
    """Directed; each at most once."""
    endpoints: tuple[RelayEndpoint, ...]
    seed: int = 0
    """The seed of jitter and loss."""
    bind_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        check_endpoints(self.endpoints, _pairs(self.links))


@dataclass(frozen=True, slots=True, kw_only=True)
class NetnsConfig:
    """All that a packet emulator does."""

    sites: tuple[str, ...]
    """Each gets a namespace."""
    links: tuple[LinkShape, ...]
    """Directed; each at most once. Packets between sites without one are dropped."""
    seed: int = 0
    """The seed of jitter and loss."""
    congestion: str | None = None
    """The congestion control of TCP between sites; None: this host's."""
    cross_traffic: CrossTraffic | None = None
    """What somebody else sends over each link, as long as the emulator is there."""
    cross_traffic_folder: str = ""
    """A folder for SITE.jsonl, which says how much of it that site has received."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """An emulator's first message: how its sites are reached."""

    op: str
    """`listening`: the relay. `ready`: the packet emulator."""
    endpoints: tuple[RelayEndpoint, ...] = ()
    """Where to dial, in the order of the relay's configuration."""
    sites: tuple[SiteNamespace, ...] = ()
    """The sites of the packet emulator, in the order of its configuration."""

    def __post_init__(self) -> None:
        if self.op not in {"listening", "ready"}:
            raise ConfigError(f"op: want listening or ready, got {self.op!r:.100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Changes of links, to be made all at once; or gateways that were started since."""

    op: str
    changes: tuple[Change, ...] = ()
    endpoints: tuple[RelayEndpoint, ...] = ()
    """Where they listen: the relay leads to them, and no more to those of the same numbers."""

    def __post_init__(self) -> None:
        if self.op != "apply":
            raise ConfigError(f"op: want apply, got {self.op!r:.100}")
        if self.changes and self.endpoints:
            raise ConfigError("endpoints: want a line without changes")
        if len(self.changes) > MAX_CHANGES:
            raise ConfigError(f"changes: {len(self.changes)}, at most {MAX_CHANGES}")


def read_line(kind: type[Message], line: bytes) -> Message:
    """Return the message of that type that a line of JSON is; else ConfigError names the place."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"want one line of JSON, got {line[:200]!r}: {error}") from error
    return read_json(kind, value)


def apply_line(changes: Iterable[Change]) -> bytes:
    """Return the line that changes links."""
    message = {"op": "apply", "changes": [each.to_json() for each in changes]}
    return json.dumps(message).encode() + b"\n"


def lead_line(endpoints: Iterable[RelayEndpoint]) -> bytes:
    """Return the line that has the relay lead to other gateways."""
    message = {"op": "apply", "endpoints": [to_json(each) for each in endpoints]}
    return json.dumps(message).encode() + b"\n"


def check_endpoints(endpoints: Sequence[RelayEndpoint], links: Collection[tuple[str, str]]) -> None:
    """Raise ConfigError unless these links lead to all of them, and back."""
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
    """Return the links of a topology as they are emulated.

    Half the RTT each way, the bandwidth before the run is told another one, and queues with room
    for at least one packet.
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
    """Return a packet emulator of all links of a topology, under its conditions.

    `folder` gets a folder CROSS_TRAFFIC, where there is any.

    Raises:
        ConfigError: it has too many sites.
    """
    return NetnsConfig(
        sites=tuple(site.name for site in topology.sites),
        links=shapes_of(topology),
        seed=seed,
        congestion=topology.emulation.congestion,
        cross_traffic=topology.emulation.cross_traffic,
        cross_traffic_folder=str(folder / CROSS_TRAFFIC),
    )


def dialled(
    topology: Topology, listening: Iterable[Endpoint], num_ports: int = GATEWAY_PORTS
) -> tuple[RelayEndpoint, ...]:
    """Return one endpoint for each gateway that can be dialled, and each site linked with it.

    `num_ports` is how many ports each listens on: 1 of a server that is none of our gateways.
    """
    return tuple(
        RelayEndpoint(
            source=site.name,
            target=gateway.site,
            gateway=gateway.gateway,
            host=gateway.host,
            port=gateway.port,
            num_ports=num_ports,
        )
        for gateway in listening
        for site in topology.sites
        if gateway.port
        and topology.link(site.name, gateway.site)
        and topology.link(gateway.site, site.name)
    )


def _pairs(links: Sequence[LinkShape]) -> set[tuple[str, str]]:
    """Return the source and target of each link; ConfigError if one stands there twice."""
    pairs = set()
    for index, link in enumerate(links):
        if (link.source, link.target) in pairs:
            raise ConfigError(f"links.{index}: {link.source} to {link.target} stands there twice")
        pairs.add((link.source, link.target))
    return pairs
