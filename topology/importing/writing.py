"""The YAML of an imported topology, with comments that say what to look at."""

from collections.abc import Sequence
from dataclasses import dataclass

from topology.presets.templates import schema_line
from topology.units import format_distance, format_rate
from topology.world import Location


@dataclass(frozen=True, slots=True)
class SiteText:
    """What is written of one site."""

    name: str
    location: Location | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkText:
    """What is written of one link."""

    source: str
    target: str
    bytes_per_s: float
    distance_km: float | None
    """None: it follows from the locations."""
    oneway: bool


def topology_text(
    name: str,
    origin: str,
    sites: Sequence[SiteText],
    links: Sequence[LinkText],
    *,
    accelerator: str,
    nodes: int,
    accelerators_per_node: int,
) -> str:
    """Return the whole file.

    Args:
        name: Of the topology.
        origin: The map's file name, for a comment.
        sites: At least one.
        links: Between them.
        accelerator: Of every site: a name of the catalogue.
        nodes: Likewise.
        accelerators_per_node: Likewise.
    """
    first = sites[0]
    lines = [
        f"# Imported from {_comment(origin)}: {len(sites)} sites, {len(links)} links.",
        "# What the map did not say is the same for all: "
        "the sites' nodes, and perhaps the links' bandwidth.",
        "version: 1",
        f"name: {_quoted(name)}",
        "",
        "sites:",
        f"  - name: {_quoted(first.name)}",
        *([f"    location: {_location(first.location)}"] if first.location else []),
        f"    nodes: {nodes}",
        f"    accelerators_per_node: {accelerators_per_node} # one training process (rank) each",
        f"    accelerator: {accelerator} # `isthmus topology accelerators` lists what is known",
        *[_site(site, first) for site in sites[1:]],
        "",
        "# Full duplex: each direction has this bandwidth. No link has an rtt: it follows from the "
        "distance,",
        "# or from the locations. `isthmus probe FILE --write` measures both.",
        "links:" if links else "links: []",
        *[_link(link) for link in links],
        "",
        "emulate: true # the WAN is emulated on this machine: remove it where the sites are real",
        "",
        "security: {mode: insecure} # no TLS yet, and therefore loopback addresses only",
    ]
    return schema_line("topology") + "\n".join(lines) + "\n"


def _site(site: SiteText, first: SiteText) -> str:
    place = f", location: {_location(site.location)}" if site.location else ""
    return f"  - {{name: {_quoted(site.name)}, like: {_quoted(first.name)}{place}}}"


def _link(link: LinkText) -> str:
    figures = [f"bandwidth: {format_rate(link.bytes_per_s)}"]
    if link.distance_km is not None:
        figures.append(f"distance: {format_distance(link.distance_km)}")
    if link.oneway:
        figures.append("oneway: true")
    ends = f"{_quoted(link.source)}, {_quoted(link.target)}"
    return f"  - {{between: [{ends}], {', '.join(figures)}}}"


def _location(place: Location) -> str:
    return f"{{lat: {round(place.lat, 4):g}, lon: {round(place.lon, 4):g}}}"


def _quoted(name: str) -> str:
    """Return a name as YAML reads it as a text: `911` and `true` need quotes."""
    return name if name[:1].isalpha() and name not in _WORDS else f'"{name}"'


_WORDS = frozenset({"true", "false", "null"})


def _comment(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)[:80]
