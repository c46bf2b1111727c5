"""Converts a network map to a topology's YAML, with assumptions as comments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from isthmus.topology.documents.load import load_topology
from isthmus.topology.importing.map_files import Edge, NetworkMap, Node, read_map, wrong
from isthmus.topology.importing.places import nearest_city, place_of, plain, unique_names
from isthmus.topology.models.topology_model import MAX_SITES
from isthmus.topology.presets.templates import schema_line
from isthmus.topology.spec.geography import great_circle_km
from isthmus.topology.spec.suggest import did_you_mean
from isthmus.topology.spec.units import format_distance, format_rate
from isthmus.topology.spec.world import Location

SHORTEST_KM = 1.0
"""Smallest distance between two nodes, even in one building."""
_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Settings of the user that complete a map."""

    bytes_per_s: float | None = None
    """Bytes per second of edges that give no speed."""
    sites: tuple[str, ...] = ()
    """The names of the sites to keep, as they will be in the topology; empty: all."""
    accelerator: str = "cpu"
    nodes: int = 1
    accelerators_per_node: int = 1


@dataclass(frozen=True, slots=True)
class Imported:
    """An imported topology, and warnings on parts left out or assumed."""

    text: str
    num_sites: int
    num_links: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One direction between two nodes."""

    distance_km: float | None
    """Kilometres between the ends; None: unknown from the map and the places of both ends."""
    bytes_per_s: float
    """Bytes per second; 0: unknown."""
    is_by_places: bool = False
    """Whether the distance is computed from the places of both ends."""


_Pair = tuple[str, str]
"""The keys of a line's source and target."""


def import_topology(text: str, source: str, wishes: Wishes) -> Imported:
    """Return a valid topology for a map's file.

    Raises:
        ConfigError: The map cannot be read, or lacks data that a topology needs; with the remedy.
    """
    network = read_map(text, source)
    warnings: list[str] = []
    names = dict(zip((each.key for each in network.nodes), _names(network), strict=True))
    places = {each.key: _place(each, names[each.key], warnings) for each in network.nodes}
    lines = _with_speeds(_lines(network.edges, places, warnings), wishes, source, warnings)
    chosen = _chosen(names, wishes, source)
    if wishes.sites:
        lines = _paths_between(lines, chosen)
    _check(chosen, lines, names, source)
    links = _links(chosen, lines, names)
    file = source.rpartition("/")[2]
    title = plain(network.name) or plain(file.partition(".")[0]) or "imported"
    sites = {names[key]: places[key] for key in chosen}
    written = _topology_text(title[:63].strip("-"), file, sites, links, wishes)
    world = load_topology(written, f"the topology of {source}")
    return Imported(written, len(world.sites), len(links), tuple(warnings))


def _names(found: NetworkMap) -> list[str]:
    """Return a name for each node: its label, else the city that it is in, else its id."""
    texts = []
    for node in found.nodes:
        city = nearest_city(node.location) if not plain(node.label) and node.location else None
        texts.append(plain(node.label) or city or f"site-{node.key}")
    return unique_names(texts)


def _place(node: Node, name: str, warnings: list[str]) -> Location | None:
    if node.location is not None:
        return node.location
    city = place_of(node.label)
    if city is not None:
        warnings.append(f"{name}: no coordinates in the map; those of the city were taken")
    return city


def _lines(
    edges: Sequence[Edge], places: Mapping[str, Location | None], warnings: list[str]
) -> dict[_Pair, _Line]:
    """Return the lines by their ends.

    Parallel edges become one line: as fast as all of them, as long as the shortest.
    """
    lines: dict[_Pair, _Line] = {}
    num_loops = num_parallel = 0
    for edge in edges:
        if edge.source == edge.target:
            num_loops += 1
            continue
        line = _line(edge, places[edge.source], places[edge.target])
        pairs = [(edge.source, edge.target)]
        pairs += [] if edge.oneway else [(edge.target, edge.source)]
        num_parallel += any(pair in lines for pair in pairs)
        for pair in pairs:
            lines[pair] = _beside(lines[pair], line) if pair in lines else line
    if num_loops:
        warnings.append(f"left out: {num_loops} edges from a node to itself")
    if num_parallel:
        warnings.append(f"{num_parallel} parallel edges were added to those beside them")
    return lines


