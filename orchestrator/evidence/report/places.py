"""Where sites are drawn.

On a plain equirectangular map, or on a circle where a location is missing.

Pure. A place is (x, y), each 0..1 of the drawing, y downwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.evidence.report.facts import SiteFacts
from orchestrator.evidence.report.scales import ticks

ASPECT = 2.3
"""Width over height of the drawing, as in page.css; on a phone it is drawn higher."""
_MARGIN = 0.22
"""Of the sites' extent, on each side: names need room."""
_MIN_SPAN_DEG = 8.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The sites' places, and the lines of the graticule under them."""

    places: dict[str, tuple[float, float]]
    meridians: tuple[tuple[float, str], ...] = ()
    """x, and the longitude in words."""
    parallels: tuple[tuple[float, str], ...] = ()
    """y, and the latitude in words."""

    @property
    def is_map(self) -> bool:
        """Whether places are locations."""
        return bool(self.meridians or self.parallels)


def lay_out(sites: Sequence[SiteFacts]) -> Layout:
    """Return where each site is drawn."""
    located = [(site.site, site.lat, site.lon) for site in sites]
    known = [(name, lat, lon) for name, lat, lon in located if lat is not None and lon is not None]
    if len(known) < len(located) or not known:
        return _circle([site.site for site in sites])
    return _map(known)


def _circle(names: Sequence[str]) -> Layout:
    """Return a circle that begins at the top and goes clockwise."""
    places = {}
    for index, name in enumerate(names):
        angle = 2 * math.pi * index / len(names) - math.pi / 2
        places[name] = (
            0.5 + 0.34 * math.cos(angle) / ASPECT * 1.3,
            0.5 + 0.34 * math.sin(angle),
        )
    return Layout(places)


def _map(sites: Sequence[tuple[str, float, float]]) -> Layout:
    """Return an equirectangular map whose degrees have their true proportion at its middle."""
    lats = [lat for _, lat, _ in sites]
    west = _west([lon for _, _, lon in sites])
    lons = [west + (lon - west) % 360.0 for _, _, lon in sites]
    lat_mid, lon_mid = (min(lats) + max(lats)) / 2, (min(lons) + max(lons)) / 2
    stretch = math.cos(math.radians(min(75.0, abs(lat_mid))))
    lat_span = max(_MIN_SPAN_DEG, (max(lats) - min(lats)) * (1 + 2 * _MARGIN))
    lon_span = max(_MIN_SPAN_DEG, (max(lons) - min(lons)) * (1 + 2 * _MARGIN))
    lat_span = max(lat_span, lon_span * stretch / ASPECT)
    lon_span = lat_span * ASPECT / stretch
    left, top = lon_mid - lon_span / 2, lat_mid + lat_span / 2

    def x_of(lon: float) -> float:
        return (lon - left) / lon_span

    def y_of(lat: float) -> float:
        return (top - lat) / lat_span

    return Layout(
        {name: (x_of(lon), y_of(lat)) for (name, lat, _), lon in zip(sites, lons, strict=True)},
        tuple((x_of(lon), longitude(lon)) for lon in ticks(left, left + lon_span, 6)),
        tuple(
            (y_of(lat), latitude(lat)) for lat in ticks(top - lat_span, top, 4) if abs(lat) <= 90
        ),
    )


def _west(lons: Sequence[float]) -> float:
    """Return the longitude to begin at: east of the widest gap, so that a pair is never split."""
    around = sorted(lon % 360.0 for lon in lons)
    gaps = [
        ((after - before) % 360.0 or 360.0, after)
        for before, after in zip(around, [*around[1:], around[0]], strict=True)
    ]
    return max(gaps)[1]


def latitude(lat: float) -> str:
    """Return `45°N`."""
    return f"{abs(lat):g}°{'N' if lat > 0 else 'S' if lat < 0 else ''}"


def longitude(lon: float) -> str:
    """Return `120°W`."""
    lon = (lon + 180.0) % 360.0 - 180.0
    return f"{abs(lon):g}°{'E' if lon > 0 else 'W' if lon < 0 else ''}"
