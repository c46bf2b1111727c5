"""A map's edges as what may become links: one line a direction, its length and speed known."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from topology.geography import great_circle_km
from topology.importing.graph import Edge
from topology.world import Location

Pair = tuple[str, str]
"""Source and target."""
SHORTEST_KM = 1.0
"""Two nodes of one building are still so far apart: nothing has no length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One direction between two nodes."""

    distance_km: float | None
    """None: neither the map nor the places of both ends tell."""
    bytes_per_s: float | None
    is_by_places: bool = False
    """The distance is that between the places of both ends."""

    def beside(self, other: Line) -> Line:
        """Return what two parallel lines are together: as fast as both, as long as the shorter."""
        rates = [each.bytes_per_s for each in (self, other) if each.bytes_per_s is not None]
        lengths = [each.distance_km for each in (self, other) if each.distance_km is not None]
        return Line(
            distance_km=min(lengths, default=None),
            bytes_per_s=sum(rates) if len(rates) == 2 else max(rates, default=None),
            is_by_places=self.is_by_places and other.is_by_places,
        )

    def then(self, other: Line) -> Line:
        """Return what two lines of known length are one after the other: as fast as the slower."""
        assert self.distance_km is not None
        assert other.distance_km is not None
        rates = [each.bytes_per_s for each in (self, other) if each.bytes_per_s is not None]
        return Line(
            distance_km=self.distance_km + other.distance_km, bytes_per_s=min(rates, default=None)
        )


def lines_of(
    edges: Iterable[Edge], places: Mapping[str, Location | None]
) -> tuple[dict[Pair, Line], list[str]]:
    """Return the lines by their ends, and what had to be changed for it, in sentences.

    Args:
        edges: Of the map.
        places: Of its nodes.
    """
    lines: dict[Pair, Line] = {}
    num_loops = num_parallel = 0
    for edge in edges:
        if edge.source == edge.target:
            num_loops += 1
            continue
        line = _line(edge, places)
        pairs = [(edge.source, edge.target)]
        pairs += [] if edge.oneway else [(edge.target, edge.source)]
        num_parallel += any(pair in lines for pair in pairs)
        for pair in pairs:
            lines[pair] = lines[pair].beside(line) if pair in lines else line
    warnings = []
    if num_loops:
        warnings.append(f"left out: {num_loops} edges from a node to itself")
    if num_parallel:
        warnings.append(f"{num_parallel} parallel edges were added to those beside them")
    return lines, warnings


def _line(edge: Edge, places: Mapping[str, Location | None]) -> Line:
    one, other = places[edge.source], places[edge.target]
    if edge.distance_km is not None:
        distance_km = max(edge.distance_km, SHORTEST_KM)
        return Line(distance_km=distance_km, bytes_per_s=edge.bytes_per_s)
    if one is None or other is None:
        return Line(distance_km=None, bytes_per_s=edge.bytes_per_s)
    distance_km = great_circle_km(one, other)
    return Line(
        distance_km=max(distance_km, SHORTEST_KM),
        bytes_per_s=edge.bytes_per_s,
        is_by_places=distance_km >= SHORTEST_KM,
    )


def paths_between(lines: Mapping[Pair, Line], chosen: Collection[str]) -> dict[Pair, Line]:
    """Return a line for each two chosen nodes whose shortest path passes no third one.

    A path is as long as its lines together, and as fast as the slowest. Lines of unknown length are
    taken by none but their own ends.
    """
    ahead: dict[str, list[tuple[str, Line]]] = {}
    for (source, target), line in lines.items():
        ahead.setdefault(source, []).append((target, line))
    found: dict[Pair, Line] = {}
    for source in chosen:
        for target, line in _paths_from(source, ahead, chosen).items():
            found[source, target] = line
        for target, line in ahead.get(source, []):
            if target in chosen and line.distance_km is None:
                found.setdefault((source, target), line)
    return found


def _paths_from(
    source: str, ahead: Mapping[str, list[tuple[str, Line]]], chosen: Collection[str]
) -> dict[str, Line]:
    """Dijkstra's algorithm; what lies behind a chosen node is that one's to reach."""
    reached: dict[str, Line] = {}
    counter = 0
    queue: list[tuple[float, int, str, Line | None]] = [(0.0, counter, source, None)]
    while queue:
        _, _, node, path = heapq.heappop(queue)
        if node in reached or (path is not None and node == source):
            continue
        if path is not None:
            reached[node] = path
            if node in chosen:
                continue
        for target, line in ahead.get(node, []):
            if line.distance_km is not None:
                longer = line if path is None else path.then(line)
                assert longer.distance_km is not None
                counter += 1
                heapq.heappush(queue, (longer.distance_km, counter, target, longer))
    return {node: path for node, path in reached.items() if node in chosen}


def parts(keys: Sequence[str], lines: Mapping[Pair, Line]) -> list[list[str]]:
    """Return the sets of nodes that lines in both directions connect, the largest first."""
    both: dict[str, list[str]] = {}
    for source, target in lines:
        if (target, source) in lines:
            both.setdefault(source, []).append(target)
    left, found = dict.fromkeys(keys), []
    while left:
        first = next(iter(left))
        part, waiting = {first}, [first]
        while waiting:
            new = [each for each in both.get(waiting.pop(), []) if each not in part]
            part.update(new)
            waiting += new
        found.append([key for key in keys if key in part])
        left = {key: None for key in left if key not in part}
    return sorted(found, key=len, reverse=True)
