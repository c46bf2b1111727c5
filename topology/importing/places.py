"""Converts between names of cities and their locations, and makes site names."""

import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from isthmus.topology.spec.geography import great_circle_km
from isthmus.topology.spec.world import Location
from isthmus.topology.text.yaml_document import read_document

NEAR_KM = 40.0
"""Kilometres to the middle of a city within which a node counts as being in that city."""
_FILE = "cities.yaml"
_NAME_CHARACTERS = 63
_SUFFIX_CHARACTERS = 6


def plain(text: str) -> str:
    """Return a text in lower case, without accents, words joined by hyphens; may be empty.

    `São Paulo, BR` becomes `sao-paulo-br`.
    """
    bare = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", bare).strip("-")


def unique_names(texts: Iterable[str]) -> list[str]:
    """Return a valid site name for each text, in order; the second `Paris` becomes `paris-2`."""
    names: dict[str, None] = {}
    for text in texts:
        base = plain(text)[: _NAME_CHARACTERS - _SUFFIX_CHARACTERS].strip("-") or "site"
        name, count = base, 1
        while name in names:
            count += 1
            name = f"{base}-{count}"
        names[name] = None
    return list(names)


@functools.cache
def cities() -> Mapping[str, Location]:
    """Return the cities that have data centers, by name."""
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    document = read_document(text, _FILE)
    document.raise_problems()
    listed: Mapping[str, Any] = document.mapping()
    return {name: Location(lat=lat, lon=lon) for name, (lat, lon) in listed.items()}


def place_of(name: str) -> Location | None:
    """Return the location of a city, in any spelling; None: unknown."""
    wanted = plain(name)
    return next((place for city, place in cities().items() if plain(city) == wanted), None)


def nearest_city(place: Location) -> str | None:
    """Return the name of the known city within NEAR_KM of a place; None: none."""
    city = min(cities(), key=lambda each: great_circle_km(cities()[each], place))
    return city if great_circle_km(cities()[city], place) <= NEAR_KM else None
