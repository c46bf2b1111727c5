"""Land is where it is: known places are on it or not, in any part of the world that is drawn."""

from __future__ import annotations

import dataclasses
import re

import pytest

from isthmus.orchestrator.evidence.report.coastline import WIDTH, View, land
from isthmus.orchestrator.evidence.report.sitemap import site_map
from isthmus.orchestrator.runs.facts import SiteFacts

HEIGHT = 600
_SITE = SiteFacts(site="", num_ranks=1, accelerator="cpu")
WORLD = View(-180, 180, -85, 85)
ON_LAND = {
    "Denver": (-105.0, 39.7),
    "Manaus": (-60.0, -3.1),
    "Frankfurt": (8.7, 50.1),
    "Nairobi": (36.8, -1.3),
    "Novosibirsk": (82.9, 55.0),
    "Alice Springs": (133.9, -23.7),
    "Chukotka": (-175.0, 66.5),
}
AT_SEA = {
    "Atlantic": (-40.0, 30.0),
    "Pacific": (-150.0, 0.0),
    "Indian Ocean": (80.0, -30.0),
    "North Sea": (3.0, 56.0),
    "Caspian Sea": (51.0, 42.0),
    "Date line": (180.0, 20.0),
}


def is_land(view: View, lon: float, lat: float) -> bool:
    """Count how often a line from the place to the west crosses an outline."""
    x = (lon - view.left) / (view.right - view.left) * WIDTH
    y = (view.top - lat) / (view.top - view.bottom) * HEIGHT + 0.31  # between whole units
    crossings = 0
    for outline in re.findall(r"M([^M]*)z", land(view, HEIGHT)):
        points = [(0, 0)]
        for across, down in (pair.split(",") for pair in re.split("[l ]", outline)):
            points.append((points[-1][0] + int(across), points[-1][1] + int(down)))
        ring = points[1:]
        for (x1, y1), (x2, y2) in zip(ring, [*ring[1:], ring[0]], strict=True):
            if (y1 > y) is not (y2 > y):
                crossings += x > x1 + (y - y1) / (y2 - y1) * (x2 - x1)
    return crossings % 2 == 1


@pytest.mark.parametrize("place", [*ON_LAND, *AT_SEA])
def test_land_is_where_it_is(place: str) -> None:
    lon, lat = {**ON_LAND, **AT_SEA}[place]
    around = View(lon - 20, lon + 20, lat - 8, lat + 8)
    beyond = View(lon - 300, lon + 60, -80, 80)
    for view in (WORLD, around, beyond):
        assert is_land(view, lon, lat) is (place in ON_LAND), view


def test_of_what_is_not_drawn_there_is_nothing() -> None:
    assert land(View(-150, -140, 10, 16), HEIGHT) == ""
    of_world, of_part = land(WORLD, HEIGHT), land(View(5, 15, 45, 50), HEIGHT)
    assert len(of_part) < 2_000
    assert len(of_world) < 40_000
    for x, y in re.findall(r"M(-?\d+),(-?\d+)", of_part):
        assert -0.05 * WIDTH < int(x) < 1.05 * WIDTH
        assert -0.05 * HEIGHT < int(y) < 1.05 * HEIGHT


def test_a_map_has_land_and_a_circle_has_none() -> None:
    def site(name: str, lat: float | None, lon: float | None) -> SiteFacts:
        return dataclasses.replace(_SITE, site=name, lat=lat, lon=lon)

    located = [site("here", 50.1, 8.7), site("there", 45.0, 7.0)]
    assert 'class="land"' in site_map(located, [])
    assert 'class="land"' not in site_map([*located, site("somewhere", None, None)], [])


def test_of_many_sites_only_those_are_named_that_are_out() -> None:
    many = [
        dataclasses.replace(_SITE, site=f"site-{at}", lat=40.0 + at % 7, lon=float(at))
        for at in range(30)
    ]
    drawn = site_map(many, [], {"site-3": "lost"})
    assert ">site-3</text>" in drawn
    assert ">site-4</text>" not in drawn
    assert "<title>site-4: 1 on cpu</title>" in drawn
    assert ">site-4</text>" in site_map(many[:20], [])