def _line(edge: Edge, one: Location | None, other: Location | None) -> _Line:
    distance_km, is_by_places = edge.distance_km, False
    if distance_km is None and one is not None and other is not None:
        distance_km = great_circle_km(one, other)
        is_by_places = distance_km >= SHORTEST_KM
    return _Line(
        distance_km=None if distance_km is None else max(distance_km, SHORTEST_KM),
        bytes_per_s=edge.bytes_per_s or 0.0,
        is_by_places=is_by_places,
    )


def _beside(one: _Line, other: _Line) -> _Line:
    lengths = [each.distance_km for each in (one, other) if each.distance_km is not None]
    return _Line(
        distance_km=min(lengths, default=None),
        bytes_per_s=one.bytes_per_s + other.bytes_per_s,
        is_by_places=one.is_by_places and other.is_by_places,
    )


def _with_speeds(
    lines: Mapping[_Pair, _Line], wishes: Wishes, source: str, warnings: list[str]
) -> dict[_Pair, _Line]:
    """Set the wished speed of lines without one."""
    missing = sum(not line.bytes_per_s for line in lines.values())
    if missing and wishes.bytes_per_s is None:
        raise wrong(
            source,
            f"{missing} of {len(lines)} directed edges have no speed: give them one, as "
            "--bandwidth 10Gbit/s",
        )
    if 0 < missing < len(lines):
        warnings.append(f"{missing} of {len(lines)} directed edges had no speed")
    return {
        pair: replace(line, bytes_per_s=line.bytes_per_s or wishes.bytes_per_s or 0.0)
        for pair, line in lines.items()
    }


def _chosen(names: Mapping[str, str], wishes: Wishes, source: str) -> list[str]:
    """Return the keys of the nodes that become sites, in the map's order."""
    unknown = [name for name in wishes.sites if name not in names.values()]
    if unknown:
        hint = did_you_mean(unknown[0], names.values())
        there = _listed(list(names.values()))
        raise wrong(source, f"--sites: no site {unknown[0]!r}{hint}; there are {there}")
    chosen = [key for key, name in names.items() if not wishes.sites or name in wishes.sites]
    if len(chosen) > MAX_SITES:
        raise wrong(
            source,
            f"{len(chosen)} nodes, and a topology has {MAX_SITES} sites at most: choose some with "
            f"--sites, of {_listed(list(names.values()))}",
        )
    return chosen


def _paths_between(lines: Mapping[_Pair, _Line], chosen: Sequence[str]) -> dict[_Pair, _Line]:
    """Return a line for each shortest path between chosen nodes that passes no third one.

    The line is as long as the path and as fast as its slowest part. A line of unknown length is
    kept if it joins two chosen nodes.
    """
    ends = set(chosen)
    found: dict[_Pair, _Line] = {}
    for start in chosen:
        graph = nx.DiGraph()
        graph.add_node(start)
        for (source, target), line in lines.items():
            if line.distance_km is not None and (source == start or source not in ends):
                graph.add_edge(source, target, km=line.distance_km)
        lengths, paths = nx.single_source_dijkstra(graph, start, weight="km")
        for end in ends & paths.keys() - {start}:
            hops = [lines[hop] for hop in nx.utils.pairwise(paths[end])]
            slowest = min(line.bytes_per_s for line in hops)
            path = _Line(distance_km=lengths[end], bytes_per_s=slowest)
            found[start, end] = hops[0] if len(hops) == 1 else path
    for pair, line in lines.items():
        if line.distance_km is None and ends.issuperset(pair):
            found.setdefault(pair, line)
    return found


