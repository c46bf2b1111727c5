"""The map of a run: its sites, and each direction of each link, drawn by how much of it was used.

Sites stand where they are on a plain equirectangular map, over outlines of land, or on a circle
where a location is missing. A place is (x, y), each 0..1 of the drawing, y downwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.orchestrator.evidence.report.charts import ticks
from isthmus.orchestrator.evidence.report.coastline import WIDTH, View, land
from isthmus.orchestrator.evidence.report.html import (
    Markup,
    element,
    join,
    key,
    line,
    percent,
    shortened,
    words_at,
)
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.runs.facts import LinkFacts, SiteFacts

ASPECT = 2.3
"""Width over height of the drawing, as in page.css; on a phone it is drawn higher."""
_MARGIN = 0.22
"""The margin on each side, as a share of the sites' extent: names need room."""
_MIN_SPAN_DEG = 8.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The sites' places, and the lines of the graticule under them."""

    places: dict[str, tuple[float, float]]
    meridians: tuple[tuple[float, str], ...] = ()
    """x, and the longitude in words."""
    parallels: tuple[tuple[float, str], ...] = ()
    """y, and the latitude in words."""
    view: View | None = None
    """The part of the world; None: it is no map."""

    @property
    def is_map(self) -> bool:
        """Whether places are locations."""
        return self.view is not None


def lay_out(sites: Sequence[SiteFacts]) -> Layout:
    """Return where each site is drawn."""
    located = [(site.site, site.lat, site.lon) for site in sites]
    known = [(name, lat, lon) for name, lat, lon in located if lat is not None and lon is not None]
    if len(known) < len(located) or not known:
        return _circle([site.site for site in sites])
    return _map(known)


def _circle(names: Sequence[str]) -> Layout:
    """Return a circle that begins at the top and goes clockwise; two sites lie side by side."""
    if len(names) == 2:
        return Layout({names[0]: (0.25, 0.5), names[1]: (0.75, 0.5)})
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
        View(left, left + lon_span, top - lat_span, top),
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


_BINS = (0.25, 0.5, 0.75)
_KEY = {
    "link u0": "to 25%",
    "link u1": "to 50%",
    "link u2": "to 75%",
    "link u3": "above",
    "link idle": "no bytes",
}
_APART_PX = 3.0
"""Half of the way between the two directions of a link."""
_MAX_USES = 8
"""Most sites with which links have their use written on them; else colour and title tell it."""
_MAX_NAMED = 20
"""Most sites of which all are named; else only those that take no part: names would cover each
other."""
_MAX_NAME = 22
"""Characters of a site's name and of what it has."""


def site_map(
    sites: Sequence[SiteFacts], links: Sequence[LinkFacts], out: Mapping[str, str] | None = None
) -> Markup:
    """Draw the sites and their links, and say what their colours mean.

    `out` has a word for each site that takes no part now.
    """
    layout = lay_out(sites)
    by_pair = {(link.source, link.target): link for link in links}
    drawn = [
        _land(layout),
        *_graticule(layout),
        *(_link(link, layout.places) for link in links if _is_drawn(link, layout)),
        *(
            _use(link, by_pair, layout.places)
            for link in links
            if _is_drawn(link, layout) and len(sites) <= _MAX_USES
        ),
        *(
            _site(site, layout, why, is_named=bool(why) or len(sites) <= _MAX_NAMED)
            for site in sites
            for why in [(out or {}).get(site.site, "")]
        ),
    ]
    kind = "by location" if layout.is_map else "on a circle, for not every site has a location"
    drawing = element(
        "svg",
        *drawn,
        role="img",
        aria_label=f"Sites {kind}, with the links between them",
        class_="chart map" if layout.is_map or len(sites) > 2 else "chart map flat",
        width="100%",
    )
    return join(key(_KEY, "links-key"), drawing)


def _is_drawn(link: LinkFacts, layout: Layout) -> bool:
    return link.source in layout.places and link.target in layout.places


