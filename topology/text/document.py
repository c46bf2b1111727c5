"""A YAML text as plain values, with the place of each: the ground on which mistakes are located."""

import re
from dataclasses import dataclass

from topology.errors import ConfigError, Problem

Path = tuple[str | int, ...]
"""The keys and positions from the root to a value."""

LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""What PyYAML counts as one."""


_SAID_CHARACTERS = 400
"""Of a message or a path: names are quoted back, and may be as long as the file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value or key stands. Line 0: in no text, as an override."""

    source: str
    line: int
    column: int
    written: str | None = None
    """A scalar as it was written, for messages; None for containers."""


class Document:
    """One parsed text.

    `problems` collects what is wrong; nothing here raises for a mere mistake.
    """

    def __init__(self, source: str, text: str) -> None:
        self.source = source
        self.value: object = None
        self.problems: list[Problem] = []
        self.places: dict[Path, Place] = {}
        self.key_places: dict[Path, Place] = {}
        self.refused: set[Path] = set()
        """Values that are wrong as YAML: what they would mean is not looked at."""
        self._lines = LINE_BREAK.split(text)

    def add(self, path: Path, message: str, *, at_key: bool = False) -> None:
        """Add a problem with the value at `path`, or with its key."""
        place = self.key_places.get(path) if at_key else None
        self.add_at(place or self.place(path), message, path)

    def add_at(self, place: Place, message: str, path: Path) -> None:
        """Add a problem at a place of its own."""
        excerpt = self._lines[place.line - 1] if 0 < place.line <= len(self._lines) else ""
        dotted = _cut(".".join(str(part) for part in path))
        self.problems.append(
            Problem(place.source, place.line, place.column, _cut(message), dotted, excerpt)
        )

    def raise_problems(self) -> None:
        """Raise a ConfigError with every problem found so far, in the order of the text."""
        if self.problems:
            raise ConfigError(sorted(self.problems, key=lambda each: (each.line, each.column)))

    def is_refused(self, path: Path) -> bool:
        """Whether a problem has been told of the value at `path`, or of one that contains it."""
        return any(path[:length] in self.refused for length in range(len(path) + 1))

    def place(self, path: Path) -> Place:
        """Return where the value at `path` stands, or the innermost that would contain it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(self.source, 1, 1))

    def get(self, *path: str | int) -> object:
        """Return the value at `path`, or None when there is none."""
        value = self.value
        for part in path:
            match value:
                case dict():
                    value = value.get(part)
                case list() if isinstance(part, int) and part < len(value):
                    value = value[part]
                case _:
                    return None
        return value

    def text(self, *path: str | int) -> str | None:
        """Return the text at `path`; None when there is none, or something else."""
        value = self.get(*path)
        return value if isinstance(value, str) and not self.is_refused(path) else None

    def mapping(self, *path: str | int) -> dict[str, object]:
        """Return the mapping at `path`; empty when there is none, or something else."""
        value = self.get(*path)
        return value if isinstance(value, dict) else {}

    def sequence(self, *path: str | int) -> list[object]:
        """Return the list at `path`; empty when there is none, or something else."""
        value = self.get(*path)
        return value if isinstance(value, list) else []


def _cut(text: str) -> str:
    return text if len(text) <= _SAID_CHARACTERS else f"{text[:_SAID_CHARACTERS]}…"
