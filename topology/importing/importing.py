"""From a map to a topology's YAML: names, places, links, and comments that say what was assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topology.documents.load import load_topology
from topology.importing.cities import nearest_city, place_of
from topology.importing.graph import Graph, Node, wrong
from topology.importing.graphml import read_graphml
from topology.importing.lines import Line, Pair, lines_of, parts, paths_between
from topology.importing.names import plain, unique_names
from topology.importing.node_link import read_node_link
from topology.importing.writing import LinkText, SiteText, topology_text
from topology.models.topology_model import MAX_SITES
from topology.suggest import did_you_mean
from topology.world import Location

_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a map does not say."""

    bytes_per_s: float | None = None
    """Of edges that have no speed."""
    sites: tuple[str, ...] = ()
    """Only these, by the names that they will have; none: all."""
    accelerator: str = "cpu"
    nodes: int = 1
    accelerators_per_node: int = 1


@dataclass(frozen=True, slots=True)
class Imported:
    """A topology, and what was left out or assumed."""

    text: str
    num_sites: int
    num_links: int
    warnings: tuple[str, ...]


def read_map(text: str, source: str) -> Graph:
    """Return the graph of a document in any format that is known, told by its first character.

    Raises:
        ConfigError: it is none, or has mistakes.
    """
    match text.lstrip()[:1]:
        case "{":
            return read_node_link(text, source)
        case "<":
            return read_graphml(text, source)
    raise wrong(source, "want node-link JSON or GraphML: it begins with neither { nor <")


def import_topology(text: str, source: str, wishes: Wishes) -> Imported:
    """Return the topology that a map describes; it is valid.

    Args:
        text: Of the map's file.
        source: What messages call it.
        wishes: What to add to it.

    Raises:
        ConfigError: it cannot be read, or lacks what a topology needs; and what to do about it.
    """
    graph = read_map(text, source)
    warnings: list[str] = []
    names = dict(zip((each.key for each in graph.nodes), _names(graph), strict=True))
    places = {each.key: _place(each, names[each.key], warnings) for each in graph.nodes}
    lines, changes = lines_of(graph.edges, places)
    warnings += changes
    lines = _with_speeds(lines, wishes, source, warnings)
    chosen = _chosen(names, wishes, source)
    if wishes.sites:
        lines = paths_between(lines, chosen)
    _check(chosen, lines, names, source)
    title = plain(graph.name) or plain(source.rpartition("/")[2].partition(".")[0]) or "imported"
    links = _links(chosen, lines, names)
    written = topology_text(
        title[:63].strip("-"),
        source.rpartition("/")[2],
        [SiteText(names[key], places[key]) for key in chosen],
        links,
        accelerator=wishes.accelerator,
        nodes=wishes.nodes,
        accelerators_per_node=wishes.accelerators_per_node,
    )
    world = load_topology(written, f"the topology of {source}")
    return Imported(written, len(world.sites), len(links), tuple(warnings))


def _names(graph: Graph) -> list[str]:
    """Return a name for each node: its label, else the city that it is in, else its id."""
    found = []
    for node in graph.nodes:
        city = nearest_city(node.location) if not plain(node.label) and node.location else None
        found.append(plain(node.label) or city or f"site-{node.key}")
    return unique_names(found)


def _place(node: Node, name: str, warnings: list[str]) -> Location | None:
    if node.location is not None:
        return node.location
    city = place_of(node.label)
    if city is not None:
        warnings.append(f"{name}: no coordinates in the map; those of the city were taken")
    return city


def _with_speeds(
    lines: Mapping[Pair, Line], wishes: Wishes, source: str, warnings: list[str]
) -> dict[Pair, Line]:
    """Give each line a speed."""
    missing = sum(line.bytes_per_s is None for line in lines.values())
    if missing and wishes.bytes_per_s is None:
        raise wrong(
            source,
            f"{missing} of {len(lines)} directed edges have no speed: give them one, as "
            "--bandwidth 10Gbit/s",
        )
    if 0 < missing < len(lines):
        warnings.append(f"{missing} of {len(lines)} directed edges had no speed")
    return {
        pair: line
        if line.bytes_per_s is not None
        else replace(line, bytes_per_s=wishes.bytes_per_s)
        for pair, line in lines.items()
    }


def _chosen(names: Mapping[str, str], wishes: Wishes, source: str) -> list[str]:
    """Return the keys of the nodes that become sites, in the map's order."""
    unknown = [name for name in wishes.sites if name not in names.values()]
    if unknown:
        hint = did_you_mean(unknown[0], names.values())
        raise wrong(source, f"--sites: no site {unknown[0]!r}{hint}; there are {_listed(names)}")
    chosen = [key for key, name in names.items() if not wishes.sites or name in wishes.sites]
    if len(chosen) > MAX_SITES:
        raise wrong(
            source,
            f"{len(chosen)} nodes, and a topology has {MAX_SITES} sites at most: choose some with "
            f"--sites, of {_listed(names)}",
        )
    return chosen


def _check(
    chosen: Sequence[str], lines: Mapping[Pair, Line], names: Mapping[str, str], source: str
) -> None:
    """Refuse a map that is not connected, or in which nothing gives a distance."""
    found = parts(chosen, lines)
    if len(found) > 1:
        told = "; ".join(_listed({key: names[key] for key in part}) for part in found[:4])
        raise wrong(
            source,
            f"the sites are in {len(found)} parts that nothing connects both ways: choose those of "
            f"one with --sites. {told}",
        )
    lost = {
        names[key]: None for pair, line in lines.items() if line.distance_km is None for key in pair
    }
    if lost:
        raise wrong(
            source,
            f"nothing gives a distance between {', '.join(list(lost)[:_NAMES_SHOWN])}: add their "
            "coordinates or the edges' dist, or choose others with --sites",
        )


def _links(
    chosen: Sequence[str], lines: Mapping[Pair, Line], names: Mapping[str, str]
) -> list[LinkText]:
    """Return the links in the order of their sites; one for both directions if they are alike."""
    order = {key: position for position, key in enumerate(chosen)}
    links = []
    for pair in sorted(lines, key=lambda pair: tuple(sorted(order[key] for key in pair))):
        source, target = pair
        back = lines.get((target, source))
        if back == lines[pair] and order[target] < order[source]:
            continue
        line = lines[pair]
        assert line.bytes_per_s is not None
        links.append(
            LinkText(
                source=names[source],
                target=names[target],
                bytes_per_s=line.bytes_per_s,
                distance_km=None if line.is_by_places else line.distance_km,
                oneway=back != line,
            )
        )
    return links


def _listed(names: Mapping[str, str]) -> str:
    found = list(names.values())
    more = f" and {len(found) - _NAMES_SHOWN} more" if len(found) > _NAMES_SHOWN else ""
    return ", ".join(found[:_NAMES_SHOWN]) + more