def _land(layout: Layout) -> Markup | None:
    height = round(WIDTH / ASPECT)
    path = "" if layout.view is None else land(layout.view, height)
    if not path:
        return None
    return element(
        "svg",
        element("path", d=path, class_="land"),
        viewBox=f"0 0 {WIDTH} {height}",
        preserveAspectRatio="none",
        aria_hidden="true",
        width="100%",
        height="100%",
    )


def _graticule(layout: Layout) -> list[Markup]:
    drawn = []
    for x, words in layout.meridians:
        drawn.append(line(percent(x), 0, percent(x), "100%", "grid"))
        if 0.04 < x < 0.93:
            drawn.append(words_at(percent(x), "100%", words, "tick faint", dx=4, dy=-6))
    for y, words in layout.parallels:
        drawn.append(line(0, percent(y), "100%", percent(y), "grid"))
        if 0.06 < y < 0.9:
            drawn.append(words_at(4, percent(y), words, "tick faint", dy=-4))
    return drawn


def _link(link: LinkFacts, places: Mapping[str, tuple[float, float]]) -> Markup:
    """Return one direction: a line to the right of the straight one, as traffic keeps."""
    (x1, y1), (x2, y2) = places[link.source], places[link.target]
    across, down = (x2 - x1) * ASPECT, y2 - y1
    length = math.hypot(across, down) or 1.0
    shift_x, shift_y = -down / length * _APART_PX, across / length * _APART_PX
    return element(
        "g",
        element("title", _words(link)),
        line(percent(x1), percent(y1), percent(x2), percent(y2), f"link {_class(link)}"),
        transform=f"translate({shift_x:.2f} {shift_y:.2f})",
    )


def _class(link: LinkFacts) -> str:
    if not link.sent_bytes:
        return "idle"
    return f"u{sum((link.use or 0.0) > edge for edge in _BINS)}"


def _words(link: LinkFacts) -> str:
    use = formats.show(link.use, formats.share)
    rate = formats.show(link.throughput_bytes_per_s, formats.rate)
    return f"{link.source} → {link.target}: {rate}, {use} of what is configured"


def _use(
    link: LinkFacts,
    by_pair: Mapping[tuple[str, str], LinkFacts],
    places: Mapping[str, tuple[float, float]],
) -> Markup | None:
    """Return the busier direction's use, in the middle of the link."""
    other = by_pair.get((link.target, link.source))
    rival = other.use if other and other.use is not None else -1.0
    if link.use is None or (rival, link.target) > (link.use, link.source):
        return None
    (x1, y1), (x2, y2) = places[link.source], places[link.target]
    x, y = percent((x1 + x2) / 2), percent((y1 + y2) / 2)
    return words_at(x, y, formats.share(link.use), "mid use", dy=4)


def _site(site: SiteFacts, layout: Layout, out: str, *, is_named: bool) -> Markup:
    x, y = layout.places[site.site]
    # Links lead to the others: the name stands on the other side.
    others = [place[1] for name, place in layout.places.items() if name != site.site]
    is_above = bool(others) and math.fsum(others) / len(others) > y
    ranks = out or ("" if site.num_ranks is None else f"{site.num_ranks} on {site.accelerator}")
    side = "end" if x > 0.85 else "start" if x < 0.15 else "mid"

    def text(words: str, dy: int, class_: str) -> Markup | None:
        if not is_named:
            return None
        words = shortened(words, _MAX_NAME)
        return words_at(percent(x), percent(y), words, f"{side} {class_}", dy=dy)

    return element(
        "g",
        element("title", f"{site.site}: {ranks}" if ranks else site.site),
        element("circle", cx=percent(x), cy=percent(y), r=7, class_="site out" if out else "site"),
        text(site.site, -28 if is_above else 24, "name"),
        text(ranks, -14 if is_above else 39, "tick"),
    )
