"""GraphML, as the Internet Topology Zoo publishes maps.

Read are the graph's and the nodes' names (`Network`, `label`), `Latitude`, `Longitude`, the edges'
`LinkSpeedRaw` (bit/s) and `dist` (km). Everything else is passed over.

A document type is refused, whatever it says: entities are how a small XML file becomes a large one,
or reads other files, and no map needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.parsers import expat

from topology.importing.graph import (
    MAX_EDGES,
    MAX_NODES,
    Edge,
    Graph,
    Node,
    location_of,
    positive,
    wrong,
)

MAX_DEPTH = 16
_VALUE_CHARACTERS = 1000
"""Of one value: what is longer is no name and no number."""


def read_graphml(text: str, source: str) -> Graph:
    """Return the graph of a GraphML document.

    Args:
        text: Of the whole file.
        source: What messages call it.

    Raises:
        ConfigError: it is not XML or not GraphML, has a document type, or a graph inside another.
    """
    reader = _Reader(source)
    try:
        # The text is decoded by now, whatever its first line says.
        reader.parser.Parse(text.encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        message = f"not XML: {expat.errors.messages[error.code]}"
        raise wrong(source, message, error.lineno, error.offset + 1) from error
    if not reader.has_graph:
        raise wrong(source, "want GraphML: there is no graph in it")
    nodes = [
        Node(
            key=each.key,
            label=each.values.get("label", ""),
            location=location_of(each.values.get("Latitude"), each.values.get("Longitude")),
        )
        for each in reader.nodes
    ]
    edges = [_edge(each, reader.is_directed) for each in reader.edges]
    values = reader.graph.values
    return Graph.checked(
        source, values.get("Network") or values.get("name") or reader.graph.key, nodes, edges
    )


@dataclass(slots=True)
class _Element:
    """A graph, node or edge, and the values of its attributes by their names."""

    key: str = ""
    ends: tuple[str, str] = ("", "")
    directed: str = ""
    values: dict[str, str] = field(default_factory=dict)


class _Reader:
    """Collects elements while expat parses."""

    def __init__(self, source: str) -> None:
        self.graph = _Element()
        self.nodes: list[_Element] = []
        self.edges: list[_Element] = []
        self.has_graph = False
        self.is_directed = False
        self._source = source
        self._names: dict[str, str] = {}
        """Of attributes, by the ids that values name them with."""
        self._open: list[str] = []
        self._owner: _Element | None = None
        self._data = ""
        self._text: list[str] = []
        self.parser = expat.ParserCreate("utf-8", namespace_separator=" ")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.StartDoctypeDeclHandler = self._doctype

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        tag = name.rpartition(" ")[2]
        self._open.append(tag)
        if len(self._open) > MAX_DEPTH:
            raise self._wrong(f"nested deeper than {MAX_DEPTH} levels")
        if len(self._open) == 1 and tag != "graphml":
            raise self._wrong(f"want GraphML, got <{tag[:60]}>")
        match tag:
            case "key":
                self._names[attributes.get("id", "")] = attributes.get("attr.name", "")
            case "graph":
                if self.has_graph:
                    raise self._wrong("a second graph: want only one")
                self.has_graph, self._owner = True, self.graph
                self.graph.key = attributes.get("id", "")
                self.is_directed = attributes.get("edgedefault") == "directed"
            case "hyperedge":
                raise self._wrong("a hyperedge joins more than two nodes: want edges")
            case "node":
                self._owner = _Element(key=attributes.get("id", ""))
                self.nodes.append(self._owner)
            case "edge":
                ends = attributes.get("source", ""), attributes.get("target", "")
                self._owner = _Element(ends=ends, directed=attributes.get("directed", ""))
                self.edges.append(self._owner)
            case "data":
                self._data, self._text = attributes.get("key", ""), []
        if len(self.nodes) > MAX_NODES or len(self.edges) > MAX_EDGES:
            raise self._wrong(f"more than {MAX_NODES} nodes or {MAX_EDGES} edges")

    def _end(self, name: str) -> None:
        tag = self._open.pop()
        if tag == "data" and self._owner is not None:
            text = "".join(self._text).strip()[:_VALUE_CHARACTERS]
            self._owner.values[self._names.get(self._data, self._data)] = text
            self._data = ""
        elif tag in ("node", "edge"):
            self._owner = self.graph

    def _characters(self, text: str) -> None:
        if self._open[-1] == "data":
            self._text.append(text)

    def _doctype(self, *_: object) -> None:
        raise self._wrong("a document type (<!DOCTYPE …>) is not read: remove it")

    def _wrong(self, message: str) -> Exception:
        line, column = self.parser.CurrentLineNumber, self.parser.CurrentColumnNumber + 1
        return wrong(self._source, message, line, column)


def _edge(found: _Element, is_directed: bool) -> Edge:
    bits_per_s = positive(found.values.get("LinkSpeedRaw"))
    return Edge(
        source=found.ends[0],
        target=found.ends[1],
        distance_km=positive(found.values.get("dist")),
        bytes_per_s=None if bits_per_s is None else bits_per_s / 8,
        oneway={"true": True, "false": False}.get(found.directed, is_directed),
    )
