"""What the relay and the packet emulator are told on stdin: a configuration, then changes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.core.run_events import Endpoint
from orchestrator.emulator.link_shape import LinkShape
from topology.errors import ConfigError
from topology.faults.script import Change, figures_of
from topology.world import Topology

MAX_SITES = 64
"""Of the packet emulator: their addresses share one network."""
MAX_ENDPOINTS = 4096
MAX_CHANGES = 8192
"""At once: two for each link of the largest full mesh that a topology may have."""

Kind = TypeVar("Kind", bound="LinkShape | RelayEndpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayEndpoint:
    """Where the gateway of `node` at site `target` is reached from site `source`.

    In a configuration: where it listens. In what the relay answers: where to dial instead.
    """

    source: str
    target: str
    node: int
    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise ConfigError(f"port: want 1 to 65535, got {self.port}")
        if self.node < 0:
            raise ConfigError(f"node: want 0 or more, got {self.node}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """All that a relay does."""

    links: tuple[LinkShape, ...]
    """Directed; each at most once."""
    endpoints: tuple[RelayEndpoint, ...]
    seed: int = 0
    """Of jitter and loss."""
    bind_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        pairs = [(link.source, link.target) for link in self.links]
        for index, (source, target) in enumerate(pairs):
            if (source, target) in pairs[:index]:
                raise ConfigError(f"links.{index}: {source} to {target} stands there twice")
        if len(self.endpoints) > MAX_ENDPOINTS:
            raise ConfigError(f"endpoints: {len(self.endpoints)}, at most {MAX_ENDPOINTS}")
        known = set(pairs)
        for index, each in enumerate(self.endpoints):
            for source, target in ((each.source, each.target), (each.target, each.source)):
                if (source, target) not in known:
                    raise ConfigError(
                        f"endpoints.{index}: there is no link from {source} to {target}; "
                        "connections need one each way"
                    )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_line(cls, line: bytes) -> RelayConfig:
        """Parse the relay's first line of stdin.

        Raises:
            ConfigError: it is not a configuration; the message names the place.
        """
        fields = parse_object(line, [field.name for field in dataclasses.fields(cls)])
        return cls(
            links=parse_list(fields, "links", LinkShape),
            endpoints=parse_list(fields, "endpoints", RelayEndpoint),
            seed=parse_scalar(fields.get("seed", 0), "int", "seed"),
            bind_host=parse_scalar(fields.get("bind_host", "127.0.0.1"), "str", "bind_host"),
        )


def shapes_of(topology: Topology) -> tuple[LinkShape, ...]:
    """Return the links of a topology as they are emulated, in its order."""
    shapes = []
    for (source, target), figures in figures_of(topology).items():
        values: dict[str, Any] = {**figures}
        shapes.append(LinkShape(source=source, target=target, **values))
    return tuple(shapes)


def listening_line(endpoints: Iterable[RelayEndpoint]) -> dict[str, Any]:
    """Return the message that says where the relay listens."""
    return {"op": "listening", "endpoints": [dataclasses.asdict(each) for each in endpoints]}


def parse_listening(line: bytes) -> tuple[RelayEndpoint, ...]:
    """Return the endpoints of a `listening` line.

    Raises:
        ConfigError: it is another line.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a line of the relay: {line[:200]!r}") from error
    if not isinstance(fields, dict) or fields.get("op") != "listening":
        raise ConfigError(f"not a `listening` line of the relay: {line[:200]!r}")
    return parse_list(fields, "endpoints", RelayEndpoint)


def apply_line(changes: Iterable[Change]) -> dict[str, Any]:
    """Return the message that changes links."""
    return {"op": "apply", "changes": [each.to_json() for each in changes]}


def parse_apply(line: bytes) -> tuple[Change, ...]:
    """Return what an `apply` line asks for.

    Raises:
        ConfigError: it is another line, or holds something that is no change.
    """
    fields = parse_object(line, ("op", "changes"))
    changes = fields.get("changes")
    if fields.get("op") != "apply" or not isinstance(changes, list):
        raise ConfigError('want {"op": "apply", "changes": [..]}')
    if len(changes) > MAX_CHANGES:
        raise ConfigError(f"changes: {len(changes)}, at most {MAX_CHANGES}")
    return tuple(Change.from_json(each, f"changes.{i}") for i, each in enumerate(changes))


