"""Outlines of land for a part of the world map, as one path of SVG.

The outlines are Natural Earth's at 1:110 million, in the public domain; scripts/gen_coastline.py
made coastline.json of them: rings of whole units, the first point and then the way to each next.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Point = tuple[float, float]

WIDTH = 1400
"""Units of the path from the left edge to the right: finer than a page shows."""
_BEYOND = 0.02
"""Land is drawn so far beyond the edges, as a share of the extent: there its outline is cut."""


@dataclass(frozen=True, slots=True)
class View:
    """The part of the world that is drawn, in degrees. Its longitudes may be beyond 180."""

    left: float
    right: float
    bottom: float
    top: float


@dataclass(frozen=True, slots=True)
class _Ring:
    points: list[Point]
    left: float
    right: float
    bottom: float
    top: float


def land(view: View, height: int) -> str:
    """Return the path of all land in a view, drawn WIDTH wide and `height` high; may be empty."""
    lon_span, lat_span = view.right - view.left, view.top - view.bottom
    wider = View(
        view.left - _BEYOND * lon_span,
        view.right + _BEYOND * lon_span,
        view.bottom - _BEYOND * lat_span,
        view.top + _BEYOND * lat_span,
    )
    parts = []
    for ring in _rings():
        if ring.top < wider.bottom or ring.bottom > wider.top:
            continue
        for shift in (-360.0, 0.0, 360.0, 720.0):
            if ring.right + shift < wider.left or ring.left + shift > wider.right:
                continue
            within = _clipped([(lon + shift, lat) for lon, lat in ring.points], wider)
            drawn = [
                (
                    round((lon - view.left) / lon_span * WIDTH),
                    round((view.top - lat) / lat_span * height),
                )
                for lon, lat in within
            ]
            parts.append(_path(drawn))
    return "".join(parts)


def _path(points: Sequence[tuple[int, int]]) -> str:
    """Return a closed path, without points that fall together."""
    apart = [point for at, point in enumerate(points) if not at or point != points[at - 1]]
    if len(set(apart)) < 3:
        return ""
    steps = [f"{x2 - x1},{y2 - y1}" for (x1, y1), (x2, y2) in itertools.pairwise(apart)]
    return f"M{apart[0][0]},{apart[0][1]}l{' '.join(steps)}z"


def _clipped(points: Sequence[Point], view: View) -> Sequence[Point]:
    """Return what of a ring is in a view (Sutherland and Hodgman)."""
    points = _cut(points, lambda point: point[0] - view.left)
    points = _cut(points, lambda point: view.right - point[0])
    points = _cut(points, lambda point: point[1] - view.bottom)
    return _cut(points, lambda point: view.top - point[1])


def _cut(points: Sequence[Point], depth: Callable[[Point], float]) -> list[Point]:
    """Return what of a ring is on the inner side of a line, where `depth` is 0 or more."""
    kept: list[Point] = []
    if not points:
        return kept
    before, before_in = points[-1], depth(points[-1])
    for point in points:
        point_in = depth(point)
        if (point_in >= 0.0) is not (before_in >= 0.0):
            share = before_in / (before_in - point_in)
            kept.append(
                (
                    before[0] + share * (point[0] - before[0]),
                    before[1] + share * (point[1] - before[1]),
                )
            )
        if point_in >= 0.0:
            kept.append(point)
        before, before_in = point, point_in
    return kept


@functools.cache
def _rings() -> tuple[_Ring, ...]:
    written = json.loads((Path(__file__).parent / "coastline.json").read_text(encoding="utf-8"))
    rings = []
    for steps in written["rings"]:
        points, lon, lat = [], 0, 0
        for across, up in zip(steps[::2], steps[1::2], strict=True):
            lon, lat = lon + across, lat + up
            points.append((lon / written["per_degree"], lat / written["per_degree"]))
        lons, lats = [lon for lon, _ in points], [lat for _, lat in points]
        rings.append(_Ring(points, min(lons), max(lons), min(lats), max(lats)))
    return tuple(rings)
