"""NetworkX's node-link JSON, as topohub publishes maps.

    {"directed": false, "multigraph": false, "graph": {"name": …},
     "nodes": [{"id": 0, "name": "Seattle", "pos": [lon, lat]}, …],
     "edges": [{"source": 0, "target": 1, "dist": 1127.0}, …]}          or "links"

`dist` is kilometres. `Latitude`, `Longitude` and `LinkSpeedRaw` (bit/s) are read where the Internet
Topology Zoo's graphs were converted. Everything else is passed over.
"""

import json
from collections.abc import Mapping
from typing import Any

from topology.importing.graph import Edge, Graph, Node, location_of, positive, wrong


def read_node_link(text: str, source: str) -> Graph:
    """Return the graph of a node-link document.

    Args:
        text: Of the whole file.
        source: What messages call it.

    Raises:
        ConfigError: it is not JSON, or not such a document.
    """
    document = _parsed(text, source)
    listed = document.get("nodes")
    edges_key = "edges" if "edges" in document else "links"
    joined = document.get(edges_key)
    if not isinstance(listed, list) or not isinstance(joined, list):
        raise wrong(
            source, "want node-link JSON: an object with the lists 'nodes' and 'edges' (or 'links')"
        )
    graph = document.get("graph")
    name = graph.get("name") if isinstance(graph, dict) else None
    oneway = document.get("directed") is True
    return Graph.checked(
        source,
        name if isinstance(name, str) else "",
        [_node(each, index, source) for index, each in enumerate(listed)],
        [_edge(each, f"{edges_key}[{i}]", oneway, source) for i, each in enumerate(joined)],
    )


def _parsed(text: str, source: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong(source, f"not JSON: {error.msg}", error.lineno, error.colno) from error
    except (ValueError, RecursionError) as error:  # a number too long, nested too deeply
        raise wrong(source, "not JSON that can be read here: nested too deeply") from error
    if not isinstance(document, dict):
        raise wrong(source, "want node-link JSON: an object with 'nodes' and 'edges'")
    return document


def _node(value: object, index: int, source: str) -> Node:
    if not isinstance(value, dict) or not isinstance(value.get("id"), str | int):
        raise wrong(source, f"nodes[{index}]: want an object with an id")
    lat, lon = value.get("Latitude", value.get("lat")), value.get("Longitude", value.get("lon"))
    position = value.get("pos")
    if isinstance(position, list) and len(position) == 2:
        lon, lat = position
    label = value.get("name", value.get("label"))
    return Node(
        key=str(value["id"]),
        label=label if isinstance(label, str) else "",
        location=location_of(lat, lon),
    )


def _edge(value: object, where: str, oneway: bool, source: str) -> Edge:
    if not isinstance(value, dict) or not all(
        isinstance(value.get(end), str | int) for end in ("source", "target")
    ):
        raise wrong(source, f"{where}: want an object with source and target, ids of nodes")
    bits_per_s = positive(value.get("LinkSpeedRaw"))
    return Edge(
        source=str(value["source"]),
        target=str(value["target"]),
        distance_km=positive(value.get("dist")),
        bytes_per_s=None if bits_per_s is None else bits_per_s / 8,
        oneway=oneway,
    )