def parse_object(line: bytes, names: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object of a line, whose keys are among `names`; else a ConfigError."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"want one line of JSON with {', '.join(names)}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"want one JSON object with {', '.join(names)}")
    for name in fields:
        if name not in names:
            raise ConfigError(f"unknown key {name!r:.100}; the keys are {', '.join(names)}")
    return fields


def parse_list(fields: dict[str, Any], name: str, kind: type[Kind]) -> tuple[Kind, ...]:
    """Return the objects of that kind in the list `fields[name]`; ConfigError names the place."""
    items = fields.get(name)
    if not isinstance(items, list):
        raise ConfigError(f"{name}: want a list, got {items!r:.100}")
    return tuple(_parse(item, kind, f"{name}.{index}") for index, item in enumerate(items))


def _parse(item: object, kind: type[Kind], where: str) -> Kind:
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: want an object, got {item!r:.100}")
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name in item:
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name!r}; the keys are {', '.join(known)}")
    values = {}
    for name, field in known.items():
        if name in item:
            values[name] = parse_scalar(item[name], str(field.type), f"{where}.{name}")
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{where}: {name} is missing")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error.problems[0].message}") from error


def parse_scalar(value: object, kind: str, where: str) -> Any:  # noqa: ANN401 - what `kind` names
    """Return `value` if it is what the annotation says, else a ConfigError; a bool is no number."""
    kind, _, optional = kind.partition(" | ")
    if optional and value is None:
        return None
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(f"{where}: the number is too large") from error
    noun = {"str": "a text", "int": "a whole number", "float": "a number"}[kind]
    raise ConfigError(f"{where}: want {noun}, got {value!r:.100}")


KINDS_HERE = ("shape", "cut", "heal")
"""What a link of packets can do. Resets and half-open connections follow from cuts and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetnsConfig:
    """All that a packet emulator does."""

    sites: tuple[str, ...]
    """Each gets a namespace."""
    links: tuple[LinkShape, ...]
    """Directed; each at most once. Packets between sites without one are dropped."""
    seed: int = 0
    """Of the losses and the jitter."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.sites) <= MAX_SITES:
            raise ConfigError(f"sites: want 1 to {MAX_SITES}, got {len(self.sites)}")
        for index, site in enumerate(self.sites):
            if site in self.sites[:index]:
                raise ConfigError(f"sites.{index}: {site} stands there twice")
        pairs = set()
        for index, link in enumerate(self.links):
            if (link.source, link.target) in pairs:
                raise ConfigError(f"links.{index}: {link.source} to {link.target} is there twice")
            pairs.add((link.source, link.target))
            for site in (link.source, link.target):
                if site not in self.sites:
                    raise ConfigError(f"links.{index}: {site} is not one of the sites")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_line(cls, line: bytes) -> NetnsConfig:
        """Parse the first line of stdin.

        Raises:
            ConfigError: it is not a configuration; the message names the place.
        """
        fields = parse_object(line, [field.name for field in dataclasses.fields(cls)])
        sites = fields.get("sites")
        if not isinstance(sites, list):
            raise ConfigError(f"sites: want a list, got {sites!r:.100}")
        return cls(
            sites=tuple(parse_scalar(site, "str", f"sites.{at}") for at, site in enumerate(sites)),
            links=parse_list(fields, "links", LinkShape),
            seed=parse_scalar(fields.get("seed", 0), "int", "seed"),
        )


def parse_changes(line: bytes, links: Sequence[LinkShape]) -> tuple[Change, ...]:
    """Return the changes of an `apply` line.

    Raises:
        ConfigError: it is another line, or one of them cannot be done here.
    """
    changes = parse_apply(line)
    known = {(link.source, link.target) for link in links}
    for index, change in enumerate(changes):
        if (change.source, change.target) not in known:
            raise ConfigError(
                f"changes.{index}: there is no link from {change.source} to {change.target}"
            )
        if change.kind not in KINDS_HERE:
            raise ConfigError(
                f"changes.{index}: {change.kind} is the relay's alone; "
                f"want one of {', '.join(KINDS_HERE)}"
            )
    return changes


def dialled(topology: Topology, listening: Iterable[Endpoint]) -> tuple[RelayEndpoint, ...]:
    """Return one endpoint for each gateway and each site that has links to and from it."""
    return tuple(
        RelayEndpoint(
            source=site.name,
            target=gateway.site,
            node=gateway.node,
            host=gateway.host,
            port=gateway.port,
        )
        for gateway in listening
        for site in topology.sites
        if topology.link(site.name, gateway.site) and topology.link(gateway.site, site.name)
    )
