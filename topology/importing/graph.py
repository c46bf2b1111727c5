"""A map as it was read: nodes that may have a place, edges that may have a length and a speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from topology.errors import ConfigError, Problem
from topology.world import Location

MAX_NODES = 10_000
MAX_EDGES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One place of the map."""

    key: str
    """What edges call it."""
    label: str
    """What people call it; empty: nothing else."""
    location: Location | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One line between two nodes: both directions, or only the one if `oneway`."""

    source: str
    target: str
    distance_km: float | None = None
    bytes_per_s: float | None = None
    oneway: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A whole map. Keys are unique, and every edge's ends are there."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @classmethod
    def checked(cls, source: str, name: str, nodes: list[Node], edges: list[Edge]) -> Graph:
        """Return the graph of what a reader found.

        Raises:
            ConfigError: there is nothing in it or too much, two nodes have one key, or an edge
                leads nowhere.
        """
        if not nodes:
            raise wrong(source, "there is no node in it")
        for count, most, what in (
            (len(nodes), MAX_NODES, "nodes"),
            (len(edges), MAX_EDGES, "edges"),
        ):
            if count > most:
                raise wrong(source, f"want at most {most} {what}, got {count}")
        keys: set[str] = set()
        for node in nodes:
            if node.key in keys:
                raise wrong(source, f"two nodes have the id {node.key!r}")
            keys.add(node.key)
        for index, edge in enumerate(edges):
            for end in (edge.source, edge.target):
                if end not in keys:
                    raise wrong(source, f"edge {index} names the node {end!r}, which is not there")
        return cls(name=name, nodes=tuple(nodes), edges=tuple(edges))


def location_of(lat: object, lon: object) -> Location | None:
    """Return the place that two figures in degrees mean, None if they mean none."""
    found = [number(each) for each in (lat, lon)]
    if found[0] is None or found[1] is None:
        return None
    if not (-90 <= found[0] <= 90 and -180 <= found[1] <= 180):
        return None
    return Location(lat=found[0], lon=found[1])


def number(value: object) -> float | None:
    """Return a finite number from a number or its text, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def positive(value: object) -> float | None:
    """Return a finite number above 0 from a number or its text, else None."""
    found = number(value)
    return found if found is not None and found > 0 else None


def wrong(source: str, message: str, line: int = 0, column: int = 0) -> ConfigError:
    """Return the error for a map that cannot be used."""
    return ConfigError([Problem(source, line, column, message, "")])
