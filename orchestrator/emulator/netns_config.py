"""What the packet emulator reads from its stdin and answers, and how that is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.emulator.config import parse_apply, parse_list, parse_object, parse_scalar
from orchestrator.emulator.link import LinkShape
from orchestrator.emulator.tun import MAX_SITES
from topology.errors import ConfigError
from topology.faults.changes import Change

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
