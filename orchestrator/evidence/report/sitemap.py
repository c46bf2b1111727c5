"""The map: sites, and each direction of each link, drawn by how much of it was used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from orchestrator.evidence.report.blocks import key
from orchestrator.evidence.report.facts import LinkFacts, SiteFacts
from orchestrator.evidence.report.markup import Markup, element, join, percent, shortened
from orchestrator.evidence.report.places import ASPECT, Layout, lay_out
from orchestrator.evidence.view import figures

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
_MAX_NAME = 22
"""Characters of a site's name and of what it has."""


def site_map(sites: Sequence[SiteFacts], links: Sequence[LinkFacts]) -> Markup:
    """Draw the sites and their links, and say what their colours mean."""
    layout = lay_out(sites)
    by_pair = {(link.source, link.target): link for link in links}
    drawn = [
        *_graticule(layout),
        *(_link(link, layout.places) for link in links if _is_drawn(link, layout)),
        *(_use(link, by_pair, layout.places) for link in links if _is_drawn(link, layout)),
        *(_site(site, layout) for site in sites),
    ]
    kind = "by location" if layout.is_map else "on a circle, for not every site has a location"
    drawing = element(
        "svg",
        *drawn,
        role="img",
        aria_label=f"Sites {kind}, with the links between them",
        class_="chart map",
        width="100%",
    )
    return join(key(_KEY, "links-key"), drawing)


def _is_drawn(link: LinkFacts, layout: Layout) -> bool:
    return link.source in layout.places and link.target in layout.places


def _graticule(layout: Layout) -> list[Markup]:
    drawn = []
    for x, words in layout.meridians:
        drawn.append(element("line", x1=percent(x), x2=percent(x), y1=0, y2="100%", class_="grid"))
        if 0.04 < x < 0.93:
            drawn.append(
                element("text", words, x=percent(x), dx=4, y="100%", dy=-6, class_="tick faint")
            )
    for y, words in layout.parallels:
        drawn.append(element("line", x1=0, x2="100%", y1=percent(y), y2=percent(y), class_="grid"))
        if 0.06 < y < 0.9:
            drawn.append(element("text", words, x=4, y=percent(y), dy=-4, class_="tick faint"))
    return drawn


def _link(link: LinkFacts, places: Mapping[str, tuple[float, float]]) -> Markup:
    """Return one direction: a line to the right of the straight one, as traffic keeps."""
    (x1, y1), (x2, y2) = places[link.source], places[link.target]
    across, down = (x2 - x1) * ASPECT, y2 - y1
    length = math.hypot(across, down) or 1.0
    shift_x, shift_y = -down / length * _APART_PX, across / length * _APART_PX
    return element(
        "line",
        element("title", _words(link)),
        x1=percent(x1),
        y1=percent(y1),
        x2=percent(x2),
        y2=percent(y2),
        transform=f"translate({shift_x:.2f} {shift_y:.2f})",
        class_=f"link {_class(link)}",
    )


def _class(link: LinkFacts) -> str:
    if not link.sent_bytes:
        return "idle"
    return f"u{sum((link.use or 0.0) > edge for edge in _BINS)}"


def _words(link: LinkFacts) -> str:
    use = figures.show(link.use, figures.share)
    rate = figures.show(link.throughput_bytes_per_s, figures.rate)
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
    return element(
        "text",
        figures.share(link.use),
        x=percent((x1 + x2) / 2),
        y=percent((y1 + y2) / 2),
        dy=4,
        class_="mid use",
    )


def _site(site: SiteFacts, layout: Layout) -> Markup:
    x, y = layout.places[site.site]
    # Links lead to the others: the name stands on the other side.
    others = [place[1] for name, place in layout.places.items() if name != site.site]
    is_above = math.fsum(others) / len(others) > y
    ranks = "" if site.num_ranks is None else f"{site.num_ranks} on {site.accelerator}"
    side = "end" if x > 0.85 else "start" if x < 0.15 else "mid"

    def text(words: str, max_length: int, dy: int, class_: str) -> Markup:
        words = shortened(words, max_length)
        return element("text", words, x=percent(x), y=percent(y), dy=dy, class_=f"{side} {class_}")

    return element(
        "g",
        element("title", f"{site.site}: {ranks}" if ranks else site.site),
        element("circle", cx=percent(x), cy=percent(y), r=7, class_="site"),
        text(site.site, _MAX_NAME, -28 if is_above else 24, "name"),
        text(ranks, _MAX_NAME, -14 if is_above else 39, "tick"),
    )
