"""`--set path=value`: a value put into a document before it is checked."""

from collections.abc import Sequence
from typing import Any

from topology.errors import ConfigError, Problem
from topology.text.document import Document, Path, Place
from topology.text.reading import read_document


def read_with_overrides(text: str, source: str, overrides: Sequence[str]) -> Document:
    """Return one file's document, a mapping, with the overrides in it.

    Raises:
        ConfigError: it is not YAML, or its root is not a mapping. Lesser mistakes are in the
            document's `problems`.
    """
    document = read_document(text, source)
    if not isinstance(document.value, dict):
        document.add((), "want a mapping: lines of key: value")
        document.raise_problems()
    apply_overrides(document, overrides)
    return document


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Change `document` by each override in turn; what cannot be placed becomes a problem of it.

    An override's value is YAML, so `--set failure.min_sites=2` sets a number and
    `--set "sites.0.location={lat: 1, lon: 2}"` a mapping. Mappings on the way that are not there
    yet are made; list positions count from 0 and must exist.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        place = Place(f"--set {name}", 0, 0, text)
        parts = name.split(".")
        if not equals or "" in parts or not name.isprintable():
            document.add_at(place, "want path=value, as --set links.0.rtt=120ms", ())
        elif not text.strip():
            document.add_at(place, "no value: want path=value", tuple(parts))
        else:
            value = _value(document, place, name, text)
            if value is not None:
                _put(document, place, parts, value)


def _value(document: Document, place: Place, name: str, text: str) -> object:
    """Return the parsed value, or None after telling what is wrong with it."""
    try:
        parsed = read_document(text, place.source)
        parsed.raise_problems()
    except ConfigError as error:
        document.problems += [
            Problem(place.source, 0, 0, problem.message, name) for problem in error.problems
        ]
        return None
    return parsed.value


def _put(document: Document, place: Place, parts: Sequence[str], value: object) -> None:
    """Put `value` where `parts` lead, or tell why it cannot be there."""
    container: Any = document.value
    path: Path = ()
    for part in parts:
        key = _key(container, part)
        if key is None:
            document.add_at(place, _misplaced(container, path, part), (*path, part))
            return
        path = (*path, key)
        if len(path) == len(parts):
            container[key] = value
        elif isinstance(container, dict) and key not in container:
            container[key] = {}
            _relocate(document, place, path)
        container = container[key]
    _relocate(document, place, path)


def _key(container: object, part: str) -> str | int | None:
    """Return what `part` means in that container, None if it means nothing there."""
    if isinstance(container, dict):
        return part
    if isinstance(container, list) and part in map(str, range(len(container))):
        return int(part)
    return None


def _misplaced(container: object, path: Path, part: str) -> str:
    inside = ".".join(str(each) for each in path)
    if isinstance(container, list):
        return f"{inside} has {len(container)} items: want a position from 0, got {part!r}"
    return f"{inside or 'the document'} is a single value: it has no {part!r}"


def _relocate(document: Document, place: Place, path: Path) -> None:
    """Make the override the place of the value, of all that is in it, and of its key."""
    for places in (document.places, document.key_places):
        for old in [each for each in places if each[: len(path)] == path]:
            del places[old]
        places[path] = place
    document.refused = {each for each in document.refused if each[: len(path)] != path}
