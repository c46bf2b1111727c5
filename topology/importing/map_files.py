"""Reads network maps in node-link JSON or GraphML. Other attributes are ignored.

Node-link JSON is what NetworkX writes and what topohub publishes:

    {"directed": false, "graph": {"name": …},
     "nodes": [{"id": 0, "name": "Seattle", "pos": [lon, lat]}, …],
     "edges": [{"source": 0, "target": 1, "dist": 1127.0}, …]}          or "links"

GraphML is what the Internet Topology Zoo publishes: `Network` names the graph, `label` a node.

In both, `Latitude` and `Longitude` are degrees, `dist` is in kilometres, `LinkSpeedRaw` in bit/s.

NetworkX's own readers are not used. They give no line and column, add a node that only an edge
names, and refuse a whole map for one attribute of an unknown type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET
from xml.parsers import expat

from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.world import Location

MAX_NODES = 10_000
MAX_EDGES = 100_000
MAX_DEPTH = 16
"""Limit on the nesting of XML elements."""
_VALUE_CHARACTERS = 1000
"""Limit on a value's characters; a longer one, which is no name or number, is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One place of a map."""

    key: str
    """The key by which edges name the node."""
    label: str
    """The name for people; may be empty."""
    location: Location | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One line between two nodes: in both directions, unless it is `oneway`."""

    source: str
    target: str
    distance_km: float | None = None
    bytes_per_s: float | None = None
    oneway: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkMap:
    """A whole map. Keys are unique, and the nodes of every edge exist."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def read_map(text: str, source: str) -> NetworkMap:
    """Return the map in a document; its first character tells the format.

    Raises:
        ConfigError: The document is in neither format, has mistakes, or is too large.
    """
    match text.lstrip()[:1]:
        case "{":
            name, nodes, edges = _node_link(text, source)
        case "<":
            name, nodes, edges = _graphml(text, source)
        case _:
            raise wrong(source, "want node-link JSON or GraphML: it begins with neither { nor <")
    if not nodes:
        raise wrong(source, "there is no node in it")
    for found, most, what in ((nodes, MAX_NODES, "nodes"), (edges, MAX_EDGES, "edges")):
        if len(found) > most:
            raise wrong(source, f"want at most {most} {what}, got {len(found)}")
    keys: set[str] = set()
    for node in nodes:
        if node.key in keys:
            raise wrong(source, f"two nodes have the id {node.key!r}")
        keys.add(node.key)
    for index, edge in enumerate(edges):
        for end in (edge.source, edge.target):
            if end not in keys:
                raise wrong(source, f"edge {index} names the node {end!r}, which is not there")
    return NetworkMap(name=name, nodes=tuple(nodes), edges=tuple(edges))


def wrong(source: str, message: str, line: int = 0, column: int = 0) -> ConfigError:
    """Return the error for a map that cannot be used."""
    return ConfigError([Problem(source, line, column, message, "")])


