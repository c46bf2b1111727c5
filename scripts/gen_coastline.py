"""Make the outlines of land that the maps of reports and the dashboard have.

From Natural Earth's countries at 1:110 million, which are in the public domain
(naturalearthdata.com, terms of use). The wheels of geopandas below 1.0 have them:

    pip download --no-deps geopandas==0.14.4
    python scripts/gen_coastline.py geopandas-0.14.4-py3-none-any.whl

Borders between countries are left out: only what one country alone has is an outline of land.
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

SHAPES = "geopandas/datasets/naturalearth_lowres/naturalearth_lowres.shp"
WRITTEN = Path(__file__).parents[1] / "orchestrator" / "evidence" / "report" / "coastline.json"
PER_DEGREE = 20
"""Units of a degree: 0.05 of it is as much as a pixel of a map 20 degrees wide is worth."""
TOLERANCE = 1.0
"""Points that lie so near to the line between their neighbours are left out, in units."""
MIN_POINTS = 3
"""Smaller islands are left out."""
_POLYGON = 5

Point = tuple[int, int]
"""Longitude and latitude, in units."""


def main() -> None:
    """Write the file anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="of geopandas 0.14")
    with zipfile.ZipFile(parser.parse_args().wheel) as wheel:
        rings = list(_rings(wheel.read(SHAPES)))
    outlines = [_thinned(ring) for ring in _joined(_own_edges(rings))]
    outlines = sorted((each for each in outlines if len(each) > MIN_POINTS), key=len, reverse=True)
    written = {
        "about": "Outlines of land: Natural Earth 1:110m, public domain; scripts/gen_coastline.py",
        "per_degree": PER_DEGREE,
        "rings": [_steps(each) for each in outlines],
    }
    text = json.dumps(written, separators=(",", ":")).replace("],[", "],\n[")
    WRITTEN.write_text(text + "\n", encoding="utf-8")
    num_points = sum(map(len, outlines))
    print(f"{WRITTEN}: {len(outlines)} rings, {num_points} points, {len(text)} bytes")


def _rings(shapes: bytes) -> Iterator[list[Point]]:
    """Yield the rings of all polygons of a shapefile; each begins where it ends."""
    place = 100
    while place < len(shapes):
        (length,) = struct.unpack_from(">i", shapes, place + 4)
        body = place + 8
        place = body + 2 * length
        kind, *_, num_parts, num_points = struct.unpack_from("<i4d2i", shapes, body)
        assert kind == _POLYGON, kind
        starts = struct.unpack_from(f"<{num_parts}i", shapes, body + 44)
        flat = struct.unpack_from(f"<{2 * num_points}d", shapes, body + 44 + 4 * num_parts)
        points = [_units(lon, lat) for lon, lat in zip(flat[::2], flat[1::2], strict=True)]
        for begin, end in zip(starts, [*starts[1:], num_points], strict=True):
            yield points[begin:end]


def _units(lon: float, lat: float) -> Point:
    return round(lon * PER_DEGREE), round(lat * PER_DEGREE)


def _own_edges(rings: Sequence[Sequence[Point]]) -> list[tuple[Point, Point]]:
    """Return the edges, in their direction, that no other ring has the other way round."""
    edges = [
        (begin, end) for ring in rings for begin, end in itertools.pairwise(ring) if begin != end
    ]
    counts = Counter(frozenset(edge) for edge in edges)
    return [edge for edge in edges if counts[frozenset(edge)] == 1]


def _joined(edges: Sequence[tuple[Point, Point]]) -> Iterator[list[Point]]:
    """Yield closed outlines."""
    after: dict[Point, list[Point]] = {}
    for begin, end in edges:
        after.setdefault(begin, []).append(end)
    while after:
        ring = [next(iter(after))]
        while ring[-1] in after:
            ends = after[ring[-1]]
            end = ends.pop()
            if not ends:
                del after[ring[-1]]
            ring.append(end)
            if end == ring[0]:
                break
        if ring[0] == ring[-1]:
            yield ring
        else:
            print(f"not closed: {len(ring)} points from {ring[0]} to {ring[-1]}")


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return a line without what hardly bends it (Douglas and Peucker)."""
    kept = {0, len(points) - 1, len(points) // 2}
    parts = [(0, len(points) // 2), (len(points) // 2, len(points) - 1)]
    while parts:
        begin, end = parts.pop()
        if end - begin < 2:
            continue
        far = max(
            range(begin + 1, end), key=lambda at: _distance(points[at], points[begin], points[end])
        )
        if _distance(points[far], points[begin], points[end]) > TOLERANCE:
            kept.add(far)
            parts += [(begin, far), (far, end)]
    return [points[at] for at in sorted(kept)]


def _distance(point: Point, begin: Point, end: Point) -> float:
    """Return how far a point is from the line between two others."""
    (x, y), (x1, y1), (x2, y2) = point, begin, end
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    if not length:
        return float(((x - x1) ** 2 + (y - y1) ** 2) ** 0.5)
    return float(abs((x2 - x1) * (y1 - y) - (x1 - x) * (y2 - y1)) / length)


def _steps(ring: Sequence[Point]) -> list[int]:
    """Return the first point, and each next one as the way to it: x, y, x, y, ..."""
    flat = list(ring[0])
    for (x1, y1), (x2, y2) in itertools.pairwise(ring):
        flat += [x2 - x1, y2 - y1]
    return flat


if __name__ == "__main__":
    main()
