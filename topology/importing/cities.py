"""Where cities with data centers are: names for places, and places for names, without one."""

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

from topology.geography import great_circle_km
from topology.importing.names import plain
from topology.text.yaml_document import read_document
from topology.world import Location

NEAR_KM = 40.0
"""A node so near to a city's middle is in that city."""
_FILE = "cities.yaml"


@functools.cache
def cities() -> Mapping[str, Location]:
    """Return the places by name."""
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    document = read_document(text, _FILE)
    document.raise_problems()
    listed: Mapping[str, Any] = document.mapping()
    return {name: Location(lat=lat, lon=lon) for name, (lat, lon) in listed.items()}


def place_of(name: str) -> Location | None:
    """Return where the city of that name is, however it is written; None if it is not known."""
    wanted = plain(name)
    return next((place for city, place in cities().items() if plain(city) == wanted), None)


def nearest_city(place: Location) -> str | None:
    """Return the name of the city that a place is in; None if it is in none of them."""
    city = min(cities(), key=lambda each: great_circle_km(cities()[each], place))
    return city if great_circle_km(cities()[city], place) <= NEAR_KM else None