def _node_link(text: str, source: str) -> tuple[str, list[Node], list[Edge]]:
    """Return the name, the nodes and the edges of a node-link document."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong(source, f"not JSON: {error.msg}", error.lineno, error.colno) from error
    except (ValueError, RecursionError) as error:  # a number too long, nested too deeply
        raise wrong(source, "not JSON that can be read here: nested too deeply") from error
    edges_key = "edges" if "edges" in document else "links"
    listed, joined = document.get("nodes"), document.get(edges_key)
    if not isinstance(listed, list) or not isinstance(joined, list):
        raise wrong(
            source, "want node-link JSON: an object with the lists 'nodes' and 'edges' (or 'links')"
        )
    nodes, edges = [], []
    for index, value in enumerate(listed):
        if not _has_ids(value, "id"):
            raise wrong(source, f"nodes[{index}]: want an object with an id")
        label = value.get("name", value.get("label"))
        nodes.append(_node(value["id"], label if isinstance(label, str) else "", value))
    for index, value in enumerate(joined):
        if not _has_ids(value, "source", "target"):
            where = f"{edges_key}[{index}]"
            raise wrong(source, f"{where}: want an object with source and target, ids of nodes")
        oneway = document.get("directed") is True
        edges.append(_edge(value["source"], value["target"], value, oneway))
    graph = document.get("graph")
    name = graph.get("name") if isinstance(graph, dict) else None
    return name if isinstance(name, str) else "", nodes, edges


def _has_ids(value: object, *names: str) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(each), str | int) for each in names)


def _graphml(text: str, source: str) -> tuple[str, list[Node], list[Edge]]:
    """Return the name, the nodes and the edges of a GraphML document."""
    # The text is decoded by now, whatever encoding its first line declares.
    data = text.encode("utf-8", "replace")
    _refuse_hostile_xml(data, source)
    root = ET.fromstring(data, ET.XMLParser(encoding="utf-8"))  # noqa: S314
    graph = root.find("{*}graph")
    if graph is None:
        raise wrong(source, "want GraphML: there is no graph in it")
    names = {key.get("id", ""): key.get("attr.name", "") for key in root.iterfind(".//{*}key")}

    def attributes(element: ET.Element) -> dict[str, str]:
        values = {}
        for value in element.iterfind("{*}data"):
            key = value.get("key", "")
            values[names.get(key, key)] = (value.text or "").strip()[:_VALUE_CHARACTERS]
        return values

    nodes = []
    for element in graph.iterfind(".//{*}node"):
        values = attributes(element)
        nodes.append(_node(element.get("id", ""), values.get("label", ""), values))
    edges = []
    for element in graph.iterfind(".//{*}edge"):
        directed = element.get("directed") or graph.get("edgedefault")
        ends = element.get("source", ""), element.get("target", "")
        edges.append(_edge(*ends, attributes(element), directed in ("true", "directed")))
    own = attributes(graph)
    name = own.get("Network") or own.get("name") or graph.get("id") or ""
    return name, nodes, edges


def _refuse_hostile_xml(data: bytes, source: str) -> None:
    """Refuse a document that is not well-formed, not GraphML, or dangerous to read as a whole.

    Every document type is refused: entities can expand a small XML file to a large one, or read
    other files, and no map needs them.
    """
    parser = expat.ParserCreate("utf-8", namespace_separator=" ")
    counts = {"graph": 0, "node": 0, "edge": 0}
    depth = 0

    def refuse(message: str) -> ConfigError:
        return wrong(source, message, parser.CurrentLineNumber, parser.CurrentColumnNumber + 1)

    def start(name: str, _: object) -> None:
        nonlocal depth
        depth += 1
        tag = name.rpartition(" ")[2]
        if depth > MAX_DEPTH:
            raise refuse(f"nested deeper than {MAX_DEPTH} levels")
        if depth == 1 and tag != "graphml":
            raise refuse(f"want GraphML, got <{tag[:60]}>")
        if tag == "hyperedge":
            raise refuse("a hyperedge joins more than two nodes: want edges")
        if tag in counts:
            counts[tag] += 1
        if counts["graph"] > 1:
            raise refuse("a second graph: want only one")
        if counts["node"] > MAX_NODES or counts["edge"] > MAX_EDGES:
            raise refuse(f"more than {MAX_NODES} nodes or {MAX_EDGES} edges")

    def end(_: str) -> None:
        nonlocal depth
        depth -= 1

    def doctype(*_: object) -> None:
        raise refuse("a document type (<!DOCTYPE …>) is not read: remove it")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        message = f"not XML: {expat.errors.messages[error.code]}"
        raise wrong(source, message, error.lineno, error.offset + 1) from error


def _node(key: object, label: str, values: Mapping[str, Any]) -> Node:
    lat, lon = values.get("Latitude", values.get("lat")), values.get("Longitude", values.get("lon"))
    position = values.get("pos")
    if isinstance(position, list) and len(position) == 2:
        lon, lat = position
    location = _location(_number(lat), _number(lon))
    return Node(key=str(key), label=label, location=location)


def _location(lat: float | None, lon: float | None) -> Location | None:
    if lat is None or lon is None or abs(lat) > 90 or abs(lon) > 180:
        return None
    return Location(lat=lat, lon=lon)


def _edge(source: object, target: object, values: Mapping[str, Any], oneway: bool) -> Edge:
    distance_km, bits_per_s = _number(values.get("dist")), _number(values.get("LinkSpeedRaw"))
    return Edge(
        source=str(source),
        target=str(target),
        distance_km=distance_km if distance_km and distance_km > 0 else None,
        bytes_per_s=bits_per_s / 8 if bits_per_s and bits_per_s > 0 else None,
        oneway=oneway,
    )


def _number(value: object) -> float | None:
    """Return a finite number from a number or its text, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