def _check(
    chosen: Sequence[str], lines: Mapping[_Pair, _Line], names: Mapping[str, str], source: str
) -> None:
    """Refuse a map that is not connected, or a line without a distance."""
    graph = nx.Graph()
    graph.add_nodes_from(chosen)
    graph.add_edges_from(pair for pair in lines if pair[::-1] in lines)
    parts = sorted(nx.connected_components(graph), key=len, reverse=True)
    if len(parts) > 1:
        listed = "; ".join(
            _listed([names[key] for key in chosen if key in part]) for part in parts[:4]
        )
        raise wrong(
            source,
            f"the sites are in {len(parts)} parts that nothing connects both ways: choose those of "
            f"one with --sites. {listed}",
        )
    lost = dict.fromkeys(
        names[key] for pair, line in lines.items() if line.distance_km is None for key in pair
    )
    if lost:
        raise wrong(
            source,
            f"nothing gives a distance between {', '.join(list(lost)[:_NAMES_SHOWN])}: add their "
            "coordinates or the edges' dist, or choose others with --sites",
        )


def _links(
    chosen: Sequence[str], lines: Mapping[_Pair, _Line], names: Mapping[str, str]
) -> list[str]:
    """Return the links as YAML, in site order; one for both directions if they are equal."""
    order = {key: position for position, key in enumerate(chosen)}
    links = []
    for pair in sorted(lines, key=lambda pair: sorted(order[key] for key in pair)):
        source, target = pair
        line, back = lines[pair], lines.get((target, source))
        if back == line and order[target] < order[source]:
            continue
        figures = [f"bandwidth: {format_rate(line.bytes_per_s)}"]
        if line.distance_km is not None and not line.is_by_places:
            figures.append(f"distance: {format_distance(line.distance_km)}")
        if back != line:
            figures.append("oneway: true")
        ends = f"{_quoted(names[source])}, {_quoted(names[target])}"
        links.append(f"  - {{between: [{ends}], {', '.join(figures)}}}")
    return links


def _topology_text(
    name: str,
    file: str,
    sites: Mapping[str, Location | None],
    links: Sequence[str],
    wishes: Wishes,
) -> str:
    """Return the whole file, with comments on points to check."""
    (first, place), *others = sites.items()
    origin = "".join(each if each.isprintable() else " " for each in file)[:80]
    lines = [
        f"# Imported from {origin}: {len(sites)} sites, {len(links)} links.",
        "# What the map did not say is the same for all: "
        "the sites' nodes, and perhaps the links' bandwidth.",
        "version: 1",
        f"name: {_quoted(name)}",
        "",
        "sites:",
        f"  - name: {_quoted(first)}",
        *([f"    location: {_degrees(place)}"] if place else []),
        f"    nodes: {wishes.nodes}",
        f"    accelerators_per_node: {wishes.accelerators_per_node} "
        "# one training process (rank) each",
        f"    accelerator: {wishes.accelerator} "
        "# `isthmus topology accelerators` lists what is known",
        *(
            f"  - {{name: {_quoted(site)}, like: {_quoted(first)}"
            + (f", location: {_degrees(place)}}}" if place else "}")
            for site, place in others
        ),
        "",
        "# Full duplex: each direction has this bandwidth. No link has an rtt: it follows from the "
        "distance,",
        "# or from the locations. `isthmus probe FILE --write` measures both.",
        "links:" if links else "links: []",
        *links,
        "",
        "emulate: true # the WAN is emulated on this machine: remove it where the sites are real",
        "",
        "security: {mode: insecure} # without TLS: loopback addresses only",
    ]
    return schema_line("topology") + "\n".join(lines) + "\n"


def _degrees(place: Location) -> str:
    return f"{{lat: {round(place.lat, 4):g}, lon: {round(place.lon, 4):g}}}"


def _quoted(name: str) -> str:
    """Return a name quoted if YAML needs it: `911` and `true` do."""
    is_plain = name[:1].isalpha() and name not in ("true", "false", "null")
    return name if is_plain else f'"{name}"'


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
